"""Drafters, one file a method: they see ids and signals only, never a target."""

"""Policies: what to draft, how much, or not at all."""

"""Targets: the models being accelerated."""

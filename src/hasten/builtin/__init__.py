"""The methods hasten ships: name, options and how each is put together."""

from __future__ import annotations

from hasten.builtin import auto, basic, racer

METHODS = (*basic.METHODS, *racer.METHODS, *auto.METHODS)

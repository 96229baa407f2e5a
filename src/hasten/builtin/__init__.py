"""The methods hasten ships: name, options and how each is put together."""

from __future__ import annotations

from hasten.builtin import adapld, auto, basic, guessing, racer, suffix

METHODS = (
    *basic.METHODS,
    *racer.METHODS,
    *suffix.METHODS,
    *adapld.METHODS,
    *guessing.METHODS,
    *auto.METHODS,
)

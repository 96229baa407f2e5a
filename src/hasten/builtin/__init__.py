"""The methods hasten ships: name, options and how each is put together."""

from __future__ import annotations

from hasten.builtin import adapld, auto, basic, early_exit, guessing, racer, suffix

METHODS = (
    *basic.METHODS,
    *racer.METHODS,
    *suffix.METHODS,
    *adapld.METHODS,
    *guessing.METHODS,
    *early_exit.METHODS,
    *auto.METHODS,
)

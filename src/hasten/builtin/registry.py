"""All of them, in the order they are listed."""

from __future__ import annotations

from hasten.builtin import adapld, auto, basic, early_exit, guessing, racer, smc, suffix

METHODS = (
    *basic.METHODS,
    *racer.METHODS,
    *suffix.METHODS,
    *adapld.METHODS,
    *guessing.METHODS,
    *early_exit.METHODS,
    *auto.METHODS,
    *smc.METHODS,
)

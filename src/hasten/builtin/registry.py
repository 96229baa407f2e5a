"""All of them, in the order they are listed."""

from __future__ import annotations

from hasten.builtin import (
    adapld,
    auto,
    basic,
    cospec,
    dflash,
    eagle3,
    early_exit,
    guessing,
    hvd,
    lede,
    racer,
    smc,
    suffix,
)

METHODS = (
    *basic.METHODS,
    *racer.METHODS,
    *suffix.METHODS,
    *adapld.METHODS,
    *guessing.METHODS,
    *early_exit.METHODS,
    *dflash.METHODS,
    *eagle3.METHODS,
    *lede.METHODS,
    *hvd.METHODS,
    *auto.METHODS,
    *smc.METHODS,
    *cospec.METHODS,
)

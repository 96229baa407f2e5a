"""Checks of what training commands are told; all raise OptionError."""

from __future__ import annotations

from hasten.errors import OptionError


def least(name: str, value: float, lowest: float) -> None:
    """A finite number, `lowest` at least."""
    if not lowest <= value < float("inf"):
        raise OptionError(name, f"must be at least {lowest}, got {value}")


def above(name: str, value: float) -> None:
    """A finite number above 0."""
    if not 0 < value < float("inf"):
        raise OptionError(name, f"must be above 0, got {value}")


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """One of the words `known`."""
    if value not in known:
        raise OptionError(name, f"must be one of {', '.join(known)}, got {value!r}")


def schedule(steps: int, minutes: float, lr: float, lr_end: float, warmup: float) -> None:
    """Bounds of a stage, and a learning rate that rises for a share of it and then falls."""
    least("steps", steps, 0)
    above("minutes", minutes)
    above("lr", lr)
    if not 0 <= lr_end <= lr:
        raise OptionError("lr_end", f"must be from 0 to lr, got {lr_end}")
    if not 0 <= warmup < 1:
        raise OptionError("warmup", f"must be a share of the steps, got {warmup}")

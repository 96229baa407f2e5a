"""Families about weekdays and months."""

from __future__ import annotations

from collections.abc import Sequence

from hasten.tasks.base import Family, Item, Template, item
from hasten.tasks.words import MONTHS, WEEKDAYS

_COUNTS = ("", "", "two", "three", "four", "five")


def _phrase(offset: int, unit: str) -> str:
    """How far, as ``the day after`` or ``two days before``."""
    side = "after" if offset > 0 else "before"
    far = abs(offset)
    return f"the {unit} {side}" if far == 1 else f"{_COUNTS[far]} {unit}s {side}"


def _around(names: Sequence[str], unit: str, farthest: int) -> list[Item]:
    offsets = [o for o in range(-farthest, farthest + 1) if o]
    return [
        item(names[(at + offset) % len(names)], phrase=_phrase(offset, unit), name=name)
        for at, name in enumerate(names)
        for offset in offsets
    ]


def _days_later() -> list[Item]:
    return [
        item(WEEKDAYS[(at + days) % 7], name=name, days=days)
        for at, name in enumerate(WEEKDAYS)
        for days in range(2, 32)
    ]


FAMILIES = (
    Family(
        "weekday",
        lambda: _around(WEEKDAYS, "day", 3),
        (
            Template("question", "Which day is {phrase} {name}?"),
            Template("order", "Name the weekday that is {phrase} {name}."),
            Template("think", "Think of {name}. What is {phrase} it?", held_out=True),
        ),
    ),
    Family(
        "month",
        lambda: _around(MONTHS, "month", 4),
        (
            Template("question", "Which month is {phrase} {name}?"),
            Template("order", "Name the month that is {phrase} {name}."),
            Template("think", "Think of {name}. What is {phrase} it?", held_out=True),
        ),
    ),
    Family(
        "days_later",
        _days_later,
        (
            Template("today", "Today is {name}. What day is it in {days} days?"),
            Template("after", "What day is it {days} days after {name}?"),
            Template("count", "Start on {name} and count {days} days on.", held_out=True),
        ),
    ),
)

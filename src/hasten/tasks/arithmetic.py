"""Families about numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from hasten.tasks.base import Family, Item, Template, item

MOST_ITEMS = 1200
"""Of a family whose items can't all be listed; these are drawn once and for all."""


def _sums(low: int, high: int) -> Callable[[], Sequence[Item]]:
    def make() -> list[Item]:
        span = range(low, high + 1)
        return [item(a + b, group=f"{min(a, b)}+{max(a, b)}", a=a, b=b) for a in span for b in span]

    return make


def _differences(low: int, high: int) -> Callable[[], Sequence[Item]]:
    def make() -> list[Item]:
        return [item(a - b, a=a, b=b) for a in range(low, high + 1) for b in range(low, a + 1)]

    return make


def drawn(name: str, count: int, make: Callable[[random.Random], Item | None]) -> list[Item]:
    """`count` different items from ``make(source of randomness)``, the same each time; those it
    answers with None don't count."""
    source = random.Random(f"hasten.tasks {name}")
    found: dict[str, Item] = {}
    for _ in range(100 * count):
        made = make(source)
        if made is not None:
            found.setdefault(made.key, made)
        if len(found) == count:
            break
    return list(found.values())


def _largest(name: str, count: int, most: int) -> Callable[[], Sequence[Item]]:
    def one(source: random.Random) -> Item:
        numbers = source.sample(range(1, most + 1), count)
        named = dict(zip("abc", numbers, strict=False))
        return item(max(numbers), group=",".join(map(str, sorted(numbers))), **named)

    return lambda: drawn(name, MOST_ITEMS, one)


def _parity() -> list[Item]:
    return [item("even" if n % 2 == 0 else "odd", n=n) for n in range(1, 1000)]


def _sequence() -> list[Item]:
    def one(source: random.Random) -> Item:
        start, step, gap = source.randint(1, 40), source.randint(1, 12), source.randint(1, 3)
        numbers = [start + step * at for at in range(5)]
        shown = ", ".join("_" if at == gap else str(n) for at, n in enumerate(numbers))
        return item(numbers[gap], group=f"{start},{step}", shown=shown)

    return drawn("sequence", MOST_ITEMS, one)


_SUM = (
    Template("symbols", "{a} + {b} ="),
    Template("words", "What is {a} plus {b}?"),
    Template("order", "Add {a} and {b}.", held_out=True),
)
_DIFFERENCE = (
    Template("symbols", "{a} - {b} ="),
    Template("words", "What is {a} minus {b}?"),
    Template("order", "Subtract {b} from {a}.", held_out=True),
)

FAMILIES = (
    Family("sum1", _sums(0, 9), _SUM),
    Family("sum2", _sums(10, 99), _SUM),
    Family("difference1", _differences(0, 15), _DIFFERENCE),
    Family("difference2", _differences(10, 99), _DIFFERENCE),
    Family(
        "larger",
        _largest("larger", 2, 999),
        (
            Template("question", "Which number is larger, {a} or {b}?"),
            Template("order", "Write the larger one of {a} and {b}."),
            Template("list", "{a}, {b}: the greater number?", held_out=True),
        ),
        chance=1 / 2,
    ),
    Family(
        "maximum",
        _largest("maximum", 3, 99),
        (
            Template("question", "Which number is the largest: {a}, {b} or {c}?"),
            Template("order", "Write the largest of {a}, {b} and {c}."),
            Template("list", "{a}, {b}, {c}: the maximum?", held_out=True),
        ),
        chance=1 / 3,
    ),
    Family(
        "parity",
        _parity,
        (
            Template("question", "Is {n} odd or even?"),
            Template("order", "Write even or odd: {n}"),
            Template("number", "The number {n}: odd or even?", held_out=True),
        ),
        chance=1 / 2,
    ),
    Family(
        "sequence",
        _sequence,
        (
            Template("question", "Which number is missing: {shown}?"),
            Template("order", "Fill the gap: {shown}"),
            Template("series", "What stands for _ in the series {shown}?", held_out=True),
        ),
    ),
)

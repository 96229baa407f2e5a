"""How many answers are right, how sure that is, and whether two methods differ."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from hasten.bench.stats import LEVEL, RESAMPLES
from hasten.errors import OptionError
from hasten.tasks.base import Problem

_Z = 1.959963984540054
"""Standard deviations on each side of a normal law's middle 95% (`LEVEL`)."""


@dataclass(frozen=True, slots=True)
class Grade:
    """Answers to problems. `right` in their order; `low` and `high` are Wilson's 95% interval of
    the share that is right, for independent problems."""

    right: tuple[bool, ...]
    low: float
    high: float

    @property
    def count(self) -> int:
        """Answers."""
        return len(self.right)

    @property
    def correct(self) -> int:
        """Those that are right."""
        return sum(self.right)

    @property
    def accuracy(self) -> float:
        """Their share."""
        return self.correct / self.count

    def __str__(self) -> str:
        spread = f"{100 * self.low:.1f} to {100 * self.high:.1f}"
        return f"{100 * self.accuracy:.1f}% ({spread}), {self.correct} of {self.count}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two methods on the same problems.

    difference  accuracy less the other's; `low` and `high` its 95% bootstrap interval
    wins        problems that are right here and wrong there; losses: the other way round
    p_value     McNemar's exact test, two-sided: how likely so uneven a split of wins and losses is
                by chance
    """

    difference: float
    low: float
    high: float
    wins: int
    losses: int
    p_value: float

    def __str__(self) -> str:
        points = [f"{100 * value:+.1f}" for value in (self.difference, self.low, self.high)]
        return (
            f"{points[0]} points ({points[1]} to {points[2]}), {self.wins} won, "
            f"{self.losses} lost, p = {self.p_value:.2g}"
        )


def grade(problems: Sequence[Problem], texts: Sequence[str]) -> Grade:
    """Grade `texts`, the answers to `problems` in their order; at least one."""
    if not problems or len(problems) != len(texts):
        raise OptionError("texts", f"{len(texts)} answers to {len(problems)} problems")
    right = tuple(p.correct(text) for p, text in zip(problems, texts, strict=True))
    return Grade(right, *wilson(sum(right), len(right)))


def wilson(successes: int, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share: of `successes` among `count` (at least 1) trials."""
    share, square = successes / count, _Z**2 / count
    middle = (share + square / 2) / (1 + square)
    half = _Z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def compare(
    mine: Sequence[bool],
    theirs: Sequence[bool],
    *,
    clusters: Sequence[Hashable] | None = None,
    seed: int = 0,
) -> Comparison:
    """Compare answers to the same problems, in the same order.

    clusters  for each problem what it is resampled with: several wordings or answers of one item
              stay together (`Problem.item`). None: each problem is on its own. McNemar's test takes
              every problem for itself in any case
    """
    if not mine or len(mine) != len(theirs):
        raise OptionError("theirs", f"{len(mine)} and {len(theirs)} answers can't be paired")
    gaps = np.asarray(mine, dtype=float) - np.asarray(theirs, dtype=float)
    low, high = bootstrap_mean(gaps, clusters, seed)
    wins, losses = int((gaps > 0).sum()), int((gaps < 0).sum())
    return Comparison(float(gaps.mean()), low, high, wins, losses, mcnemar(wins, losses))


def bootstrap_mean(
    values: Sequence[float] | np.ndarray, clusters: Sequence[Hashable] | None, seed: int
) -> tuple[float, float]:
    """The 95% percentile interval of a mean over clusters (None: each value is one)."""
    numbers = np.asarray(values, dtype=float)
    names: dict[Hashable, int] = {}
    keys: Sequence[Hashable] = range(len(numbers)) if clusters is None else clusters
    where = np.array([names.setdefault(key, len(names)) for key in keys])
    sums, sizes = np.zeros(len(names)), np.zeros(len(names))
    np.add.at(sums, where, numbers)
    np.add.at(sizes, where, 1.0)
    draws = np.random.default_rng(seed).integers(0, len(names), (RESAMPLES, len(names)))
    means = sums[draws].sum(1) / sizes[draws].sum(1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def mcnemar(wins: int, losses: int) -> float:
    """The exact two-sided p-value of `wins` against `losses`: 1 where there are none."""
    count, most = wins + losses, max(wins, losses)
    tail = sum(math.comb(count, k) for k in range(most, count + 1))
    return min(1.0, 2 * tail / (1 << count))

"""What passes cost by a measured table, and how that drifts: what policies decide by."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

FORMAT = 2
AFFORDABLE = 1.6
_STEP = 16


@dataclass(frozen=True, slots=True)
class CostTable:
    """Milliseconds of a pass: ``ms[i][j]`` at ``contexts[i]`` tokens of context for ``rows[j]``
    rows; ``topk_ms[j]`` is what argmax and top-8 of their logits take.

    Raises ValueError when sizes don't match, or numbers aren't positive and in order.
    """

    key: str
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    ms: tuple[tuple[float, ...], ...]
    topk_ms: tuple[float, ...] = ()
    measured_at: float = 0.0
    busy: bool = False
    format: int = FORMAT

    def __post_init__(self) -> None:
        lines = (*self.ms, self.topk_ms) if self.topk_ms else self.ms
        if len(self.ms) != len(self.contexts) or any(len(x) != len(self.rows) for x in lines):
            raise ValueError("a cost table needs a line per context and a number per row count")
        for axis in (self.rows, self.contexts):
            if not axis or axis[0] < 1 or any(a >= b for a, b in pairwise(axis)):
                raise ValueError("a cost table's rows and contexts must be positive and increasing")
        if not all(math.isfinite(x) and x > 0 for line in self.ms for x in line):
            raise ValueError("a cost table's times must be positive")
        if not all(math.isfinite(x) and x >= 0 for x in self.topk_ms):
            raise ValueError("a cost table's times of selection can't be negative")

    def pass_ms(self, rows: int, context: int) -> float:
        """Milliseconds of a pass of `rows` rows at `context` tokens: linear between what was
        measured, by the last slope beyond it."""
        return self.at_context(self.per_context(rows), context)

    def per_context(self, rows: int) -> list[float]:
        """Milliseconds of a pass of `rows` rows at each of the measured contexts."""
        return [_line(self.rows, line, rows) for line in self.ms]

    def at_context(self, per_context: Sequence[float], context: int) -> float:
        """What they come to at `context` tokens."""
        return max(_line(self.contexts, per_context, context), 1e-6)

    def select_ms(self, rows: int) -> float:
        """Milliseconds of argmax and top-k over `rows` rows of logits."""
        return max(_line(self.rows, self.topk_ms, rows), 0.0) if self.topk_ms else 0.0

    def curve(self, most: int, context: int) -> list[float]:
        """``[pass_ms(1), ..., pass_ms(most)]``, never decreasing: other work on the machine
        only ever adds time, so a pass takes no longer than one of more rows did."""
        return rising([self.pass_ms(rows, context) for rows in range(1, most + 1)])


def affordable_rows(table: CostTable) -> int:
    """How many rows a pass may have before it costs `AFFORDABLE` times a plain one, 8 to 64: drafts
    beyond that rarely pay, and making candidates takes time too."""
    curve = table.curve(64, 256)
    return max(sum(ms <= AFFORDABLE * curve[0] for ms in curve), 8)


def _line(xs: Sequence[int], ys: Sequence[float], x: int) -> float:
    """The broken line through the points at `x`: flat before the first, straight on after the
    last, never sloping down there."""
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    at = min(bisect_right(xs, x) - 1, len(xs) - 2)
    slope = (ys[at + 1] - ys[at]) / (xs[at + 1] - xs[at])
    if x > xs[-1]:
        return ys[-1] + max(slope, 0.0) * (x - xs[-1])
    return ys[at] + slope * (x - xs[at])


def rising(values: Sequence[float]) -> list[float]:
    """Each value, or a smaller one behind it."""
    return list(accumulate(reversed(values), min))[::-1]


class CostModel:
    """A cost table and what rounds have shown since: it drifts with the machine, slowly.

    The logarithm of observed / tabled time is averaged for each measured row count. Their mean is
    the machine's drift, which all row counts share, those never run too; beyond it each has its
    own deviation, as far as it was seen lately.
    """

    SLOW = 0.05
    """Weight of a new observation, once there are some."""

    FADES, FADE_EVERY = 0.72, 16
    """What observations still count for after so many others."""

    TRUST = 8
    """The table counts as so many observations."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._gaps = [0.0] * len(table.rows)
        self._seen = [0.0] * len(table.rows)
        self._select_gap = 0.0
        self._total = 0
        self._curve: list[float] = []
        self._curve_for = (-1, -1, -1)
        self._tabled: dict[tuple[int, int], tuple[int, float, float]] = {}
        self._per_rows: list[tuple[list[float], float]] = []
        """For 1, 2, ... rows: milliseconds of a pass by measured context, and of the selection."""

    def curve(self, most: int, context: int) -> list[float]:
        """Milliseconds of a pass and the selection after it, for 1..most rows at least (cached)."""
        # Recomputed now and then: neither the context nor the drift changes much in a round.
        most = -(-most // _STEP) * _STEP  # shared passes ask for ever other numbers
        wanted = (most, context // 64, self._total // 16)
        if wanted != self._curve_for:
            table, select = self.table, math.exp(self._select_gap)
            self._curve = rising(
                [
                    table.at_context(passes, context) * ratio + selecting * select
                    for (passes, selecting), ratio in zip(
                        self._tabled_for(most), self._spread(self._ratios(), most), strict=True
                    )
                ]
            )
            self._curve_for = wanted
        return self._curve

    def _tabled_for(self, most: int) -> list[tuple[list[float], float]]:
        if len(self._per_rows) < most:  # made whole: others may be reading
            table = self.table
            self._per_rows = [
                (table.per_context(rows), table.select_ms(rows)) for rows in range(1, most + 1)
            ]
        return self._per_rows[:most]

    def _spread(self, ratios: Sequence[float], most: int) -> list[float]:
        """The ratios of the measured row counts for 1..most rows; flat beyond the last."""
        rows = self.table.rows
        out = [ratios[0]] * rows[0]
        for (low, high), (a, b) in zip(pairwise(rows), pairwise(ratios), strict=True):
            slope = (b - a) / (high - low)
            out += [a + slope * n for n in range(1, high - low + 1)]
        return (out + [ratios[-1]] * (most - len(out)))[:most]

    def _ratios(self) -> list[float]:
        """Expected / tabled time for each measured row count."""
        total = sum(self._seen)
        mean = sum(n * gap for n, gap in zip(self._seen, self._gaps, strict=True)) / max(total, 1)
        drift = mean * total / (total + self.TRUST)
        return [
            math.exp(drift + n / (n + self.TRUST) * (gap - mean))
            for n, gap in zip(self._seen, self._gaps, strict=True)
        ]

    def observe(self, rows: int, context: int, pass_ms: float, select_ms: float) -> None:
        """A round's pass over `rows` rows took so long, and argmax and top-k after it."""
        if pass_ms <= 0:
            return
        at, tabled, select = self._look_up(rows, context)
        self._total += 1
        if self._total % self.FADE_EVERY == 0:
            self._seen = [n * self.FADES for n in self._seen]
        self._seen[at] += 1
        self._gaps[at] = self._nearer(self._gaps[at], math.log(pass_ms / tabled), self._seen[at])
        if select > 0 and select_ms > 0:
            gap = math.log(select_ms / select)
            self._select_gap = self._nearer(self._select_gap, gap, self._total + self.TRUST)

    def _look_up(self, rows: int, context: int) -> tuple[int, float, float]:
        """Index of the nearest measured row count, and the tabled milliseconds of pass and
        selection."""
        key = (rows, context // 64)
        found = self._tabled.get(key)
        if found is None:
            gaps = [abs(each - rows) for each in self.table.rows]
            select = self.table.select_ms(rows)
            found = (gaps.index(min(gaps)), self.table.pass_ms(rows, context), select)
            self._tabled[key] = found
        return found

    def _nearer(self, average: float, value: float, seen: float) -> float:
        """A running average after another value; a factor of two at most counts, so that a hiccup
        of the machine is a small one."""
        step = min(max(value - average, -math.log(2)), math.log(2))
        return average + max(1 / seen, self.SLOW) * step

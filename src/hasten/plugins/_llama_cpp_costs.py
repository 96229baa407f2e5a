"""What a pass of llama.cpp costs by its rows, as seen from outside: the time between two calls."""

from __future__ import annotations

import math

from hasten.plugins.session import even_costs
from hasten.policies.cost_model import CostModel, rising


class PassCosts(CostModel):
    """Milliseconds of passes of 1..most rows, learned one row count at a time.

    On a CPU two rows may cost more than twice one; on a GPU eight cost what one does. So what was
    seen of a row count is believed, and the first guess (`row_cost`, a share of a plain pass for
    each further row) only says how row counts never seen compare with those that were. What was
    seen long ago is believed less, so that it is tried again.
    """

    FADES, WEIGHT, FAR = 0.998, 0.2, 0.02
    """Belief left after another pass; weight of a new observation; belief lost for each row of
    distance."""

    def __init__(self, row_cost: float, most: int) -> None:
        super().__init__(even_costs(row_cost))
        self._most = most
        self._ms: dict[int, float] = {}
        self._belief: dict[int, float] = {}

    def observe(self, rows: int, context: int, pass_ms: float, select_ms: float) -> None:
        """A pass over `rows` rows took so long."""
        if pass_ms <= 0:
            return
        rows = min(rows, self._most)
        for each in self._belief:
            self._belief[each] *= self.FADES
        known = self._ms.get(rows, pass_ms)
        # A hiccup, or somebody who reads the answer slowly, counts as twice the time at most.
        self._ms[rows] = known + self.WEIGHT * (min(pass_ms, 2 * known) - known)
        self._belief[rows] = 1.0

    def curve(self, most: int, context: int) -> list[float]:
        """Milliseconds of a pass of 1..most rows, never decreasing."""
        return rising([self._expected(min(rows, self._most)) for rows in range(1, most + 1)])

    def _expected(self, rows: int) -> float:
        guess = self.table.pass_ms(rows, 0)
        if not self._ms:
            return guess
        belief = self._belief
        near = max(self._ms, key=lambda seen: belief[seen] - self.FAR * abs(seen - rows))
        scaled = self._ms[near] * guess / self.table.pass_ms(near, 0)
        own = belief.get(rows, 0.0)
        return math.exp(own * math.log(self._ms.get(rows, scaled)) + (1 - own) * math.log(scaled))

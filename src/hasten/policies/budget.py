"""The budget policy: each round verifies the node set that maximises expected tokens per second.

For every candidate node the policy predicts the probability that it is kept *given that its parent
is*,
from counts by source, rank and depth; along a path probabilities multiply. Nodes are taken in the
order
of their path probability (a child never comes before its parent), and the number taken maximises

    (1 + sum of path probabilities) / (milliseconds of a pass of so many rows + milliseconds of
    drafting)

with the measured cost table. One row, a plain step, is a choice like any other: when nothing pays,
nothing is verified. Counting goes on all the same, because the emitted tokens tell which of the
*candidates* would have been kept; so returning to drafts costs no trial passes. After a run of
plain
steps drafting itself pauses for a growing, bounded number of rounds, which keeps its host work
down.

Decisions look at sources, ranks and depths, never at the drawn token, so sampling stays exact.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hasten.drafts import prune
from hasten.policies.base import PlanContext
from hasten.policies.cost import CostTable
from hasten.types import Budget, Draft, Round

Key = tuple[str, int, int]

_DEPTHS = 4
"""Depths from here on share their counts."""


@dataclass(slots=True)
class AcceptanceBook:
    """Counts of kept / offered by (source, rank, depth): of the method on this model, shared by
    requests.

    It holds no text. `prior` gives a first guess for a key never seen.
    """

    kept: dict[Key, float] = field(default_factory=dict)
    offered: dict[Key, float] = field(default_factory=dict)
    limit: float = 2000.0
    """Counts beyond this are halved, so that old evidence fades."""

    def add(self, key: Key, kept: bool) -> None:
        """One candidate whose parent was kept."""
        self.offered[key] = self.offered.get(key, 0.0) + 1.0
        if kept:
            self.kept[key] = self.kept.get(key, 0.0) + 1.0
        if self.offered[key] > self.limit:
            self.offered[key] *= 0.5
            self.kept[key] = self.kept.get(key, 0.0) * 0.5

    def rate(self, key: Key) -> float:
        """Estimated probability, the prior counting as four candidates."""
        return (self.kept.get(key, 0.0) + 4.0 * prior(key)) / (self.offered.get(key, 0.0) + 4.0)


def prior(key: Key) -> float:
    """Before anything was counted: deliberately low, so that a new source has to earn its rows."""
    source, rank, _depth = key
    if source == "retrieval":  # the rank is 10 * match length + quarter of the share
        return min(0.1 + 0.05 * (rank // 10) + 0.1 * (rank % 10), 0.7)
    if source == "lookup":  # the rank is the match length
        return min(0.2 + 0.1 * rank, 0.6)
    return 0.3 * 0.5**rank


@dataclass(slots=True)
class _Candidates:
    """A draft before pruning, for counting what would have been kept."""

    draft: Draft
    keys: list[Key]


class BudgetPolicy:
    """One request's budget policy.

    table     measured cost of passes
    book      counts shared by this method's requests
    most      largest number of rows considered
    weight    how much the shared counts weigh against this request's own, in candidates
    """

    def __init__(
        self, table: CostTable, book: AcceptanceBook, *, most: int = 32, weight: float = 12.0
    ) -> None:
        self.table, self.book, self.most, self.weight = table, book, most, weight
        self._own = AcceptanceBook(limit=200.0)
        self._last: _Candidates | None = None
        self._plain_run = 0
        self._pause = 0
        self._draft_ms = 0.0
        self._planned_at = 0.0
        self._context = 0

    def plan(self, context: PlanContext) -> Budget:
        """How many candidates to ask for: all that could be verified, or none during a pause."""
        self._last = None
        self._context = context.context
        if self._pause > 0:
            self._pause -= 1
            return Budget(1, 0)
        self._planned_at = time.perf_counter()
        return Budget(self.most, min(context.remaining - 1, self.most))

    def select(self, draft: Draft) -> Draft:
        """The candidates worth verifying."""
        spent = 1e3 * (time.perf_counter() - self._planned_at)
        self._draft_ms = spent if not self._draft_ms else 0.9 * self._draft_ms + 0.1 * spent
        tree = draft.tree
        keys = [_key(draft, node) for node in range(len(tree))]
        self._last = _Candidates(draft, keys)
        chance = self._path_chances(draft, keys)
        order = sorted(range(1, len(tree)), key=lambda n: (-chance[n], n))
        keep = self._best_count(order, chance)
        if keep == 0:
            self._plain_run += 1
            if self._plain_run >= 8:  # nothing has paid for a while: look again later
                self._pause = min(self._plain_run // 4, 8)
            return Draft(prune(draft, []).tree)
        self._plain_run = 0
        return prune(draft, sorted(order[:keep]))

    def _path_chances(self, draft: Draft, keys: Sequence[Key]) -> list[float]:
        rates: dict[Key, float] = {}
        chance = [1.0] * len(keys)
        parents = draft.tree.parents
        for node in range(1, len(keys)):
            key = keys[node]
            if key not in rates:
                rates[key] = self._rate(key)
            chance[node] = chance[parents[node]] * rates[key]
        for (
            parent
        ) in draft.q:  # drawn siblings may only be dropped from the end of their draw order
            kids = [n for n in range(1, len(keys)) if parents[n] == parent]
            for before, after in pairwise(kids):
                chance[after] = min(chance[after], chance[before])
        return chance

    def _rate(self, key: Key) -> float:
        own = self._own
        shared = self.book.rate(key)
        return (own.kept.get(key, 0.0) + self.weight * shared) / (
            own.offered.get(key, 0.0) + self.weight
        )

    def _best_count(self, order: Sequence[int], chance: Sequence[float]) -> int:
        """How many of the ordered candidates to verify; 0 is a plain step."""
        curve = self.table.curve(len(order) + 1, self._context)
        # Drafting is paid for already when this is decided, so it weighs on both sides alike.
        best, best_rate, gain = 0, 1.0 / (curve[0] + self._draft_ms), 1.0
        for count, node in enumerate(order, start=1):
            gain += chance[node]
            rate = gain / (curve[count] + self._draft_ms)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def learn(self, round: Round) -> None:
        """Count, for every candidate whose parent the target reached, whether it was the token
        chosen."""
        last, self._last = self._last, None
        if last is None or not round.emitted:
            return
        tree = last.draft.tree
        children = tree.children()
        node: int | None = 0
        for token in round.emitted:
            following: int | None = None
            for kid in children[node or 0]:
                hit = tree.tokens[kid] == token
                self.book.add(last.keys[kid], hit)
                self._own.add(last.keys[kid], hit)
                if hit:
                    following = kid
            if following is None:
                return
            node = following


def _key(draft: Draft, node: int) -> Key:
    source = draft.sources[node] if draft.sources else ""
    rank = draft.ranks[node] if draft.ranks else 0
    return source, rank, min(draft.tree.depths[node], _DEPTHS)

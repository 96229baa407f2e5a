"""The budget policy: each round verifies the node set that is worth most tokens per second.

For every candidate node the policy predicts the probability that it is kept *given that its parent
is*, from counts by source, rank and depth; along a path probabilities multiply. Nodes are taken in
the order of their path probability (a child never comes before its parent), and the number taken
maximises

    (1 + sum of path probabilities) / (milliseconds of a pass of so many rows + those of drafting)

One row, a plain step, is a choice like any other: when nothing pays, nothing is verified. Counting
goes on all the same, because the emitted tokens tell which of the *candidates* would have been
kept; returning to drafts costs no trial passes. When drafting itself (host work, a draft model's
passes) costs more time than it has saved lately, it pauses for a growing, bounded number of rounds.

Decisions look at sources, ranks and depths, never at the drawn tokens, so sampling stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from hasten.drafters.ranks import prior
from hasten.drafts import prune
from hasten.policies.base import PlanContext
from hasten.policies.cost_model import CostModel, CostTable
from hasten.types import Budget, Draft, DraftTree, Round

Key = tuple[str, int, int]
"""Source, rank and depth."""

_ROOT: Key = ("", 0, 0)

DEPTHS = 3
"""Depths from here on share their counts."""

SHORTEST_PAUSE, LONGEST_PAUSE, LONGEST_SHARED_PAUSE = 2, 16, 64
"""Rounds without drafting before another look. In a shared pass a request's part is short, and
drafting for nothing a larger part of it."""

LOOKS_ANEW = 8
"""Of so many requests that join a crowd where drafting doesn't pay one tries all the same."""

PRIOR_WEIGHT = 4.0
"""The first guess of a key counts as so many candidates."""

LUCK_WEIGHT = 4.0
"""Candidates kept and promised alike before the first."""

LUCK_FADES = 0.98
"""What is left of them a round later."""


@dataclass(slots=True)
class AcceptanceBook:
    """Counts of kept / offered by source, rank and depth: a method's on a model, over requests.

    It holds no text. A key never seen has `hasten.drafters.ranks.prior`.
    """

    limit: float = 2000.0
    """Counts beyond this are halved, so that old evidence fades."""
    counts: dict[Key, list[float]] = field(default_factory=dict)
    """``[kept, offered]`` of each key."""
    crowds: dict[int, list[float]] = field(default_factory=dict)
    """By the size (`_crowd`) of what shares a pass: the milliseconds that drafting saved a request
    lately, and how many requests have relied on that since."""

    def add(self, key: Key, kept: bool) -> None:
        """One candidate whose parent was kept."""
        count = self.counts.get(key)
        if count is None:
            count = self.counts[key] = [0.0, 0.0]
        count[0] += kept
        count[1] += 1.0
        if count[1] > self.limit:
            count[0] *= 0.5
            count[1] *= 0.5

    def rate(self, key: Key, guess: float, weight: float) -> float:
        """Kept / offered, where `guess` counts as `weight` candidates; in (0, 1)."""
        kept, offered = self.counts.get(key, _NONE)
        return (kept + weight * guess) / (offered + weight)

    def saved(self, others: int, saved_ms: float) -> None:
        """What drafting saved a request in a pass shared with `others`."""
        crowd = self.crowds.setdefault(_crowd(others), [saved_ms, 0.0])
        crowd[0] += 0.1 * (saved_ms - crowd[0])

    def hopeless(self, others: int) -> bool:
        """Whether a new request need not look if drafting pays beside so many others: it didn't
        lately, and somebody looked not long ago."""
        crowd = self.crowds.get(_crowd(others))
        if crowd is None or crowd[0] >= 0:
            return False
        crowd[1] += 1
        return crowd[1] % LOOKS_ANEW != 0

    def reset(self) -> None:
        """Forget all counts."""
        self.counts.clear()
        self.crowds.clear()

    def fork(self) -> AcceptanceBook:
        """A copy that shares nothing."""
        counts = {key: list(count) for key, count in self.counts.items()}
        crowds = {size: list(crowd) for size, crowd in self.crowds.items()}
        return AcceptanceBook(self.limit, counts, crowds)


def _crowd(others: int) -> int:
    return others.bit_length()


_NONE = (0.0, 0.0)

_prior = lru_cache(maxsize=4096)(prior)
"""Keys are few, and come again every round."""


class BudgetPolicy:
    """One request's budget policy.

    costs     what passes cost: a table, or a model of it shared by a method's requests
    book      counts shared by a method's requests
    most      candidates asked for, and rows verified, the root included, at most
    weight    how much the shared counts weigh against this request's own, in candidates

    A request also has its *luck*: how many candidates were kept lately against how many the shared
    counts promised. It scales all of these, so that a text unlike the earlier ones is noticed in a
    dozen rounds instead of once for each key.
    """

    def __init__(
        self,
        costs: CostTable | CostModel,
        book: AcceptanceBook,
        *,
        most: int = 24,
        weight: float = 30.0,
    ) -> None:
        self.costs = CostModel(costs) if isinstance(costs, CostTable) else costs
        self.book, self.most, self.weight = book, most, weight
        self._own = AcceptanceBook(limit=200.0)
        self._draft: Draft | None = None
        self._others = 0
        self._keys: list[Key] = []
        self._shared: dict[Key, float] = {}
        """The shared rates of the draft's keys."""
        self._kept, self._promised = 0.0, 0.0
        self._rows, self._context = 1, 1
        self.draft_ms = 0.0
        """What drafting took lately, in the rounds that did."""
        self._gain_ms = 0.0
        """Milliseconds the last draft promised to save, its own making not counted."""
        self._saved_ms: float | None = None
        """Running mean of the milliseconds drafting saved, its own making counted."""
        self._pause, self._next_pause = 0, SHORTEST_PAUSE
        self._fresh = True
        """Nothing was planned yet."""

    # -- deciding --------------------------------------------------------------------------------

    def plan(self, context: PlanContext) -> Budget:
        """How many candidates to ask for: all that could be verified, or none during a pause."""
        self._draft, self._rows, self._context = None, 1, context.context
        self._others = context.others
        self._shared.clear()
        depth = min(context.remaining - 1, self.most)
        if depth < 1 or self.most < 2:
            return Budget(1, 0)
        if self._fresh and context.others and self.book.hopeless(context.others):
            self._pause = LONGEST_SHARED_PAUSE
        self._fresh = False
        if not context.others:  # a pause as long as a crowd's would be too long alone
            self._pause = min(self._pause, LONGEST_PAUSE)
        if self._pause > 0:
            self._pause -= 1
            return Budget(1, 0)
        return Budget(self.most, depth)

    def select(self, draft: Draft) -> Draft:
        """The candidates worth verifying in a pass of one's own."""
        chance = self.weigh(draft)
        size = len(chance)
        order = sorted(range(1, size), key=chance.__getitem__, reverse=True)  # ties: by index
        extra = 0 if draft.extra is None else len(draft.extra.tokens)
        whole = extra > 0 or bool(draft.frontiers)  # such a draft is run whole, or not at all
        keep = self._best_count(order, chance, size - 1 if whole else 1, extra)
        return self.keep(draft, sorted(order[:keep]), self._gain_ms)

    def weigh(self, draft: Draft) -> list[float]:
        """For each node the probability that it is kept (see `hasten.policies.sharing`)."""
        self._draft = draft
        return self._path_chances(draft)

    def keep(self, draft: Draft, nodes: Sequence[int], gain_ms: float) -> Draft:
        """Verify these nodes (increasing; none: a plain step), which promise to save so much."""
        self._gain_ms = gain_ms
        if not nodes:
            return Draft(DraftTree.trusted(draft.tree.tokens[:1], (-1,), (0,)))
        extra = 0 if draft.extra is None else len(draft.extra.tokens)
        self._rows = 1 + len(nodes) + extra
        return draft if extra or draft.frontiers else prune(draft, nodes)

    def _path_chances(self, draft: Draft) -> list[float]:
        """For each node the probability that it is kept; never more than its parent's, nor, among
        drawn siblings, than that of one drawn earlier: these may only be dropped from the end."""
        parents, depths, size = draft.tree.parents, draft.tree.depths, len(draft.tree)
        sources, ranks = draft.sources or ("",) * size, draft.ranks or (0,) * size
        luck = (self._kept + LUCK_WEIGHT) / (self._promised + LUCK_WEIGHT)
        book, own, weight = self.book, self._own, self.weight
        rates: dict[Key, float] = {}
        keys = [_ROOT]
        chance = [1.0]
        drawn: dict[int, float] = dict.fromkeys(draft.q, 1.0)
        for node in range(1, size):
            parent, depth = parents[node], depths[node]
            key = (sources[node], ranks[node], depth if depth < DEPTHS else DEPTHS)
            keys.append(key)
            rate = rates.get(key)
            if rate is None:
                shared = self._shared[key] = book.rate(key, _prior(*key), PRIOR_WEIGHT)
                rate = rates[key] = own.rate(key, min(shared * luck, 0.97), weight)
            each = chance[parent] * rate
            if parent in drawn:
                each = drawn[parent] = min(each, drawn[parent])
            chance.append(each)
        self._keys = keys
        return chance

    def _best_count(
        self, order: Sequence[int], chance: Sequence[float], least: int, extra: int
    ) -> int:
        """How many of the ordered candidates to verify, at least `least`; 0 is a plain step."""
        curve = self.costs.curve(self.most + extra, self._context)
        # What drafting takes is spent when this is decided, whatever the choice.
        spent, plain = self.draft_ms, curve[0]
        best, best_rate, tokens = 0, 1.0 / (plain + spent), 1.0
        self._gain_ms = 0.0
        for count, node in enumerate(order, start=1):
            tokens += chance[node]
            rate = tokens / (curve[count + extra] + spent)
            if rate > best_rate and count >= least:
                best, best_rate = count, rate
                self._gain_ms = tokens * plain - curve[count + extra]
        return best

    # -- learning --------------------------------------------------------------------------------

    def learn(self, round: Round) -> None:
        """Take note of the round's times and of what became of its candidates."""
        draft, self._draft = self._draft, None
        if round.tree is None:
            return
        times = round.times
        if not self._others:  # a shared pass is told to the costs once
            self.costs.observe(self._rows, self._context, 1e3 * times.target, 1e3 * times.topk)
        if draft is not None:
            # Beside others nearly all host work of such a round is for the draft.
            took = times.host + times.draft_model if self._others else times.draft
            self._weigh_drafting(1e3 * took)
            self._count(draft.tree, round.emitted)

    def _weigh_drafting(self, took_ms: float) -> None:
        """Pause when drafts haven't saved the time of their making lately."""
        if self._saved_ms is None:  # hopeful at first
            self.draft_ms = took_ms
            plain = self.costs.curve(self.most, self._context)[0]
            self._saved_ms = 0.25 * plain / (1 + self._others)
        self.draft_ms += 0.1 * (took_ms - self.draft_ms)
        saved = self._gain_ms - self.draft_ms
        if self._others:
            self.book.saved(self._others, saved)
        self._saved_ms += 0.2 * (saved - self._saved_ms)
        if saved > 0:
            self._saved_ms = max(self._saved_ms, saved)
            self._next_pause = SHORTEST_PAUSE
        elif self._saved_ms < 0:
            # The more share a pass, the smaller a request's part of it, and the dearer a look.
            self._pause = max(self._next_pause, 1 + self._others)
            more, longest = (4, LONGEST_SHARED_PAUSE) if self._others else (2, LONGEST_PAUSE)
            self._next_pause = min(more * self._next_pause, longest)

    def _count(self, tree: DraftTree, emitted: Sequence[int]) -> None:
        """Count every candidate whose parent the target reached, verified or not: was it the token
        the target went on with?"""
        self._kept *= LUCK_FADES
        self._promised *= LUCK_FADES
        node: int | None = 0
        tokens, parents, keys = tree.tokens, tree.parents, self._keys
        for token in emitted:
            if node is None:
                return
            kids = [kid for kid, parent in enumerate(parents) if parent == node]
            node = None
            for kid in kids:
                key, kept = keys[kid], tokens[kid] == token
                self._kept += kept
                self._promised += self._shared[key]
                self.book.add(key, kept)
                self._own.add(key, kept)
                if kept:
                    node = kid

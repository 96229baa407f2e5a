"""How much of a drafted block is verified, in one request: the rule, and what it learns.

`hasten.policies.length` has the rules; here they meet a request. With ``cost`` the policy also
stops drafting for some rounds where drafts haven't saved the time of their making, so that a
drafter which is of no use to a text costs little.
"""

from __future__ import annotations

from collections.abc import Sequence

from hasten.policies.base import PlanContext
from hasten.policies.cost_model import CostModel
from hasten.policies.length import LengthPolicy, SurvivalBook
from hasten.types import Budget, Draft, Round

SHORTEST_PAUSE, LONGEST_PAUSE = 2, 16
"""Rounds without a draft before another try."""

_NEW, _AGAIN = 0.2, 0.5
"""Weight of a round in the running means, and of one that was drafted after a pause."""


class BlockLength:
    """A request's policy with a rule that needs no costs: ``fixed`` or ``ratio``."""

    def __init__(self, rule: LengthPolicy) -> None:
        self.rule = rule

    @property
    def asks(self) -> bool:
        """Whether the length head's word is wanted."""
        return self.rule.policy != "fixed"

    @property
    def learns(self) -> bool:
        """Whether it learns from tokens that weren't verified, too."""
        return False

    def rows(self, fraction: float | None) -> int:
        """Rows of the block to verify, the anchor's included. `fraction` is the length head's word;
        None: there is none. Never decided from a drawn token."""
        return self.rule.rows(fraction)

    def judged(
        self, fraction: float | None, drafted: Sequence[int], emitted: Sequence[int]
    ) -> None:
        """A block's tokens, verified or not, beside what the target emitted."""

    def plan(self, context: PlanContext) -> Budget:
        """As many rows as the rule may want, and as may still be emitted."""
        return Budget(self.rule.most or self.rule.block, max(context.remaining - 1, 0))

    def select(self, draft: Draft) -> Draft:
        """All of it: the drafter has asked `rows` already."""
        return draft

    def learn(self, round: Round) -> None:
        """Nothing to learn."""


class CostedLength(BlockLength):
    """A request's policy by measured costs.

    costs  what passes cost; shared by a method's requests, as `book` is: how often slots are kept
    """

    def __init__(self, rule: LengthPolicy, costs: CostModel, book: SurvivalBook) -> None:
        super().__init__(rule)
        self._costs, self._book = costs, book
        self._context = PlanContext(1, 1)
        self._drafting = False
        self._draft_ms = 0.0
        """What drafting took lately, in the rounds that did."""
        self._saved_ms: float | None = None
        """Running mean of the milliseconds that drafting saved, its own making counted."""
        self._pause, self._next_pause = 0, SHORTEST_PAUSE
        self._weight = _NEW

    @property
    def learns(self) -> bool:
        """It does."""
        return True

    def plan(self, context: PlanContext) -> Budget:
        """All rows, or none during a pause."""
        self._context, self._drafting = context, False
        if self._pause > 0:
            self._pause -= 1
            return Budget(1, 0)
        budget = super().plan(context)
        self._drafting = budget.nodes > 1 and budget.depth > 0
        return budget

    def rows(self, fraction: float | None) -> int:
        """The number with the most expected tokens for its time."""
        curve = self._share()
        return self.rule.rows(fraction, curve=curve, draft_ms=self._draft_ms, book=self._book)

    def _share(self) -> list[float]:
        """Milliseconds of this request's part of a pass, by its rows: all of it when alone; beside
        others its share of a pass of one row each, and what more rows add."""
        others, most = self._context.others, self.rule.most or self.rule.block
        curve = self._costs.curve(others + most, self._context.context)
        one = curve[others]
        return [one / (others + 1) + curve[others + n] - one for n in range(most)]

    def judged(
        self, fraction: float | None, drafted: Sequence[int], emitted: Sequence[int]
    ) -> None:
        """Count it."""
        self._book.learn(fraction, drafted, emitted)

    def learn(self, round: Round) -> None:
        """Take note of the round's times, and pause when drafts don't pay."""
        if round.tree is None:
            return
        times, rows = round.times, len(round.tree)
        if not self._context.others:  # a shared pass's time isn't one request's
            self._costs.observe(rows, self._context.context, 1e3 * times.target, 1e3 * times.topk)
        if not self._drafting:
            return
        took, share = 1e3 * times.draft, self._share()
        self._draft_ms += (_NEW if self._draft_ms else 1.0) * (took - self._draft_ms)
        cost = share[min(rows, len(share)) - 1] + self._draft_ms
        saved = len(round.emitted) * share[0] - cost
        if self._saved_ms is None:  # hopeful at first
            self._saved_ms = share[0]
        self._saved_ms += self._weight * (saved - self._saved_ms)
        if self._saved_ms >= 0:
            self._next_pause, self._weight = SHORTEST_PAUSE, _NEW
        else:
            self._pause, self._weight = self._next_pause, _AGAIN
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)

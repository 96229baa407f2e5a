"""Which arm drafts a round: the cache, the model's drafter, or nobody. Decided before any pass.

A decision rests on the draft of the cache, on counters and on how earlier rounds went; it never
sees this round's logits, nor a token drawn for it, so every verifier stays exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hasten.drafters.suffix import SuffixQuery
from hasten.payoff.features import Classes, Floats, History, features, static_features
from hasten.policies.base import PlanContext
from hasten.policies.cost_model import CostModel
from hasten.types import Budget, Round

RULES = ("payoff", "cost", "frequency", "cache", "model")
CACHE, MODEL, PLAIN = "cache", "model", "plain"
TAU, LEAST_SCORE = 6.0, 4.0
PATIENCE = 16
"""Rounds after which the model's drafter is tried again where plain rounds are worth more."""


class Predicts(Protocol):
    """What tells a draft's payoff (`hasten.payoff.predictor.Predictor`)."""

    def predict(self, x: Floats) -> Floats:
        """Tokens expected to be kept, from features."""
        ...


@dataclass(frozen=True, slots=True)
class Rule:
    """How a round's arm is chosen.

    name    ``payoff``: the cache where at least `tau` tokens are expected to be kept (the paper);
            ``cost``: the arm with most expected tokens for its time; ``frequency``: the cache where
            its score is at least `s0`; ``cache``: whenever it has a draft; ``model``: never
    plain   with ``cost``: a plain round is a choice, too
    """

    name: str = "payoff"
    tau: float = TAU
    s0: float = LEAST_SCORE
    plain: bool = False


@dataclass(slots=True)
class Record:
    """What the model arm's rounds were like, over a method's requests; it holds no text.

    kept   running mean of tokens kept
    cost   of drafting and verifying, in plain passes (a geometric mean)
    """

    SLOW = 0.05
    """Weight of a new round, once there are some."""
    kept: float = 1.0
    cost: float = 1.2
    rounds: int = field(default=1)
    """The first guesses count as one."""

    def learn(self, kept: int, cost: float) -> None:
        """Another round. Of its cost a factor of two at most counts: a hiccup is a small one."""
        self.rounds += 1
        weight = max(1.0 / self.rounds, self.SLOW)
        self.kept += weight * (kept - self.kept)
        step = math.log(max(cost, 1e-6) / self.cost)
        self.cost *= math.exp(weight * min(max(step, -math.log(2)), math.log(2)))

    def reset(self) -> None:
        """Back to the first guesses."""
        self.kept, self.cost, self.rounds = 1.0, 1.2, 1

    def fork(self) -> Record:
        """A copy."""
        return Record(self.kept, self.cost, self.rounds)


@dataclass(frozen=True, slots=True)
class Choice:
    """Who drafts, and how many of the cache's tokens are verified where it is the cache."""

    arm: str
    tokens: int = 0


class Gate:
    """One request's choices.

    rule       how they are made
    predictor  needed by rules ``payoff`` and ``cost``
    table      kinds of tokens, see `hasten.payoff.features.class_table`; for a predictor
    costs      what passes cost, for ``cost``; shared by a method's requests, as `record` is
    model      whether there is a drafter with a model
    """

    def __init__(
        self,
        rule: Rule,
        predictor: Predicts | None = None,
        table: Classes | None = None,
        *,
        costs: CostModel | None = None,
        record: Record | None = None,
        model: bool = True,
    ) -> None:
        self.rule, self._predictor, self._table, self._model = rule, predictor, table, model
        self.costs, self.record = costs, record or Record()
        self.begin(0)

    def begin(self, prompt: int) -> None:
        """A new request with so many tokens of prompt."""
        self._prompt, self._history = prompt, History()
        self._context = PlanContext(1, 1)
        self.model_budget: Budget | None = None
        """What the model arm's own policy planned for this round; None: nobody was asked."""
        self.arm = PLAIN
        """Who drafts this round, or drafted the last one."""
        self._asked = False
        self._passed_over = 0
        self.expected: float | None = None
        """What the predictor said last."""

    def plan(self, context: PlanContext, model: Budget) -> None:
        """A round begins; it is plain until `choose` says otherwise."""
        self._context, self.model_budget, self.arm = context, model, PLAIN

    # -- deciding --------------------------------------------------------------------------------

    def choose(self, query: SuffixQuery | None, length: int) -> Choice:
        """The arm of this round. `query` is what the cache drafts; `length` counts all tokens so
        far, the pending one included."""
        self._asked, self.expected = True, None
        drafted = len(query.tokens) if query is not None else 0
        choice = Choice(MODEL if self._model else PLAIN)
        if query is not None and drafted and self._cache_wins(query, length):
            choice = Choice(CACHE, self._verified(drafted))
        elif choice.arm == MODEL and self.rule.plain and self._plain_wins():
            choice = Choice(PLAIN)
        self.arm = choice.arm
        return choice

    def _cache_wins(self, query: SuffixQuery, length: int) -> bool:
        name = self.rule.name
        if name == "frequency":
            return query.score >= self.rule.s0
        if name in (CACHE, MODEL):
            return name == CACHE
        expected = self.expected = self._predict(query, length)
        if name == "payoff":
            return expected >= self.rule.tau
        curve = self._curve(1 + len(query.tokens))
        tokens = min(expected, self._verified(len(query.tokens)))
        rate = (tokens + 1.0) / curve[self._verified(len(query.tokens))]
        others = self._model_rate(curve[0]) if self._model else 0.0
        if self.rule.plain or not self._model:
            others = max(others, 1.0 / curve[0])
        return rate >= others

    def _predict(self, query: SuffixQuery, length: int) -> float:
        assert self._predictor is not None
        assert self._table is not None
        static = static_features(query, self._prompt, length - self._prompt, self._table)
        return float(self._predictor.predict(features(static, self._history.columns())))

    def _verified(self, drafted: int) -> int:
        """Tokens of a copy that are verified: where rows cost time, not many more than are
        expected to be kept."""
        if self.rule.name != "cost" or self.expected is None:
            return drafted
        return min(drafted, math.ceil(1.5 * self.expected) + 4)

    def _plain_wins(self) -> bool:
        """Whether a plain round is worth more than the model arm's, which is tried now and then all
        the same."""
        plain = self._curve(1)[0]
        wins = self._model_rate(plain) < 1.0 / plain and self._passed_over < PATIENCE
        self._passed_over = self._passed_over + 1 if wins else 0
        return wins

    def _model_rate(self, plain: float) -> float:
        return (self.record.kept + 1.0) / (self.record.cost * plain)

    def _curve(self, most: int) -> Sequence[float]:
        """Milliseconds of this request's part of a pass by its rows: all of it when alone; beside
        others its share of a pass of one row each, and what more rows add."""
        assert self.costs is not None
        others = self._context.others
        curve = self.costs.curve(others + most, self._context.context)
        one = curve[others]
        return [one / (others + 1) + curve[others + n] - one for n in range(most)]

    # -- learning --------------------------------------------------------------------------------

    def observe(self, round: Round) -> None:
        """A round is over: what was kept, and whose draft it was."""
        asked, self._asked = self._asked, False
        if round.tree is not None:
            cached = asked and self.arm == CACHE and round.drafted > 0
            self._history.add(cached, round.drafted, len(round.accepted) - 1)

    def learn(self, round: Round) -> None:
        """What the round cost; of use where costs are weighed. Passes shared with others don't
        tell."""
        if self.costs is None or round.tree is None or self._context.others:
            return
        times = round.times
        if self.arm != MODEL:
            rows, context = len(round.tree), self._context.context
            self.costs.observe(rows, context, 1e3 * times.target, 1e3 * times.topk)
            return
        spent = 1e3 * (times.draft + times.target + times.topk)
        self.record.learn(len(round.accepted) - 1, spent / self._curve(1)[0])

"""Hybrid Verified Decoding: a copy where it will pay, else a draft of a model (arXiv 2606.01019).

Each round the cache is asked first (suffix decoding, a chain). A gate says whether its draft will
pay (`hasten.payoff.gate`); if not, the other drafter is asked, which has a model behind it and
takes longer. It isn't run in rounds of the cache: what they verified waits in it and is caught up
in one batch when it drafts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hasten.drafters.base import BaseDrafter, DraftContext, Drafter
from hasten.drafters.ranks import SUFFIX, suffix_rank
from hasten.drafters.suffix import Suffix
from hasten.drafters.suffix_guess import Guess
from hasten.payoff.gate import CACHE, MODEL, Gate
from hasten.types import Budget, Draft, DraftTree, Round, RowSignals, Signals


class Hybrid(BaseDrafter):
    """A chain of the cache, or a draft of the model arm.

    cache     drafts chains (mode ``path``)
    gate      this request's choice of arms
    model     the model arm's drafter; None: there is none
    longest   tokens that the cache drafts at most

    Nodes' sources are ``suffix`` for the cache, and the model arm's own, or its name.
    """

    name = "hvd"

    def __init__(self, cache: Suffix, gate: Gate, model: Drafter | None, *, longest: int) -> None:
        self.cache, self.gate, self.model, self._longest = cache, gate, model, longest
        self.needs = Signals() if model is None else model.needs

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Both arms read the prompt."""
        self.gate.begin(len(prompt))
        self.cache.begin(prompt, signals)
        if self.model is not None:
            self.model.begin(prompt, signals)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """The chosen arm's draft; a lone root where it has none."""
        guess = Guess()
        query = None
        if self.gate.rule.name != MODEL:
            guess = self.cache.guess(min(budget.nodes - 1, self._longest), budget.depth)
            query = self.cache.last_query
        choice = self.gate.choose(query, len(ctx.ids))
        if choice.arm == CACHE:
            return _copy(ctx.ids[-1], guess, choice.tokens)
        if choice.arm == MODEL and self.model is not None:
            return self._drafted(self.model, ctx, budget)
        return Draft(DraftTree.chain(ctx.ids[-1]))

    def _drafted(self, model: Drafter, ctx: DraftContext, budget: Budget) -> Draft:
        """The model arm's draft within what its own policy planned."""
        planned = self.gate.model_budget or budget
        nodes, depth = min(budget.nodes, planned.nodes), min(budget.depth, planned.depth)
        if nodes < 2 or depth < 1:
            return Draft(DraftTree.chain(ctx.ids[-1]))
        draft = model.propose(ctx, Budget(nodes, depth))
        if draft.sources:
            return draft
        return replace(draft, sources=("", *[model.name] * (len(draft.tree) - 1)))

    def observe(self, round: Round) -> None:
        """Both arms see what was kept, whoever drafted it."""
        self.gate.observe(round)
        self.cache.observe(round)
        if self.model is not None:
            self.model.observe(round)

    def end(self) -> None:
        """Leave no trace of the request."""
        self.cache.end()
        if self.model is not None:
            self.model.end()


def _copy(root: int, guess: Guess, count: int) -> Draft:
    """The first `count` tokens of a chain of the cache."""
    tokens = guess.tokens[:count]
    ranks = map(suffix_rank, guess.lengths[:count], guess.chances[:count])
    return Draft(
        DraftTree.chain(root, tokens), sources=("", *[SUFFIX] * len(tokens)), ranks=(0, *ranks)
    )

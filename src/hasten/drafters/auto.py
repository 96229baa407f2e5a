"""`auto`'s drafter (ours): what followed the text's suffixes elsewhere, then stored candidates.

Suffix counts (`hasten.drafters.suffix`, blend) guess what the text repeats, and the latest top-k of
each token (RACER's and token recycling's table) the rest. The table also has a say in the copies: a
copied token that the model itself ranked first, or nowhere, after its parent is a better or a worse
guess, which its rank tells the budget policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.drafters.logits_tree import grow_logits
from hasten.drafters.ranks import COPIED, agreement, copied_rank
from hasten.drafters.successors import SuccessorTable
from hasten.drafters.suffix import Suffix
from hasten.drafters.tree_builder import TreeBuilder
from hasten.types import Budget, Draft, Round, RowSignals, Signals

COPIES = 0.75
"""Share of the budget that copies may take."""


class Auto(BaseDrafter):
    """A tree of copies and stored candidates.

    breadth   candidates kept per token
    start     candidates of tokens not seen yet (`hasten.start_rows`); None: there are none
    eos_ids   nothing is drafted after these
    """

    name = "auto"

    def __init__(
        self,
        *,
        breadth: int = 8,
        start: np.ndarray[Any, Any] | None = None,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.breadth, self._start, self._eos_ids = breadth, start, eos_ids
        self.needs = Signals(topk=breadth, prompt=True)
        self._suffix = Suffix(eos_ids=eos_ids)
        self._successors = SuccessorTable(start=start)

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Count the prompt and store its candidates."""
        self._suffix.begin(prompt, signals)
        self._successors = SuccessorTable(start=self._start)
        if signals.topk_ids is not None:
            self._successors.update(prompt[-len(signals.topk_ids) :], signals.topk_ids)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """Copies first, then the logits tree."""
        tree = TreeBuilder(ctx.ids[-1], budget.nodes, budget.depth)
        guess = self._suffix.guess(round(COPIES * (budget.nodes - 1)), budget.depth)
        nodes: list[int] = []
        for at, (token, parent) in enumerate(zip(guess.tokens, guess.parents, strict=True)):
            above = nodes[parent] if parent >= 0 else 0
            agrees = agreement(token, self._successors.get(tree.tokens[above]))
            rank = copied_rank(guess.lengths[at], guess.chances[at], agrees)
            child = tree.add(above, token, COPIED, rank)
            assert child is not None  # the guess keeps to the budget
            nodes.append(child)
        grow_logits(tree, self._successors, self.breadth, eos_ids=self._eos_ids)
        return tree.draft()

    def observe(self, round: Round) -> None:
        """Count what was emitted, store what was evaluated."""
        self._suffix.observe(round)
        if round.tree is not None and round.signals.topk_ids is not None:
            self._successors.update(round.tree.tokens, round.signals.topk_ids, round.accepted)

    def end(self) -> None:
        """Leave no trace of the request."""
        self._suffix.end()
        self._successors.reset()

"""RACER: retrieved n-grams and copied logits in one draft tree (arXiv 2604.14885).

Retrieval ("seen"): the best continuations of every suffix of the text that occurred before. Logits
("unseen"): a breadth-first expansion of the latest top-k successors of each token, with shrinking
breadth. Retrieval goes first, logits take what is left, and both fuse into one tree. What follows
the paper, what is ours and what is unknown: docs/methods/racer.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.drafters.logits_tree import SCHEDULES, grow_logits
from hasten.drafters.ngrams import Cursor, NGramStore
from hasten.drafters.phrase_tree import grow_phrases
from hasten.drafters.ranks import RETRIEVAL, retrieval_rank
from hasten.drafters.successors import SuccessorTable
from hasten.drafters.tree_builder import TreeBuilder
from hasten.errors import OptionError
from hasten.phrases import Phrases
from hasten.types import Budget, Draft, Round, RowSignals, Signals

LEAST_RETRIEVED = 8


@dataclass(slots=True)
class RacerState:
    """What RACER remembers: of one request, or shared where the user asked for it."""

    ngrams: NGramStore = field(default_factory=NGramStore)
    successors: SuccessorTable = field(default_factory=SuccessorTable)

    def reset(self) -> None:
        """Forget everything."""
        self.ngrams.reset()
        self.successors.reset()

    def fork(self) -> RacerState:
        """A copy that shares nothing that changes."""
        return RacerState(self.ngrams.fork(), self.successors.fork())


class Racer(BaseDrafter):
    """A tree from retrieved n-grams and copied logits.

    breadth     successors kept per token, and children of the root in the logits tree; 0 switches
                it off
    ngram       longest n-gram kept; 0 switches retrieval off
    min_match   shortest suffix (the root counts) whose continuations are drafted
    schedule    breadths of the logits tree: ``deep`` (the authors' code) or ``wide`` (as published)
    capacity    most trie nodes of a request's own state
    retrieved   share of the budget that retrieved nodes may take, and 8 of them at least (ours; the
                paper's: 1)
    decay       how much less a border one token shorter counts (ours); None: the paper's order, by
                count
    refill      grow the logits tree until the budget is full, duplicates not counted (ours)
    graft       start the logits tree from retrieved leaves too (ours)
    start       candidates of tokens not seen yet (`hasten.start_rows`; ours); None: there are none
    phrases     what the model often says, drafted between the two (`hasten.phrases`; ours); None:
                there are none
    state       shared memory (start rows included); None: this request's own
    eos_ids     nothing is drafted after these
    """

    name = "racer"

    def __init__(
        self,
        *,
        breadth: int = 8,
        ngram: int = 10,
        min_match: int = 1,
        schedule: str = "deep",
        capacity: int = 10_000,
        retrieved: float = 0.4,
        decay: float | None = 0.5,
        refill: bool = True,
        graft: bool = True,
        start: np.ndarray[Any, Any] | None = None,
        phrases: Phrases | None = None,
        state: RacerState | None = None,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        if schedule not in SCHEDULES:
            raise OptionError(
                "racer.schedule",
                f"unknown schedule {schedule!r}",
                f"Choose one of {', '.join(SCHEDULES)}",
            )
        self.breadth, self.ngram, self.min_match = breadth, ngram, min_match
        self.schedule, self.capacity, self.retrieved = schedule, capacity, retrieved
        self.decay, self.refill, self.graft = decay, refill, graft
        self.needs = Signals(topk=breadth, prompt=breadth > 0, sparse=True)
        self._start, self._phrases, self._shared = start, phrases, state
        self._eos_ids = eos_ids
        self._forget()

    def _forget(self) -> None:
        self._cursor = Cursor()
        if self._shared is not None:
            self._state = self._shared
        else:
            self._state = RacerState(
                NGramStore(max(self.ngram, 1), self.capacity), SuccessorTable(start=self._start)
            )

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Warm up on the prompt: every n-gram, and the successors the prefill already computed."""
        self._forget()
        if self.ngram:
            self._state.ngrams.push(self._cursor, prompt)
        if signals.topk_ids is not None:
            self._state.successors.update(prompt[-len(signals.topk_ids) :], signals.topk_ids)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """Retrieved nodes first, then phrases, then the logits tree."""
        tree = TreeBuilder(ctx.ids[-1], budget.nodes, budget.depth, self._eos_ids)
        leaves, rivals = self._retrieve(tree) if self.ngram else ((), {})
        if self._phrases is not None:
            grow_phrases(tree, self._phrases, self._state.successors, ctx.ids)
        if self.breadth:
            grow_logits(
                tree,
                self._state.successors,
                self.breadth,
                schedule=self.schedule,
                leaves=leaves if self.graft else (),
                rivals=rivals,
                refill=self.refill,
            )
        return tree.draft()

    def _retrieve(self, tree: TreeBuilder) -> tuple[Sequence[int], Mapping[int, int]]:
        """Add the best continuations of the text's borders.

        Gives the retrieved leaves, and for each node with retrieved children the longest match
        length among these.
        """
        guesses = tree.limit - 1
        room = max(round(self.retrieved * guesses), min(guesses, LEAST_RETRIEVED))
        chosen = self._state.ngrams.continuations(
            self._cursor, room, min_match=self.min_match, decay=self.decay
        )
        nodes: list[int | None] = []
        rivals: dict[int, int] = {}
        for parent, token, share, length in chosen:
            above = 0 if parent < 0 else nodes[parent]
            if above is None:  # deeper than the budget allows, or after an end
                nodes.append(None)
                continue
            row = self._state.successors.get(tree.tokens[above])
            rank = retrieval_rank(length, share, token, row)
            nodes.append(tree.add(above, token, RETRIEVAL, rank))
            rivals[above] = max(rivals.get(above, 0), length)
        return [n for n in nodes if n is not None and n not in rivals], rivals

    def observe(self, round: Round) -> None:
        """Store what was evaluated (rejected rows too) and what was emitted."""
        if self.ngram:
            self._state.ngrams.push(self._cursor, round.emitted)
        if round.tree is not None and round.signals.topk_ids is not None:
            self._state.successors.update(round.tree.tokens, round.signals.topk_ids, round.accepted)

    def end(self) -> None:
        """Leave no trace of the request, unless its state is shared."""
        self._forget()

"""RACER: retrieved n-grams and copied logits in one draft tree (arXiv 2604.14885, ACL Findings
2026).

Retrieval ("seen"): the most frequent continuations of every suffix of the text that occurred
before.
Logits ("unseen"): a breadth-first expansion of the latest top-k successors of each token, with
shrinking
breadth. Retrieval takes up to the whole budget, logits what is left, and both fuse into one tree.
What follows the paper, what is ours and what is unknown: docs/methods/racer.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.drafters.ngrams import NGramStore, best_first
from hasten.drafters.successors import SuccessorTable
from hasten.drafters.tree_builder import TreeBuilder
from hasten.errors import OptionError
from hasten.types import Budget, Draft, Round, RowSignals, Signals

SCHEDULES = ("deep", "wide")


@dataclass(slots=True)
class RacerState:
    """What RACER remembers: of one request, or shared where the user asked for it."""

    ngrams: NGramStore = field(default_factory=NGramStore)
    successors: SuccessorTable = field(default_factory=SuccessorTable)


class Racer(BaseDrafter):
    """A tree from retrieved n-grams and copied logits.

    breadth     successors kept per token, and children of the root in the logits tree; 0 switches
                it off
    ngram       longest n-gram kept; 0 switches retrieval off
    min_match   shortest suffix (the root counts) whose continuations are drafted
    schedule    breadths of the logits tree: ``deep`` (as the authors' code) or ``wide`` (as
                published)
    decay       how much less a border one token shorter counts (ours); None: the paper's order, by
                count
    refill      grow the logits tree until the budget is full, duplicates not counted
    graft       start the logits tree from retrieved leaves too
    state       shared memory; None: this request's own
    """

    name = "racer"

    def __init__(
        self,
        *,
        breadth: int = 8,
        ngram: int = 10,
        min_match: int = 2,
        schedule: str = "deep",
        capacity: int = 10_000,
        decay: float | None = 0.5,
        refill: bool = True,
        graft: bool = True,
        state: RacerState | None = None,
    ) -> None:
        if schedule not in SCHEDULES:
            raise OptionError(
                "racer.schedule",
                f"unknown schedule {schedule!r}",
                f"Choose one of {', '.join(SCHEDULES)}",
            )
        self.breadth, self.ngram, self.min_match, self.schedule = (
            breadth,
            ngram,
            min_match,
            schedule,
        )
        self.capacity, self.decay, self.refill, self.graft = capacity, decay, refill, graft
        self.needs = Signals(topk=breadth, prompt=breadth > 0)
        self._shared = state
        self._state = state or self._fresh()

    def _fresh(self) -> RacerState:
        return RacerState(NGramStore(max(self.ngram, 1), self.capacity), SuccessorTable())

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Warm up on the prompt: every n-gram, and the successors the prefill already computed."""
        self._state = self._shared or self._fresh()
        if self.ngram:
            self._state.ngrams.break_text()
            self._state.ngrams.push(prompt)
        if signals.topk_ids is not None:
            self._state.successors.update(list(prompt[-len(signals.topk_ids) :]), signals.topk_ids)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """Retrieved nodes first, then the logits tree."""
        tree = TreeBuilder(ctx.ids[-1], budget.nodes, budget.depth)
        leaves = self.retrieve(tree)
        if self.breadth:
            self.expand(tree, leaves if self.graft else ())
        return tree.draft()

    def retrieve(self, tree: TreeBuilder) -> list[int]:
        """Add the best continuations of the text's borders; gives the retrieved leaves."""
        if not self.ngram:
            return []
        borders = [b for b in self._state.ngrams.borders() if b[2] >= self.min_match]
        chosen = best_first(borders, tree.limit - len(tree), decay=self.decay)
        nodes: list[int | None] = []
        inner: set[int | None] = set()
        for parent, token, share, length in chosen:
            above = 0 if parent < 0 else nodes[parent]
            rank = retrieval_rank(length, share)
            node = None if above is None else tree.add(above, token, "retrieval", rank)
            nodes.append(node)
            inner.add(above)
        return [n for n in nodes if n is not None and n not in inner]

    def expand(self, tree: TreeBuilder, leaves: Iterable[int]) -> None:
        """Breadth-first expansion of the successor table from the root (and the leaves).

        A child of rank j of a node with breadth b gets breadth max(1, base >> j), where base is b
        at the
        root ("wide") or at the root's children ("deep"), and b >> 1 at every other node.
        """
        room = tree.limit - len(tree)
        queue: deque[tuple[int, int, int]] = deque([(0, self.breadth, 0)])
        queue.extend((leaf, max(self.breadth >> 2, 1), 2) for leaf in leaves)
        # "deep", as the authors' code: root children get 4,2,1,1,...; "wide", as published:
        # 8,4,2,1,...
        while queue and not tree.full and room > 0:
            node, breadth, level = queue.popleft()
            candidates = self._state.successors.get(tree.tokens[node])[:breadth]
            base = self._base(breadth, level)
            for rank, token in enumerate(candidates):
                before = len(tree)
                child = tree.add(node, token, "logits", rank)
                if child is None:
                    continue
                if not self.refill or len(tree) > before:
                    room -= 1
                queue.append((child, max(1, base >> rank), level + 1))
                if room <= 0:
                    break

    def _base(self, breadth: int, level: int) -> int:
        keep = level == (1 if self.schedule == "deep" else 0)
        return breadth if keep else breadth >> 1

    def observe(self, round: Round) -> None:
        """Store what was evaluated (rejected rows too) and what was emitted."""
        if self.ngram:
            self._state.ngrams.push(round.emitted)
        if round.tree is not None and round.signals.topk_ids is not None:
            self._state.successors.update(round.tree.tokens, round.signals.topk_ids, round.accepted)

    def end(self) -> None:
        """Leave no trace of the request, unless its state is shared."""
        self._state = self._shared or self._fresh()


def retrieval_rank(length: int, share: float) -> int:
    """Match length and share of the continuations, as one number for the budget policy's counts."""
    return 10 * length + min(int(4 * share), 3)

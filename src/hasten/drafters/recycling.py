"""Token recycling: a fixed tree of candidate ranks filled from the latest top-k of each token.

Luo et al., "Turning Trash into Treasure" (arXiv 2408.08696, ACL 2025). The static template of 80
guesses is the paper's; the budgeted form keeps the template's nodes likeliest by rank, so that a
machine where 81 rows are dear can use it too (ours).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.drafters.ranks import LOGITS, START, logits_rank
from hasten.drafters.successors import SuccessorTable
from hasten.drafters.tree_builder import TreeBuilder
from hasten.types import Budget, Draft, Round, RowSignals, Signals

BREADTH = 8

Path = tuple[int, ...]


def _template() -> tuple[Path, ...]:
    """The paper's 80 paths of candidate ranks, level by level (its ``tree_version`` 2.2.2)."""
    children: dict[Path, int] = {(): 8}
    children |= dict(zip([(r,) for r in range(8)], (8, 4, 3, 2, 1, 1, 1, 1), strict=True))
    children |= {(0, r): c for r, c in enumerate((8, 3, 2, 1, 1, 1, 1, 1))}
    children |= {(1, 0): 2, (1, 1): 1, (2, 0): 1, (3, 0): 1, (4, 0): 1, (5, 0): 1}
    children |= {(0, 0, 0): 5, (0, 0, 1): 2, (0, 0, 2): 1, (0, 0, 3): 1, (0, 0, 4): 1}
    children |= {(0, 1, 0): 1, (0, 2, 0): 1, (1, 0, 0): 1, (2, 0, 0): 1, (3, 0, 0): 1}
    children |= {(0, 0, 0, 0): 3, (0, 0, 0, 1): 1, (0, 0, 0, 2): 1, (0, 0, 1, 0): 1}
    children |= {(0, 1, 0, 0): 1, (1, 0, 0, 0): 1, (0, 0, 0, 0, 0): 2, (0, 0, 0, 1, 0): 1}
    paths = [(*parent, rank) for parent, count in children.items() for rank in range(count)]
    return tuple(sorted(paths, key=_by_level))


def _by_level(path: Path) -> tuple[int, Path]:
    return len(path), path


TEMPLATE = _template()


def best_paths(count: int) -> tuple[Path, ...]:
    """The `count` paths of the template likeliest by rank, closed under parents, level by level.

    A candidate of rank r is taken to be 1 / (r + 1) ** 2 as likely as the first, and a level deeper
    half as likely: rough, but only the order matters.
    """

    def score(path: Path) -> float:
        out = 1.0
        for rank in path:
            out *= 0.5 / (rank + 1) ** 2
        return out

    best = sorted(TEMPLATE, key=lambda path: (-score(path), path))[: max(count, 0)]
    return tuple(sorted(best, key=_by_level))


class TokenRecycling(BaseDrafter):
    """Fills the template from the successor table.

    warm_up   learn from the prompt's rows too (ours; the paper starts from what earlier requests
              left)
    start     candidates of tokens not seen yet (`hasten.start_rows`; ours); None: there are none
    table     shared memory (start rows included); None: this request's own
    eos_ids   nothing is drafted after these
    """

    name = "recycling"

    def __init__(
        self,
        *,
        warm_up: bool = True,
        start: np.ndarray[Any, Any] | None = None,
        table: SuccessorTable | None = None,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.needs = Signals(topk=BREADTH, prompt=warm_up, sparse=True)
        self._start, self._shared, self._eos_ids = start, table, eos_ids
        self._forget()
        self._plan: list[tuple[int, int]] = []
        """For each path but the root: the place of its parent (0: the root), and its rank."""
        self._planned = 0

    def _forget(self) -> None:
        self._table = SuccessorTable(start=self._start) if self._shared is None else self._shared

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Store the prompt's successors."""
        self._forget()
        if signals.topk_ids is not None:
            self._table.update(prompt[-len(signals.topk_ids) :], signals.topk_ids)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """The template, or its best ``budget.nodes - 1`` paths, as far as the table knows them."""
        if self._planned != budget.nodes:
            paths = best_paths(budget.nodes - 1)
            places = {path: place for place, path in enumerate(((), *paths))}
            self._plan = [(places[path[:-1]], path[-1]) for path in paths]
            self._planned = budget.nodes
        tree = TreeBuilder(ctx.ids[-1], budget.nodes, budget.depth, self._eos_ids)
        nodes: list[int | None] = [0]
        rows = [self._row(ctx.ids[-1])]
        for above, place in self._plan:
            parent, (row, source) = nodes[above], rows[above]
            node = None
            if parent is not None and place < len(row):
                node = tree.add(parent, row[place], source, logits_rank(place, 0))
            nodes.append(node)
            rows.append(((), "") if node is None else self._row(tree.tokens[node]))
        return tree.draft()

    def _row(self, token: int) -> tuple[Sequence[int], str]:
        """Candidates after `token`, and where they are from."""
        row = self._table.get(token)
        return (row, LOGITS) if row else (self._table.first(token), START)

    def observe(self, round: Round) -> None:
        """Store every evaluated row, rejected ones too; accepted ones win."""
        if round.tree is not None and round.signals.topk_ids is not None:
            self._table.update(round.tree.tokens, round.signals.topk_ids, round.accepted)

    def end(self) -> None:
        """Leave no trace of the request, unless its table is shared."""
        self._forget()

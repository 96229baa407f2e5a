"""The dynamic tree of EAGLE-2 (arXiv 2406.16858): expanded where the drafter is surest, then cut.

A node's score is the sum of the log-probabilities on its path. Level by level the `top_k` best new
nodes get `top_k` children each; of all nodes the best are kept. Scores never grow along a path and
ties go to the older node, so a kept node's parent is kept, too. Nothing here is random.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

Expand = Callable[[Sequence[int], Sequence[int]], torch.Tensor]
"""``(places, parents) -> logits``: the next level's rows, their tokens' places in the draft
vocabulary and the rows of the level before that they follow (for the first level: 0). Float32
``(rows, draft_vocab)``."""


@dataclass(slots=True)
class Pool:
    """Nodes in the order they were made, so that a parent comes before its children.

    places in the draft vocabulary; parents: indices here, -1 for the root; ranks among siblings
    """

    places: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.places)

    def add(self, parent: int, logits: torch.Tensor, top_k: int) -> list[int]:
        """The `top_k` likeliest children of a node, from its logits ``(draft_vocab,)``; their
        indices, best first. A row that says nothing (NaN) has none."""
        said = torch.log_softmax(logits, -1).clamp(max=0.0)
        values, places = said.nan_to_num(-torch.inf, neginf=-torch.inf).topk(min(top_k, len(said)))
        before = self.scores[parent] if parent >= 0 else 0.0
        depth = self.depths[parent] + 1 if parent >= 0 else 1
        made: list[int] = []
        pairs = zip(values.tolist(), places.tolist(), strict=True)
        for rank, (value, place) in enumerate(pairs):
            if value == -torch.inf:
                break
            made.append(len(self))
            self.places.append(place)
            self.parents.append(parent)
            self.scores.append(before + value)
            self.depths.append(depth)
            self.ranks.append(rank)
        return made

    def best(self, nodes: Sequence[int], count: int) -> list[int]:
        """The `count` best of these nodes, the older first where scores tie; increasing."""
        ranked = sorted(nodes, key=lambda node: (-self.scores[node], node))
        return sorted(ranked[:count])


def grow(
    logits: torch.Tensor,
    expand: Expand,
    *,
    top_k: int,
    depth: int,
    count: int,
    last: Collection[int] = (),
) -> tuple[Pool, list[int]]:
    """All nodes, and the `count` best of them (increasing).

    logits  ``(draft_vocab,)`` after the root
    expand  runs the next level; called ``depth - 1`` times at most
    depth   of the deepest node (the reference's depth is one less)
    last    places after which nothing comes: they get no children
    """
    pool = Pool()
    level, before = pool.add(-1, logits, top_k), [-1]
    for _ in range(depth - 1):
        open_ = [node for node in level if pool.places[node] not in last]
        frontier = pool.best(open_, top_k)
        if not frontier:
            break
        rows = [before.index(pool.parents[node]) for node in frontier]
        said = expand([pool.places[node] for node in frontier], rows)
        level, before = [], frontier
        for node, row in zip(frontier, said, strict=True):
            level += pool.add(node, row, top_k)
    return pool, pool.best(range(len(pool)), count)

"""The logits tree: guesses from the latest candidates of each token, breadth first.

RACER's "unseen" half (arXiv 2604.14885), which is token recycling's tree (arXiv 2408.08696) with a
shape that fits any budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from hasten.drafters.ranks import LOGITS, START, logits_rank
from hasten.drafters.successors import SuccessorTable
from hasten.drafters.tree_builder import TreeBuilder

SCHEDULES = ("deep", "wide")

_NONE: Mapping[int, int] = {}


def grow_logits(
    tree: TreeBuilder,
    successors: SuccessorTable,
    breadth: int,
    *,
    schedule: str = "deep",
    leaves: Iterable[int] = (),
    rivals: Mapping[int, int] = _NONE,
    refill: bool = True,
) -> None:
    """Expand `tree` from its root (and from `leaves`) by stored candidates.

    A node of breadth b has b children; the one of rank j has breadth ``max(1, base >> j)``, where
    base is b at the root ("wide") or at the root's children ("deep"), else b >> 1. So the root's
    children get breadths 4, 2, 1, 1... ("deep") or 8, 4, 2, 1, 1... ("wide").

    rivals   for nodes with other children, the length of the match these come from
    refill   go on until the tree is full, duplicates not counted
    """
    keeps = 1 if schedule == "deep" else 0
    room = tree.limit - len(tree)
    queue: deque[tuple[int, int, int]] = deque([(0, breadth, 0)])
    queue.extend((leaf, max(breadth >> 2, 1), 2) for leaf in leaves)
    while queue and room > 0:
        node, width, level = queue.popleft()
        base = width if level == keeps else width >> 1
        rival = rivals.get(node, 0)
        row, source = successors.get(tree.tokens[node]), LOGITS
        if not row:  # not seen yet
            row, source = successors.first(tree.tokens[node]), START
        for place, token in enumerate(row[:width]):
            before = len(tree)
            child = tree.add(node, token, source, logits_rank(place, rival))
            if child is None:
                if tree.full:
                    return
                break  # too deep, or nothing follows here
            queue.append((child, max(1, base >> place), level + 1))
            if len(tree) > before or not refill:
                room -= 1
                if room <= 0:
                    return

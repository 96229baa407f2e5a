"""Growing a draft tree by phrases: the likeliest paths first (`hasten.phrases`, ours)."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from hasten.drafters.ranks import PHRASE, agreement, phrase_rank
from hasten.drafters.successors import SuccessorTable
from hasten.drafters.tree_builder import TreeBuilder
from hasten.phrases import Phrases

LIMIT = 6
"""Nodes that phrases add at most."""
FLOOR = 0.06
"""Paths less likely by the counts aren't drafted."""


def grow_phrases(
    tree: TreeBuilder,
    phrases: Phrases,
    successors: SuccessorTable,
    ids: Sequence[int],
    *,
    limit: int = LIMIT,
) -> None:
    """Add at most `limit` nodes to `tree` below its root, which is the last of `ids`.

    Nodes that other sources have put there stay theirs, and are gone on from. Stored candidates
    have a say in a node's rank.
    """
    contexts = {0: _end(ids)}
    heap: list[tuple[float, int, int, int, int]] = []
    _followers(heap, phrases, successors, 0, contexts[0], 1.0)
    while heap and limit > 0:
        minus, _, parent, token, rank = heappop(heap)
        before = len(tree)
        node = tree.add(parent, token, PHRASE, rank)
        if node is None:  # too deep, nothing follows there, or full
            if tree.full:
                return
            continue
        limit -= len(tree) > before
        _, second, last = contexts[parent]
        contexts[node] = (second, last, token)
        _followers(heap, phrases, successors, node, contexts[node], -minus)


def usual(phrases: Phrases, ids: Sequence[int]) -> list[int]:
    """The tokens that phrases name next after `ids`, the likeliest first."""
    _, tokens, shares = phrases.after(*_end(ids))
    return [token for token, share in zip(tokens, shares, strict=True) if share]


def _end(ids: Sequence[int]) -> tuple[int, int, int]:
    """The last three ids; -1 where there are none."""
    first, second, last = (-1, -1, *ids[-3:])[-3:]
    return first, second, last


def _followers(
    heap: list[tuple[float, int, int, int, int]],
    phrases: Phrases,
    successors: SuccessorTable,
    node: int,
    context: tuple[int, int, int],
    chance: float,
) -> None:
    """Queue what follows a node that the text reaches with this chance."""
    length, tokens, shares = phrases.after(*context)
    if not length:
        return
    known = successors.get(context[2])
    for token, share in zip(tokens, shares, strict=True):
        path = chance * share / 255
        if path < FLOOR:
            return
        rank = phrase_rank(length, share / 255, agreement(token, known))
        heappush(heap, (-path, len(heap), node, token, rank))

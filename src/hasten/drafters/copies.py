"""Copies in a tree, beside stored candidates and a module: what `auto` and `lede` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hasten.drafters.ranks import CHECKED, COPIED, agreement, checked_rank, copied_rank
from hasten.drafters.successors import SuccessorTable
from hasten.drafters.suffix_guess import Guess
from hasten.drafters.tree_builder import TreeBuilder

COPIES = 0.75
"""Share of the budget that copies may take."""


def add_copies(tree: TreeBuilder, guess: Guess, successors: SuccessorTable) -> dict[int, float]:
    """Add what the text's suffixes say, ranked by chance and by how the model ranked each token
    after its parent before; the nodes and their chances. The guess keeps to the tree's budget."""
    nodes: list[int] = []
    for at, (token, parent) in enumerate(zip(guess.tokens, guess.parents, strict=True)):
        above = nodes[parent] if parent >= 0 else 0
        agrees = agreement(token, successors.get(tree.tokens[above]))
        rank = copied_rank(guess.lengths[at], guess.chances[at], agrees)
        child = tree.add(above, token, COPIED, rank)
        assert child is not None
        nodes.append(child)
    return dict(zip(nodes, guess.chances, strict=True))


def check_copies(
    tree: TreeBuilder,
    copied: Mapping[int, float],
    said: Mapping[int, Sequence[tuple[int, float]]],
) -> None:
    """What a module says at the nodes it was asked at goes into the ranks of the copies below."""
    for node, chance in copied.items():
        pairs = said.get(tree.parents[node])
        if pairs is not None:
            tree.sources[node] = CHECKED
            tree.ranks[node] = checked_rank(chance, dict(pairs).get(tree.tokens[node], 0.0))

"""The draft tree of PTD: how it grows, slides and stays within its bounds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

import pytest

from hasten.drafters.ptd_tree import FlatTree

WORST = {(4, 4): 32, (4, 6): 124, (2, 6): 80, (1, 6): 24, (7, 6): 128, (4, 8): 464}
"""Rows at most by width and depth, with four subtrees."""
WARM_UP = (2, 5, 11, 22, 44, 86, 109)
"""Rows at most of the first passes at width 4 and depth 6."""


def grown(width: int, depth: int, tokens: Iterator[int], steps: int) -> Iterator[FlatTree]:
    """The tree as it stands before each pass."""
    tree = FlatTree()
    tree.seed([[next(tokens)], [next(tokens)]])
    for _ in range(steps):
        yield tree
        predictions = [next(tokens) for _ in range(len(tree))]
        tree.advance(predictions, next(tokens), width=width, depth=depth, roots=4)


def some_tokens(seed: int, kinds: int) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        yield rng.randrange(kinds)


def path(tree: FlatTree, node: int, parents: list[int]) -> list[int]:
    out = [node]
    while parents[out[-1]] >= 0:
        out.append(parents[out[-1]])
    return out[::-1]


@pytest.mark.parametrize(("width", "depth"), WORST)
def test_an_adversarial_predictor_cannot_make_it_larger_than_its_bound(
    width: int, depth: int
) -> None:
    sizes = [len(tree) for tree in grown(width, depth, count(), 40)]
    assert max(sizes) == WORST[width, depth]


def test_warm_up_stays_within_its_bounds() -> None:
    sizes = [len(tree) for tree in grown(4, 6, count(), 7)]
    assert all(size <= most for size, most in zip(sizes, WARM_UP, strict=True))
    assert sizes[0] == 2


@pytest.mark.parametrize("kinds", [2, 5, 12, 1000])
@pytest.mark.parametrize(("width", "depth"), [(1, 2), (2, 4), (4, 6)])
def test_its_shape_keeps_to_the_rules_whatever_is_predicted(
    width: int, depth: int, kinds: int
) -> None:
    full = 0
    for tree in grown(width, depth, some_tokens(kinds, kinds), 60):
        heights = tree.heights()
        assert all(heights[root] <= depth - 1 for root in tree.roots)
        assert len(tree.root_tokens()) == len(tree.roots) <= 4
        assert all(len(kids) <= width for kids in tree.kids)
        for kids in (tree.roots, *tree.kids):
            assert len({tree.tokens[kid] for kid in kids}) == len(kids)
        assert all(parent < node for node, parent in enumerate(tree.parents))
        full += len(tree.roots) == 4
    assert full > 20 or kinds < 12


def test_a_node_gets_one_new_child_a_round_at_most() -> None:
    last = 0
    for tree in grown(4, 8, count(), 8):
        assert len(tree) <= 2 * last + 2
        last = len(tree)


def test_nodes_are_numbered_in_preorder() -> None:
    for tree in grown(3, 4, some_tokens(3, 9), 30):
        seen: list[int] = []
        stack = list(reversed(tree.roots))
        while stack:
            seen.append(stack.pop())
            stack.extend(reversed(tree.kids[seen[-1]]))
        assert seen == list(range(len(tree)))


def test_a_prediction_that_is_a_child_already_or_finds_no_room_is_dropped() -> None:
    tree = FlatTree()
    tree.seed([[1, 2]])
    tree.grow([2, 5], width=2)
    assert tree.tokens == [1, 2, 5]
    tree.grow([3, 5, 6], width=2)
    tree.grow([4, 7, 6, 8, 8], width=2)
    assert [tree.tokens[k] for k in tree.kids[0]] == [2, 3]  # 4 came too late
    assert [tree.tokens[k] for k in tree.kids[1]] == [5, 7]


def test_a_new_subtree_is_the_newest_roots_prediction_which_loses_that_child() -> None:
    tree = FlatTree()
    tree.seed([[1], [2]])
    predictions = [7, 8]
    tree.grow(predictions, width=4)
    tree.fix_roots(predictions, 99, 4)
    tree.renumber()
    assert [tree.tokens[root] for root in tree.roots] == [1, 2, 8]
    assert [[tree.tokens[k] for k in tree.kids[root]] for root in tree.roots] == [[7], [], []]


def test_two_subtrees_never_share_a_root_token() -> None:
    tree = FlatTree()
    tree.seed([[1], [2], [1]])
    predictions = [7, 1]
    tree.fix_roots(predictions, 99, 4)
    assert [tree.tokens[root] for root in tree.roots] == [1, 2]


def test_the_oldest_of_too_many_subtrees_goes() -> None:
    tree = FlatTree()
    tree.seed([[1], [2], [3]])
    tree.fix_roots([7, 7, 7], 99, 2)
    assert [tree.tokens[root] for root in tree.roots] == [2, 3]


def test_an_empty_tree_starts_with_the_targets_next_token() -> None:
    tree = FlatTree()
    tree.advance([], 9, width=2, depth=2, roots=2)
    assert (tree.tokens, tree.parents) == ([9], [-1])


def test_a_sliding_subtree_keeps_its_oldest_child() -> None:
    tree = FlatTree()
    tree.seed([[1, 2, 3]])
    tree.add(0, 4)
    tree.slide(2)
    tree.renumber()
    assert (tree.tokens, tree.parents) == ([2, 3], [-1, 0])
    assert tree.depth == 2


def test_a_child_that_is_another_root_is_passed_over_when_sliding() -> None:
    tree = FlatTree()
    tree.seed([[1, 2, 3], [2]])
    tree.add(0, 4)
    tree.slide(2)
    tree.renumber()
    assert [tree.tokens[root] for root in tree.roots] == [2, 4]


def test_a_subtree_whose_children_are_all_roots_already_goes() -> None:
    tree = FlatTree()
    tree.seed([[1, 2, 3], [2]])
    tree.slide(2)
    tree.renumber()
    assert (tree.tokens, tree.parents) == ([2], [-1])


def test_an_end_takes_four_ancestors_along() -> None:
    tree = FlatTree()
    tree.seed([[1, 2, 3, 4, 5, 6], [7, 9]])
    tree.add(tree.add(1, 30), 31)
    end = tree.add(tree.add(1, 10), 50)
    assert tree.tokens[end] == 50
    tree.add(5, 50)  # 50 below 6: climbs to 3
    tree.drop(frozenset({50}))
    tree.renumber()
    assert tree.tokens == [7, 9]  # the other 50 hung below 1, 2, 10: it took 1
    tree.seed([[1, 2, 3, 4, 5, 6, 50]])
    tree.drop(frozenset({50}))
    tree.renumber()
    assert tree.tokens == [7, 9, 1, 2]


def test_no_end_is_ever_in_the_tree() -> None:
    tokens = some_tokens(5, 8)
    tree = FlatTree()
    tree.seed([[1], [2]])
    sizes = set()
    for _ in range(100):
        predictions = [next(tokens) for _ in range(len(tree))]
        after = next(tokens)
        tree.advance(predictions, after, width=3, depth=6, roots=3, eos_ids=frozenset({0}))
        assert 0 not in tree.tokens
        sizes.add(len(tree))
    assert max(sizes) > 5


@pytest.mark.parametrize("spine", [True, False])
def test_what_a_row_sees_stands_at_contiguous_positions(spine: bool) -> None:
    for tree in grown(3, 5, some_tokens(4, 30), 30):
        parents = tree.row_parents(spine)
        for node in range(len(tree)):
            own = path(tree, node, tree.parents)
            subtree = tree.roots.index(own[0])
            seen = path(tree, node, parents)
            before = tree.roots[:subtree] if spine else []
            assert seen == [*before, *own]
            # A row stands as many positions after the pending token as it sees rows, itself
            # included: its depth in its subtree, and with the spine that subtree's place.
            assert len(seen) == len(own) + (subtree if spine else 0)

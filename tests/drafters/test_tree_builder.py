"""A tree under construction fuses what is proposed twice and stays inside its limits."""

from __future__ import annotations

import random

from hasten.drafters.tree_builder import TreeBuilder
from hasten.drafts import check_draft
from hasten.types import Budget, DraftTree


def test_nothing_stands_below_an_end_but_the_root_may_be_one() -> None:
    tree = TreeBuilder(2, 10, 10, {2, 5})
    assert tree.add(0, 5, "a") == 1
    assert tree.add(1, 6, "a") is None
    assert tree.add(0, 6, "a") == 2
    assert tree.add(2, 5, "a") == 3
    assert tree.add(3, 7, "a") is None
    assert not tree.full


def test_a_node_proposed_twice_is_one_with_its_first_source() -> None:
    tree = TreeBuilder(9, 10, 10)
    first = tree.add(0, 5, "retrieval", 3)
    assert tree.add(0, 5, "logits", 0) == first == 1
    assert tree.add(1, 5, "logits", 1) == 2
    draft = tree.draft()
    assert draft.tree == DraftTree((9, 5, 5), (-1, 0, 1))
    assert draft.sources == ("", "retrieval", "logits")
    assert draft.ranks == (0, 3, 1)


def test_a_full_tree_takes_no_new_nodes_and_still_knows_the_old() -> None:
    tree = TreeBuilder(9, 3, 10)
    assert [tree.add(0, t, "a") for t in (1, 2, 3)] == [1, 2, None]
    assert tree.full
    assert len(tree) == 3
    assert tree.add(0, 2, "b") == 2


def test_no_node_is_deeper_than_allowed() -> None:
    tree = TreeBuilder(9, 10, 2)
    assert [tree.add(0, 1, "a"), tree.add(1, 1, "a"), tree.add(2, 1, "a")] == [1, 2, None]
    assert TreeBuilder(9, 10, 0).add(0, 1, "a") is None


def test_whatever_is_added_the_draft_is_sound() -> None:
    rng = random.Random(0)
    for limit in (1, 2, 7, 40):
        tree = TreeBuilder(3, limit, 4)
        for _ in range(200):
            tree.add(rng.randrange(len(tree)), rng.randrange(6), "a", rng.randrange(4))
        draft = tree.draft()
        check_draft(draft, 3, Budget(limit, 4), 6)
        assert draft.tree.depths == tuple(tree.depths)
        assert len(draft.tree) == limit

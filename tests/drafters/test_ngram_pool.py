"""The pool of guessed continuations: what goes in, what comes out, and its bounds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from hasten.drafters.ngram_pool import NOTHING, NGramPool
from hasten.drafters.ranks import POOL, prior
from hasten.drafters.tree_builder import TreeBuilder

Path = tuple[int, ...]


def merge_chain(pool: NGramPool, *tokens: int, before: int = NOTHING) -> None:
    """A chain of guesses; the last token is the prediction after the one before it."""
    count = len(tokens) - 1
    predictions = [NOTHING] * (count - 1) + [tokens[-1]]
    pool.merge(tokens[:-1], range(-1, count - 1), predictions, [before, *tokens[: count - 1]])


def fill(pool: NGramPool, root: int, before: int = NOTHING, limit: int = 100) -> TreeBuilder:
    tree = TreeBuilder(root, limit, 100)
    pool.fill(tree, before)
    return tree


def paths(tree: TreeBuilder) -> list[Path]:
    """Below the root, in the order they were added."""
    out: list[Path] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        out.append((*out[parent], token))
    return out[1:]


def sizes(pool: NGramPool) -> dict[object, int]:
    return {key: len(list(pool.paths(key))) for key in pool.keys()}  # noqa: SIM118


def test_every_node_of_a_tree_is_a_key_of_what_hangs_below_it() -> None:
    pool = NGramPool(key=1)
    # 1 -> (2 -> 3, 4), predictions 20, 30 and 40 after the last three.
    pool.merge([1, 2, 3, 4], [-1, 0, 1, 0], [NOTHING, 20, 30, 40], [NOTHING, 1, 2, 1])
    assert set(pool.paths(1)) == {(2,), (2, 20), (2, 3), (2, 3, 30), (4,), (4, 40)}
    assert set(pool.paths(2)) == {(20,), (3,), (3, 30)}
    assert set(pool.paths(3)) == {(30,)}
    assert set(pool.paths(4)) == {(40,)}


def test_keys_of_two_tokens_are_kept_beside_those_of_one() -> None:
    pool = NGramPool(key=2)
    merge_chain(pool, 1, 2, 3, before=9)
    assert set(pool.keys()) == {1, (9, 1), 2, (1, 2)}
    assert set(pool.paths((9, 1))) == {(2,), (2, 3)}


def test_the_longer_key_comes_first_and_the_shorter_fills_up() -> None:
    pool = NGramPool(key=2)
    merge_chain(pool, 1, 2, 3, before=9)
    merge_chain(pool, 1, 4, 5, before=8)  # newer, after another token
    tree = fill(pool, 1, before=9)
    assert paths(tree)[:2] == [(2,), (2, 3)]
    assert set(paths(tree)) == {(2,), (2, 3), (4,), (4, 5)}
    assert paths(fill(pool, 1, before=9, limit=3)) == [(2,), (2, 3)]
    assert paths(fill(pool, 1, before=7, limit=3)) == [(4,), (4, 5)]


def test_the_newest_continuation_comes_first() -> None:
    pool = NGramPool(key=1)
    merge_chain(pool, 1, 2)
    merge_chain(pool, 1, 3)
    assert paths(fill(pool, 1)) == [(3,), (2,)]
    merge_chain(pool, 1, 2)
    assert paths(fill(pool, 1)) == [(2,), (3,)]


def test_ranks_tell_the_length_of_the_key_and_the_place() -> None:
    pool = NGramPool(key=2)
    for token in (2, 3, 4, 5):
        merge_chain(pool, 1, token, before=9)
    merge_chain(pool, 1, 6, before=8)
    tree = fill(pool, 1, before=9)
    assert dict(zip(tree.tokens, tree.ranks, strict=True)) == {1: 0, 5: 0, 4: 1, 3: 2, 2: 2, 6: 3}
    assert tree.sources[1:] == [POOL] * 5
    chances = [prior(POOL, rank, 1) for rank in range(6)]
    assert chances[:3] == sorted(chances[:3], reverse=True)
    assert chances[3] < chances[0] <= 0.3


def test_verifying_deepens_a_trie_by_one_level_up_to_the_cap() -> None:
    pool = NGramPool(key=1, max_depth=4)
    merge_chain(pool, 1, 2)
    for expected in (2, 3, 4, 4):
        tree = fill(pool, 1)
        predictions = [*tree.tokens[1:], tree.tokens[-1] + 1]
        before = [NOTHING, *tree.tokens[:-1]]
        pool.merge(tree.tokens, tree.parents, predictions, before)
        assert max(len(path) for path in pool.paths(1)) == expected


def test_a_trie_that_is_too_large_loses_its_oldest_child() -> None:
    pool = NGramPool(key=1, max_nodes=5)
    merge_chain(pool, 1, 2, 3, 4)
    merge_chain(pool, 1, 5, 6)
    assert len(list(pool.paths(1))) == 5
    merge_chain(pool, 1, 2, 3)  # there already; it stays the oldest
    merge_chain(pool, 1, 7)
    assert set(pool.paths(1)) == {(5,), (5, 6), (7,)}


def test_the_key_touched_longest_ago_goes_when_the_pool_is_full() -> None:
    pool = NGramPool(key=1, capacity=6)
    for token in (1, 2, 3):
        merge_chain(pool, token, 9)
    merge_chain(pool, 1, 9)
    merge_chain(pool, 4, 9)
    assert pool.keys() == [3, 1, 4]
    assert len(pool) == 6


@pytest.mark.parametrize("key", [1, 2])
def test_size_and_depth_never_exceed_their_bounds(key: int) -> None:
    rng = random.Random(key)
    pool = NGramPool(key=key, max_nodes=20, max_depth=3, capacity=300)
    for _ in range(300):
        count = rng.randrange(1, 40)
        tokens = [rng.randrange(25) for _ in range(count)]
        parents = [rng.randrange(-1, node) for node in range(count)]
        predictions = [rng.randrange(-1, 25) for _ in range(count)]
        previous = [tokens[p] if p >= 0 else rng.randrange(25) for p in parents]
        pool.merge(tokens, parents, predictions, previous)
        found = sizes(pool)
        assert max(found.values()) <= 20
        assert len(pool) == sum(found.values()) + len(found) <= 300
        assert all(len(path) <= 3 for k in found for path in pool.paths(k))  # type: ignore[arg-type]


def _text(pool: NGramPool, *tokens: int) -> None:
    for token in tokens:  # as it comes, one by one
        pool.extend([token])


def test_what_followed_in_the_text_is_a_continuation() -> None:
    pool = NGramPool(key=2, max_depth=3)
    _text(pool, 1, 2, 3, 4, 5, 6, 8, 2, 9, 2)
    # After "9 2" nothing came yet; after 2 first 9, the latest, then 3.
    assert paths(fill(pool, 2, before=9)) == [(9,), (9, 2), (3,), (3, 4), (3, 4, 5)]
    assert paths(fill(pool, 2, before=1))[:3] == [(3,), (3, 4), (3, 4, 5)]


def test_text_and_guesses_are_one_tree() -> None:
    pool = NGramPool(key=1)
    _text(pool, 1, 2, 3)
    merge_chain(pool, 1, 2, 4)
    assert paths(fill(pool, 1)) == [(2,), (2, 4), (2, 3)]
    assert len(pool) == 5  # the text takes no nodes


def test_a_whole_text_at_once_or_token_by_token_is_the_same() -> None:
    rng = random.Random(4)
    tokens = [rng.randrange(6) for _ in range(200)]
    one, other = NGramPool(key=2), NGramPool(key=2)
    one.extend(tokens)
    _text(other, *tokens)
    for before in range(6):
        for root in range(6):
            trees = [paths(fill(p, root, before, limit=30)) for p in (one, other)]
            assert trees[0] == trees[1]
            assert len(trees[0]) == 29


@pytest.mark.parametrize(
    "text",
    [
        pytest.param([7] * 4000, id="one token"),
        pytest.param([t for i in range(2000) for t in (0, 5 + i)], id="hub"),
    ],
)
def test_hard_texts_fill_trees_within_their_limits(text: Sequence[int]) -> None:
    pool = NGramPool(key=2, max_depth=8)
    pool.extend(text)
    for at in (1, 2, len(text) // 2):
        tree = fill(pool, text[at], before=text[at - 1], limit=9)
        assert len(tree) == 9
        assert max(tree.depths) <= 8


def test_a_full_tree_or_an_unknown_root_is_left_alone() -> None:
    pool = NGramPool(key=2)
    merge_chain(pool, 1, 2, 3)
    assert paths(fill(pool, 5, before=1)) == []
    assert paths(fill(pool, 1, limit=1)) == []

"""The dynamic tree is the reference's: best first, closed under parents, ties to the older."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch

from hasten.eagle3.tree import Pool, grow

VOCAB = 7


class Model:
    """A next-token law that is a function of the path."""

    def __init__(self, seed: int, *, flat: bool = False) -> None:
        self.seed, self.flat = seed, flat
        self.paths: list[tuple[int, ...]] = [()]
        self.calls: list[int] = []

    def logits(self, path: Sequence[int]) -> torch.Tensor:
        if self.flat:
            return torch.zeros(VOCAB)
        key = hash((self.seed, *path)) % (1 << 31)
        return 2.0 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(key))

    def expand(self, places: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        self.calls.append(len(places))
        self.paths = [
            (*self.paths[parent], place) for place, parent in zip(places, parents, strict=True)
        ]
        return torch.stack([self.logits(path) for path in self.paths])


def paths(pool: Pool, kept: Sequence[int]) -> set[tuple[int, ...]]:
    out: dict[int, tuple[int, ...]] = {-1: ()}
    for node in range(len(pool)):
        out[node] = (*out[pool.parents[node]], pool.places[node])
    return {out[node] for node in kept}


def brute(model: Model, top_k: int, depth: int, count: int) -> set[tuple[int, ...]]:
    """The node set by the definition: every path of a level scored anew from the root."""

    def score(path: tuple[int, ...]) -> float:
        return sum(
            float(torch.log_softmax(model.logits(path[:i]), 0)[path[i]]) for i in range(len(path))
        )

    def children(path: tuple[int, ...]) -> list[tuple[int, ...]]:
        best = model.logits(path).topk(top_k).indices.tolist()
        return [(*path, place) for place in best]

    frontier, pool = [()], []
    for _ in range(depth):
        level = [child for path in frontier for child in children(path)]
        pool += level
        frontier = sorted(level, key=score, reverse=True)[:top_k]
    return set(sorted(pool, key=score, reverse=True)[:count])


@pytest.mark.parametrize(
    ("top_k", "depth", "count"),
    [(1, 4, 4), (2, 3, 5), (3, 3, 11), (3, 1, 2), (4, 5, 20), (5, 2, 99)],
)
def test_the_nodes_are_those_of_the_definition(top_k: int, depth: int, count: int) -> None:
    for seed in range(6):
        model = Model(seed)
        pool, kept = grow(model.logits(()), model.expand, top_k=top_k, depth=depth, count=count)
        assert paths(pool, kept) == brute(Model(seed), top_k, depth, count)
        assert model.calls == [top_k] * (depth - 1)
        assert len(pool) == top_k + (depth - 1) * top_k**2


def test_a_kept_nodes_parent_is_kept_even_where_every_score_ties() -> None:
    for seed, flat, count in product(range(4), (False, True), (1, 2, 5, 9)):
        model = Model(seed, flat=flat)
        pool, kept = grow(model.logits(()), model.expand, top_k=3, depth=4, count=count)
        assert len(kept) == count
        assert kept == sorted(kept)
        assert all(pool.parents[node] in {-1, *kept} for node in kept)
        for node in range(len(pool)):
            parent = pool.parents[node]
            assert parent < node
            assert parent < 0 or pool.scores[node] <= pool.scores[parent]


def test_a_sure_drafter_ties_with_its_own_parent_and_keeps_it() -> None:
    """Log-probabilities of zero: child and parent score the same."""
    sure = torch.full((VOCAB,), -1e9)
    sure[3] = 1e9
    pool, kept = grow(sure, lambda places, parents: sure.expand(len(places), -1),
                      top_k=2, depth=5, count=3)  # fmt: skip
    assert [pool.depths[node] for node in kept] == [1, 2, 3]
    assert {pool.places[node] for node in kept} == {3}


def test_nothing_follows_a_last_place() -> None:
    model = Model(1)
    ends = set(model.logits(()).topk(1).indices.tolist())
    pool, kept = grow(model.logits(()), model.expand, top_k=3, depth=4, count=30, last=ends)
    parents = {
        pool.places[pool.parents[node]] for node in range(len(pool)) if pool.depths[node] > 1
    }
    assert parents
    assert not parents & ends
    assert any(pool.places[node] in ends for node in kept)
    everything = set(range(VOCAB))
    pool, kept = grow(model.logits(()), model.expand, top_k=3, depth=4, count=30, last=everything)
    assert len(pool) == len(kept) == 3


def test_rows_that_say_nothing_have_no_children() -> None:
    nothing = torch.full((VOCAB,), float("nan"))
    assert grow(nothing, Model(0).expand, top_k=3, depth=3, count=5)[1] == []
    one = torch.full((VOCAB,), -torch.inf)
    one[2] = 0.0
    pool, kept = grow(one, lambda places, parents: nothing.expand(len(places), -1),
                      top_k=3, depth=3, count=5)  # fmt: skip
    assert paths(pool, kept) == {(2,)}


def test_siblings_are_different_and_the_likeliest_comes_first() -> None:
    model = Model(5)
    pool, _ = grow(model.logits(()), model.expand, top_k=4, depth=3, count=9)
    for parent in {*pool.parents}:
        kids = [node for node in range(len(pool)) if pool.parents[node] == parent]
        assert len({pool.places[kid] for kid in kids}) == 4
        assert [pool.ranks[kid] for kid in kids] == [0, 1, 2, 3]
        assert sorted((pool.scores[kid] for kid in kids), reverse=True) == [
            pool.scores[kid] for kid in kids
        ]

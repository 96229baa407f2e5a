from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from hasten import keyed
from hasten.smc.resampling import SCHEMES, assign, systematic

ALL = tuple(SCHEMES)
WEIGHTS = (0.37, 0.02, 0.0, 0.21, 0.08, 0.05, 0.27)


def counts(scheme: str, weights: Sequence[float], draw: int) -> list[int]:
    uniforms = keyed.uniforms(0, draw, "test", len(weights))
    return SCHEMES[scheme](torch.tensor(weights, dtype=torch.float64), uniforms)


@pytest.mark.parametrize("scheme", ALL)
def test_offspring_are_n_times_the_weight_on_average(scheme: str) -> None:
    draws, size = 3000, len(WEIGHTS)
    found = torch.tensor([counts(scheme, WEIGHTS, i) for i in range(draws)], dtype=torch.float64)
    assert (found.sum(1) == size).all()
    error = found.std(0) / math.sqrt(draws)
    off = (found.mean(0) - size * torch.tensor(WEIGHTS, dtype=torch.float64)).abs()
    assert (off <= 4 * error + 1e-12).all()
    assert (found[:, 2] == 0).all(), "no copy of what has no weight"


def test_systematic_counts_are_the_floor_or_the_ceiling() -> None:
    for draw in range(300):
        for weight, count in zip(WEIGHTS, counts("systematic", WEIGHTS, draw), strict=True):
            assert math.floor(7 * weight) <= count <= math.ceil(7 * weight)


def test_residual_keeps_the_whole_parts() -> None:
    for draw in range(300):
        for weight, count in zip(WEIGHTS, counts("residual", WEIGHTS, draw), strict=True):
            assert count >= math.floor(7 * weight)


@pytest.mark.parametrize("scheme", ALL)
def test_all_weight_on_one_gives_it_every_copy(scheme: str) -> None:
    for place in range(4):
        weights = [0.0] * 4
        weights[place] = 1.0
        assert counts(scheme, weights, place) == [4 * int(i == place) for i in range(4)]


@pytest.mark.parametrize("scheme", ["systematic", "residual", "stratified"])
def test_even_weights_give_no_copies(scheme: str) -> None:
    for size in (1, 3, 6, 7, 49):
        found = counts(scheme, [1 / size] * size, size)
        assert found == [1] * size
        assert assign(found) == {}


def test_a_sum_that_rounds_below_one_never_points_past_the_end() -> None:
    weights = torch.full((10,), 0.1, dtype=torch.float64)
    weights[-1] -= 1e-12
    assert sum(systematic(weights, torch.tensor([1 - 1e-16], dtype=torch.float64))) == 10


def test_copies_are_the_fewest_and_never_chained() -> None:
    for draw in range(100):
        found = counts("multinomial", WEIGHTS, draw)
        copies = assign(found)
        assert len(copies) == found.count(0)
        assert not copies.keys() & set(copies.values())
        after = [copies.get(slot, slot) for slot in range(len(found))]
        assert [after.count(slot) for slot in range(len(found))] == found

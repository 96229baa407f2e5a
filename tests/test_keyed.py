"""Keyed randomness: a pure function whose values look independent in every argument."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from scipy import stats

from hasten import keyed

N = 20_000


def test_known_values_never_change():
    # sampled answers of a released version must stay reproducible
    assert keyed.uniform(0, 0, "token") == 0.4820437303219668
    assert keyed.uniform(2**80 - 3, 17, "accept", 5) == 0.20209845165436346


@pytest.mark.parametrize("seed", [0, 1, -1, -(2**70), 2**63, 2**64 - 1, 2**64, 10**40])
@pytest.mark.parametrize("purpose", ["token", "draft", "accept"])
def test_scalar_and_tensor_versions_agree_for_any_seed(seed, purpose):
    many = keyed.uniforms(seed, 1234, purpose, 50).tolist()
    assert many == [keyed.uniform(seed, 1234, purpose, i) for i in range(50)]


def test_ids_may_be_any_tensor():
    ids = torch.tensor([[7, 0], [49_151, 2**40]])
    got = keyed.uniforms(3, 9, "token", ids)
    assert got.shape == (2, 2)
    assert got.dtype == torch.float64
    assert got.flatten().tolist() == [keyed.uniform(3, 9, "token", int(i)) for i in ids.flatten()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_values_are_the_same_on_a_gpu():
    here, there = (keyed.uniforms(5, 6, "token", 1000, d) for d in ("cpu", "cuda"))
    assert torch.equal(here, there.cpu())


def test_global_generators_are_neither_read_nor_moved():
    torch.manual_seed(1)
    first = keyed.uniforms(1, 2, "token", 100)
    torch.manual_seed(2)
    np.random.seed(3)
    random.seed(4)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    again = keyed.uniforms(1, 2, "token", 100)
    keyed.draw(torch.ones(1000), 5, 1, 2, "draft")
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]


def test_arguments_are_not_changed():
    ids, weights = torch.arange(300), torch.rand(300)
    ids_before, weights_before = ids.clone(), weights.clone()
    keyed.uniforms(1, 2, "token", ids)
    keyed.draw(weights, 7, 1, 2, "draft")
    assert torch.equal(ids, ids_before)
    assert torch.equal(weights, weights_before)


def _along(what: str) -> np.ndarray:
    if what == "ids":
        return keyed.uniforms(11, 3, "token", N).numpy()
    if what == "positions":
        return np.array([keyed.uniform(11, p, "token", 3) for p in range(N)])
    if what == "seeds":
        return np.array([keyed.uniform(s, 3, "token", 3) for s in range(N)])
    return np.array([keyed.uniform(11, 3, f"purpose {k}", 3) for k in range(N)])


@pytest.mark.parametrize("what", ["ids", "positions", "seeds", "purposes"])
def test_values_are_uniform_and_independent_along_each_argument(what):
    u = _along(what)
    assert ((u > 0) & (u < 1)).all()
    bins = 64
    assert stats.chisquare(np.histogram(u, bins, (0, 1))[0]).pvalue > 1e-4
    # neighbours: pairs fill the square evenly, at several distances
    for lag in (1, 2, 16, 256):
        square = np.histogram2d(u[:-lag], u[lag:], 16, ((0, 1), (0, 1)))[0]
        assert stats.chisquare(square.ravel()).pvalue > 1e-4
    # low bits too, which a plain multiplicative hash gets wrong
    low = np.floor(u * 2**40).astype(np.int64) % bins
    assert stats.chisquare(np.bincount(low, minlength=bins)).pvalue > 1e-4


def test_streams_of_neighbouring_keys_are_uncorrelated():
    base = keyed.uniforms(11, 3, "token", N).numpy()
    others = [
        (12, 3, "token"),
        (11, 4, "token"),
        (11, 3, "draft"),
        (3, 11, "token"),
        (-11, 3, "token"),
    ]
    for key in others:
        u = keyed.uniforms(*key, N).numpy()
        assert abs(np.corrcoef(base, u)[0, 1]) < 5 / N**0.5
        square = np.histogram2d(base, u, 16, ((0, 1), (0, 1)))[0]
        assert stats.chisquare(square.ravel()).pvalue > 1e-4


@pytest.mark.parametrize("which", ["seed", "position", "id"])
def test_flipping_any_input_bit_flips_half_of_the_output_bits(which):
    def bits(seed: int, position: int, index: int) -> int:
        return int(keyed.uniform(seed, position, "token", index) * 2**52)

    width = 64 if which == "seed" else 20
    for bit in range(width):
        flips = np.zeros(52)
        for trial in range(200):
            args = [trial * 7919, trial * 31 % 4096, trial * 13 % 50_000]
            before = bits(*args)
            args[["seed", "position", "id"].index(which)] ^= 1 << bit
            change = before ^ bits(*args)
            flips += [(change >> b) & 1 for b in range(52)]
        assert 0.45 < flips.mean() / 200 < 0.55
        assert flips.min() / 200 > 0.3
        assert flips.max() / 200 < 0.7


def test_gumbels_have_the_gumbel_distribution():
    assert stats.kstest(keyed.gumbels(1, 2, "token", N).numpy(), "gumbel_r").pvalue > 1e-4


def _matches(counts: np.ndarray, expected: np.ndarray) -> bool:
    expected = expected.astype(np.float64)
    return bool(stats.chisquare(counts, expected / expected.sum() * counts.sum()).pvalue > 1e-4)


def test_race_draws_from_the_softmax():
    scores, ids = torch.tensor([1.0, -0.5, 0.0, 2.0]), torch.tensor([5, 9, 1000, 40_000])
    drawn = [keyed.race(scores, ids, 7, p, "token") for p in range(4000)]
    counts = np.array([drawn.count(int(i)) for i in ids])
    assert _matches(counts, scores.softmax(0).numpy())


def _weights() -> torch.Tensor:
    # more than two blocks of ids, unevenly filled, the last one not full
    weights = torch.zeros(600)
    weights[torch.tensor([0, 3, 255, 256, 400, 599])] = torch.tensor([1.0, 4.0, 2.0, 3.0, 0.5, 2.0])
    return weights


def test_draw_is_proportional_to_the_weights_across_blocks():
    weights = _weights()
    drawn = [keyed.draw(weights, 1, 7, p, "draft")[0] for p in range(4000)]
    counts = np.bincount(drawn, minlength=600)
    support = weights > 0
    assert counts[~support.numpy()].sum() == 0
    assert _matches(counts[support], weights[support].numpy())


def test_second_draw_is_proportional_to_what_is_left():
    weights = _weights()
    support = weights.nonzero().squeeze(1).tolist()
    pairs = [tuple(keyed.draw(weights, 2, 7, p, "draft")) for p in range(6000)]
    expected, counts = [], []
    total = float(weights.sum())
    for a in support:
        for b in support:
            if a != b:
                p = float(weights[a] / total * weights[b] / (total - weights[a]))
                expected.append(p)
                counts.append(pairs.count((a, b)))
    assert sum(counts) == len(pairs)
    assert _matches(np.array(counts), np.array(expected))


def test_draw_gives_distinct_ids_and_no_more_than_the_support():
    drawn = keyed.draw(_weights(), 50, 1, 2, "draft")
    assert sorted(drawn) == [0, 3, 255, 256, 400, 599]
    assert keyed.draw(_weights(), 3, 1, 2, "draft") == drawn[:3]
    assert keyed.draw(torch.zeros(10), 3, 1, 2, "draft") == []
    assert keyed.draw(_weights(), 0, 1, 2, "draft") == []


def test_a_tiny_change_of_the_weights_rarely_changes_the_draw():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2000, generator=generator)
    noisy = scores + 1e-4 * torch.randn(2000, generator=generator)
    before, after = scores.softmax(0), noisy.softmax(0)
    changed = inverted = 0
    for position in range(2000):
        changed += keyed.draw(before, 1, 3, position, "t") != keyed.draw(after, 1, 3, position, "t")
        u = keyed.uniform(3, position, "t")
        low, high = (torch.searchsorted(p.double().cumsum(0), u) for p in (before, after))
        inverted += int(low != high)
    assert changed <= 1
    assert inverted > changed  # what drawing by the cumulated sum would give

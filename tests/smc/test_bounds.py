"""S4, S5: the bounds and closed forms of docs/methods/smc.md, and that runs obey them."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import pytest
import torch

from hasten.smc import weights
from hasten.smc.diagnose import summarise
from hasten.types import SamplingParams
from tests.smc import toy

PAIRS = tuple(itertools.product(range(3), repeat=2))
ONE_ROUND = SamplingParams(max_new_tokens=4, temperature=1.0, ignore_eos=True)


@cache
def block_law(model: toy.Table, first: int) -> list[float]:
    """The law of two tokens after the first one."""
    out = []
    for one, two in PAIRS:
        prefix = [*toy.PROMPT, first]
        p = toy.next_law(model, prefix)[one] * toy.next_law(model, [*prefix, one])[two]
        out.append(float(p))
    return out


def law_of_two_particles(p: list[float], q: list[float]) -> list[float]:
    """What two particles' pick by weight gives, by all pairs of drafts."""
    ratio = [math.log(a / b) for a, b in zip(p, q, strict=True)]
    out = [0.0] * len(p)
    for x, y in itertools.product(range(len(p)), repeat=2):
        share = weights.normalised(torch.tensor([ratio[x], ratio[y]], dtype=torch.float64))
        out[x] += q[x] * q[y] * float(share[0])
        out[y] += q[x] * q[y] * float(share[1])
    return out


@pytest.mark.parametrize("draft", [toy.GOOD, toy.HARD, toy.EAGER])
def test_one_round_of_two_particles_keeps_within_the_bounds(draft: toy.Table) -> None:
    for first in (0, 1):
        p, q = block_law(toy.TARGET, first), block_law(draft, first)
        m = law_of_two_particles(p, q)
        assert sum(m) == pytest.approx(1)
        ratio = [a / b for a, b in zip(p, q, strict=True)]
        chi = sum(a * a / b for a, b in zip(p, q, strict=True)) - 1
        assert all(x >= 2 * a / (1 + w) - 1e-12 for x, a, w in zip(m, p, ratio, strict=True))
        divergence = sum(a * math.log(a / x) for a, x in zip(p, m, strict=True))
        assert 0 < divergence <= math.log1p(chi / 2)
        far = sum(abs(a - x) for a, x in zip(p, m, strict=True)) / 2
        assert far <= sum(a * max(w - 1, 0) / (1 + w) for a, w in zip(p, ratio, strict=True))


def test_runs_have_the_law_that_counting_all_pairs_gives() -> None:
    infos = list(toy.runs(900, draft=toy.HARD, particles=2, params=ONE_ROUND, first_token="shared"))
    first = toy.next_law(toy.TARGET, toy.PROMPT).tolist()
    for place in (0, 1, 3, 4):
        want = sum(
            first[x] * law_of_two_particles(block_law(toy.TARGET, x), block_law(toy.HARD, x))[place]
            for x in range(3)
        )
        exact = sum(first[x] * block_law(toy.TARGET, x)[place] for x in range(3))
        found = toy.Estimate.of(
            [sum(a.weight for a in info.answers if a.tokens[1:3] == PAIRS[place]) for info in infos]
        )
        assert found.off(want) < 4
        assert place != 1 or found.off(exact) > 4.5, "two particles aren't many: the bias shows"


class Flat(toy.Table):
    """The same law after every prefix."""

    def _logits(self, key: int, token: int) -> torch.Tensor:
        return super()._logits(1, 0)


FLAT = Flat(5, mass=0.0)
FLAT_DRAFT = Flat(6, mass=0.0, base=FLAT, share=0.6)
FAR_DRAFT = Flat(6, mass=0.0, base=FLAT, share=0.9)


@pytest.mark.slow
def test_never_resampling_is_told_from_the_closed_form() -> None:
    """The test below is worth something: it fails where resampling is left out."""
    found, want = variances(4, FAR_DRAFT, threshold=0.0, count=400)
    assert abs(found.rel_var - want) > 4 * found.rel_var_error
    found, want = variances(4, FAR_DRAFT, threshold=1.01, count=400)
    assert abs(found.rel_var - want) < 4 * found.rel_var_error


@pytest.mark.parametrize("rounds", [1, 3])
def test_resampling_each_round_gives_the_variance_of_the_closed_form(rounds: int) -> None:
    found, want = variances(rounds, FLAT_DRAFT, threshold=1.01, count=250)
    assert 0.02 < want < 0.6
    assert abs(found.rel_var - want) < 4 * found.rel_var_error
    assert found.rel_var_error < 0.35 * want


def variances(rounds: int, draft: Flat, *, threshold: float, count: int) -> tuple[Any, float]:
    """What is found, and the closed form of resampling each round."""
    particles, length = 8, 3
    p, q = (toy.next_law(model, toy.PROMPT) for model in (FLAT, draft))
    block = float((p * p / q).sum()) ** length - 1
    params = SamplingParams(
        max_new_tokens=1 + rounds * (length + 1), temperature=1.0, ignore_eos=True
    )
    infos = list(
        toy.runs(
            count,
            draft=draft,
            target=FLAT,
            params=params,
            particles=particles,
            length=length,
            threshold=threshold,
        )
    )
    return summarise(infos), (1 + block / particles) ** rounds - 1

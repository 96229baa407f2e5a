"""S1, S2, S3, S7, S8: what is unbiased for any number of particles, and what gets better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hasten.smc import weights
from hasten.smc.proposals import Choose, Lane, ModelProposal
from hasten.types import SamplingParams
from tests.smc import toy

SIGMAS = 4.5
"""Fixed seeds; fifteen figures a case, so that 4 would be passed by chance now and then."""


def forced(monkeypatch: pytest.MonkeyPatch, path: Sequence[int]) -> None:
    """Every draw gives the path's token."""

    def draw(
        law: Any, slots: Sequence[int], seed: int, position: int, purpose: str, of: Any = None
    ) -> list[int]:
        at = position - len(toy.PROMPT)
        return [path[at] if at < len(path) else 0] * len(slots)

    monkeypatch.setattr(weights, "draw", draw)


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_an_answers_weight_is_its_ratio_for_every_answer(
    monkeypatch: pytest.MonkeyPatch, alpha: float
) -> None:
    for path in toy.answers():
        expected = 0.0
        for at, token in enumerate(path):
            prefix = [*toy.PROMPT, *path[:at]]
            p = toy.next_law(toy.TARGET, prefix)
            if at in (0, 3, 5):  # the target's own: the first, after two drafts, after the last
                expected += math.log(float((p**alpha).sum()))
            else:
                q = toy.next_law(toy.GOOD, prefix)
                expected += alpha * math.log(p[token]) - math.log(q[token])
        forced(monkeypatch, path)
        info = toy.run(0, particles=1, threshold=0, alpha=alpha, length=2)
        assert info.answers[0].tokens == path
        assert abs(info.log_evidence - expected) < 1e-10


CASES: list[dict[str, Any]] = [
    {"particles": 1},
    {"particles": 2, "threshold": 1.01},
    {"particles": 4, "threshold": 0.0},
    {"particles": 4, "threshold": 0.9},
    {"particles": 4, "threshold": 1.01, "resampler": "stratified"},
    {"particles": 4, "threshold": 1.01, "resampler": "residual"},
    {"particles": 4, "threshold": 1.01, "resampler": "multinomial"},
    {"particles": 8, "threshold": 1.01, "length": 1},
    {"particles": 4, "first_token": "shared", "length": 5},
    {"particles": 4, "population": "committed"},
    {"particles": 4, "draft_temperature": 1.6},
    {"particles": 4, "mix": 0.3},
    {"particles": 4, "population": "committed", "length": 1, "mix": 0.1},
    {"particles": 4, "ending": 0.3},
    {"particles": 4, "ending": 0.2, "mix": 0.1},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_evidence_and_weighted_answers_are_unbiased(case: dict[str, Any]) -> None:
    found, name = toy.worst(list(toy.runs(200, **case)))
    assert found < SIGMAS, name


BAN = (-math.inf, -0.5, 0.0)


def odd_places_ban(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Prefix-pure: id 0 is banned at every other place."""
    return scores + torch.tensor(BAN) if ids.shape[1] % 2 else scores


OPTIONS: list[tuple[SamplingParams, dict[str, Any]]] = [
    (SamplingParams(temperature=0.6), {}),
    (SamplingParams(temperature=1.0, top_k=2), {"particles": 16}),
    (SamplingParams(temperature=1.0, repetition_penalty=1.7, frequency_penalty=0.5), {}),
    (SamplingParams(temperature=1.0, min_new_tokens=4, logit_bias={1: -0.7}), {"ending": 0.2}),
    (SamplingParams(temperature=1.0, stop=("ba", "aa"), min_new_tokens=0), {"length": 3}),
    (SamplingParams(temperature=1.0, processors=(odd_places_ban,)), {"particles": 24}),
]


@pytest.mark.parametrize(("params", "case"), OPTIONS, ids=lambda each: type(each).__name__)
def test_sampling_options_act_as_in_plain_decoding(
    params: SamplingParams, case: dict[str, Any]
) -> None:
    params = replace(params, max_new_tokens=toy.HORIZON)
    exact = toy.answers_under(params)
    infos = list(toy.runs(160, params=params, threshold=0.8, **case))
    assert not sum(info.collapsed for info in infos), "the case is no test of the law then"
    assert all(info.answers[info.picked].tokens in exact for info in infos)
    found, name = toy.worst(infos, exact)
    assert found < SIGMAS, name


def test_the_weighted_law_comes_nearer_with_more_particles() -> None:
    exact = toy.marginal(3, toy.answers())
    far = [
        toy.distance(toy.law_of(list(toy.runs(runs, particles=n, draft=toy.HARD)), 3), exact)
        for n, runs in ((1, 300), (4, 250), (24, 120))
    ]
    assert far[0] > 0.2
    assert far[1] < 0.6 * far[0]
    assert far[2] < 0.6 * far[1]


def test_a_draft_of_the_targets_own_law_leaves_all_weights_even() -> None:
    for seed in range(20):
        info = toy.run(seed, draft=toy.TARGET, threshold=0.99)
        assert info.log_evidence == 0
        assert {a.weight for a in info.answers} == {0.25}
        assert not info.resampled
        assert all(size == pytest.approx(4) for size in info.ess)


def test_a_draft_of_the_targets_own_law_gives_its_law() -> None:
    found, name = toy.worst(list(toy.runs(150, draft=toy.TARGET)))
    assert found < SIGMAS, name


class TopTwo(ModelProposal):
    """A draft that says it covers every id, and leaves out the unlikeliest."""

    def draft(self, lanes: Sequence[Lane], length: int, choose: Choose) -> int:
        def cut(logits: torch.Tensor, of: Sequence[int]) -> list[int]:
            return choose(logits.scatter(1, logits.argmin(1, keepdim=True), -math.inf), of)

        return super().draft(lanes, length, cut)


def test_a_draft_that_misses_tokens_is_biased_for_any_number_of_particles() -> None:
    def missing() -> TopTwo:
        return TopTwo(toy.GOOD, vocab_size=3)

    for count, runs in ((2, 150), (32, 60)):
        infos = list(toy.runs(runs, draft=missing, particles=count))
        assert toy.Estimate.of([math.exp(i.log_evidence) for i in infos]).mean < 0.9
        assert toy.worst(infos)[0] > 5
    mixed = list(toy.runs(150, draft=missing, particles=8, mix=0.2))
    found, name = toy.worst(mixed)
    assert found < SIGMAS, name


def test_a_power_of_the_target_has_its_own_law_and_normaliser() -> None:
    exact = toy.answers(2.0)
    infos = list(toy.runs(250, alpha=2.0, particles=4, threshold=0.9))
    found, name = toy.worst(infos, exact)
    assert found < SIGMAS, name


def test_a_powers_law_is_reached_with_many_particles() -> None:
    exact = toy.marginal(3, toy.answers(2.0))
    few, many = (
        toy.distance(toy.law_of(list(toy.runs(runs, alpha=2.0, particles=n)), 3), exact)
        for n, runs in ((1, 300), (48, 60))
    )
    assert many < 0.4 * few

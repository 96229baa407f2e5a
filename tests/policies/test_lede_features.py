"""The features of LEDE's agent."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.policies.exit_cases import PLAIN, costs, drafts, probe

from hasten.errors import OptionError
from hasten.policies.exits import SELECT
from hasten.policies.lede_features import (
    FEATURES,
    MINIMAL,
    FeatureFacts,
    LiveFeatures,
    Prior,
    Running,
    Seen,
    context_feature,
)

AT = (2, 4)
COSTS = costs(AT, 12)
PRIOR = Prior(
    np.array([3, 5]),
    np.array([[0.9, 0.8], [0.1, 0.2]], dtype=np.float32),
    np.array([0.4, 0.6], dtype=np.float32),
)
FACTS = FeatureFacts(AT, COSTS, (0.5, 0.7), 1.5, PRIOR, 6)
PLACE = {name: at for at, name in enumerate(FEATURES)}


def seen(**changes: object) -> Seen:
    usual: dict[str, object] = {
        "phase": 0.0, "exit": 0, "drafted": 0, "p1": 0.5, "p2": 0.2, "entropy": 0.3, "gap": 1.0,
        "agrees": 0.5, "cosine": 0.1, "growth": 0.2, "token": -1, "context": 0.5,
    }  # fmt: skip
    return Seen(**{**usual, **changes})  # type: ignore[arg-type]


def test_there_are_twenty_features_and_the_minimal_ones_are_among_them() -> None:
    assert len(FEATURES) == len(set(FEATURES)) == 20
    assert FEATURES[:4] == ("phase", "layer", "drafted", "p1")
    assert set(MINIMAL) < set(FEATURES)


def test_each_feature_says_what_its_name_says() -> None:
    live = LiveFeatures(FACTS)
    live.root(5)
    x = dict(
        zip(FEATURES, live.features(probe(SELECT, 0.6, exit=1, layer=4)).tolist(), strict=True)
    )
    assert x["phase"] == 0.0
    assert x["layer"] == pytest.approx(4 / 12)
    assert x["p1"] == pytest.approx(0.6, abs=1e-6)
    assert x["margin"] == pytest.approx(0.6 - 0.4 / 7, abs=1e-6)
    assert 0.0 < x["entropy"] < 1.0
    assert (x["agrees"], x["cosine"], x["growth"]) == (0.5, 0.0, 0.0)
    assert (x["joint"], x["least"]) == (0.0, 1.0)
    assert x["rate"] == pytest.approx(0.7)
    assert x["length"] == pytest.approx(1.5 / 6)
    assert (x["last"], x["missed"]) == (0.5, 0.0)
    assert x["prior"] == pytest.approx(0.2)
    assert x["context"] == pytest.approx(math.log2(101) / 16)
    assert x["below"] == pytest.approx(COSTS.layer[1])
    wider = COSTS.resume(1, 4, 2) - COSTS.resume(1, 4, 1)
    assert x["wider"] == pytest.approx(wider, abs=1e-6)


def test_the_drafted_rows_confidence_adds_up_and_a_round_forgets_it() -> None:
    live = LiveFeatures(FACTS)
    live.root(1)
    live.features(probe(SELECT, 0.5))
    live.took()
    live.features(probe(p1=0.25, drafted=1))
    live.took()
    x = live.features(probe(p1=0.9, drafted=2))
    assert x[PLACE["joint"]] == pytest.approx(math.log(0.125) / 8, abs=1e-5)
    assert x[PLACE["least"]] == pytest.approx(0.25, abs=1e-6)
    assert x[PLACE["phase"]] == 1.0
    live.root(1)
    x = live.features(probe(SELECT, 0.5))
    assert (x[PLACE["joint"]], x[PLACE["least"]]) == (0.0, 1.0)


def test_a_row_that_was_probed_and_not_taken_adds_nothing() -> None:
    live = LiveFeatures(FACTS)
    live.features(probe(SELECT, 0.2, exit=0))
    x = live.features(probe(SELECT, 0.9, exit=1))
    assert (x[PLACE["joint"]], x[PLACE["least"]]) == (0.0, 1.0)
    assert x[PLACE["agrees"]] == 1.0


def test_exits_that_disagree_on_the_walk_are_seen() -> None:
    live = LiveFeatures(FACTS)
    live.features(probe(SELECT, 0.9, exit=0))
    other = probe(SELECT, 0.9, exit=1)
    other.logits = other.logits.flip(0)
    assert live.features(other)[PLACE["agrees"]] == 0.0


def test_outputs_are_compared_with_the_probe_before_in_the_round() -> None:
    live = LiveFeatures(FACTS)
    first, second = probe(SELECT, 0.5), probe(p1=0.5, drafted=1)
    first.hidden = torch.tensor([3.0, 4.0, 0.0, 0.0])
    second.hidden = torch.tensor([0.0, 10.0, 0.0, 0.0])
    live.features(first)
    x = live.features(second)
    assert x[PLACE["cosine"]] == pytest.approx(0.8)
    assert x[PLACE["growth"]] == pytest.approx(math.log(2.0), abs=1e-6)
    live.root(1)
    assert live.features(second)[PLACE["cosine"]] == 0.0


def test_rounds_move_the_means_of_their_exit_and_plain_steps_move_none() -> None:
    live = LiveFeatures(FACTS)
    live.learn(drafts(4, 1, layer=4))
    running = live.running
    assert running.rate[:, 0].tolist() == pytest.approx([0.5, 0.7 + 0.1 * (0.25 - 0.7)])
    assert running.length[0] == pytest.approx(1.5 + 0.1 * (1 - 1.5))
    assert (running.last[0], running.missed[0]) == (0.25, 0.0)
    live.learn(drafts(2, 0, layer=2))
    assert (running.last[0], running.missed[0]) == (0.0, 1.0)
    before = running.rate.copy(), running.length.copy()
    live.learn(PLAIN)
    assert (running.rate == before[0]).all()
    assert (running.length == before[1]).all()
    assert (running.last[0], running.missed[0]) == (0.5, 0.0)


def test_many_lanes_are_many_single_requests() -> None:
    rng, lanes = np.random.default_rng(0), 5
    many = Running(FACTS, lanes)
    single = [Running(FACTS, 1) for _ in range(lanes)]
    for _ in range(20):
        exit, drafted = rng.integers(0, 2, lanes), rng.integers(0, 6, lanes)
        kept = np.minimum(rng.integers(0, 6, lanes), drafted)
        p1 = rng.random(lanes).astype(np.float32)
        some = rng.random(lanes) < 0.7
        many.begin()
        many.took(p1[some], some)
        at = np.where(drafted > 0, exit, -1)
        out = np.zeros((20, lanes), dtype=np.float32)
        token = rng.integers(-1, 9, lanes)
        many.encode(out, seen(exit=exit, drafted=drafted, p1=p1, p2=0.1 * p1, token=token))
        for lane, one in enumerate(single):
            one.begin()
            if some[lane]:
                one.took(float(p1[lane]))
            alone = np.zeros(20, dtype=np.float32)
            shown = {"exit": int(exit[lane]), "drafted": int(drafted[lane])}
            numbers = {"p1": float(p1[lane]), "p2": 0.1 * float(p1[lane])}
            one.encode(alone, seen(**shown, **numbers, token=int(token[lane])))
            np.testing.assert_allclose(out[:, lane], alone, atol=1e-6)
            one.learn(int(at[lane]), int(drafted[lane]), int(kept[lane]))
        many.learn(at, drafted, kept)
    many.restart(np.array([True, False, False, False, False]))
    assert many.rate[:, 0].tolist() == pytest.approx([0.5, 0.7])
    assert many.rate[0, 1] == single[1].rate[0, 0]


def test_priors_are_of_known_ids_and_the_mean_elsewhere() -> None:
    assert PRIOR.at(3, 0) == pytest.approx(0.9)
    for unknown in (-1, 0, 4, 6, 10_000):
        assert PRIOR.at(unknown, 1) == pytest.approx(0.6)
    found = PRIOR.at(np.array([5, 99, -1]), np.array([0, 0, 1]))
    np.testing.assert_allclose(found, [0.1, 0.4, 0.6])
    assert Prior.flat([0.3]).at(7, 0) == pytest.approx(0.3)


def test_nothing_is_known_of_the_token_drawn_from_the_row_decided_on() -> None:
    """Two requests that differ in what is drawn next get the same features now."""
    found = []
    for drawn in (1, 7):
        live = LiveFeatures(FACTS)
        live.root(3)
        x = live.features(probe(SELECT, 0.4)).copy()
        live.took()
        live.drew(drawn)
        found.append(x)
    assert (found[0] == found[1]).all()


def test_a_model_on_another_device_or_in_half_precision_is_read() -> None:
    live = LiveFeatures(FACTS)
    half = probe(SELECT, 0.5)
    half.hidden = torch.ones(4, dtype=torch.bfloat16)
    assert np.isfinite(live.features(half)).all()


def test_extreme_rows_give_finite_features() -> None:
    live = LiveFeatures(FACTS)
    sure = probe(SELECT, 0.5)
    sure.p1, sure.p2, sure.gap, sure.hidden = 0.0, 0.0, 1e4, torch.zeros(4)
    for drafted in range(6):
        sure.drafted = drafted
        x = live.features(sure)
        live.took()
        assert np.isfinite(x).all()
    assert x[PLACE["joint"]] == -1.0
    assert x[PLACE["gap"]] == 1.0
    assert context_feature(0) == 0.0


def test_costs_and_means_of_other_exits_are_refused() -> None:
    with pytest.raises(OptionError, match="costs"):
        FeatureFacts((2, 4, 6), COSTS, (0.5,) * 3, 1.0, Prior.flat((0.5,) * 3), 6)
    with pytest.raises(OptionError, match="means"):
        FeatureFacts(AT, COSTS, (0.5,), 1.0, PRIOR, 6)
    with pytest.raises(OptionError, match="steps"):
        FeatureFacts(AT, COSTS, (0.5, 0.5), 1.0, PRIOR, 40)

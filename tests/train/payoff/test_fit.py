"""Predictors are fitted to what is there, the same each time, and judged by what they route."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hasten.errors import OptionError
from hasten.payoff.features import FEATURES
from hasten.payoff.predictor import CacheOptions, Predictor
from hasten.train.payoff import evaluate, fit
from hasten.train.payoff.fit import FitOptions, Scaled
from hasten.train.payoff.traces import always, never
from tests.train.payoff.test_traces import invented

LENGTH = FEATURES.index("length")


def rows(count: int, seed: int = 0) -> tuple[Any, Any]:
    """Long drafts are kept where the score is high, and nothing else."""
    dice = np.random.default_rng(seed)
    x = dice.normal(size=(count, len(FEATURES))).astype(np.float32)
    x[:, LENGTH] = dice.integers(1, 40, count)
    x[:, 3] = 0.7  # a column that never changes
    return x, np.where(x[:, 0] > 0.5, x[:, LENGTH], 0.0).astype(np.float32)


def fitted(kind: str) -> Predictor:
    x, y = rows(3000)
    scaled = Scaled.of(x)
    if kind == "mlp":
        layers = fit.fit_mlp(scaled(x), y, FitOptions(epochs=6, hidden=32, lr=3e-3))
    else:
        x_val, y_val = rows(500, 1)
        layers = fit.fit_ridge(scaled(x), y, scaled(x_val), y_val)
    return Predictor(kind, scaled.mean, scaled.scale, layers, CacheOptions(), {})


@pytest.mark.parametrize("kind", ["mlp", "ridge"])
def test_what_pays_is_learned(kind: str) -> None:
    x, y = rows(1000, 2)
    said = fitted(kind).predict(x)
    found = evaluate.scores(y, said >= 6.0, 6.0)
    assert found.precision > (0.75 if kind == "mlp" else 0.6)
    assert found.recall > 0.8
    base = float(np.square(y - y.mean()).mean())
    assert float(np.square(said - y).mean()) < (0.3 if kind == "mlp" else 0.6) * base


def test_fitting_is_the_same_each_time_and_leaves_the_global_generator_alone() -> None:
    x, y = rows(300)
    options = FitOptions(epochs=2, hidden=8)
    before = torch.get_rng_state()
    one, two = (fit.fit_mlp(x, y, options) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    for (weight, bias), (other, beside) in zip(one, two, strict=True):
        assert np.array_equal(weight, other)
        assert np.array_equal(bias, beside)
    again = fit.fit_mlp(x, y, FitOptions(epochs=2, hidden=8, seed=1))
    assert not np.array_equal(one[0][0], again[0][0])


def test_the_published_shape_is_the_usual_one() -> None:
    x, y = rows(64)
    layers = fit.fit_mlp(x, y, FitOptions(epochs=1))
    width = len(FEATURES)
    assert [weight.shape for weight, _ in layers] == [(width, 256), (256, 256), (256, 1)]
    usual = FitOptions()
    assert (usual.epochs, usual.lr, usual.seed, fit.BATCH) == (20, 1e-3, 42, 65_536)


def test_progress_is_told_to_the_end() -> None:
    x, y = rows(100)
    told: list[tuple[str, int, int]] = []
    fit.fit_mlp(x, y, FitOptions(epochs=3, hidden=4), lambda *at: told.append(at))
    fit.fit_ridge(x, y, x, y, lambda *at: told.append(at))
    assert told[2] == ("mlp", 3, 3)
    assert told[-1] == ("ridge", len(fit.PENALTIES), len(fit.PENALTIES))


@pytest.mark.parametrize("bad", [{"epochs": 0}, {"hidden": 0}, {"batch": -1}, {"lr": 0.0}])
def test_options_out_of_range_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(bad))):
        FitOptions(**bad)


# -- scores ----------------------------------------------------------------------------------------


def test_precision_recall_and_surplus_are_counted_at_tau() -> None:
    kept = np.array([10, 6, 5, 0, 8])
    routed = np.array([True, False, True, False, True])
    found = evaluate.scores(kept, routed, 6.0)
    assert (found.states, found.paying, found.routed) == (5, 3, 3)
    assert found.precision == pytest.approx(2 / 3)
    assert found.recall == pytest.approx(2 / 3)
    assert found.surplus == pytest.approx((4 - 1 + 2) / 5)
    nothing = evaluate.scores(kept, np.zeros(5, bool), 6.0)
    assert (nothing.precision, nothing.recall, nothing.surplus) == (0.0, 0.0, 0.0)


def test_a_replay_counts_rounds_tokens_and_who_drafted() -> None:
    traces = [invented([3, 0, 0, 0, 1, 0]), invented([0, 0])]
    models = [lambda place: 1] * 2
    cache = evaluate.replay(traces, evaluate.same(always), models, 3.0)
    assert (cache.rounds, cache.cached) == (2 + 2, 4)
    assert cache.tokens_per_round == pytest.approx(8 / 4)
    alone = evaluate.replay(traces, evaluate.same(never), models, 3.0)
    assert (alone.rounds, alone.cached) == (3 + 1, 0)
    assert cache.states.precision == pytest.approx(1 / 4)


def test_who_knows_what_will_be_kept_does_best() -> None:
    dice = np.random.default_rng(3)
    traces = [invented(np.minimum(dice.integers(0, 9, 40), range(40, 0, -1)).tolist())
              for _ in range(8)]  # fmt: skip
    models = [lambda place, n=n: (place * 7 + n) % 4 for n in range(8)]
    rules = {
        "always": evaluate.same(always), "never": evaluate.same(never), "oracle": evaluate.best_of
    }  # fmt: skip
    rounds = {name: evaluate.replay(traces, rule, models, 6.0).rounds
              for name, rule in rules.items()}  # fmt: skip
    assert rounds["oracle"] < min(rounds["always"], rounds["never"])


def test_groups_are_told_apart_and_together() -> None:
    traces = [invented([3, 0, 0, 0]), invented([0, 0])]
    found = evaluate.by_group(traces, evaluate.same(always), [lambda place: 0] * 2, 3.0)
    assert list(found) == ["x", "overall"]
    assert found["x"] == found["overall"]

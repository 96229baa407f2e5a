"""The acceptance model finds the coefficients it was made with, keeps to the rows that say
something, and survives being written down."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from tests.policies.exit_cases import VOCAB, entropy_of, probe

from hasten.errors import OptionError
from hasten.policies.exit_calibration import FEATURES, Calibration, features, fit_logistic, labelled
from hasten.policies.exits import DRAFT, SELECT, Outcome

TRUE = np.array([0.7, 1.5, -2.0, 0.5, 0.0, 3.0])


def rows(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features of very different scales, and the chances `TRUE` gives them."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, 5)) * [3.0, 0.2, 1.0, 0.5, 0.1] + [-4.0, 0.5, 0.0, 1.0, -0.2]
    return x, 1.0 / (1.0 + np.exp(-(TRUE[0] + x @ TRUE[1:])))


# -- features --------------------------------------------------------------------------------------


def test_features_are_of_the_distribution_and_of_the_tokens_drafted_before() -> None:
    x = features(probe(DRAFT, 0.6, drafted=3), least=-1.5)
    rest = 0.4 / (VOCAB - 1)
    expected = (
        math.log(0.6),
        0.1 * math.log(0.6 / rest),
        entropy_of(0.6) / math.log(VOCAB),
        math.log(4),
        -1.5,
    )
    assert x == pytest.approx(expected, abs=1e-5)
    assert len(FEATURES) == len(x)


def test_samples_end_with_the_first_token_that_was_not_kept() -> None:
    probes = (
        probe(SELECT, 0.2, exit=0, layer=2),
        probe(SELECT, 0.9, exit=1, layer=4),
        probe(DRAFT, 0.5, exit=1, drafted=1, layer=4),
        probe(DRAFT, 0.7, exit=1, drafted=2, layer=4),
        probe(DRAFT, 0.1, exit=1, drafted=3, layer=4),
    )
    samples = labelled(Outcome(4, 3, 1, probes))
    assert [(e, kept) for e, _, kept in samples] == [(1, True), (1, False)]
    assert [x[4] for _, x, _ in samples] == pytest.approx([0.0, math.log(0.9)], abs=1e-5)
    kept = labelled(Outcome(4, 3, 3, probes))
    assert [k for _, _, k in kept] == [True] * 3, "the row that ended the draft has no token"
    assert kept[2][1][4] == pytest.approx(math.log(0.5), abs=1e-5)
    assert labelled(Outcome(None, 0, 0, probes[:1])) == []


# -- fitting ---------------------------------------------------------------------------------------


def test_given_the_chances_themselves_the_fit_is_the_truth() -> None:
    x, chances = rows(2000)
    assert fit_logistic(x, chances, ridge=1e-6) == pytest.approx(TRUE, abs=1e-3)


def test_given_what_was_kept_the_fit_comes_near_it() -> None:
    x, chances = rows(40_000)
    kept = (np.random.default_rng(1).random(len(x)) < chances).astype(float)
    found = fit_logistic(x, kept)
    assert found[1:] * x.std(0) == pytest.approx(TRUE[1:] * x.std(0), abs=0.2)


@pytest.mark.parametrize("kept", ["all", "none", "separable"])
def test_rows_that_leave_no_doubt_give_finite_weights(kept: str) -> None:
    x, _ = rows(200)
    separable = (x[:, 0] > -4.0).astype(float)
    y = {"all": np.ones(200), "none": np.zeros(200), "separable": separable}[kept]
    w = fit_logistic(x, y)
    assert np.isfinite(w).all()
    chances = 1.0 / (1.0 + np.exp(-np.clip(w[0] + x @ w[1:], -30, 30)))
    assert np.mean((chances > 0.5) == (y > 0.5)) > 0.97


def test_a_feature_that_never_varies_changes_nothing() -> None:
    x, chances = rows(500)
    x[:, 3] = 2.0
    w = fit_logistic(x, chances)
    assert np.isfinite(w).all()
    assert w[4] == pytest.approx(0.0, abs=1e-6)


def opening(x: np.ndarray, share: float) -> np.ndarray:
    """The same rows, so many of them at depth 0."""
    x = x.copy()
    x[:, 3] = np.where(np.arange(len(x)) < share * len(x), 0.0, 0.7)
    return x


def test_a_calibration_tables_first_and_later_tokens_apart() -> None:
    x, _ = rows(800)
    x = opening(x, 0.5)
    y = np.where(x[:, 3] == 0.0, 0.8, 0.4)
    made = Calibration.fit([(x, y)], ridge=1e-3, groups=4)
    assert made.later[0] == pytest.approx(0.4)
    assert made.first[0] == pytest.approx((0.8,) * 4, abs=0.01)
    assert made.chance(0, x[0]) == pytest.approx(0.8, abs=0.02)
    assert made.chance(0, x[-1]) == pytest.approx(0.4, abs=0.02)


def test_groups_of_first_chances_rise_and_have_the_mean_of_all() -> None:
    x, chances = rows(801)
    x = opening(x, 1.0)
    made = Calibration.fit([(x, chances)], groups=8)
    (first,) = made.first
    assert len(first) == 8
    assert list(first) == sorted(first)
    assert first[-1] - first[0] > 0.5
    assert np.mean(first) == pytest.approx(chances.mean(), abs=0.02)
    assert made.later[0] == pytest.approx(chances.mean()), "no later token seen: the mean of all"


def test_an_exit_without_samples_is_refused() -> None:
    x, chances = rows(10)
    with pytest.raises(OptionError, match="exit 1") as error:
        Calibration.fit([(x, chances), (x[:0], chances[:0])])
    assert error.value.option == "early-exit.calibration"


# -- as data ---------------------------------------------------------------------------------------


def test_json_keeps_a_calibration_to_the_bit() -> None:
    x, chances = rows(300)
    made = Calibration.fit([(x, chances), (opening(x, 0.3), chances)])
    again = Calibration.from_json(made.to_json())
    assert again == made
    assert again.chance(1, x[0]) == made.chance(1, x[0])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weights": [["a"]], "first": [], "later": []}'])
def test_text_that_is_no_calibration_is_refused(text: str) -> None:
    with pytest.raises(OptionError) as error:
        Calibration.from_json(text)
    assert error.value.option == "early-exit.calibration"


def test_a_calibration_of_other_features_or_sizes_is_refused() -> None:
    made = Calibration.constant([0.5, 0.6])
    for change in (
        {"features": (*FEATURES, "weather")},
        {"weights": made.weights[:1]},
        {"weights": ((0.0,), (0.0,))},
        {"later": (0.5,)},
        {"first": ((0.5,), ())},
        {"later": (0.5, math.nan)},
    ):
        with pytest.raises(OptionError) as error:
            replace(made, **change)
        assert error.value.option == "early-exit.calibration"


def test_a_constant_calibration_gives_its_chance_to_every_row() -> None:
    made = Calibration.constant([0.3, 0.8])
    for p1 in (0.1, 0.9):
        x = features(probe(SELECT, p1))
        assert [made.chance(e, x) for e in (0, 1)] == pytest.approx([0.3, 0.8])
    with pytest.raises(OptionError):
        Calibration.constant([1.0])

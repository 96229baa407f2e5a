from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from hasten.errors import OptionError
from hasten.tasks import compare, grade, problems
from hasten.tasks.grading import bootstrap_mean, mcnemar, wilson


@pytest.mark.parametrize(("successes", "count"), [(0, 10), (3, 10), (10, 10), (120, 470)])
def test_wilsons_interval_is_the_one_in_scipy(successes: int, count: int) -> None:
    theirs = binomtest(successes, count).proportion_ci(method="wilson")
    assert wilson(successes, count) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (5, 5), (12, 3), (3, 12), (900, 700)])
def test_mcnemar_is_a_binomial_test_of_the_pairs_that_differ(wins: int, losses: int) -> None:
    theirs = binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert mcnemar(wins, losses) == pytest.approx(theirs)


def test_answers_are_graded_in_their_order() -> None:
    asked = problems(["sum1", "sort"], "train", 4)
    found = grade(asked, [asked[0].answer, "no", asked[2].answer + ".", ""])
    assert found.right == (True, False, True, False)
    assert (found.count, found.correct, found.accuracy) == (4, 2, 0.5)
    assert found.low < 0.5 < found.high
    assert str(found).startswith("50.0%")
    assert str(found).endswith("2 of 4")
    with pytest.raises(OptionError, match="texts"):
        grade(asked, [])
    with pytest.raises(OptionError, match="texts"):
        grade([], [])


def test_a_difference_is_paired() -> None:
    source = np.random.default_rng(0)
    theirs = source.random(400) < 0.5
    mine = theirs | (source.random(400) < 0.15)
    found = compare(mine.tolist(), theirs.tolist())
    assert found.losses == 0
    assert found.difference == pytest.approx(found.wins / 400)
    assert 0 < found.low < found.difference < found.high
    assert found.p_value < 1e-4
    turned = compare(theirs.tolist(), mine.tolist())
    assert (turned.wins, turned.losses) == (0, found.wins)
    assert turned.difference == -found.difference
    same = compare(theirs.tolist(), theirs.tolist())
    assert (same.difference, same.low, same.high, same.p_value) == (0, 0, 0, 1)
    with pytest.raises(OptionError, match="theirs"):
        compare([True], [])


def test_an_interval_covers_what_it_should() -> None:
    source = np.random.default_rng(1)
    inside = 0
    for trial in range(200):
        low, high = bootstrap_mean(source.normal(0.3, 1, 60), None, trial)
        inside += low <= 0.3 <= high
    assert 0.88 <= inside / 200 <= 0.99


def test_wordings_of_one_item_count_as_one() -> None:
    mine = [True, False] * 30
    theirs = [False] * 60
    alone = compare(mine, theirs)
    doubled = compare(
        [each for each in mine for _ in range(4)],
        [False] * 240,
        clusters=[at for at in range(60) for _ in range(4)],
    )
    assert doubled.difference == alone.difference
    assert math.isclose(doubled.high - doubled.low, alone.high - alone.low, rel_tol=0.05)

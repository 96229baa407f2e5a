from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from hasten.errors import OptionError
from hasten.smc.diagnose import HEADER, diagnose, row, summarise
from hasten.smc.info import SMCInfo, WeightedAnswer
from hasten.smc.run import SMCRun
from tests.smc import toy


def info(log_evidence: float, ess: Sequence[float] = (), collapsed: int = 0) -> SMCInfo:
    answers = tuple(WeightedAnswer((0,), 0.5, None, None) for _ in range(2))
    return SMCInfo(answers, 0, log_evidence, tuple(ess), (), 1, 0, 0, 0, 0, collapsed)


def start(seed: int) -> SMCRun:
    proposal = toy.drafted_by(toy.GOOD)()
    return SMCRun(toy.TARGET, toy.PROMPT, toy.PARAMS, toy.options(), proposal=proposal, seed=seed)


def test_the_bounds_are_those_of_the_relative_variance() -> None:
    found = summarise([info(math.log(x), [1.5, 1.0]) for x in (0.5, 1.5, 1.0, 1.0)])
    assert found.evidence == pytest.approx(1)
    assert found.rel_var == pytest.approx(0.5 / 3)
    assert found.kl_bound == pytest.approx(math.log(1 + 0.5 / 3))
    assert found.tv_bound == pytest.approx(math.sqrt(found.kl_bound / 2))
    assert found.ess_share == pytest.approx(0.625)


def test_evidence_hundreds_of_nats_apart_is_told_not_a_division_by_zero() -> None:
    found = summarise([info(x) for x in (0.0, -400.0, -401.0, -1200.0)])
    assert found.rel_var == pytest.approx(4)  # as large as four runs can show
    assert not found.trusted


def test_the_bound_holds_on_the_toy_whose_law_is_known() -> None:
    found = diagnose(start, 150)
    assert abs(found.evidence - 1) < 4 * found.evidence_error
    far = toy.distance(toy.law_of(list(toy.runs(150)), 2), toy.marginal(2, toy.answers()))
    assert far < found.tv_bound
    assert found.trusted


def test_answers_too_unlikely_for_a_float_are_measured_too() -> None:
    found = summarise([info(-3000.0), info(-3001.0), info(-3000.5)])
    assert found.evidence == 0
    assert 0 < found.rel_var < 1
    assert math.isfinite(found.rel_var_error)
    huge = summarise([info(3000.0), info(2999.0)])
    assert huge.evidence == math.inf
    assert 0 < huge.rel_var < 1


def test_heavy_tails_and_collapses_arent_trusted() -> None:
    heavy = summarise([info(-9.0)] * 9 + [info(0.0)])
    assert not heavy.trusted
    assert row("p", heavy)[4].startswith(">")
    assert not summarise([info(0.0), info(0.0, collapsed=1)]).trusted
    missed = [info(-20.0), info(-20.5), info(-20.2)]
    assert not summarise(missed).trusted, "evidence is 1 on average: the runs that make it so"
    assert summarise(missed, alpha=2.0).trusted
    even = summarise([info(0.0), info(0.0)])
    assert even.trusted
    assert len(row("p", even)) == len(HEADER)


def test_one_run_says_nothing_and_is_refused() -> None:
    with pytest.raises(OptionError, match="runs"):
        diagnose(start, 1)

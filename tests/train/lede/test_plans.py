"""Prices, fixed settings and oracles."""

from __future__ import annotations

import numpy as np
import pytest

from hasten.train.lede import plans
from hasten.train.lede.chances import calibrate, chances
from hasten.train.lede.world import World
from tests.train.lede.toy import Toy

TOY = Toy()


@pytest.fixture(scope="module")
def world() -> World:
    return TOY.world(16, 100)


def test_dinkelbach_finds_the_higher_ratio_where_the_mean_of_ratios_is_wrong() -> None:
    """Two settings. One earns 1 token in 0.5 or 9 in 9, half the time each: 5 / 4.75 in the long
    run, though its rounds' ratios are 2 and 1. The other earns 1.2 in 1, always."""
    settings = {"swinging": [(1.0, 0.5), (9.0, 9.0)], "steady": [(1.2, 1.0)] * 2}

    def mean(pairs: list[tuple[float, float]], at: int) -> float:
        return sum(pair[at] for pair in pairs) / len(pairs)

    def solve(rho: float) -> tuple[float, float, str]:
        best = max(settings, key=lambda k: mean(settings[k], 0) - rho * mean(settings[k], 1))
        return mean(settings[best], 0), mean(settings[best], 1), best

    rho, best = plans.dinkelbach(solve)
    assert best == "steady"
    assert rho == pytest.approx(1.2)
    naive = max(settings, key=lambda k: np.mean([n / t for n, t in settings[k]]))
    assert naive == "swinging"


def test_a_worse_solution_doesnt_lower_the_price() -> None:
    prices: list[float] = []

    def solve(rho: float) -> tuple[float, float, int]:
        prices.append(rho)
        return (3.0, 2.0, 1) if len(prices) == 1 else (1.0, 1.0, 2)

    rho, _ = plans.dinkelbach(solve)
    assert prices == [1.0, 1.5]
    assert rho == 1.5


def test_runs_count_right_drafts_up_to_the_end_of_the_document(world: World) -> None:
    found = plans.runs(world)
    for exit, row in ((0, 0), (1, 57), (0, 98), (1, 99), (0, 1599)):
        last = int(world.offsets[1:][world.offsets[1:] > row][0])
        count = 0
        while count < world.steps and row + count < last and world.hit[exit, count, row + count]:
            count += 1
        assert found[exit, row] == count


def test_the_clairvoyant_is_never_beaten(world: World) -> None:
    docs = np.arange(4)
    best = plans.clairvoyant(world, docs, TOY.costs)
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows = len(world.token)
        plan = plans.Plan(rng.integers(-1, 2, rows), rng.integers(0, 7, rows))
        assert plans.follow(world, docs, plan, TOY.costs).rho <= best.rho
    assert (best.accepted == best.drafted).all(), "it drafts nothing that is wrong"


def test_foresight_with_certain_chances_is_the_clairvoyant(world: World) -> None:
    docs = np.arange(3)
    sure = plans.foresight(world, docs, TOY.costs, world.hit.astype(np.float32))
    seer = plans.clairvoyant(world, docs, TOY.costs)
    assert sure.rho == pytest.approx(seer.rho, rel=2e-3)


def test_foresight_without_knowledge_is_the_best_fixed_setting() -> None:
    """Where every row is as likely right as any other there is nothing to choose."""
    toy = Toy(chances=((0.8, 0.8), (0.6, 0.6)))
    world = toy.world(16, 200)
    docs = np.arange(16)
    blind = plans.foresight(world, docs, toy.costs, np.repeat(
        np.array([0.8, 0.6], dtype=np.float32)[:, None, None], len(world.token), 2))  # fmt: skip
    scores = plans.grid(world, docs, toy.costs)
    assert blind.rho == pytest.approx(scores[plans.best_fixed(scores)].rho, rel=0.03)


def test_fitted_chances_are_those_of_the_world(world: World) -> None:
    docs = world.docs("policy")
    found = chances(world, world.docs("test"), docs)
    rows = world.rows(world.docs("test"))
    np.testing.assert_allclose(found[:, 0, rows], world.alpha[:, 0, rows], atol=0.08)
    assert not found[:, :, world.rows(docs)].any(), "of the documents asked for only"


def test_the_myopic_rules_calibration_is_fitted_from_the_tables(world: World) -> None:
    made = calibrate(world, world.docs("policy"))
    assert len(made.weights) == 2
    first = np.array(made.first[0])
    assert first.min() == pytest.approx(0.25, abs=0.08)
    assert first.max() == pytest.approx(0.9, abs=0.06)


def test_plain_steps_cost_what_they_do(world: World) -> None:
    score = plans.follow(world, np.array([0]), plans.Plan.fixed(world, 0, 0), TOY.costs)
    assert score.tokens[0] == score.time[0] == score.rounds[0] == 100
    assert score.rho == 1.0
    assert (score.drafted, score.acceptance, score.exit) == (0, 0.0, 0.0)

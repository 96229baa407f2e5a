"""How much of a block is verified: the rules at work in a request, and when drafting pauses."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from hasten.dflash.lengths import LONGEST_PAUSE, BlockLength, CostedLength
from hasten.policies.base import PlanContext
from hasten.policies.cost_model import CostModel, CostTable
from hasten.policies.length import LengthPolicy, SurvivalBook
from hasten.types import Budget, DraftTree, Round, Times
from tests.dflash.dflash_models import BLOCK

FLAT = CostTable("flat", (1, 16), (64,), ((10.0, 10.5),))
STEEP = CostTable("steep", (1, 2, 16), (64,), ((10.0, 18.0, 130.0),))


def costed(table: CostTable, **rule: int) -> CostedLength:
    made = LengthPolicy(BLOCK, policy="cost", **rule)
    return CostedLength(made, CostModel(table), SurvivalBook())


def play(
    length: CostedLength, rounds: int, chance: float, *, draft_ms: float = 1.0, seed: int = 0
) -> list[int]:
    """Rows verified in each round where every slot is kept with `chance`; -1: nobody drafted."""
    coin, out = random.Random(seed), []
    for _ in range(rounds):
        plan = length.plan(PlanContext(100, 50))
        drafting = plan.nodes > 1
        rows = length.rows(None) if drafting else 1
        kept = next((i for i in range(BLOCK - 1) if coin.random() >= chance), BLOCK - 1)
        emitted = [0] * min(kept, rows - 1) + [0 if kept > rows - 1 else 1]
        if drafting:
            length.judged(None, [0] * (BLOCK - 1), emitted)
        took = Times(0.02, draft_ms / 1e3 * drafting, 0.010, 0.0)
        tree = DraftTree.chain(0, [0] * (rows - 1))
        length.learn(Round(1, tuple(emitted), tree=tree, times=took))
        out.append(rows if drafting else -1)
    return out


def mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


def test_a_rule_without_costs_plans_what_it_may_want_and_what_may_still_come() -> None:
    for rule, rows in ((LengthPolicy(BLOCK, policy="fixed", most=3), 3), (LengthPolicy(BLOCK), 5)):
        length = BlockLength(rule)
        assert length.plan(PlanContext(9, 100)) == Budget(rows, 99)
        assert length.plan(PlanContext(9, 1)) == Budget(rows, 0)
        assert length.rows(None) == rows
    assert BlockLength(LengthPolicy(BLOCK)).rows(0.4) == 2
    assert not BlockLength(LengthPolicy(BLOCK, policy="fixed")).asks


def test_cheap_rows_and_good_drafts_are_verified_whole() -> None:
    got = play(costed(FLAT), 60, 0.9)
    assert mean(got[20:]) > 4.5


def test_dear_rows_are_verified_only_while_they_pay() -> None:
    good = play(costed(STEEP), 200, 0.95)
    assert 1 < mean([rows for rows in good[100:] if rows > 0]) < BLOCK
    assert max(play(costed(STEEP), 300, 0.3)[200:]) <= 2


def test_drafts_that_are_never_kept_are_seldom_made() -> None:
    got = play(costed(FLAT), 400, 0.0, draft_ms=3.0)
    assert sum(rows > 0 for rows in got[200:]) <= 200 / LONGEST_PAUSE + 1


def test_drafting_comes_back_when_drafts_are_kept_again() -> None:
    length = costed(FLAT)
    play(length, 100, 0.0, draft_ms=2.0)
    got = play(length, 200, 0.95, draft_ms=2.0)
    assert mean(got[150:]) > 4


@pytest.mark.parametrize("others", [1, 7])
def test_beside_others_a_request_pays_its_share_and_what_its_rows_add(others: int) -> None:
    length = costed(STEEP)
    length.plan(PlanContext(100, 50, others))
    share = length._share()
    whole = CostModel(STEEP).curve(others + BLOCK, 100)
    assert len(share) == BLOCK
    assert share[0] == pytest.approx(whole[others] / (others + 1))
    assert share[4] - share[0] == pytest.approx(whole[others + 4] - whole[others])


def test_no_more_rows_than_asked_for_and_no_fewer_than_the_least() -> None:
    assert max(play(costed(FLAT, most=3), 50, 1.0)) == 3
    got = play(costed(STEEP, least=3), 50, 0.0)
    assert {rows for rows in got if rows > 0} == {3}

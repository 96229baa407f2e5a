"""Which arm drafts: each rule, what it decides from, and what costs have to say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hasten.payoff.gate import CACHE, MODEL, PATIENCE, PLAIN, Choice, Gate, Record, Rule
from hasten.policies.base import PlanContext
from hasten.policies.cost_model import CostModel, CostTable
from hasten.types import Budget, DraftTree, Round, Times
from tests.payoff.cases import Says, query

TABLE = np.zeros((100, 5), np.uint8)
FLAT = CostTable("flat", (1, 64), (64,), ((10.0, 10.5),))
STEEP = CostTable("steep", (1, 64), (64,), ((10.0, 640.0),))


def gate(name: str, says: float = 0.0, costs: CostTable = FLAT, **more: Any) -> Gate:
    model = more.pop("model", True)
    record = more.pop("record", None)
    made = Gate(
        Rule(name, **more), Says(says), TABLE, costs=CostModel(costs), record=record, model=model
    )
    made.begin(20)
    made.plan(PlanContext(30, 50), Budget(4, 4))
    return made


@pytest.mark.parametrize(("says", "arm"), [(6.0, CACHE), (5.99, MODEL), (0.0, MODEL)])
def test_payoff_takes_the_cache_from_tau_on(says: float, arm: str) -> None:
    made = gate("payoff", says)
    assert made.choose(query(9), 30) == Choice(arm, 9 if arm == CACHE else 0)
    assert made.arm == arm
    assert made.expected == pytest.approx(says)


def test_tau_may_be_another() -> None:
    assert gate("payoff", 2.0, tau=2.0).choose(query(9), 30).arm == CACHE
    assert gate("payoff", 1e6, tau=1e9).choose(query(9), 30).arm == MODEL
    assert gate("payoff", 0.0, tau=-1e9).choose(query(1), 30).arm == CACHE


def test_frequency_takes_the_cache_by_its_score_alone() -> None:
    assert gate("frequency", 0.0, s0=4.0).choose(query(9, score=4.0), 30).arm == CACHE
    assert gate("frequency", 99.0, s0=4.0).choose(query(9, score=3.9), 30).arm == MODEL


@pytest.mark.parametrize(("name", "arm"), [("cache", CACHE), ("model", MODEL)])
def test_two_rules_always_say_the_same(name: str, arm: str) -> None:
    assert gate(name, 99.0).choose(query(2), 30).arm == arm


@pytest.mark.parametrize("name", ["payoff", "cost", "frequency", "cache", "model"])
def test_where_the_cache_has_nothing_the_model_drafts_or_nobody(name: str) -> None:
    for empty in (query(0), None):
        assert gate(name, 99.0, tau=0.0).choose(empty, 30).arm == MODEL
        assert gate(name, 99.0, tau=0.0, model=False).choose(empty, 30) == Choice(PLAIN)


# -- costs -----------------------------------------------------------------------------------------


def usual(kept: float = 3.0, cost: float = 1.3) -> Record:
    return Record(kept, cost, 50)


def test_where_rows_are_cheap_little_payoff_is_enough_and_where_they_are_dear_it_isnt() -> None:
    assert gate("cost", 4.0, FLAT, record=usual()).choose(query(30), 30).arm == CACHE
    assert gate("cost", 4.0, STEEP, record=usual()).choose(query(30), 30).arm == MODEL
    assert gate("cost", 1.0, FLAT, record=usual()).choose(query(30), 30).arm == MODEL


def test_the_better_the_model_arm_the_less_the_cache_drafts() -> None:
    arms = [
        gate("cost", 4.0, record=usual(kept)).choose(query(30), 30).arm for kept in (2.0, 4.0, 8.0)
    ]
    assert arms == [CACHE, CACHE, MODEL]


def test_by_cost_not_many_more_rows_are_verified_than_are_expected_to_be_kept() -> None:
    assert gate("cost", 8.0, record=usual()).choose(query(60), 30) == Choice(CACHE, 16)
    assert gate("cost", 8.0, record=usual()).choose(query(12), 30) == Choice(CACHE, 12)
    assert gate("payoff", 8.0).choose(query(60), 30) == Choice(CACHE, 60)


def test_beside_others_a_request_pays_its_share_and_what_its_rows_add() -> None:
    made = gate("cost", 5.0, STEEP, record=usual(0.0, 1.0))
    made.plan(PlanContext(30, 50, others=7), Budget(4, 4))
    alone = gate("cost", 5.0, FLAT, record=usual(0.0, 1.0))
    assert alone.choose(query(9), 30).arm == CACHE
    assert made.choose(query(9), 30).arm == MODEL
    share = made._curve(2)
    whole = CostModel(STEEP).curve(9, 30)
    assert share[0] == pytest.approx(whole[7] / 8)
    assert share[1] == pytest.approx(whole[7] / 8 + whole[8] - whole[7])


def test_a_plain_round_is_a_choice_where_that_is_asked_for() -> None:
    bad = usual(0.1, 2.0)
    assert gate("cost", 0.0, record=bad).choose(query(9), 30).arm == CACHE, "cheaper than the model"
    assert gate("cost", 0.0, record=bad, plain=True).choose(query(9), 30).arm == PLAIN
    assert gate("cost", 0.0, record=usual(), plain=True).choose(query(9), 30).arm == MODEL
    assert gate("cost", 0.0, STEEP, model=False).choose(query(9), 30).arm == PLAIN


def test_a_model_arm_that_does_not_pay_is_tried_now_and_then() -> None:
    made = gate("cost", 0.0, record=usual(0.1, 2.0), plain=True)
    arms = []
    for _ in range(2 * PATIENCE + 3):
        made.plan(PlanContext(30, 50), Budget(4, 4))
        arms.append(made.choose(query(9), 30).arm)
    assert arms.count(MODEL) == 2
    assert arms.index(MODEL) == PATIENCE


def ended(rows: int, kept: int, ms: float, draft_ms: float = 0.0) -> Round:
    tree = DraftTree.chain(1, range(2, rows + 1))
    times = Times(total=1.0, draft=1e-3 * draft_ms, target=1e-3 * ms, topk=0.0)
    accepted = tuple(range(kept + 1))
    return Round(1, tuple(range(kept + 1)), tree, accepted, times=times)


def test_the_model_arms_rounds_are_what_they_took_in_plain_passes() -> None:
    made = gate("cost", 0.0, record=Record())
    for _ in range(400):
        made.plan(PlanContext(30, 50), Budget(4, 4))
        made.choose(query(9), 30)
        made.learn(ended(5, 3, ms=16.0, draft_ms=4.0))
    assert made.record.kept == pytest.approx(3.0, abs=0.05)
    assert made.record.cost == pytest.approx(2.0, rel=0.05)


def test_cache_rounds_shared_passes_and_prompts_teach_nothing_of_the_model_arm() -> None:
    made = gate("cost", 40.0, record=usual())
    assert made.choose(query(40), 30).arm == CACHE
    made.learn(ended(41, 9, ms=50.0))
    made.plan(PlanContext(30, 50, others=2), Budget(4, 4))
    made.choose(query(0), 30)
    made.learn(ended(5, 3, ms=50.0))
    made.learn(Round(0, (1,)))
    assert made.record == usual()


def test_a_hiccup_of_the_machine_moves_the_record_little() -> None:
    record = usual()
    record.learn(3, 1300.0)
    assert record.cost < 1.3 * 1.05
    assert record.fork() == record
    other = record.fork()
    other.learn(0, 1.0)
    assert other != record
    record.reset()
    assert record == Record()


# -- history ---------------------------------------------------------------------------------------


def seen(made: Gate) -> list[tuple[bool, int]]:
    return list(made._history._rounds)


def test_rounds_count_as_the_arms_that_drafted_them() -> None:
    made = gate("payoff", 9.0)
    made.observe(Round(0, (1,)))
    assert seen(made) == [], "the prompt is no round"
    made.choose(query(9), 30)
    made.observe(ended(10, 4, 1.0))
    made.plan(PlanContext(35, 45), Budget(4, 4))
    made.choose(query(0), 35)
    made.observe(ended(4, 2, 1.0))
    made.observe(ended(1, 0, 1.0))
    assert seen(made) == [(True, 4), (False, 2), (False, 0)]


def test_a_round_nobody_was_asked_in_is_not_the_caches_though_the_last_one_was() -> None:
    made = gate("cache")
    made.choose(query(9), 30)
    made.observe(ended(10, 4, 1.0))
    made.observe(ended(1, 0, 1.0))  # without `plan`: another policy planned it
    assert seen(made) == [(True, 4), (False, 0)]


def test_a_new_request_starts_with_no_history() -> None:
    made = gate("cache")
    made.choose(query(9), 30)
    made.observe(ended(10, 4, 1.0))
    made.begin(5)
    assert seen(made) == []
    assert made.model_budget is None

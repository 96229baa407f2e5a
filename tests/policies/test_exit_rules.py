"""Exit rules stop where they say, from distributions alone; adaptive thresholds follow the papers'
update, checked against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.policies.exit_cases import PLAIN, drafted, drafts, entropy_of, probe

from hasten.errors import OptionError
from hasten.policies import exit_adaptive
from hasten.policies.exit_rules import (
    SVIP,
    AdaEDL,
    Adversarial,
    DraftVerify,
    FixedExit,
    Kangaroo,
    Random,
    Static,
    Thresholds,
    describe,
)
from hasten.policies.exits import DRAFT, SELECT, ExitPolicy, Outcome, Probe

SURE, UNSURE = 0.95, 0.3

FIXED: list[Callable[..., FixedExit]] = [Kangaroo, SVIP, DraftVerify, AdaEDL]


# -- fixed exits -----------------------------------------------------------------------------------


def test_the_static_policy_drafts_its_length_at_its_exit_however_unsure_rows_are() -> None:
    policy = Static(exit=1, length=3)
    assert [policy.leave(probe(SELECT, UNSURE, exit=e)) for e in (0, 1)] == [False, True]
    assert drafted(policy, UNSURE, [UNSURE] * 9, exit=1) == 3


def test_a_static_length_of_none_is_plain_decoding() -> None:
    policy = Static(exit=0, length=0)
    assert drafted(policy, SURE, [SURE] * 3) == 0
    assert not policy.wants(SELECT, 0, 0)


@pytest.mark.parametrize("rule", FIXED)
def test_a_rule_stops_before_the_unsure_row(rule: Callable[..., FixedExit]) -> None:
    assert drafted(rule(0), SURE, [SURE, SURE, UNSURE, SURE]) == 3


@pytest.mark.parametrize("rule", FIXED)
def test_kept_the_unsure_token_is_the_last_one_drafted(rule: Callable[..., FixedExit]) -> None:
    policy = rule(0, keep=True)
    assert drafted(policy, SURE, [SURE, UNSURE, SURE, SURE]) == 3
    assert drafted(policy, UNSURE, [SURE, SURE]) == 1
    assert drafted(policy, SURE, [SURE] * 3) == 4, "an ended draft doesn't end the next one"


@pytest.mark.parametrize("rule", FIXED)
def test_a_first_token_is_always_drafted_at_the_exit_and_nowhere_else(
    rule: Callable[..., FixedExit],
) -> None:
    policy = rule(1)
    assert policy.leave(probe(SELECT, UNSURE, exit=1))
    assert not policy.leave(probe(SELECT, SURE, exit=0))
    assert not policy.leave(probe(SELECT, SURE, exit=2))


@pytest.mark.parametrize("rule", FIXED)
def test_steps_end_a_draft_of_sure_rows(rule: Callable[..., FixedExit]) -> None:
    assert drafted(rule(0, steps=5), 0.99, [0.99] * 20) == 5


def test_a_probe_that_is_not_wanted_is_never_left() -> None:
    policy = Kangaroo(1, steps=3, keep=True)
    for phase, exit, count in [(SELECT, 0, 0), (SELECT, 2, 0), (DRAFT, 1, 3), (DRAFT, 1, 4)]:
        assert not policy.wants(phase, exit, count)
        assert not policy.leave(probe(phase, SURE, exit=exit, drafted=count))
    assert policy.wants(SELECT, 1, 0)
    assert policy.leave(probe(SELECT, UNSURE, exit=1))
    assert not policy.wants(DRAFT, 1, 1), "the unsure token was kept: what comes next is known"


def test_kangaroo_compares_p1_with_six_tenths() -> None:
    assert drafted(Kangaroo(0), SURE, [0.601, 0.599]) == 2
    assert drafted(Kangaroo(0), SURE, [SURE] * 9) == 6


def test_svip_stops_where_the_root_of_the_scaled_entropy_exceeds_its_threshold() -> None:
    bound = math.sqrt(0.15 * entropy_of(0.8))
    assert drafted(SVIP(0, threshold=bound + 1e-3), SURE, [0.8, SURE]) == 3
    assert drafted(SVIP(0, threshold=bound - 1e-3), SURE, [0.8, SURE]) == 1
    assert drafted(SVIP(0, threshold=bound - 1e-3, scale=0.1), SURE, [0.8, SURE]) == 3


def test_adaedl_stops_where_its_bound_falls_below_the_threshold() -> None:
    bound = 1.0 - math.sqrt(0.2 * entropy_of(0.8))
    assert drafted(AdaEDL(0, threshold=bound - 1e-3), SURE, [0.8, SURE]) == 3
    assert drafted(AdaEDL(0, threshold=bound + 1e-3), SURE, [0.8, SURE]) == 1
    assert drafted(AdaEDL(0, threshold=bound + 1e-3, factor=0.1), SURE, [0.8, SURE]) == 3


# -- thresholds that follow acceptance -------------------------------------------------------------


def test_draft_verify_moves_its_threshold_by_the_published_update() -> None:
    policy = DraftVerify(0)
    policy.learn(drafts(4, 4))  # matched 0.5 < 0.9: up
    assert policy.matched == pytest.approx(0.5)
    assert policy.threshold == pytest.approx(0.9 * 0.8 + 0.1 * 0.81)
    for _ in range(3):  # 0.75, 0.875, 0.9375
        policy.learn(drafts(4, 4))
    assert policy.matched == pytest.approx(0.9375)
    # Up by a thousandth three times, then down: matched well, and the draft could be longer.
    assert policy.threshold == pytest.approx(0.8 + 3 * 0.001 - 0.001)
    policy.learn(drafts(8, 8))
    assert policy.threshold == pytest.approx(0.802), "a full draft matched well: stays"


def test_adaedl_looks_at_the_tokens_kept_where_draft_verify_looks_at_those_drafted() -> None:
    bound, drawn = AdaEDL(0, 0.5, steps=8, target=0.5), DraftVerify(0, 0.5, steps=8, target=0.4)
    for policy in (bound, drawn):
        policy.learn(drafts(8, 7))  # well matched, drafted in full, not kept in full
    assert bound.threshold == pytest.approx(0.499)
    assert drawn.threshold == 0.5


def test_adaedl_begins_at_its_target_and_rises_at_the_first_poor_round() -> None:
    policy = AdaEDL(0, 0.5)
    policy.learn(drafts(4, 1))
    assert policy.matched == pytest.approx(0.5 * 0.9 + 0.5 * 0.25)
    assert policy.threshold == pytest.approx(0.501)


@pytest.mark.parametrize("rule", [DraftVerify, AdaEDL])
def test_a_plain_round_moves_nothing(rule: Callable[[int], DraftVerify | AdaEDL]) -> None:
    policy = rule(0)
    before = policy.threshold, policy.matched
    policy.learn(PLAIN)
    assert (policy.threshold, policy.matched) == before


@pytest.mark.parametrize(("kept", "end"), [(0, 1.0), (4, 0.0)])
def test_a_threshold_stays_between_none_and_all(kept: int, end: float) -> None:
    policy = DraftVerify(0, 0.5, step=0.5)
    for _ in range(100):
        policy.learn(drafts(4, kept))
    assert policy.threshold == pytest.approx(end, abs=0.05)
    assert 0.0 <= policy.threshold <= 1.0


def test_a_moved_threshold_decides() -> None:
    policy = DraftVerify(0, 0.5, step=1.0)
    assert drafted(policy, SURE, [0.55]) == 2
    policy.learn(drafts(2, 0))  # 0.6
    assert drafted(policy, SURE, [0.55]) == 1


# -- thresholds by exit ----------------------------------------------------------------------------


def test_the_walk_ends_at_the_first_exit_that_is_sure_enough() -> None:
    policy = Thresholds([0.9, 0.6, 0.4], stop=0.5)

    def walk(*p1: float) -> list[bool]:
        return [policy.leave(probe(SELECT, p, exit=e)) for e, p in enumerate(p1)]

    assert walk(0.95) == [True]
    assert walk(0.85, 0.85) == [False, True]
    assert walk(0.3, 0.5, 0.45) == [False, False, True]
    assert walk(0.3, 0.3, 0.3) == [False, False, False]


def test_drafting_stops_by_the_exits_own_threshold_and_by_steps() -> None:
    policy = Thresholds([0.0, 0.0], stop=[0.7, 0.3], steps=4)
    assert drafted(policy, SURE, [0.5], exit=0) == 1
    assert drafted(policy, SURE, [0.5, 0.5, 0.5, 0.5], exit=1) == 4
    assert not policy.wants(DRAFT, 1, 4)


def test_sloped_thresholds_go_evenly_from_the_first_to_the_last() -> None:
    assert Thresholds.sloped(0.9, 0.5, 3, 0.4).select == pytest.approx((0.9, 0.7, 0.5))
    assert Thresholds.sloped(0.9, 0.5, 1, 0.4).select == (0.9,)


# -- for tests of exactness ------------------------------------------------------------------------


def test_a_random_policy_is_the_same_for_the_same_seed_and_blind_to_the_row() -> None:
    def tosses(seed: int, p1: float) -> list[bool]:
        policy = Random(seed, 0.3)
        return [policy.leave(probe(DRAFT, p1, drafted=n)) for n in range(200)]

    assert tosses(1, SURE) == tosses(1, UNSURE)
    assert tosses(1, SURE) != tosses(2, SURE)
    assert 30 < sum(tosses(1, SURE)) < 90


def test_the_adversarial_policy_leaves_exactly_where_entropy_is_high() -> None:
    policy = Adversarial(1.0)
    assert entropy_of(0.95) < 1.0 < entropy_of(0.3)
    for phase in (SELECT, DRAFT):
        assert policy.leave(probe(phase, 0.3))
        assert not policy.leave(probe(phase, 0.95))


POLICIES: list[ExitPolicy] = [
    Static(0, 3),
    Kangaroo(0),
    SVIP(0),
    DraftVerify(0),
    AdaEDL(0),
    Thresholds([0.5], 0.5),
    Random(0),
    Adversarial(),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_the_order_of_ids_changes_no_decision(policy: ExitPolicy) -> None:
    """What a rule may know of the tokens is how likely they are."""
    row = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])

    def decisions(logits: torch.Tensor) -> list[bool]:
        made = Random(0) if isinstance(policy, Random) else policy
        rounds = [(SELECT, 0), (DRAFT, 1), (DRAFT, 2)]
        return [made.leave(Probe(p, 4, 0, n, logits, torch.zeros(2), 9)) for p, n in rounds]

    assert decisions(row) == decisions(row.flip(0))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_policy_is_small_and_says_where_it_is_from(policy: ExitPolicy) -> None:
    assert not hasattr(policy, "__dict__")
    assert describe(policy) == describe(type(policy))
    name, source = describe(policy).split(": ", 1)
    assert name == type(policy).__name__
    assert "arXiv" in source or source.startswith("ours")
    policy.learn(Outcome(None, 0, 0))


def test_only_policies_that_use_shadows_ask_for_them() -> None:
    assert [policy.shadow for policy in POLICIES] == [False] * len(POLICIES)
    assert exit_adaptive.DEL.shadow
    assert not exit_adaptive.Myopic.shadow


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: Static(-1, 3), "exit"),
        (lambda: Static(0, -1), "length"),
        (lambda: Static(0, True), "length"),
        (lambda: Kangaroo(0, 1.5), "threshold"),
        (lambda: Kangaroo(0, math.nan), "threshold"),
        (lambda: Kangaroo(0, steps=-1), "steps"),
        (lambda: SVIP(0, -0.1), "threshold"),
        (lambda: SVIP(0, scale=0.0), "scale"),
        (lambda: AdaEDL(0, factor=-1.0), "factor"),
        (lambda: AdaEDL(0, threshold=2.0), "threshold"),
        (lambda: DraftVerify(0, target=1.1), "target"),
        (lambda: DraftVerify(0, step=-0.01), "step"),
        (lambda: Thresholds([], 0.5), "select"),
        (lambda: Thresholds([0.5, 1.5], 0.5), "select"),
        (lambda: Thresholds([0.5, 0.5], [0.5]), "stop"),
        (lambda: Thresholds([0.5], -0.5), "stop"),
        (lambda: Thresholds.sloped(0.9, 0.5, 0, 0.5), "exits"),
        (lambda: Random(0, 1.5), "chance"),
        (lambda: Adversarial(-1.0), "entropy"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(
    make: Callable[[], ExitPolicy], option: str
) -> None:
    with pytest.raises(OptionError) as error:
        make()
    assert error.value.option == f"early-exit.{option}"

"""DEL and the myopic rule choose what brute force finds best, on costs made by hand; evidence,
thresholds and the price of time are followed by numbers worked out here."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from tests.policies.exit_cases import PLAIN, costs, drafted, drafts, probe

from hasten.errors import OptionError
from hasten.policies.exit_adaptive import DEL, Myopic, best_plan, round_cost
from hasten.policies.exit_calibration import Calibration
from hasten.policies.exits import DRAFT, SELECT, ExitCosts, ExitPolicy, Outcome

AT = (2, 8)
TWO = costs(AT)
Shadow = tuple[list[int], list[int], list[float]]


def shadow(matched: int, missed: int, sure: float = 0.9, unsure: float = 0.3) -> Shadow:
    """So many guesses that were the target's, each `sure`, and so many that were not."""
    guesses = [1] * (matched + missed)
    truths = [1] * matched + [2] * missed
    return guesses, truths, [sure] * matched + [unsure] * missed


def seen(*shadows: Shadow) -> Outcome:
    return Outcome(None, 0, 0, shadows=shadows)


def random_costs(dice: random.Random, at: Sequence[int], rows: int = 10) -> ExitCosts:
    """Dear and cheap row counts in no order, as machines have them."""
    verify = (0.0, 1.0, *(1.0 + 0.08 * n * dice.uniform(0.3, 2.0) for n in range(1, rows)))
    probes = tuple(dice.uniform(0.0, 0.1) for _ in at)
    return ExitCosts(tuple(e / 12 * dice.uniform(1.0, 1.3) for e in at), probes, verify, 12)


# -- costs -----------------------------------------------------------------------------------------


def test_a_rounds_cost_is_its_rows_layers_probes_and_verification() -> None:
    probes = (
        probe(SELECT, exit=0, layer=2),
        probe(SELECT, exit=1, layer=8),
        probe(DRAFT, exit=1, layer=8, drafted=1),
    )
    cost = round_cost(Outcome(8, 2, 1, probes), TWO, AT)
    assert cost == pytest.approx(3 * 8 / 12 + 3 * 0.05 + (1 - 8 / 12) * 1.04)
    assert round_cost(Outcome(None, 0, 0, probes[:2]), TWO, AT) == pytest.approx(1.1)


# -- DEL: the plan ---------------------------------------------------------------------------------


def test_the_plan_is_the_one_brute_force_finds() -> None:
    dice = random.Random(3)
    lengths = set()
    for _ in range(200):
        table, chances = random_costs(dice, AT), [dice.uniform(0.2, 0.97) for _ in AT]
        rates = {(0, 0): 1.0 / 1.2}
        for e, a in enumerate(chances):
            for d in range(1, 9):
                probes = d + (d < 8)
                resumed = table.verify[d + 1] * (12 - AT[e]) / 12
                cost = (d + 1) * table.layer[e] + probes * table.probe[e] + resumed + 0.2
                rates[e, d] = (1 - a ** (d + 1)) / (1 - a) / cost
        plan = best_plan(chances, table, AT, 8, every_round=0.2)
        assert plan == max(rates, key=rates.__getitem__)
        lengths.add(plan[1])
    assert len(lengths) > 4, "the cases are of many kinds"


def test_the_shallow_exit_is_taken_where_it_pays() -> None:
    policy = DEL(TWO, AT)
    policy.learn(seen(shadow(8, 2), shadow(9, 1)))
    assert policy.exit == 0
    assert drafted(policy, 0.9, [0.9] * 20, exit=0) == 12


def test_the_deep_exit_is_taken_where_the_shallow_one_misses() -> None:
    deep = costs((2, 4))
    policy = DEL(deep, (2, 4))
    policy.learn(seen(shadow(1, 9), shadow(9, 1)))
    assert policy.exit == 1
    assert not policy.wants(SELECT, 0, 0), "nobody looks at the shallow exit"
    assert not policy.leave(probe(SELECT, 0.99, exit=0))
    assert policy.leave(probe(SELECT, 0.2, exit=1))


def test_where_no_exit_pays_rounds_are_plain_until_shadows_say_otherwise() -> None:
    policy = DEL(TWO, AT)
    policy.learn(seen(shadow(0, 5), shadow(1, 9)))
    assert [policy.wants(SELECT, e, 0) for e in (0, 1)] == [False, False]
    assert [policy.leave(probe(SELECT, 0.99, exit=e)) for e in (0, 1)] == [False, False]
    for _ in range(30):
        policy.learn(seen(shadow(1, 0), shadow(1, 0)))
    assert policy.leave(probe(SELECT, 0.99, exit=0))


def test_without_evidence_one_token_is_drafted_at_the_shallowest_exit() -> None:
    policy = DEL(TWO, AT)
    assert policy.chance(0) is None
    assert drafted(policy, 0.1, [0.99, 0.99], exit=0) == 1
    policy.learn(PLAIN)  # no shadows
    assert drafted(policy, 0.1, [0.99, 0.99], exit=0) == 1


def test_an_exit_never_seen_is_not_planned() -> None:
    assert best_plan([None, None], TWO, AT, 8) == (0, 0)
    assert best_plan([None, 0.95], costs((2, 4)), (2, 4), 8)[0] == 1


# -- DEL: evidence ---------------------------------------------------------------------------------


def test_evidence_fades_by_the_decay_a_round() -> None:
    policy = DEL(TWO, AT, decay=0.5)
    policy.learn(seen(shadow(4, 0), shadow(0, 4)))
    policy.learn(seen(shadow(0, 2), shadow(2, 0)))
    assert policy.chance(0) == pytest.approx(2 / 4)
    assert policy.chance(1) == pytest.approx(2 / 4)
    policy.learn(seen(shadow(1, 0), shadow(0, 1)))
    assert policy.chance(0) == pytest.approx((1 + 1) / (1 + 1 + 1))
    assert policy.chance(1) == pytest.approx(1 / 3)


def test_the_threshold_is_halfway_between_matched_and_missed() -> None:
    policy = DEL(TWO, AT)
    policy.learn(seen(shadow(3, 0), shadow(1, 1, 0.6, 0.2)))
    assert policy.threshold(0) == 0.0, "nothing missed yet: nothing is unsure"
    assert policy.threshold(1) == pytest.approx(0.4)
    policy.learn(seen(shadow(1, 1, 0.7, 0.1), shadow(0, 0)))
    matched = (3 * 0.95 * 0.9 + 0.7) / (3 * 0.95 + 1)
    assert policy.threshold(0) == pytest.approx((matched + 0.1) / 2)
    assert policy.threshold(1) == pytest.approx(0.4), "fading alone moves no mean"


@pytest.mark.parametrize(
    ("ending", "sure", "mixed"),
    [("confidence", 12, 2), ("length", 3, 3), ("both", 3, 2)],
)
def test_confidence_or_the_planned_length_ends_a_draft(ending: str, sure: int, mixed: int) -> None:
    table = costs(AT, row=0.1)
    policy = DEL(table, AT, ending=ending)
    policy.learn(seen(shadow(8, 2), shadow(8, 2)))
    assert policy.threshold(0) == pytest.approx(0.6)
    last = ending == "confidence"
    planned = best_plan([0.8, 0.8], table, AT, 12, last_probe=last, every_round=0.1)
    assert planned == (0, 3)
    assert drafted(policy, 0.9, [0.9] * 20, exit=0) == sure
    assert drafted(policy, 0.9, [0.9, 0.5, 0.9, 0.9], exit=0) == mixed


def test_the_cost_of_shadows_counts_in_every_round() -> None:
    """What each round pays anyway speaks for longer drafts."""
    table = costs((2,), probe=0.2, row=0.05)
    bare = best_plan([0.8], table, (2,), 12, last_probe=False)
    counted = best_plan([0.8], table, (2,), 12, last_probe=False, every_round=0.2)
    assert (bare, counted) == ((0, 2), (0, 3))
    policy = DEL(table, (2,), ending="length")
    policy.learn(seen(shadow(8, 2)))
    assert (policy.exit, policy.steps) == counted


def test_kept_an_unsure_token_is_drafted_and_ends_the_draft() -> None:
    policy = DEL(TWO, AT, keep=True)
    policy.learn(seen(shadow(8, 2), shadow(8, 2)))
    assert drafted(policy, 0.9, [0.9, 0.5, 0.9], exit=0) == 3


# -- the myopic rule -------------------------------------------------------------------------------


def play(policy: Myopic, first: Sequence[float] = (), later: float = 0.5) -> tuple[int, int]:
    """Exit and tokens of a round as the engine runs it, asking `wants` first; (-1, 0) is plain."""
    for e, layer in enumerate(policy.at):
        if not policy.wants(SELECT, e, 0):
            continue
        p1 = first[e] if first else 0.5
        if not policy.leave(probe(SELECT, p1, exit=e, layer=layer)):
            continue
        count = 1
        while policy.wants(DRAFT, e, count):
            if not policy.leave(probe(DRAFT, later, exit=e, drafted=count, layer=layer)):
                break
            count += 1
        return e, count
    return -1, 0


def priced(policy: Myopic, rho: float) -> Myopic:
    """The policy after rounds that made a plain step's time worth `rho` tokens."""
    policy.rate = 1.0
    table = policy.costs
    kept = 1_000
    policy.learn(Outcome(None, 0, kept - 1))
    assert policy.rho == pytest.approx(kept / table.verify[1])
    policy.rho = rho
    policy._price()
    return policy


def value(d: int, e: int, chance: float, table: ExitCosts, at: Sequence[int], rho: float) -> float:
    """Tokens less the price of the whole round, with steps=8."""
    if d == 0:
        return 1.0 - rho * table.verify[1]
    tokens = sum(chance**k for k in range(d + 1))
    cost = (d + 1) * table.layer[e] + (d + (d < 8)) * table.probe[e]
    return tokens - rho * (cost + table.resume(e, at[e], d + 1))


@pytest.mark.parametrize("rho", [1.0, 1.2, 1.6])
def test_with_constant_chances_the_marginal_rule_is_the_brute_force_optimum(rho: float) -> None:
    """Rows cost the same each, so that what a token more is worth only falls."""
    lengths = set()
    for chance in (0.3, 0.5, 0.6, 0.7, 0.8, 0.85):
        for row in (0.02, 0.1, 0.3):
            table = costs((1,), row=row, probe=0.03)
            policy = priced(Myopic(table, (1,), Calibration.constant([chance]), steps=8), rho)
            worth = [value(d, 0, chance, table, (1,), rho) for d in range(8)]
            best = max(range(8), key=worth.__getitem__)
            length = play(policy)[1]
            lengths.add(length)
            assert length == best or length == 8  # the last token pays no probe
            if length == 8:
                assert value(8, 0, chance, table, (1,), rho) >= worth[best]
    assert len(lengths) > 3


def test_looking_ahead_it_finds_the_best_exit_and_length_whatever_rows_cost() -> None:
    dice = random.Random(5)
    at, found = (2, 4), set()
    for _ in range(200):
        table, rho = random_costs(dice, at), dice.uniform(1.0, 2.0)
        chances = [dice.uniform(0.2, 0.97) for _ in at]
        calibration = Calibration.constant(chances)
        policy = priced(Myopic(table, at, calibration, steps=8, ahead=8), rho)
        worth = {(-1, 0): value(0, 0, 1.0, table, at, rho)}
        for e, chance in enumerate(chances):
            worth |= {(e, d): value(d, e, chance, table, at, rho) for d in range(1, 9)}
        choice = play(policy)
        assert worth[choice] == pytest.approx(max(worth.values()))
        found.add(choice)
    assert {e for e, _ in found} == {-1, 0, 1}


def test_the_marginal_rule_stops_at_a_dear_row_count_and_a_look_ahead_crosses_it() -> None:
    verify = (0.0, 1.0, 1.05, 1.95, 1.95, 1.96, 1.97)
    table = ExitCosts((0.0,), (0.0,), verify, 12)
    calibration = Calibration.constant([0.9])
    assert play(Myopic(table, (0,), calibration, steps=4)) == (0, 1)
    assert play(Myopic(table, (0,), calibration, steps=4, ahead=4)) == (0, 4)


def test_a_draft_goes_on_while_all_its_tokens_are_likely_kept_together() -> None:
    """Chances multiply: rows that would pay alone don't after unsure ones."""
    weights = ((2.0, 2.0, 0.0, 0.0, 0.0, 0.0),)  # by log p1 alone
    calibration = Calibration(weights, ((0.8,),), (0.8,))
    table = costs((1,), row=0.1, probe=0.02)

    def count(*rows: float) -> int:
        return drafted(Myopic(table, (1,), calibration), 0.95, rows)

    assert count(0.95, 0.95, 0.95, 0.01) == 4
    assert count(0.95, 0.5, 0.5, 0.5, 0.5) == 5  # .87 · .87 · .65^3 = .206 > .195
    assert count(0.3, 0.5, 0.5, 0.5, 0.5) == 3  # .87 · .40 · .65 = .225, then .146


def test_an_exit_is_left_where_its_row_is_sure_and_passed_where_it_is_not() -> None:
    weights = (2.0, 2.0, 0.0, 0.0, 0.0, 0.0)
    calibration = Calibration((weights, weights), ((0.1, 0.9), (0.1, 0.9)), (0.7, 0.7))
    policy = Myopic(TWO, AT, calibration)
    assert play(policy, (0.95, 0.95))[0] == 0
    assert play(policy, (0.02, 0.02)) == (-1, 0)
    assert play(policy, (0.95, 0.95))[0] == 0, "the walk begins anew each round"


def test_a_deep_exit_is_probed_only_where_its_table_promises_enough() -> None:
    near = (2, 3)
    table = costs(near)
    weights = (2.0, 2.0, 0.0, 0.0, 0.0, 0.0)

    def probed(first: tuple[float, ...]) -> bool:
        policy = Myopic(table, near, Calibration((weights,) * 2, ((0.5,), first), (0.5, 0.9)))
        assert not policy.leave(probe(SELECT, 0.02, exit=0))
        return policy.wants(SELECT, 1, 0)

    assert probed((0.9,))
    assert not probed((0.1,))


def test_the_walk_begins_anew_whether_it_was_left_or_broken_off() -> None:
    weights = (2.0, 2.0, 0.0, 0.0, 0.0, 0.0)
    near = (2, 3)
    policy = Myopic(
        costs(near), near, Calibration((weights,) * 2, ((0.5, 0.9), (0.9,)), (0.5,) * 2)
    )
    assert policy.leave(probe(SELECT, 0.95, exit=0, layer=2))
    assert policy.wants(SELECT, 0, 0)
    assert not policy.leave(probe(SELECT, 0.02, exit=0, layer=2))
    assert policy.wants(SELECT, 1, 0)
    policy.learn(PLAIN)
    assert policy.wants(SELECT, 0, 0)


def test_the_least_sure_token_so_far_counts_not_the_last() -> None:
    by_least = Calibration(((3.0, 0.0, 0.0, 0.0, 0.0, 3.0),), ((0.95,),), (0.9,))
    table = costs((1,), row=0.1, probe=0.02)
    # After a token of 0.2 a later one has 1 / (1 + exp(-3 - 3 log 0.2)) = 0.14, however sure.
    assert drafted(Myopic(table, (1,), by_least), 0.2, [0.9, 0.9, 0.9]) == 1
    assert drafted(Myopic(table, (1,), by_least), 0.9, [0.2, 0.9, 0.9, 0.9]) == 2
    # 0.6: 0.81 each, so that .95 · .94 · .81^k falls below .195 with the ninth; 0.9: never.
    assert drafted(Myopic(table, (1,), by_least), 0.9, [0.6] + [0.9] * 12) == 9
    assert drafted(Myopic(table, (1,), by_least), 0.9, [0.9] * 13) == 12


def test_a_probe_pays_by_the_rows_it_finds_sure_not_by_the_mean_row() -> None:
    table = ExitCosts((0.0,), (0.02,), (0.0, 1.0, 1.6, 2.2, 2.8, 3.4), 12)
    weights = ((0.0,) * 6,)
    even = Calibration(weights, ((0.5, 0.5),), (0.1,))
    split = Calibration(weights, ((0.02, 0.98),), (0.1,))
    assert not Myopic(table, (0,), even, steps=3).wants(SELECT, 0, 0)
    assert Myopic(table, (0,), split, steps=3).wants(SELECT, 0, 0)


def test_where_nothing_pays_nothing_is_probed_or_left() -> None:
    policy = Myopic(TWO, AT, Calibration.constant([0.05, 0.05]))
    assert [policy.wants(SELECT, e, 0) for e in (0, 1)] == [False, False]
    assert [policy.leave(probe(SELECT, 0.99, exit=e, layer=AT[e])) for e in (0, 1)] == [False] * 2


def test_the_price_of_time_follows_tokens_over_costs_and_never_falls_below_one() -> None:
    policy = Myopic(TWO, AT, Calibration.constant([0.8, 0.8]), rate=0.5)
    assert policy.rho == 1.0
    policy.learn(drafts(4, 3, layer=2))  # 4 tokens
    cost = 5 * 2 / 12 + (1 - 2 / 12) * 1.08
    assert policy.rho == pytest.approx((0.5 + 0.5 * 4) / (0.5 + 0.5 * cost))
    for _ in range(20):
        policy.learn(drafts(8, 0, layer=8))
    assert policy.rho == 1.0


def test_time_that_is_worth_more_shortens_drafts() -> None:
    def length(rho: float) -> int:
        table = costs((1,), row=0.05)
        return play(priced(Myopic(table, (1,), Calibration.constant([0.8])), rho))[1]

    assert length(1.0) > length(1.6) > length(2.2) > 0


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: DEL(TWO, AT, decay=0.0), "decay"),
        (lambda: DEL(TWO, AT, ending="never"), "ending"),
        (lambda: DEL(TWO, AT, steps=0), "steps"),
        (lambda: DEL(TWO, AT, steps=16), "steps"),
        (lambda: DEL(TWO, (8, 2)), "exits"),
        (lambda: DEL(TWO, (2, 12)), "exits"),
        (lambda: DEL(TWO, ()), "exits"),
        (lambda: DEL(TWO, (2,)), "costs"),
        (lambda: Myopic(TWO, AT, Calibration.constant([0.5])), "calibration"),
        (lambda: Myopic(TWO, AT, Calibration.constant([0.5, 0.5]), rate=2.0), "rate"),
        (lambda: Myopic(TWO, AT, Calibration.constant([0.5, 0.5]), ahead=0), "ahead"),
        (lambda: Myopic(TWO, AT, Calibration.constant([0.5, 0.5]), steps=99), "steps"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(
    make: Callable[[], ExitPolicy], option: str
) -> None:
    with pytest.raises(OptionError) as error:
        make()
    assert error.value.option == f"early-exit.{option}"


def test_as_long_a_draft_as_the_table_knows_is_allowed() -> None:
    assert len(TWO.verify) == 17
    assert DEL(TWO, AT, steps=15).costs is TWO

"""LEDE's agent in a request: what it is asked, when it isn't, and what it is told; the guard."""

from __future__ import annotations

import numpy as np
import pytest
from tests.policies import lede_cases
from tests.policies.exit_cases import PLAIN, drafted, drafts, probe

from hasten.errors import OptionError
from hasten.policies.exits import DRAFT, SELECT
from hasten.policies.lede import LedePolicy
from hasten.policies.lede_features import Prior
from hasten.policies.lede_guard import MARGIN, PAUSE, PROBING, Guard

AT = (2, 4)


def policy(agent: lede_cases.Ruled, guard: Guard | None = None, steps: int = 5) -> LedePolicy:
    made = LedePolicy(agent, lede_cases.facts(AT), steps=steps, guard=guard)
    made.root(7)
    return made


# -- decisions -------------------------------------------------------------------------------------


def test_the_action_of_more_value_is_taken_and_of_equals_going_on() -> None:
    class Equal:
        def q_values(self, features: object) -> tuple[float, float]:
            return 0.3, 0.3

    assert policy(lede_cases.eager()).leave(probe(SELECT))
    assert not policy(lede_cases.reluctant()).leave(probe(SELECT))
    made = LedePolicy(Equal(), lede_cases.facts(AT), steps=3)
    assert not made.leave(probe(SELECT))


def test_one_agent_decides_in_both_phases_and_hears_which() -> None:
    agent = lede_cases.Ruled(lambda x: x[lede_cases.feature("p1")] > 0.4)
    assert drafted(policy(agent), 0.9, [0.8, 0.5, 0.2, 0.9]) == 3
    phases = [x[lede_cases.feature("phase")] for x in agent.seen]
    assert phases == [0.0, 1.0, 1.0, 1.0]
    assert [round(12 * x[lede_cases.feature("drafted")]) for x in agent.seen] == [0, 1, 2, 3]


def test_a_full_draft_isnt_probed() -> None:
    made = policy(lede_cases.eager(), steps=3)
    assert [made.wants(DRAFT, 0, count) for count in (1, 2, 3)] == [True, True, False]
    assert all(made.wants(SELECT, exit, 0) for exit in (0, 1))


def test_what_is_known_of_input_ids_is_looked_up_by_the_rows_own_token() -> None:
    prior = Prior(
        np.array([7, 9]),
        np.array([[0.1, 0.2], [0.8, 0.9]], np.float32),
        np.array([0.5, 0.6], np.float32),
    )
    agent = lede_cases.eager()
    made = LedePolicy(agent, lede_cases.facts(AT, prior=prior), steps=5)
    for root, drew in ((7, 9), (3, 7)):
        made.root(root)
        made.leave(probe(SELECT, exit=1))
        made.drew(drew)
        made.leave(probe(DRAFT, exit=1, drafted=1))
    seen = [float(x[lede_cases.feature("prior")]) for x in agent.seen]
    assert seen == pytest.approx([0.2, 0.9, 0.6, 0.2])


def test_running_means_follow_what_rounds_kept() -> None:
    agent = lede_cases.eager()
    made = policy(agent)
    made.leave(probe(SELECT))
    for _ in range(5):
        made.learn(drafts(4, 0, layer=2))
    made.root(7)
    made.leave(probe(SELECT))
    rate, missed = (lede_cases.feature(name) for name in ("rate", "missed"))
    assert agent.seen[1][rate] < agent.seen[0][rate]
    assert (agent.seen[0][missed], agent.seen[1][missed]) == (0.0, 1.0)


def test_decisions_and_their_seconds_are_counted() -> None:
    made = policy(lede_cases.eager())
    drafted(made, 0.9, [0.9, 0.9])
    assert made.decided == 3
    assert made.deciding_s > 0.0


def test_a_rounds_cost_is_what_the_table_says() -> None:
    made = policy(lede_cases.eager())
    made.learn(drafts(3, 1, layer=4))
    table = lede_cases.facts(AT).costs
    assert made.spent == pytest.approx(4 * table.layer[1] + table.resume(1, 4, 4))
    made.learn(PLAIN)
    assert made.spent == 1.0


def test_drafts_longer_than_the_table_are_refused() -> None:
    with pytest.raises(OptionError, match=r"steps: must be at most"):
        LedePolicy(lede_cases.eager(), lede_cases.facts(AT), steps=99)


# -- the guard -------------------------------------------------------------------------------------


def test_bad_rounds_stop_drafting_soon_and_good_ones_never() -> None:
    bad, good = Guard(), Guard()
    count = 0
    while bad.drafting:
        bad.learn(1, 1.4)
        count += 1
    assert 2 <= count <= 6
    assert bad.rate < 1.0 - MARGIN
    for _ in range(500):
        good.learn(2, 1.4)
    assert good.drafting


def test_a_pause_lasts_so_many_tokens_and_four_rounds_say_how_it_goes_on() -> None:
    for tokens, time, goes_on in ((1, 1.3, False), (2, 1.3, True)):
        guard = Guard()
        while guard.drafting:
            guard.learn(1, 2.0)
        plain = 0
        while not guard.drafting:
            guard.learn(1, 1.0)
            plain += 1
        assert plain == PAUSE
        for _ in range(PROBING - 1):
            guard.learn(tokens, time)
            assert guard.drafting
        guard.learn(tokens, time)
        assert guard.drafting is goes_on
        for _ in range(3 * goes_on):
            guard.learn(tokens, time)
            assert guard.drafting


def test_hope_gives_a_good_agent_time_over_a_bad_start() -> None:
    def rounds(guard: Guard) -> int:
        count = 0
        while guard.drafting:
            guard.learn(1, 1.4)
            count += 1
        return count

    assert rounds(Guard(1.4)) > 2 * rounds(Guard())


def test_a_pausing_policy_asks_nobody_and_returns() -> None:
    made = policy(lede_cases.eager(), Guard())
    while made.wants(SELECT, 0, 0):
        made.learn(drafts(4, 0, layer=4))
    assert not made.wants(SELECT, 1, 0)
    for _ in range(PAUSE):
        made.learn(PLAIN)
    assert made.wants(SELECT, 0, 0)

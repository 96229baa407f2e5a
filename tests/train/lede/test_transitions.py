"""Transitions: how far returns reach, and where they stop."""

from __future__ import annotations

import numpy as np
import pytest

from hasten.policies.lede_features import FEATURES
from hasten.train.lede.logs import LoggedRound, Rollout, Step
from hasten.train.lede.simulate import Moved, Simulator
from hasten.train.lede.transitions import REWARDS, Trace, among, from_rollouts, n_step, priced
from tests.train.lede.toy import Toy

TOY = Toy()


def trace(done: list[int], greedy: list[int], gain: list[float]) -> Trace:
    """One lane; a decision's number is its first feature."""
    made = Trace.empty(len(done), 1)
    made.features[:, 0, 0] = np.arange(len(done))
    made.gain[:, 0], made.cost[:, 0] = gain, 0.5
    made.done[:, 0], made.greedy[:, 0] = np.array(done) > 0, np.array(greedy) > 0
    return made


def test_a_return_reaches_three_greedy_steps_and_bootstraps_after_them() -> None:
    made = n_step(trace([0] * 8, [1] * 8, [1, 2, 4, 8, 16, 32, 64, 128]), 3)
    assert made.gain.tolist() == [7, 14, 28, 56, 112]
    assert made.cost.tolist() == [1.5] * 5
    assert made.after[:, 0].tolist() == [3, 4, 5, 6, 7]
    assert not made.done.any()


def test_a_return_stops_before_the_first_step_that_wasnt_greedy() -> None:
    """The first step's own action may be anything: it is what the value is of."""
    made = n_step(trace([0] * 7, [0, 1, 0, 1, 1, 1, 1], [1, 2, 4, 8, 16, 32, 64]), 3)
    assert made.gain.tolist() == [3, 2, 28, 56]
    assert made.after[:, 0].tolist() == [2, 2, 5, 6]


def test_no_return_crosses_the_end_of_a_round() -> None:
    made = n_step(trace([0, 1, 0, 0, 1, 0, 0, 0], [1] * 8, [1, 2, 4, 8, 16, 32, 64, 128]), 3)
    assert made.gain.tolist() == [3, 2, 28, 24, 16]
    assert made.done.tolist() == [True] * 5
    ends = {0: 1, 1: 1, 2: 4, 3: 4, 4: 4}
    assert [int(x) for x in made.before[:, 0]] == list(ends)


def test_one_step_is_the_decision_itself() -> None:
    made = n_step(trace([0, 1, 0, 0], [1] * 4, [1, 2, 4, 8]), 1)
    assert made.gain.tolist() == [1, 2, 4]
    assert made.after[:, 0].tolist() == [1, 2, 3]


def test_transitions_of_a_run_stay_in_their_document_and_split() -> None:
    """Documents of a split carry a mark in a feature; no transition leads from one to another."""
    world = TOY.world(8, 30)
    docs = world.docs("policy")
    rng = np.random.default_rng(0)
    simulator = Simulator(world, docs, TOY.facts, rng, lanes=4, endless=True)
    steps = 400
    made = Trace.empty(steps, 4)
    context = FEATURES.index("context")
    for at in range(steps):
        made.features[at] = simulator.observe().T
        made.features[at, :, 0] = docs[simulator._slot]
        made.features[at, :, 1] = simulator.row
        moved = simulator.step(rng.random(4) < 0.7)
        made.gain[at], made.cost[at] = priced(moved, "throughput")
        made.done[at], made.greedy[at] = moved.done, True
    found = n_step(made, 3)
    inner = ~found.done
    assert inner.sum() > 100
    assert (found.before[inner, 0] == found.after[inner, 0]).all(), "another document"
    assert (found.before[inner, 1] == found.after[inner, 1]).all(), "another round"
    assert set(found.before[:, 0].astype(int)) == set(docs.tolist())
    assert not set(found.before[:, 0].astype(int)) & set(world.docs("test").tolist())
    assert found.before[:, context].min() > 0


def test_a_rounds_rewards_add_up_to_its_tokens_and_its_time() -> None:
    world = TOY.world(4, 50)
    rng = np.random.default_rng(1)
    docs = np.arange(4)
    simulator = Simulator(world, docs, TOY.facts, rng)
    gain = cost = begun = 0.0
    start = TOY.costs.layer[0] + TOY.costs.probe[0]
    while simulator.live.any():
        simulator.observe()
        moved = simulator.step(rng.random(4) < 0.6)
        more, time = priced(moved, "throughput")
        gain, cost = gain + float(more.sum()), cost + float(time.sum())
        begun += start * int(moved.done.sum())
    plain = simulator.score.tokens.sum() - gain  # a last token without room for a draft
    assert 0 <= plain <= 4
    np.testing.assert_allclose(cost + begun + plain, simulator.score.time.sum(), rtol=1e-4)


def moved() -> Moved:
    made = Moved.nothing(np.array([True, True, False, False]))
    made.right[:] = [True, False, False, False]
    made.done[:] = [False, True, False, True]
    made.gain[:] = [0, 3, 0, 1]
    made.cost[:], made.layers[:] = 0.2, [0, 0, 0.5, 0.25]
    made.round_cost[:] = [0, 2.0, 0, 0.5]
    return made


def test_the_rewards_are_what_they_are_called() -> None:
    gain, cost = priced(moved(), "throughput")
    assert gain.tolist() == [0, 3, 0, 1]
    assert cost.tolist() == pytest.approx([0.2] * 4)
    gain, cost = priced(moved(), "match")
    assert gain.tolist() == [1, -1, -0.5, -0.25]
    assert not cost.any()
    gain, cost = priced(moved(), "ratio")
    assert gain.tolist() == [0, 1.5, 0, 2]
    assert not cost.any()
    assert REWARDS == ("throughput", "match", "ratio")


def step(phase: int, exit: int, drafted: int, action: int, p1: float = 0.5) -> Step:
    return Step(
        phase, exit, drafted, p1, 0.1, 0.3, 1.0, 0.5, 0.2, 0.1, 7, action, 0.9, 11 if action else -1
    )


def test_rollouts_become_transitions_at_the_costs_given() -> None:
    """A walk to the second exit, two tokens drafted, one kept."""
    steps = (step(0, 0, 0, 0), step(0, 1, 0, 1), step(1, 1, 1, 1), step(1, 1, 2, 0))
    rounds = (
        LoggedRound(20, 1, 2, 1, 2, steps),
        LoggedRound(22, -1, 0, 0, 1, (step(0, 0, 0, 0), step(0, 1, 0, 0))),
    )
    made = from_rollouts([Rollout(0, {"kind": "coin"}, rounds)], TOY.facts, None, 3)
    assert made is not None
    costs = TOY.costs
    climb = costs.layer[1] - costs.layer[0] + costs.probe[1]
    draft = costs.layer[1] + costs.probe[1]
    rest = costs.resume(1, 4, 3)
    want = [climb, draft, draft, rest, climb, costs.resume(1, 4, 1)]
    np.testing.assert_allclose(made.cost, want, rtol=1e-5)
    assert made.gain.tolist() == [0, 0, 0, 2, 0, 1]
    assert made.done.tolist() == [False, False, False, True, False, True]
    rate, last = FEATURES.index("rate"), FEATURES.index("last")
    assert made.before[0, rate] == pytest.approx(0.5)
    assert made.before[5, last] == pytest.approx(0.5), "one of two was kept"
    whole = (costs.layer[0] + costs.probe[0]) + float(made.cost[:4].sum())
    by_hand = 3 * costs.layer[1] + costs.probe[0] + 3 * costs.probe[1] + rest
    assert whole == pytest.approx(by_hand, rel=1e-5)


def test_no_rollouts_are_no_transitions() -> None:
    assert from_rollouts([], TOY.facts, None, 3) is None


def test_rollouts_are_narrowed_to_some_exits() -> None:
    """With exit 1 alone: walks begin there, rounds drafted from exit 0 are left out."""
    first = (step(0, 0, 0, 1), step(1, 0, 1, 0))
    second = (step(0, 0, 0, 0), step(0, 1, 0, 1), step(1, 1, 1, 0))
    plain = (step(0, 0, 0, 0), step(0, 1, 0, 0))
    rounds = (
        LoggedRound(20, 0, 1, 1, 2, first),
        LoggedRound(22, 1, 1, 0, 1, second),
        LoggedRound(23, -1, 0, 0, 1, plain),
    )
    (made,) = among([Rollout(0, {}, rounds)], slice(1, 2), 6)
    assert [(r.context, r.exit, len(r.steps)) for r in made.rounds] == [(22, 0, 2), (23, -1, 1)]
    assert {s.exit for r in made.rounds for s in r.steps} == {0}
    assert (made.rounds[0].steps[0].cosine, made.rounds[0].steps[0].agrees) == (0.0, 0.5)
    (low,) = among([Rollout(0, {}, rounds)], slice(0, 1), 6)
    assert [r.exit for r in low.rounds] == [0], "a walk that went on higher isn't a plain step here"


def test_rollouts_are_cut_to_shorter_drafts() -> None:
    """Three were drafted and two kept; with one at most, one is, and the target adds its own."""
    toy = Toy(steps=2)
    steps = (step(0, 0, 0, 1), step(1, 0, 1, 1), step(1, 0, 2, 1), step(1, 0, 3, 0))
    rollout = Rollout(0, {}, (LoggedRound(20, 0, 3, 2, 3, steps),))
    (made,) = among([rollout], slice(0, 2), 1)
    (one,) = made.rounds
    assert (one.drafted, one.accepted, one.emitted, len(one.steps)) == (1, 1, 2, 1)
    (made,) = among([rollout], slice(0, 2), 2)
    found = from_rollouts([made], toy.facts, None, 3)
    assert found is not None
    assert found.gain.tolist() == [0, 3]
    assert found.done.tolist() == [False, True]
    costs = toy.costs
    want = [costs.layer[0] + costs.probe[0], costs.layer[0] + costs.resume(0, 2, 3)]
    np.testing.assert_allclose(found.cost, want, rtol=1e-5)

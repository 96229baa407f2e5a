"""Stage A: labels from both branches, the fit, the threshold, and when not to use any of it."""

from __future__ import annotations

import pytest
import torch

from hasten.errors import OptionError
from hasten.train.arbiter.episodes import Decisions, Job, Memory, Point, always, never
from hasten.train.arbiter.fit import NEVER, accuracy, candidates, choose, fit, pick
from hasten.train.arbiter.labels import TIE_WEIGHT, Pair, mine, shuffled
from hasten.train.arbiter.nets import ArbiterNet, Gate, Scores, deciding
from hasten.train.arbiter.oracle import branches, headroom
from tests.train.arbiter_toy import MISMATCHES, SCALARS, Agreeing, Toy

GATE = Gate()


def memory(toy: Toy) -> Memory:
    return Memory(toy, [str(at) for at in range(len(toy.critical))])


def test_the_toy_has_the_accuracies_it_says() -> None:
    toy = Toy(20_000, seed=1)
    jobs = range(20_000)
    assert accuracy(toy.run([Job(at, never) for at in jobs])) == pytest.approx(0.455, abs=0.01)
    assert accuracy(toy.run([Job(at, always) for at in jobs])) == pytest.approx(0.213, abs=0.01)


def a_fit(runner: Memory, pairs: list[Pair], seed: int) -> ArbiterNet:
    kind, l2 = pick(pairs, ("linear",), seed=seed)
    return fit(pairs, kind=kind, l2=l2, seed=seed)


@pytest.mark.parametrize("seed", range(10))
def test_stage_a_on_two_hundred_mismatches_beats_target_only(seed: int) -> None:
    toy = Toy(1800, seed=100 + seed)
    runner = memory(toy)
    pairs = mine(runner, range(100), never, each=2, seed=seed)
    assert len(pairs) == 200
    net = a_fit(runner, pairs, seed)
    choice, _ = choose(runner, range(100, 300), net, GATE)
    jobs = range(300, 1800)
    plain = accuracy(runner.run([Job(at, never) for at in jobs]))
    rule = deciding(Scores(net), choice.theta, GATE)
    assert accuracy(runner.run([Job(at, rule) for at in jobs])) > plain


def test_shuffled_labels_do_not_beat_target_only() -> None:
    gains = []
    for seed in range(3):
        toy = Toy(1000, seed=seed)
        runner = memory(toy)
        net = a_fit(runner, shuffled(mine(runner, range(100), never, seed=seed), seed), seed)
        choice, _ = choose(runner, range(100, 200), net, GATE)
        theta = choice.theta if choice.better else NEVER
        rule = deciding(Scores(net), theta, GATE)
        jobs = range(200, 1000)
        plain = accuracy(runner.run([Job(at, never) for at in jobs]))
        gains.append(accuracy(runner.run([Job(at, rule) for at in jobs])) - plain)
    assert max(gains) < 0.04


def test_labels_say_which_branch_is_right_and_ties_speak_for_the_draft() -> None:
    point = Toy(1).point(0, 0)
    assert (Pair(point, 0, True, False).label, Pair(point, 0, True, False).weight) == (1.0, 1.0)
    assert (Pair(point, 0, False, True).label, Pair(point, 0, False, True).weight) == (0.0, 1.0)
    assert (Pair(point, 0, True, True).label, Pair(point, 0, True, True).weight) == (
        1.0,
        TIE_WEIGHT,
    )
    assert Pair(point, 0, False, False).weight == 0.0


def test_both_branches_share_what_came_before_and_differ_at_the_mismatch() -> None:
    toy = Toy(50)
    for decide in (never, always):
        for pair in mine(memory(toy), range(50), decide, each=3):
            at = pair.point.position
            keep = decide(pair.point, ())
            others = [keep] * MISMATCHES
            for kept, right in ((True, pair.draft_right), (False, pair.target_right)):
                script = (*others[:at], kept, *others[at + 1 :])
                (episode,) = toy.run([Job(pair.problem, decide, script)])
                assert episode.correct == right


def test_at_most_so_many_mismatches_of_a_problem_are_tried() -> None:
    pairs = mine(memory(Toy(30)), range(30), never, each=2)
    assert len(pairs) == 60
    assert len({(pair.problem, pair.point.position) for pair in pairs}) == 60


def test_the_fit_and_the_threshold_repeat_by_seed() -> None:
    made = []
    for _ in range(2):
        runner = memory(Toy(300))
        net = fit(mine(runner, range(100), never, seed=3), seed=3)
        made.append((net.tensors["w1"].detach(), choose(runner, range(100, 300), net, GATE)[0]))
    assert torch.equal(made[0][0], made[1][0])
    assert made[0][1] == made[1][1]


def test_a_threshold_that_is_no_better_than_the_target_is_called_so() -> None:
    toy = Toy(300)
    toy.draft_right[:] = False  # the draft is never right
    runner = memory(toy)
    net = ArbiterNet("linear", torch.zeros(SCALARS), torch.ones(SCALARS))
    choice, tried = choose(runner, range(300), net, GATE)
    assert choice.accuracy == choice.plain
    assert not choice.better
    assert min(each.accuracy for each in tried) < choice.accuracy


def test_of_equal_thresholds_the_one_that_keeps_more_drafts_is_taken() -> None:
    toy = Toy(200)
    toy.critical[:] = False  # nothing matters
    net = ArbiterNet("linear", torch.zeros(SCALARS), torch.ones(SCALARS))
    choice, _ = choose(memory(toy), range(200), net, GATE)
    assert choice.theta == 0.0
    assert choice.kept == 1.0


def test_thresholds_lie_between_scores() -> None:
    assert candidates([0.2, 0.2, 0.6]) == [pytest.approx(0.4), 0.0]
    assert candidates([]) == []


def test_nothing_to_learn_from_is_said() -> None:
    pairs = [Pair(Toy(1).point(0, 0), 0, False, False)]
    with pytest.raises(OptionError, match="nothing to learn from"):
        fit(pairs)


def test_the_gate_closes_on_unlikely_tokens_and_after_a_run() -> None:
    def point(log_p: float) -> Point:
        return Point((0.0, log_p, *[0.0] * 16), 0, 0, 1, 2)

    gate = Gate(least=1e-3, consecutive=2)
    assert gate.allows(point(-6.9), ())
    assert not gate.allows(point(-7.0), ())
    assert gate.allows(point(-1.0), (True,))
    assert not gate.allows(point(-1.0), (False, True, True))
    assert gate.allows(point(-1.0), (True, True, False))
    assert Gate(least=0.0, consecutive=0).allows(point(-20.0), (True,) * 50)


# -- the oracle


def test_the_oracle_takes_every_combination_once() -> None:
    toy = Toy(60)
    found = branches(memory(toy), range(60), depth=3)
    for problem, some in enumerate(found):
        assert {each.decisions for each in some} == {
            (*head, False, False, False) for head in _all(3)
        }
        assert len(some) == 8
        assert not any(some[0].decisions)
        best = ~(toy.critical & toy.draft_right)[problem, 3:]
        assert any(each.correct for each in some) == best.all()


def _all(length: int) -> list[Decisions]:
    ways: list[Decisions] = [()]
    for _ in range(length):
        ways = [(*way, kept) for way in ways for kept in (True, False)]
    return ways


def test_the_oracles_luck_is_counted_on_answers_that_are_not_asked_for() -> None:
    toy = Toy(50)

    def lucky(problem: int, n: int):  # type: ignore[no-untyped-def]
        return (lambda episode: episode.decisions[0]) if n < 2 else None

    def unlucky(problem: int, n: int):  # type: ignore[no-untyped-def]
        return (lambda episode: False) if n < 2 else None

    assert headroom(memory(toy), range(50), lucky).lucky == 1.0
    found = headroom(memory(toy), range(50), unlucky)
    assert found.lucky == 0.0
    assert found.gain > 0.1
    assert found.enough


def test_a_draft_that_is_the_target_leaves_nothing_to_gain() -> None:
    runner = Memory(Agreeing(), [str(at) for at in range(20)])
    found = headroom(runner, range(20), lambda problem, n: None)
    assert (found.gain, found.mismatches) == (0.0, 0.0)
    assert not found.enough
    assert mine(runner, range(20), never) == []

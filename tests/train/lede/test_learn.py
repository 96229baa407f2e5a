"""The agent learns what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from hasten.errors import OptionError
from hasten.policies.lede_features import FEATURES
from hasten.train.lede import plans
from hasten.train.lede.fit import Fitted, fit
from hasten.train.lede.learn import (
    PRESETS,
    UNIT,
    Learner,
    LearnOptions,
    Mixture,
    draw_noise,
    objective,
    with_reward,
)
from hasten.train.lede.logs import LoggedRound, Rollout, Step
from hasten.train.lede.net import make_net, noise
from hasten.train.lede.replay import score_agent
from hasten.train.lede.simulate import Score, Simulator
from hasten.train.lede.world import World
from tests.train.lede.toy import Toy

TOY = Toy()
QUICK = replace(
    PRESETS["fast"], updates=350, prices=2, check=350, lanes=96, episodes=60, target_every=100
)


def states(*numbers: int) -> torch.Tensor:
    """One-hot."""
    found = torch.zeros(len(numbers), len(FEATURES))
    for row, number in enumerate(numbers):
        found[row, number] = 1.0
    return found


def batch(before: list[int], action: list[int], gain: list[float], cost: list[float],
          after: list[int], done: list[bool]) -> TensorDict:  # fmt: skip
    ended = torch.tensor(done).unsqueeze(1)
    then = {
        "observation": states(*after),
        "gain": torch.tensor(gain).unsqueeze(1),
        "cost": torch.tensor(cost).unsqueeze(1),
        "done": ended,
        "terminated": ended.clone(),
    }
    fields = {"observation": states(*before), "action": torch.tensor(action).unsqueeze(1)}
    return TensorDict({**fields, "next": then}, batch_size=[len(before)])


def inner(name: str) -> tuple[str, ...]:
    """A parameter's name among torchrl's functional ones."""
    return ("module", "0", "module", *name.split("."))


def q_of(net: Any, number: int) -> torch.Tensor:
    with torch.no_grad():
        return net(states(number))[0]


def test_the_target_is_the_target_networks_value_of_the_online_networks_choice() -> None:
    net = make_net(0)
    loss, _, _ = objective(net, QUICK)
    target = make_net(1)
    with torch.no_grad():
        for name, value in target.named_parameters():
            loss.target_value_network_params[inner(name)].data.copy_(value)
    with noise(False):
        for number in range(12):
            made = with_reward(batch([0], [1], [3.0], [2.0], [number], [False]), 0.5)
            error = float(loss(made)["loss"].detach())
            choice = int(q_of(net, number).argmax())
            want = (3.0 - 0.5 * 2.0) / UNIT + float(q_of(target, number)[choice])
            gap = abs(float(q_of(net, 0)[1]) - want)
            huber = 0.5 * gap**2 if gap < 1.0 else gap - 0.5
            assert error == pytest.approx(huber, abs=1e-5)
        disagree = [n for n in range(12) if q_of(net, n).argmax() != q_of(target, n).argmax()]
        assert disagree, "a plain target would do as well here"


def test_nothing_comes_after_a_rounds_end_and_nothing_is_discounted() -> None:
    net = make_net(0)
    loss, _, _ = objective(net, QUICK)
    with noise(False):
        for done in (True, False):
            made = with_reward(batch([0], [0], [4.0], [0.0], [5], [done]), 1.0)
            error = float(loss(made)["loss"].detach())
            after = 0.0 if done else float(q_of(net, 5).max())
            gap = abs(float(q_of(net, 0)[0]) - (4.0 / UNIT + after))
            assert error == pytest.approx(0.5 * gap**2 if gap < 1 else gap - 0.5, abs=1e-5)


def test_a_chain_of_three_states_gets_its_values() -> None:
    """0 -> 1 -> 2 -> end at a cost of 1 each; stopping gives 0, 1, 2, and 8 tokens come at the end.
    At a price of 0.5: on from 2 is worth 8 - 0.5, from 1 a half less, from 0 another half."""
    net = make_net(0, sigma=0.01)
    options = replace(QUICK, rate=5e-3, target_every=40)
    loss, optimizer, updater = objective(net, options)
    made = batch(
        [0, 0, 1, 1, 2, 2], [0, 1] * 3, [0.0, 0.0, 1.0, 0.0, 2.0, 8.0], [0.0, 1.0] * 3,
        [0, 1, 0, 2, 0, 0], [True, False, True, False, True, True],
    )  # fmt: skip
    made = with_reward(made, 0.5)
    for _ in range(500):
        with noise(True):
            error = loss(made)["loss"]
        optimizer.zero_grad(set_to_none=True)
        error.backward()
        optimizer.step()
        updater.step()
    found = UNIT * torch.stack([q_of(net, number) for number in range(3)])
    want = torch.tensor([[0.0, 6.5], [1.0, 7.0], [2.0, 7.5]])
    torch.testing.assert_close(found, want, atol=0.15, rtol=0.0)


def test_online_and_target_network_have_noise_of_their_own() -> None:
    net = make_net(0)
    loss, _, _ = objective(net, QUICK)
    target = dict(loss.target_value_network_params.items(True, True))
    own = dict(loss.value_network_params.items(True, True))
    names = [name for name in target if name[-1].endswith("epsilon")]
    assert len(names) == 8
    for layer in net.modules():
        if hasattr(layer, "reset_noise"):
            layer.reset_noise()
    fresh = {name: value for name, value in net.named_buffers() if "epsilon" in name}
    for name, value in fresh.items():
        assert torch.equal(own[inner(name)], value), "the loss sees the new noise"
    before = {name: target[name].clone() for name in names}
    draw_noise(loss.target_value_network_params, torch.Generator().manual_seed(0))
    for name in names:
        assert not torch.equal(target[name], before[name])
        assert not torch.equal(target[name], own[name])
        if name[-1] == "weight_epsilon":
            assert int(torch.linalg.matrix_rank(target[name])) == 1


@pytest.fixture(scope="module")
def world() -> World:
    return TOY.world(60, 150)


@pytest.fixture(scope="module")
def fitted(world: World) -> Fitted:
    docs = world.docs("policy")
    return fit(world, docs[:20], docs[20:], TOY.costs, QUICK)


def played(world: World, made: Fitted) -> Score:
    return score_agent(world, world.docs("test"), made.agent.feature_facts(), made.agent)


def test_it_reaches_19_twentieths_of_what_is_possible(world: World, fitted: Fitted) -> None:
    best = TOY.best()
    scores = plans.grid(world, world.docs("test"), TOY.costs)
    fixed = scores[plans.best_fixed(scores)].rho
    score = played(world, fitted)
    assert fixed < 0.95 * best, "a fixed setting would do: this shows little"
    assert score.rho >= 0.95 * best
    assert score.rho <= 1.03 * best, "nothing beats the optimum but luck"


def test_the_price_of_time_ends_at_what_the_agent_earns(fitted: Fitted) -> None:
    assert fitted.agent.facts.rho == pytest.approx(TOY.best(), rel=0.06)
    prices = [row["rho"] for row in fitted.rows]
    assert prices == sorted(prices)
    assert prices[-1] > prices[0]


def test_the_curve_has_a_row_a_check(fitted: Fitted) -> None:
    assert [row["updates"] for row in fitted.rows] == [350, 700]
    assert {"selected", "acceptance", "length", "exit", "loss"} <= set(fitted.rows[0])


def test_an_agent_is_the_same_from_the_same_seed(world: World) -> None:
    docs, quick = world.docs("policy"), replace(QUICK, updates=16, prices=1, check=16)
    made = [fit(world, docs[:6], docs[6:8], TOY.costs, quick).agent for _ in range(2)]
    for a, b in zip(made[0].weights, made[1].weights, strict=True):
        np.testing.assert_array_equal(a, b)
    other = fit(world, docs[:6], docs[6:8], TOY.costs, replace(quick, seed=1)).agent
    assert not np.array_equal(made[0].weights[0], other.weights[0])


def test_learning_leaves_the_global_generator_alone(world: World) -> None:
    quick = replace(QUICK, updates=16, prices=1, check=16)
    torch.manual_seed(5)
    want = torch.rand(1)
    torch.manual_seed(5)
    fit(world, world.docs("policy")[:6], world.docs("policy")[6:8], TOY.costs, quick)
    assert torch.equal(torch.rand(1), want)


def rollout() -> Rollout:
    taken = Step(0, 0, 0, 0.9, 0.05, 0.1, 2.0, 0.5, 0.0, 0.0, 1, 1, 0.9, 2)
    stopped = Step(1, 0, 1, 0.3, 0.2, 0.7, 0.5, 0.5, 0.0, 0.0, 2, 0, 0.9)
    return Rollout(0, {}, (LoggedRound(10, 0, 1, 1, 2, (taken, stopped)),) * 20)


def test_the_conservative_term_holds_down_what_was_not_done(world: World) -> None:
    gaps = []
    for kappa in (0.0, 3.0):
        options = replace(QUICK, kappa=kappa, logged=1.0)
        learner = Learner(world, world.docs("policy"), TOY.facts, options, [rollout()])
        learner.learn(1.4, 60)
        x = np.zeros(len(FEATURES), dtype=np.float32)
        logged = learner._logged()
        assert logged is not None
        with noise(False), torch.no_grad():
            values = learner.net(logged["observation"])
        taken = values.gather(1, logged["action"])
        gaps.append(float((taken - values.gather(1, 1 - logged["action"])).mean()))
        assert x.shape == (20,)
    assert gaps[1] > gaps[0] + 0.2


def test_behaviours_mix_fixed_settings_thresholds_and_coins(world: World) -> None:
    rng = np.random.default_rng(0)
    mixture = Mixture(1000, 2, 6, rng)
    shares = np.bincount(mixture.kind, minlength=3) / 1000
    np.testing.assert_allclose(shares, [0.4, 0.3, 0.3], atol=0.05)
    docs = np.resize(world.docs("policy"), 1000)
    simulator = Simulator(world, docs, TOY.facts, rng)
    lengths = []
    for _ in range(40):
        simulator.observe()
        simulator.step(mixture(simulator))
        lengths.append(simulator.drafted.max())
    assert max(lengths) >= 4
    assert 0.2 < simulator.score.acceptance < 0.95


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(OptionError, match="reward"):
        LearnOptions(reward="money")
    with pytest.raises(OptionError, match="mood"):
        LearnOptions(features=("p1", "mood"))
    with pytest.raises(OptionError, match="updates"):
        LearnOptions(updates=0)
    assert PRESETS["paper"].rate == 6.25e-5
    assert PRESETS["paper"].sigma == 0.1
    assert PRESETS["paper"].episodes == 200

"""Stage B: the gradient it follows, on problems small enough to know it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from hasten.errors import OptionError
from hasten.train.arbiter.episodes import Job, Memory, never
from hasten.train.arbiter.fit import accuracy
from hasten.train.arbiter.nets import ArbiterNet, Gate, Scores, deciding
from hasten.train.arbiter.policy import (
    Batch,
    Objective,
    PolicyOptions,
    advantages,
    batch_of,
    collect,
    reward,
    train,
    update,
)
from tests.train.arbiter_toy import SCALARS, Toy

pytest.importorskip("torchrl", reason="stage B's loss is torchrl's")

PLAIN = PolicyOptions(kl=0.0, entropy=0.0, temperature=1.0)
GATE = Gate()


def a_net(seed: int = 1, kind: str = "mlp") -> ArbiterNet:
    source = torch.Generator().manual_seed(7)
    mean, std = torch.randn(SCALARS, generator=source), torch.rand(SCALARS, generator=source) + 0.5
    return ArbiterNet(kind, mean, std, seed=seed)


class Enumerable:
    """Three mismatches; what a mismatch looks like depends on the decisions before it, and each of
    the eight ways through has a reward of its own."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(3)
        ways = [w for length in range(3) for w in product((0, 1), repeat=length)]
        self.scalars = {w: torch.randn(SCALARS, generator=source).double() for w in ways}
        self.rewards = {w: float(i * i % 7) for i, w in enumerate(product((0, 1), repeat=3))}

    def ways(self, net: ArbiterNet) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Every way through and its probability."""
        for way in product((0, 1), repeat=3):
            chance = torch.ones((), dtype=torch.float64)
            for at, action in enumerate(way):
                draft = torch.sigmoid(net(self.scalars[way[:at]].unsqueeze(0)))[0]
                chance = chance * (draft if action else 1 - draft)
            yield way, chance

    def value(self, net: ArbiterNet) -> float:
        with torch.no_grad():
            return float(sum(chance * self.rewards[way] for way, chance in self.ways(net)))


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_the_policy_gradient_is_the_finite_difference_of_the_expected_reward(kind: str) -> None:
    mdp, net = Enumerable(), a_net(kind=kind).double()
    objective = Objective(net, a_net(kind=kind).double(), PLAIN)
    scalars, actions, rewards, weights = [], [], [], []
    for way, chance in mdp.ways(net):
        for at, action in enumerate(way):
            scalars.append(mdp.scalars[way[:at]])
            actions.append(float(action))
            rewards.append(mdp.rewards[way])
            weights.append(chance.detach())
    table, taken = torch.stack(scalars), torch.tensor(actions, dtype=torch.float64)
    with torch.no_grad():
        logp = torch.distributions.Bernoulli(logits=net(table)).log_prob(taken)
    relative = torch.tensor(rewards, dtype=torch.float64)
    batch = Batch(table, taken, logp, relative, torch.arange(len(taken)))
    (torch.stack(weights) * objective.terms(batch)).sum().backward()
    step = 1e-5
    for parameter in net.parameters():
        assert parameter.grad is not None
        flat, found = parameter.data.view(-1), -parameter.grad.view(-1)
        wanted = torch.empty_like(found)
        for at in range(len(flat)):
            before = float(flat[at])
            flat[at] = before + step
            above = mdp.value(net)
            flat[at] = before - step
            wanted[at] = (above - mdp.value(net)) / (2 * step)
            flat[at] = before
        error = float((found - wanted).norm() / wanted.norm())
        assert error < 1e-4


def test_equal_rewards_give_exactly_no_gradient() -> None:
    toy, net = Toy(4), a_net()
    groups, rewards = collect(toy, net, GATE, range(4), PLAIN, (0, 1))
    assert batch_of(groups, torch.ones_like(rewards), net, GATE) is None
    some = torch.ones_like(rewards)
    some[2, 0] = 0.0
    mixed = batch_of(groups, some, net, GATE)
    alone = batch_of(groups[2:3], some[2:3], net, GATE)
    assert mixed is not None
    assert alone is not None
    assert torch.equal(mixed.scalars, alone.scalars), "the other groups are left out altogether"
    relative, useful = advantages(torch.full((1, 8), 0.3))
    assert not useful.any()
    assert (relative == 0).all()


def test_a_clipped_decision_pulls_no_further() -> None:
    net = a_net()
    objective = Objective(net, a_net(), PLAIN)
    scalars = torch.randn(2, SCALARS, generator=torch.Generator().manual_seed(0))
    taken = torch.tensor([1.0, 0.0])
    with torch.no_grad():
        now = torch.distributions.Bernoulli(logits=net(scalars)).log_prob(taken)
    # Both became likelier by more than the clip allows; the advantage says: likelier still.
    batch = Batch(scalars, taken, now - 0.5, torch.ones(2), torch.arange(2))
    objective.terms(batch).sum().backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in net.parameters())


def test_the_loss_is_a_mean_over_decisions_and_the_other_mean_is_logged() -> None:
    net = a_net()
    objective = Objective(net, a_net(seed=5), PolicyOptions(epochs=1))
    scalars = torch.randn(4, SCALARS, generator=torch.Generator().manual_seed(0))
    taken = torch.tensor([1.0, 0.0, 1.0, 1.0])
    with torch.no_grad():
        now = torch.distributions.Bernoulli(logits=net(scalars)).log_prob(taken)
    rollout = torch.tensor([0, 0, 0, 1])
    batch = Batch(scalars, taken, now, torch.tensor([1.0, 1.0, 1.0, -2.0]), rollout)
    terms = objective.terms(batch).detach()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    row = update(net, objective, optimizer, batch, PolicyOptions(epochs=1))
    assert row["loss"] == pytest.approx(float(terms.mean()), rel=1e-5)
    by_rollout = (terms[:3].mean() + terms[3]) / 2
    assert row["loss_by_rollout"] == pytest.approx(float(by_rollout), rel=1e-5)


def test_the_terms_of_a_decision_are_surrogate_entropy_and_nearness_at_the_temperature() -> None:
    options = PolicyOptions(kl=0.3, entropy=0.2, temperature=2.0)
    net, reference = a_net(), a_net(seed=5)
    scalars = torch.randn(4, SCALARS, generator=torch.Generator().manual_seed(0))
    taken, advantage = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([1.0, -2.0, 0.5, 1.0])
    with torch.no_grad():
        p = torch.sigmoid(net(scalars) / 2).double()
        r = torch.sigmoid(reference(scalars) / 2).double()
    entropy = -(p * p.log() + (1 - p) * (1 - p).log())
    far = p * (p / r).log() + (1 - p) * ((1 - p) / (1 - r)).log()
    logp = torch.where(taken > 0, p, 1 - p).log().float()
    batch = Batch(scalars, taken, logp, advantage, torch.arange(4))
    found = Objective(net, reference, options).terms(batch).detach().double()
    wanted = -advantage - 0.2 * entropy + 0.3 * far
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", [{"clip": float("inf")}, {"clip": 0.0}, {"temperature": 0.0}])
def test_options_that_would_make_nan_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="stage_b"):
        PolicyOptions(**wrong)  # type: ignore[arg-type]


def test_speed_is_paid_for_right_answers_only_unless_asked() -> None:
    toy = Toy(40)
    made = toy.run(_jobs(40))
    wrong = next(each for each in made if not each.correct)
    right = next(each for each in made if each.correct)
    assert reward(wrong, PolicyOptions()) == 0.0
    assert 1.0 < reward(right, PolicyOptions()) <= 1.05
    assert reward(wrong, PolicyOptions(speed_if_correct=False)) > 0.0


def _jobs(count: int):  # type: ignore[no-untyped-def]
    from hasten.train.arbiter.episodes import Job

    return [Job(problem, never) for problem in range(count)]


def test_stage_b_improves_a_poor_start_and_repeats_by_its_seed(tmp_path: Path) -> None:
    options = PolicyOptions(iterations=12, problems=64, every=3, rate=1e-2)
    toy = Toy(700, seed=2)
    start = a_net(kind="linear")

    def run(**more: object) -> tuple[torch.Tensor, float, float]:
        runner = Memory(toy, [str(i) for i in range(700)])
        best = train(
            runner, start, GATE, range(400), runner, range(400, 700), options, seed=1, **more
        )  # type: ignore[arg-type]
        return best.net.tensors["w"].detach(), best.choice.accuracy, best.choice.plain

    weights, accuracy, plain = run()
    assert accuracy > plain + 0.05
    again, _, _ = run()
    assert torch.equal(weights, again)


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    toy, start = Toy(120, seed=2), a_net(kind="linear")
    whole = PolicyOptions(iterations=4, problems=16, every=2)
    names = [str(i) for i in range(120)]

    def run(options: PolicyOptions, checkpoint: Path | None) -> torch.Tensor:
        rows: list[dict[str, object]] = []
        best = train(
            Memory(toy, names), start, GATE, range(80), Memory(toy, names), range(80, 120),
            options, seed=1, checkpoint=checkpoint, log=rows.append,
        )  # fmt: skip
        assert len(rows) == (2 if checkpoint else 4)
        return best.net.tensors["w"].detach()

    at_once = run(whole, None)
    run(replace(whole, iterations=2), tmp_path / "b.pt")
    assert torch.equal(run(whole, tmp_path / "b.pt"), at_once)


def test_the_best_net_and_its_threshold_are_chosen_on_the_validators_problems() -> None:
    """Numbers mean other problems there: those of training must not stand in for them."""
    names = [str(i) for i in range(60)]
    training, others = Toy(60, seed=2), Toy(60, seed=5)
    best = train(
        Memory(training, names), a_net(kind="linear"), GATE, range(60), Memory(others, names),
        range(60), PolicyOptions(iterations=4, problems=16, every=1), seed=1,
    )  # fmt: skip
    plain = accuracy(others.run([Job(at, never) for at in range(60)]))
    assert plain != accuracy(training.run([Job(at, never) for at in range(60)]))
    assert best.choice.plain == plain
    rule = deciding(Scores(best.net), best.choice.theta, GATE)
    made = accuracy(others.run([Job(at, rule) for at in range(60)]))
    assert best.choice.accuracy == made

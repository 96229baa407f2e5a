"""Stage B: the policy gradient, on the decisions at mismatches and nothing else.

An update sees scalars, actions and rewards only: the models never get a gradient. The clipped
surrogate and the entropy term are torchrl's; advantages are relative to a problem's own rollouts.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Bernoulli, kl_divergence

from hasten.errors import CapabilityError, OptionError
from hasten.train.arbiter.episodes import Decide, Decisions, Episode, Job, Point, Runner
from hasten.train.arbiter.fit import Choice, accuracy, choose
from hasten.train.arbiter.nets import ArbiterNet, Gate, Scores, table

MOST_DECISIONS = 512
"""Random numbers drawn for a rollout."""
SPREAD = 1e-4
"""Added to a group's standard deviation."""


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """How stage B goes.

    problems, rollouts  of an iteration: so many problems, each answered so often
    speed       weight of the passes saved in the reward
    speed_if_correct  wrong answers get nothing for their speed: else a policy drifts to the draft
                on problems that neither model solves
    clip, kl, entropy   of the objective; kl is against the policy that stage A made
    temperature  of the policy that rolls out and is improved, sigma(f / temperature): stage A's
                net is sure of itself, and a policy that hardly varies learns nothing. Not of the
                arbiter that is deployed
    every       iterations between validations; patience: validations without a gain before it ends
    """

    iterations: int = 20
    problems: int = 16
    rollouts: int = 8
    speed: float = 0.05
    speed_if_correct: bool = True
    clip: float = 0.2
    kl: float = 0.02
    entropy: float = 0.01
    temperature: float = 2.0
    rate: float = 3e-3
    epochs: int = 4
    most_gradient: float = 1.0
    every: int = 2
    patience: int = 4

    def __post_init__(self) -> None:
        for name, least in (("iterations", 0), ("rollouts", 1)):
            if getattr(self, name) < least:
                problem = f"must be at least {least}, got {getattr(self, name)}"
                raise OptionError(name, problem)
        if not math.isfinite(self.speed):
            raise OptionError("speed", f"must be finite, got {self.speed}")
        for name in ("clip", "temperature"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise OptionError(f"stage_b.{name}", f"must be above 0 and finite, got {value}")


def reward(episode: Episode, options: PolicyOptions) -> float:
    """1 for a correct answer, and a little for the passes it saved."""
    if options.speed_if_correct and not episode.correct:
        return 0.0
    return float(episode.correct) + options.speed * episode.saved


def advantages(rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rollouts relative to their group's: rewards ``(groups, rollouts)`` -> the same shape, and
    bool ``(groups,)``: which groups say anything (rewards that are all equal say nothing)."""
    spread = rewards.std(1, correction=0, keepdim=True)
    made = (rewards - rewards.mean(1, keepdim=True)) / (spread + SPREAD)
    useful = (rewards != rewards[:, :1]).any(1)
    return made * useful.unsqueeze(1), useful  # exactly nothing, also where a mean was rounded


@dataclass(slots=True)
class Batch:
    """Decisions of some rollouts, ``(n, ...)``: scalars float32, actions 0 or 1, the log
    probability each had when it was made, and its rollout's advantage; `rollout` is its number."""

    scalars: torch.Tensor
    actions: torch.Tensor
    logp: torch.Tensor
    advantage: torch.Tensor
    rollout: torch.Tensor

    def __len__(self) -> int:
        return len(self.actions)


class Objective:
    """The loss of decisions under `net`; `reference` is what it should stay near."""

    def __init__(self, net: ArbiterNet, reference: ArbiterNet, options: PolicyOptions) -> None:
        self._net = Softened(net, options.temperature)
        self._reference, self._kl = Softened(reference, options.temperature), options.kl
        self._loss = _clipped(self._net, options)

    def terms(self, batch: Batch) -> torch.Tensor:
        """One for each decision, ``(n,)``; their mean over all decisions is the loss (a mean per
        rollout first would favour short answers)."""
        from tensordict import TensorDict  # type: ignore[import-untyped]

        made = self._loss(
            TensorDict(
                {
                    "scalars": batch.scalars,
                    "action": batch.actions,
                    "action_log_prob": batch.logp,
                    "advantage": batch.advantage.unsqueeze(-1),
                },
                batch_size=[len(batch)],
            )
        )
        with torch.no_grad():
            reference = Bernoulli(logits=self._reference(batch.scalars))
        near = kl_divergence(Bernoulli(logits=self._net(batch.scalars)), reference)
        out: torch.Tensor = made["loss_objective"].reshape(-1) + made["loss_entropy"].reshape(-1)
        return out + self._kl * near


class Softened(nn.Module):
    """A net whose logits are divided by a temperature: the policy of stage B."""

    def __init__(self, net: ArbiterNet, temperature: float) -> None:
        super().__init__()
        self.net, self.temperature = net, temperature

    def forward(self, scalars: torch.Tensor) -> torch.Tensor:
        """Logits ``(n,)`` of mismatches' scalars ``(n, scalars)``."""
        made: torch.Tensor = self.net(scalars)
        return made / self.temperature


def _clipped(net: nn.Module, options: PolicyOptions) -> Any:
    """torchrl's PPO loss over `net`, without a critic: groups are their own baseline."""
    try:
        from tensordict.nn import (  # type: ignore[import-untyped]
            ProbabilisticTensorDictModule,
            ProbabilisticTensorDictSequential,
            TensorDictModule,
        )
        from torchrl.objectives import ClipPPOLoss  # type: ignore[import-untyped]
    except ImportError:
        raise CapabilityError(
            "stage B needs torchrl, which isn't installed: pip install 'hasten[train]', or leave "
            "stage B out (--iterations 0)"
        ) from None
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(net, in_keys=["scalars"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=Bernoulli,
            return_log_prob=True,
            log_prob_key="action_log_prob",
        ),
    )
    loss = ClipPPOLoss(
        actor,
        None,
        clip_epsilon=options.clip,
        entropy_coeff=options.entropy,
        functional=False,  # the optimiser has the net's own parameters
        reduction="none",
    )
    loss.set_keys(action="action", sample_log_prob="action_log_prob")
    return loss


def sampling(scores: Scores, gate: Gate, noise: Sequence[float]) -> Decide:
    """Draws each decision; `noise` are uniform numbers, one for each mismatch in order."""

    def decide(point: Point, before: Decisions) -> bool:
        return gate.allows(point, before) and float(noise[len(before)]) < scores(point)

    return decide


def collect(
    runner: Runner,
    net: ArbiterNet,
    gate: Gate,
    problems: Sequence[int],
    options: PolicyOptions,
    key: Sequence[int],
) -> tuple[list[list[Episode]], torch.Tensor]:
    """Rollouts of each problem, and their rewards ``(problems, rollouts)``; `key` seeds draws."""
    scores = Scores(Softened(net, options.temperature))
    jobs = []
    for problem in problems:
        for rollout in range(options.rollouts):
            noise = np.random.default_rng([*key, problem, rollout]).random(MOST_DECISIONS)
            jobs.append(Job(problem, sampling(scores, gate, noise.tolist())))
    made = runner.run(jobs)
    size = options.rollouts
    groups = [made[at : at + size] for at in range(0, len(made), size)]
    return groups, torch.tensor([[reward(each, options) for each in group] for group in groups])


def batch_of(
    groups: Sequence[Sequence[Episode]], rewards: torch.Tensor, net: nn.Module, gate: Gate
) -> Batch | None:
    """The decisions of the groups that say anything; None when there are none. Where the gate
    decided, the policy didn't: such mismatches are left out."""
    relative, useful = advantages(rewards)
    points: list[Point] = []
    actions: list[bool] = []
    weights: list[torch.Tensor] = []
    rollouts: list[int] = []
    for number, group in enumerate(groups):
        for at, episode in enumerate(group if useful[number] else ()):
            for place, point in enumerate(episode.points):
                if gate.allows(point, episode.decisions[:place]):
                    points.append(point)
                    actions.append(episode.decisions[place])
                    weights.append(relative[number, at])
                    rollouts.append(number * len(group) + at)
    if not points:
        return None
    scalars, taken = table(points), torch.tensor(actions, dtype=torch.float32)
    with torch.no_grad():
        logp = log_chance(net(scalars), taken)
    return Batch(scalars, taken, logp, torch.stack(weights), torch.tensor(rollouts))


def update(
    net: ArbiterNet, objective: Objective, optimizer: torch.optim.Optimizer, batch: Batch,
    options: PolicyOptions,
) -> dict[str, float]:  # fmt: skip
    """Some steps on a batch; the first step's loss, by decision and by rollout."""
    found: dict[str, float] = {}
    for epoch in range(options.epochs):
        terms = objective.terms(batch)
        loss = terms.mean()
        if not epoch:
            found = {"loss": float(loss.detach()), "loss_by_rollout": by_rollout(batch, terms)}
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(net.parameters(), options.most_gradient)
        optimizer.step()
    return found


def log_chance(logits: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """Log-probability of actions (0 or 1) under a policy's logits."""
    return -F.binary_cross_entropy_with_logits(logits, taken, reduction="none")


def by_rollout(batch: Batch, terms: torch.Tensor) -> float:
    """The mean over rollouts of their decisions' means: for comparison only."""
    numbers = batch.rollout.tolist()
    sums: dict[int, list[float]] = {}
    for number, term in zip(numbers, terms.tolist(), strict=True):
        sums.setdefault(number, []).append(term)
    return sum(sum(each) / len(each) for each in sums.values()) / len(sums)


@dataclass(slots=True)
class Best:
    """The net that did best on validation, and its threshold."""

    net: ArbiterNet
    choice: Choice
    iteration: int = 0


def train(
    runner: Runner,
    net: ArbiterNet,
    gate: Gate,
    problems: Sequence[int],
    validator: Runner,
    validation: Sequence[int],
    options: PolicyOptions,
    *,
    seed: int = 0,
    log: Callable[[dict[str, Any]], None] = lambda row: None,
    checkpoint: Path | None = None,
) -> Best:
    """Improve `net`, which isn't changed; the best by validation, `net` itself included.

    runner, problems       what rollouts are of, by number
    validator, validation  other problems, with a runner and numbers of their own: which net is best
                           and its threshold are chosen there

    `checkpoint` is read if it is there (of a run from the same start), and written after every
    iteration.
    """
    reference = copy.deepcopy(net).eval()
    net = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.rate, weight_decay=0.0)
    objective = Objective(net, reference, options)
    best = Best(copy.deepcopy(reference), choose(validator, validation, reference, gate)[0])
    done, stale = 0, 0
    if checkpoint is not None and checkpoint.is_file():
        done, stale = _restore(checkpoint, reference, net, optimizer, best)
    for iteration in range(done + 1, options.iterations + 1):
        if stale >= options.patience:
            break
        count = min(options.problems, len(problems))
        chosen = random.Random(f"{seed} {iteration}").sample(list(problems), count)
        groups, rewards = collect(runner, net, gate, chosen, options, (seed, iteration))
        batch = batch_of(groups, rewards, Softened(net, options.temperature), gate)
        row: dict[str, Any] = {
            "iteration": iteration,
            "reward": float(rewards.mean()),
            "accuracy": accuracy([each for group in groups for each in group]),
            "skipped_groups": int((~advantages(rewards)[1]).sum()),
            "decisions": len(batch) if batch is not None else 0,
        }
        if batch is not None:
            row |= update(net, objective, optimizer, batch, options)
        if iteration % options.every == 0 or iteration == options.iterations:
            choice = choose(validator, validation, net, gate)[0]
            row["validation"] = choice.to_json()
            stale += 1
            if (choice.accuracy, -choice.passes) > (best.choice.accuracy, -best.choice.passes):
                best, stale = Best(copy.deepcopy(net).eval(), choice, iteration), 0
        log(row)
        if checkpoint is not None:
            _save(checkpoint, reference, net, optimizer, best, iteration, stale)
    return best


def _save(
    path: Path, start: ArbiterNet, net: ArbiterNet, optimizer: torch.optim.Optimizer, best: Best,
    done: int, stale: int,
) -> None:  # fmt: skip
    scratch = path.with_suffix(".tmp")
    state = {
        "start": start.state_dict(),
        "net": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "best": best.net.state_dict(),
        "choice": {k: v for k, v in best.choice.to_json().items() if k != "better"},
        "iteration": best.iteration,
        "done": done,
        "stale": stale,
    }
    torch.save(state, scratch)
    scratch.replace(path)


def _restore(
    path: Path, start: ArbiterNet, net: ArbiterNet, optimizer: torch.optim.Optimizer, best: Best
) -> tuple[int, int]:
    """Iterations done and validations without a gain; the rest is put where it belongs. A file of
    a run that started elsewhere counts as none."""
    state = torch.load(path, weights_only=True)
    theirs = state["start"]
    mine = start.state_dict()
    if mine.keys() != theirs.keys() or not all(torch.equal(mine[k], theirs[k]) for k in mine):
        return 0, 0
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    best.net.load_state_dict(state["best"])
    best.choice, best.iteration = Choice(**state["choice"]), state["iteration"]
    return int(state["done"]), int(state["stale"])

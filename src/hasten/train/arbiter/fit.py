"""Stage A: a net fitted to branch labels, and the threshold chosen on validation problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hasten.errors import OptionError
from hasten.train.arbiter.episodes import Decide, Episode, Job, Point, Runner, always, never
from hasten.train.arbiter.labels import Pair
from hasten.train.arbiter.nets import ArbiterNet, Gate, Scores, deciding, table

STEPS = 80
L2 = (1e-3, 1e-2, 1e-1)
"""Weights of the squared weights that are tried."""
FOLDS = 5
THRESHOLDS = 24
"""Thresholds tried, at most."""


def fit(
    pairs: Sequence[Pair], *, kind: str = "mlp", l2: float = L2[0], seed: int = 0
) -> ArbiterNet:
    """A net fitted to labels by weighted cross entropy with an L2 term, on all pairs at once.

    Raises OptionError when no pair says anything.
    """
    if not any(pair.weight for pair in pairs):
        raise OptionError(
            "problems", "no branch of any mismatch is correct: there is nothing to learn from",
            "Use families that the model or its draft gets right now and then",
        )  # fmt: skip
    scalars = table([pair.point for pair in pairs])
    net = ArbiterNet(kind, scalars.mean(0), scalars.std(0, correction=0), seed=seed)
    labels = torch.tensor([pair.label for pair in pairs])
    weights = torch.tensor([pair.weight for pair in pairs])
    weights = weights / weights.sum()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        errors = F.binary_cross_entropy_with_logits(net(scalars), labels, reduction="none")
        value: torch.Tensor = (weights * errors).sum() + l2 * net.size()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return net.eval()


@torch.no_grad()
def loss_of(net: ArbiterNet, pairs: Sequence[Pair]) -> float:
    """Weighted cross entropy on pairs, summed."""
    weights = torch.tensor([pair.weight for pair in pairs])
    labels = torch.tensor([pair.label for pair in pairs])
    made = net(table([pair.point for pair in pairs]))
    errors = F.binary_cross_entropy_with_logits(made, labels, reduction="none")
    return float((weights * errors).sum())


def pick(pairs: Sequence[Pair], kinds: Sequence[str], *, seed: int = 0) -> tuple[str, float]:
    """The kind and the L2 weight that predict labels of other problems best: cross-validated, in
    folds of problems. Informative pairs are few, and a net that fits them all predicts nothing."""
    ways = [(kind, l2) for kind in kinds for l2 in L2]
    folds = [[pair for pair in pairs if pair.problem % FOLDS == fold] for fold in range(FOLDS)]
    rest = [[pair for pair in pairs if pair.problem % FOLDS != fold] for fold in range(FOLDS)]
    usable = [at for at in range(FOLDS) if folds[at] and any(pair.weight for pair in rest[at])]

    def error(way: tuple[str, float]) -> float:
        kind, l2 = way
        nets = ((fit(rest[at], kind=kind, l2=l2, seed=seed), at) for at in usable)
        return sum(loss_of(net, folds[at]) for net, at in nets)

    return min(ways, key=error)


@dataclass(frozen=True, slots=True)
class Choice:
    """A threshold, and what it reaches on the validation problems.

    theta     of the draft's probability; above 1 the draft's token is never kept
    accuracy  with it; plain: target-only's
    margin    standard error of their paired difference
    kept      share of mismatches at which the draft's token is kept
    passes    target passes a token; plain decoding: 1
    """

    theta: float
    accuracy: float
    plain: float
    margin: float
    kept: float
    passes: float
    problems: int

    @property
    def better(self) -> bool:
        """Better than target-only by more than chance explains easily: one standard error. The
        best of many thresholds is above target-only by luck alone often enough."""
        return self.accuracy - self.plain > self.margin

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "better": self.better}


NEVER = 2.0
"""A threshold that no probability reaches: target-only."""


def choose(
    runner: Runner, problems: Sequence[int], net: ArbiterNet, gate: Gate
) -> tuple[Choice, list[Choice]]:
    """The threshold with the best accuracy on `problems`, of equal ones the lowest (which keeps
    more of the draft), and all that were tried, from the highest."""
    scores = Scores(net)
    plain = runner.run([Job(problem, never) for problem in problems])
    kept_all = runner.run([Job(problem, always) for problem in problems])
    seen = [point for episode in (*plain, *kept_all) for point in episode.points]
    scores.learn(seen)
    tried = [
        outcome(runner, problems, deciding(scores, theta, gate), plain, theta)
        for theta in (NEVER, *candidates([scores(point) for point in seen]))
    ]
    best = max(tried, key=lambda each: (each.accuracy, -each.theta))
    return best, tried


def candidates(scores: Sequence[float]) -> list[float]:
    """Thresholds between scores, evenly by rank, from the highest."""
    ordered = np.unique(np.asarray(scores, dtype=float))
    if not len(ordered):
        return []
    middles = np.concatenate([[0.0], (ordered[1:] + ordered[:-1]) / 2])
    picks = np.unique(np.linspace(0, len(middles) - 1, min(THRESHOLDS, len(middles))).astype(int))
    return [float(middles[at]) for at in picks[::-1]]


def outcome(
    runner: Runner,
    problems: Sequence[int],
    decide: Decide,
    plain: Sequence[Episode],
    theta: float = NEVER,
) -> Choice:
    """What a rule reaches on problems of which `plain` are the target's own answers."""
    made = runner.run([Job(problem, decide) for problem in problems])
    gaps = np.array([a.correct - b.correct for a, b in zip(made, plain, strict=True)], dtype=float)
    met = sum(len(each.points) for each in made)
    return Choice(
        theta=theta,
        accuracy=accuracy(made),
        plain=accuracy(plain),
        margin=float(gaps.std() / np.sqrt(max(len(gaps), 1))),
        kept=sum(each.overrides for each in made) / met if met else 0.0,
        passes=pass_share(made),
        problems=len(made),
    )


def accuracy(episodes: Sequence[Episode]) -> float:
    """Share that is correct."""
    return sum(each.correct for each in episodes) / len(episodes)


def pass_share(episodes: Sequence[Episode]) -> float:
    """Target passes a token, those of the prompts left out."""
    tokens = sum(len(each.tokens) for each in episodes)
    return sum(each.passes for each in episodes) / tokens if tokens else 1.0


def points_of(episodes: Sequence[Episode]) -> list[Point]:
    """All their mismatches."""
    return [point for each in episodes for point in each.points]

"""The arbiter as it is trained, and deciding with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hasten.arbitration.arbiter import STD_FLOOR, Arbiter, forward, standardise
from hasten.errors import OptionError
from hasten.train.arbiter.episodes import Decide, Decisions, Point

KINDS = ("mlp", "linear")
WIDTH = 32
START = -2.0
"""First value of the last bias: about one mismatch in eight goes to the draft."""
LOG_P_DRAFT = 1
"""Place of log p(d) among the scalars."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Where the draft's token may not be kept, whatever a rule says: below a probability under the
    target, and after so many kept in a row; 0: no bound."""

    least: float = 1e-3
    consecutive: int = 8

    def allows(self, point: Point, before: Decisions) -> bool:
        """Whether the draft's token may be kept here."""
        run = len(before) - max((at + 1 for at, kept in enumerate(before) if not kept), default=0)
        if self.consecutive and run >= self.consecutive:
            return False
        return self.least <= 0 or point.scalars[LOG_P_DRAFT] >= math.log(self.least)


def check_kind(kind: str) -> None:
    """Raise OptionError for an unknown kind of arbiter."""
    if kind not in KINDS:
        raise OptionError("kinds", f"no such arbiter: {kind!r}", f"Known: {', '.join(KINDS)}")


class ArbiterNet(nn.Module):
    """An arbiter's tensors in training; its arithmetic is `hasten.arbitration.arbiter`'s.

    kind       ``mlp`` (18-32-1) or ``linear`` (18-1)
    mean, std  of the training mismatches' scalars, float32 ``(scalars,)``
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, kind: str, mean: torch.Tensor, std: torch.Tensor, *, seed: int = 0) -> None:
        super().__init__()
        check_kind(kind)
        self.kind = kind
        self.register_buffer("mean", mean.float())
        self.register_buffer("std", std.float().clamp_min(STD_FLOOR))
        shapes: dict[str, dict[str, tuple[int, ...]]] = {
            "mlp": {"w1": (WIDTH, len(mean)), "w2": (WIDTH,)},
            "linear": {"w": (len(mean),)},
        }
        generator = torch.Generator().manual_seed(seed)
        made = {
            name: torch.randn(shape, generator=generator) * 0.5 * shape[-1] ** -0.5
            for name, shape in shapes[kind].items()
        }
        start = torch.tensor(START)
        made |= {"b1": torch.zeros(WIDTH), "b2": start} if kind == "mlp" else {"b": start}
        self.tensors = nn.ParameterDict({name: nn.Parameter(x) for name, x in made.items()})

    def forward(self, scalars: torch.Tensor) -> torch.Tensor:
        """Logits ``(n,)`` of mismatches' scalars ``(n, scalars)``."""
        inputs = standardise(scalars, self.mean, self.std)
        return forward(dict(self.tensors), self.kind, inputs)

    def size(self) -> torch.Tensor:
        """Sum of the squared weights, biases left out."""
        weights = [x for name, x in self.tensors.items() if name.startswith("w")]
        return torch.stack([x.square().sum() for x in weights]).sum()

    def arbiter(
        self, theta: float, gate: Gate, *, fallback: bool, meta: Mapping[str, Any]
    ) -> Arbiter:
        """What is deployed."""
        return Arbiter(
            kind=self.kind,
            weights={name: x.detach().clone() for name, x in self.tensors.items()},
            mean=self.mean.clone(),
            std=self.std.clone(),
            theta=theta,
            gate=gate.least,
            consecutive=gate.consecutive,
            fallback=fallback,
            meta=meta,
        )


def table(points: Sequence[Point]) -> torch.Tensor:
    """Their scalars, float32 ``(points, scalars)``."""
    return torch.tensor([point.scalars for point in points], dtype=torch.float32)


class Scores:
    """A net's probabilities for the draft, each mismatch computed once."""

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._known: dict[tuple[float, ...], float] = {}

    @torch.no_grad()
    def learn(self, points: Sequence[Point]) -> None:
        """Compute those of many mismatches at once."""
        fresh = [point for point in points if point.scalars not in self._known]
        if fresh:
            chances = torch.sigmoid(self._net(table(fresh))).tolist()
            self._known.update(zip((point.scalars for point in fresh), chances, strict=True))

    def __call__(self, point: Point) -> float:
        """sigma(f), in [0, 1]."""
        if point.scalars not in self._known:
            self.learn([point])
        return self._known[point.scalars]


def deciding(scores: Scores, theta: float, gate: Gate) -> Decide:
    """The deployed rule: keep the draft's token where its probability is at least `theta`."""

    def decide(point: Point, before: Decisions) -> bool:
        return gate.allows(point, before) and scores(point) >= theta

    return decide

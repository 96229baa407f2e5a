"""The agent's network while it learns: a dueling network whose streams are noisy, from torchrl.

20 features -> 64 -> 64, then two streams of a noisy 32, a value and two advantages. What comes out
of it is folded to plain products (`hasten.policies.lede_agent`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hasten.errors import CapabilityError
from hasten.policies.lede_features import FEATURES, Floats

try:
    from torchrl.envs.utils import ExplorationType, set_exploration_type  # type: ignore[import-untyped]
    from torchrl.modules import NoisyLinear  # type: ignore[import-untyped]
    from torchrl.modules.models import DuelingMlpDQNet  # type: ignore[import-untyped]
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise CapabilityError(
        "LEDE's agent learns through torchrl, which isn't here. Install hasten's extra: "
        "pip install 'hasten[train]'"
    ) from error

WIDTH, STREAM = 64, 32
SIGMA = 0.1
"""First standard deviation of the noise (the paper's; over the root of a layer's inputs)."""
ADVANTAGES = 2


def make_net(seed: int, sigma: float = SIGMA, width: int = WIDTH, stream: int = STREAM) -> Any:
    """A new network: ``(n, 20) -> (n, 2)``. The global random generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        relu = {"activation_class": nn.ReLU}
        return DuelingMlpDQNet(
            out_features=ADVANTAGES,
            mlp_kwargs_feature={
                "in_features": len(FEATURES), "num_cells": [width], "out_features": width, **relu
            },
            mlp_kwargs_output={
                "in_features": width,
                "num_cells": stream,
                "depth": 1,
                "layer_class": NoisyLinear,
                "layer_kwargs": {"std_init": sigma},
                **relu,
            },
        )  # fmt: skip


def noise(on: bool) -> Any:
    """A context in which the networks' noise is on, or off."""
    return set_exploration_type(ExplorationType.RANDOM if on else ExplorationType.DETERMINISTIC)


@dataclass(frozen=True, slots=True)
class Scale:
    """What is done to features and values for the network: ``(x - mean) / std``, those that it may
    not see set to 0; its values times `unit` are tokens."""

    mean: Floats
    std: Floats
    mask: Floats
    unit: float

    @classmethod
    def of(cls, features: Floats, seen: tuple[str, ...], unit: float) -> Scale:
        """From features ``(n, 20)``; what hardly varies is only centred."""
        std = features.std(0)
        mask = np.array([name in seen for name in FEATURES], dtype=np.float32)
        return cls(features.mean(0), np.where(std > 1e-3, std, 1.0).astype(np.float32), mask, unit)

    def __call__(self, features: Floats) -> Floats:
        """Standardised features ``(n, 20)``."""
        shown: Floats = (features - self.mean) / self.std * self.mask
        return shown


@torch.no_grad()
def fold(
    net: Any, scale: Scale, *, noisy: bool = False
) -> tuple[tuple[Floats, ...], tuple[Floats, ...]]:
    """Weights and biases of the plain network that gives the same values (`noisy`: with the noise
    as it is drawn now) in tokens from raw features."""
    with noise(noisy):
        features = _linears(net.features)
        value, advantage = _linears(net.value), _linears(net.advantage)
    (w0, b0), (w1, b1) = features
    (v0, c0), (v1, c1) = value
    (a0, d0), (a1, d1) = advantage
    w0 = w0 * (scale.mask / scale.std)
    b0 = b0 - w0 @ scale.mean
    a1, d1 = a1 - a1.mean(0), d1 - d1.mean()
    last = scale.unit * np.concatenate([np.repeat(v1, len(a1), 0), a1], 1)
    weights = (w0, w1, np.concatenate([v0, a0]), last)
    biases = (b0, b1, np.concatenate([c0, d0]), scale.unit * (c1 + d1))
    return (
        tuple(np.ascontiguousarray(w, dtype=np.float32) for w in weights),
        tuple(np.ascontiguousarray(b, dtype=np.float32) for b in biases),
    )


def _linears(stack: Any) -> list[tuple[Floats, Floats]]:
    """Weight and bias of each product, as they count now."""
    return [
        (each.weight.detach().numpy().copy(), each.bias.detach().numpy().copy())
        for each in stack
        if isinstance(each, nn.Linear)
    ]

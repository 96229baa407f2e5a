"""A length head as serving asks it: a few small products in numpy on a CPU, where each of torch's
operations would start cold after a pass of the target."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hasten.dflash.net import LengthHead

Floats = np.ndarray[Any, np.dtype[np.float32]]


class HostLengthHead:
    """`LengthHead` in float32 on the host; weights are copied."""

    def __init__(self, head: LengthHead) -> None:
        inner = head.res[0]
        assert isinstance(inner, torch.nn.Linear)
        self._layers = [_floats(layer) for layer in (head.down, inner, head.out)]

    def __call__(self, hidden: torch.Tensor) -> float:
        """The share of one block worth verifying, in (0, 1), from its states ``(1, B, H)``; NaN
        where the states are."""
        block = hidden[0].float().numpy()
        (down, to), (inner, by), (out, off) = self._layers
        with np.errstate(all="ignore"):
            u = _silu(down @ np.concatenate([block.mean(0), block[-1]]) + to)
            u = u + _silu(inner @ u + by)
            return float(_sigmoid(out @ u + off)[0])


def _floats(layer: torch.nn.Linear) -> tuple[Floats, Floats]:
    weight = layer.weight.detach().float().numpy().copy()
    return weight, layer.bias.detach().float().numpy().copy()


def _sigmoid(x: Floats) -> Floats:
    out: Floats = np.reciprocal(np.exp(-x) + np.float32(1.0))
    return out


def _silu(x: Floats) -> Floats:
    return x * _sigmoid(x)

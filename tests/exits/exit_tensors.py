"""Descriptions and tensors of tiny exit modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hasten.exits.config import ExitConfig

LAYERS = 6
VOCAB = 199
"""Of `target`."""


def config(
    kind: str, layer: int, hidden: int, *, deep_at: Sequence[int] = (3, LAYERS), **changes: Any
) -> ExitConfig:
    sizes: dict[str, Any] = {"lens": {}, "affine": {"rank": 4}}.get(
        kind, {"heads": 4, "kv_heads": 2, "head_dim": 8, "inner": 24}
    )
    if kind == "deep":
        sizes = {**sizes, "deep": tuple(deep_at)}
    return ExitConfig(kind, layer, hidden, **{**sizes, **changes})


def random_tensors(made: ExitConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, torch.Tensor] = {}
    for name, shape in made.shapes().items():
        value = torch.randn(shape, generator=generator)
        out[name] = 1.0 + 0.2 * value if name.endswith("norm") else value * shape[-1] ** -0.5
    return out


def near_tensors(made: ExitConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors of a module whose output stays near the state it was given: its drafts are
    kept now and then."""
    out = random_tensors(made, seed)
    for name in ("up", "bias", "out", "down", "fuse"):
        if name in out:
            out[name] *= 0.2
    if "skip" in out:
        out["skip"] = 2.0 * torch.eye(made.hidden)
    return out

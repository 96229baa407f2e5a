"""Tiny DFlash drafters with random tensors, over the tiny fused target of the exits' tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hasten.dflash import store
from hasten.dflash.bank import DFlashBank, assemble
from hasten.dflash.config import DFlashConfig
from hasten.dflash.net import DFlashNet
from hasten.dflash.store import Loaded
from hasten.targets.base import Target, TargetInfo
from hasten.targets.fused_weights import make_linear
from tests.exits import exit_models as tiny
from tests.exits.exit_tensors import LAYERS, VOCAB

BLOCK = 5
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "vocab_size": VOCAB,
    "num_target_layers": LAYERS,
    "block_size": BLOCK,
    "mask_token_id": 3,
    "target_layer_ids": (1, 4),
}


def config(**changes: Any) -> DFlashConfig:
    return DFlashConfig(**{**SIZES, **changes})


def net(made: DFlashConfig, seed: int = 0) -> DFlashNet:
    """Random tensors; nothing of the global generator is used."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        out = DFlashNet(made)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in out.state_dict().items():
        drawn = torch.randn(value.shape, generator=generator)
        is_norm = name.endswith("norm.weight") or "layernorm" in name
        tensors[name] = 1.0 + 0.2 * drawn if is_norm else drawn * value.shape[-1] ** -0.5
    out.load_state_dict(tensors, assign=True)
    return out.eval().requires_grad_(False)


def loaded(made: DFlashConfig, seed: int = 0, ids: Sequence[int] | None = None) -> Loaded:
    known = None if ids is None else torch.tensor(sorted(ids))
    return Loaded(made, net(made, seed), known, "", None, {})


def bank(
    over: Target | None = None, ids: Sequence[int] | None = None, seed: int = 0, **changes: Any
) -> DFlashBank:
    """A drafter on the tiny target, its products torch's own."""
    if ids is not None:
        changes["draft_vocab_size"] = len(ids)
    return assemble(over or tiny.target(), loaded(config(**changes), seed, ids), make_linear)


def save_for(folder: Path, info: TargetInfo, *, ids: Sequence[int] | None = None) -> Path:
    """A drafter with a length head for this target, in a folder."""
    made = config(
        hidden_size=info.hidden_size,
        vocab_size=info.vocab_size,
        num_target_layers=info.num_layers,
        target_layer_ids=(0, info.num_layers - 1),
        draft_vocab_size=info.vocab_size if ids is None else len(ids),
        length_head=6,
    )
    known = None if ids is None else torch.tensor(sorted(ids))
    store.save(folder, made, net(made), known, {"target": info.fingerprint})
    return folder

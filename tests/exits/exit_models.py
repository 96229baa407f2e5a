"""Tiny exit modules with random tensors, over a tiny fused target."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from hasten.exits.bank import ExitBank, assemble
from hasten.exits.config import ExitConfig
from hasten.exits.modules import ExitModule
from hasten.targets.fused import FusedTarget
from hasten.targets.fused_weights import make_linear
from tests.exits.exit_tensors import LAYERS as LAYERS
from tests.exits.exit_tensors import VOCAB as VOCAB
from tests.exits.exit_tensors import config as config
from tests.exits.exit_tensors import near_tensors as near_tensors
from tests.exits.exit_tensors import random_tensors as random_tensors


def module(
    made: ExitConfig, seed: int = 0, *, near: bool = False, dtype: torch.dtype = torch.float32
) -> ExitModule:
    device = torch.device("cpu")
    tensors = (near_tensors if near else random_tensors)(made, seed)
    return ExitModule(made, tensors, make_linear, dtype=dtype, device=device)


@cache
def target(
    eos_ids: tuple[int, ...] = (), context: int = 128, dtype: torch.dtype = torch.float32
) -> FusedTarget:
    """Six layers whose upper four change a state but little, so that early exits are
    often right; shared: tests open sequences of their own."""
    from tests.targets.fused_models import llama, random_model

    shape = {"num_hidden_layers": LAYERS, "max_position_embeddings": context}
    model = random_model(llama(**shape), initializer_range=0.3)
    tensors = dict(model.state_dict())
    for name, value in tensors.items():
        upper = any(f"layers.{layer}." in name for layer in range(2, LAYERS))
        if upper and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = 0.3 * value
    return FusedTarget.from_tensors(
        model.config,
        tensors,
        name="tiny",
        dtype=dtype,
        device=torch.device("cpu"),
        eos_ids=eos_ids,
        fingerprint="tiny",
    )


Kinds = Sequence[tuple[str, int]]


def bank(
    kinds: Kinds,
    ids: Sequence[int] | None = None,
    *,
    near: bool = True,
    over: FusedTarget | None = None,
) -> ExitBank:
    """Modules of these kinds at these layers; `ids` is the draft vocabulary, None: all ids."""
    over = over or target()
    modules = [
        module(config(kind, layer, over.info.hidden_size), seed, near=near, dtype=over.info.dtype)
        for seed, (kind, layer) in enumerate(kinds)
    ]
    return assemble(over, modules, ids, make_linear)

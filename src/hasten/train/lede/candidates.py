"""The candidate exits of a collection: as the engine runs them, and as nets over whole texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hasten.errors import CapabilityError, OptionError
from hasten.exits import store
from hasten.exits.bank import ExitBank, own_head_bank
from hasten.exits.config import ExitConfig
from hasten.policies.lede_agent import modules_digest
from hasten.targets.base import Target
from hasten.targets.fused import FusedTarget
from hasten.targets.fused_weights import make_linear
from hasten.train.exit_nets import ExitNet


@dataclass(frozen=True, slots=True)
class Candidates:
    """Exits of a target, lowest first: a bank for rollouts, and a net for each (the same
    arithmetic; `lens` has no tensors). `digest` is `modules_digest`'s."""

    target: FusedTarget
    bank: ExitBank
    nets: tuple[ExitNet, ...]
    digest: str

    @property
    def layers(self) -> tuple[int, ...]:
        """Where they stand."""
        return self.bank.layers

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose outputs their tables need, the last one included."""
        deep = {layer for net in self.nets for layer in net.config.deep}
        return tuple(sorted({*self.layers, *deep, self.target.info.num_layers} - {0}))


def find(
    target: Target, layers: Sequence[int], modules: str | Path | None = None, *, own: bool = False
) -> Candidates:
    """Exits at `layers` (none: all there are) with the modules in a folder, those shipped for these
    weights, or (`own`) the model's own norm and head. Raises CapabilityError, ModelError or
    OptionError."""
    if not isinstance(target, FusedTarget):
        raise CapabilityError(
            f"{target.info.name} runs in the {target.info.engine} engine: experience of early "
            "exits needs a model of the fused family (see `hasten info`)"
        )
    if own:
        if not layers:
            raise OptionError("exits", "must be named with --head own", "As --exits 4+8+12")
        bank = own_head_bank(target, layers, None, make_linear, option="exits")
        configs = [ExitConfig("lens", layer, target.info.hidden_size) for layer in bank.layers]
        nets = tuple(ExitNet(config) for config in configs)
        return Candidates(target, bank, nets, modules_digest(None, bank.layers))
    stored = store.read(modules) if modules else store.shipped(target.info)
    if stored is None:
        hint = "Train some (`hasten train exits`) and name their folder"
        raise OptionError("modules", f"none are shipped for {target.info.name}", hint)
    store.check_belongs(stored, target.info, str(modules or "the package"))
    with torch.inference_mode():
        bank = store.build(target, stored, make_linear)
    if layers:
        bank = bank.pick(layers, "exits")
    return Candidates(target, bank, _nets(stored, bank.layers), modules_digest(stored, bank.layers))


def _nets(stored: store.Stored, layers: Sequence[int]) -> tuple[ExitNet, ...]:
    configs = {config.layer: config for config in stored.configs}
    nets = []
    for layer in layers:
        net = ExitNet(configs[layer])
        names = configs[layer].shapes()
        net.load({name: stored.tensors[f"{layer}.{name}"] for name in names})
        nets.append(net.requires_grad_(False).eval())
    return tuple(nets)

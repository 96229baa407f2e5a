"""Which exits the options of a method name, and what rounds with them cost here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hasten.builtin.common import need
from hasten.errors import OptionError
from hasten.exits import store
from hasten.exits.bank import ExitBank, own_head_bank, require_exits
from hasten.exits.modules import ExitState
from hasten.policies.cost import CostTable
from hasten.policies.exits import ExitCosts
from hasten.targets.base import Target
from hasten.targets.fused_native import draft_linear

EXITS = "candidate exit layers, as 0+2+4; empty: those of the modules, or by the model's depth"
MODULES = "folder of exit modules; empty: those shipped for these weights"
HEAD = "modules, or own: the model's norm and head, which LayerSkip checkpoints are trained for"


@dataclass(frozen=True, slots=True)
class Exits:
    """Candidate exits, and what is stored about their modules (`hasten.exits.store.Stored`)."""

    bank: ExitBank
    facts: Mapping[str, Any]


def find_exits(
    target: Target, exits: str, modules: str, head: str, *, method: str, several: bool
) -> Exits:
    """The exits that the options of `method` name; `several`: it chooses among candidates, else it
    gets one. Raises OptionError, ModelError or CapabilityError before anything has run."""
    require_exits(target)
    need(f"{method}.head", head in ("modules", "own"), "modules or own", head)
    layers = _layers(f"{method}.exits", exits, target)
    if not several and len(layers) > 1:
        problem = f"this rule drafts from one exit, got {exits!r}"
        raise OptionError(f"{method}.exits", problem, "Name one")
    if head == "own":
        if modules:
            raise OptionError(f"{method}.modules", "contradicts head=own", "Give one of the two")
        layers = layers or own_layers(target.info.num_layers, several)
        bank = own_head_bank(target, layers, None, draft_linear, option=f"{method}.exits")
        return Exits(bank, {})
    stored = _stored(target, modules, method)
    with torch.inference_mode():
        bank = store.build(target, stored, draft_linear)
    if not layers:
        layers = bank.layers if several else bank.layers[:1]
    return Exits(bank.pick(layers, f"{method}.exits"), stored.facts)


def _stored(target: Target, modules: str, method: str) -> store.Stored:
    """The modules in the folder named, or those shipped for the target."""
    stored = store.read(modules) if modules else store.shipped(target.info)
    if stored is None:
        raise OptionError(
            f"{method}.modules",
            f"no exit modules are shipped for {target.info.name}",
            "Train some (`hasten train exits`) and name their folder; a LayerSkip checkpoint needs "
            "none: head=own",
        )
    store.check_belongs(stored, target.info, modules or "the package")
    return stored


def own_layers(num_layers: int, several: bool) -> tuple[int, ...]:
    """Where models trained for it (LayerSkip) are left early when nobody says: after a quarter of
    the layers, as in their authors' examples; candidates: after one to four eighths."""
    eighths = (1, 2, 3, 4) if several else (2,)
    return tuple(sorted({max(num_layers * n // 8, 1) for n in eighths}))


def _layers(option: str, text: str, target: Target) -> tuple[int, ...]:
    if not text:
        return ()
    try:
        layers = tuple(int(part) for part in text.split("+"))
    except ValueError:
        raise OptionError(option, f"must be layers joined by +, as 0+2+4, got {text!r}") from None
    top = target.info.num_layers
    if len(set(layers)) != len(layers) or not all(0 <= layer < top for layer in layers):
        raise OptionError(
            option,
            f"{text!r} names a layer twice, or one that {target.info.name} hasn't",
            f"It has {top} layers: choose some of 0 to {top - 1}",
        )
    return layers


def exit_costs(target: Target, bank: ExitBank, table: CostTable, steps: int) -> ExitCosts:
    """What rounds' operations cost here, in plain steps: passes from the cost table, probes timed
    now, one after the other, the median of a few."""
    curve = table.curve(steps + 2, 256)
    plain, layers = curve[0], target.info.num_layers
    probes = [probe_ms(bank, number) / plain for number in range(len(bank.modules))]
    return ExitCosts(
        layer=tuple(layer / layers for layer in bank.layers),
        probe=tuple(probes),
        verify=(0.0, *(ms / plain for ms in curve)),
        layers=layers,
    )


def probe_ms(bank: ExitBank, number: int, repeats: int = 9) -> float:
    """Milliseconds of one probe of a bank's module, timed now: the median of a few."""
    module = bank.modules[number]
    config, head = module.config, bank.head.local(())
    row = bank.embeddings[:1]
    times: list[float] = []
    with torch.inference_mode():
        state = ExitState()
        for _ in range(repeats):
            started = time.perf_counter()
            feature = row if config.deep else None
            out = module.run(state, row, feature, verified=1, want=1)
            torch.softmax(head(bank.normed(module, out)), -1).max()
            times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)

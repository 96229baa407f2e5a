"""Which exits the options of a method name, and what rounds with them cost here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hasten.builtin.common import need
from hasten.drafters.base import DraftContext
from hasten.drafters.exit_session import ExitSession
from hasten.drafters.exit_tree import Growth, grow
from hasten.drafters.tree_builder import TreeBuilder
from hasten.errors import OptionError
from hasten.exits import store
from hasten.exits.bank import ExitBank, own_head_bank, require_exits
from hasten.passes import synchronize
from hasten.policies.cost_model import CostTable
from hasten.policies.exits import ExitCosts
from hasten.targets.base import Target
from hasten.targets.fused_native import draft_linear
from hasten.types import DraftTree, Round, Rows, RowSignals

EXITS = "candidate exit layers, as 0+2+4; empty: those of the modules, or by the model's depth"
MODULES = "folder of exit modules; empty: those shipped for these weights"
_CONTEXT, _WARMUP = 256, 2
"""Tokens before a question that is timed, and how many aren't."""
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
        problem = f"drafts here come from one exit, got {exits!r}"
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
    session, row = ExitSession(bank), bank.embeddings[:1]
    run, hidden = session.runs[number], dict.fromkeys(bank.taps, row)
    state = row if run.config.layer else None
    times: list[float] = []
    with torch.inference_mode():
        for _ in range(repeats):
            started = time.perf_counter()
            run.feed([0], hidden)
            torch.softmax(session.logits(run, run.first(0, state)), -1).max()
            times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


class Questions:
    """Questions to a bank's module at exit 0, each as a round asks it: what a pass of the target
    verified is fed, then a tree is grown, in as many steps as `growth` allows.

    They have a sequence of their own, which `close` gives back.
    """

    def __init__(self, target: Target, bank: ExitBank, context: int, growth: Growth) -> None:
        self._target = target
        self._growth = replace(growth, mass=0.0)
        self._ids = [1 + i % (target.info.vocab_size - 1) for i in range(context)]
        self._sequence = target.open()
        try:
            self._taps = bank.taps
            hidden = target.prefill(self._sequence, self._ids[:-1], taps=self._taps).hidden
            self._session = ExitSession(bank)
            self._session.begin(self._ids[:-1], RowSignals(hidden=hidden))
            self._round: Round | None = None
        except BaseException:
            self.close()
            raise

    def run_pass(self) -> float:
        """Milliseconds of a plain pass."""
        root = self._ids[-1]
        started = time.perf_counter()
        (passed,) = self._target.forward([Rows(self._sequence, (root,), (-1,))], taps=self._taps)
        synchronize(self._target)
        took = time.perf_counter() - started
        self._target.rollback(self._sequence)
        tree = DraftTree.chain(root)
        signals = RowSignals(hidden=passed.hidden)
        self._round = Round(1, (root,), tree=tree, accepted=(0,), signals=signals)
        return 1e3 * took

    def ask(self) -> float:
        """Milliseconds of a question."""
        assert self._round is not None, "a pass comes first"
        session, tree = self._session, TreeBuilder(self._ids[-1], 64, 64)
        context = DraftContext(self._ids, _no_ids, _no_probs, True)
        started = time.perf_counter()
        session.observe(self._round)
        with torch.inference_mode():
            grow(tree, session, session.runs[0], context, self._growth)
        return 1e3 * (time.perf_counter() - started)

    def close(self) -> None:
        """Give everything back."""
        self._target.close(self._sequence)


def question_share(target: Target, bank: ExitBank, growth: Growth, repeats: int = 12) -> float:
    """What a question of `growth` to the module at exit 0 costs, as a share of a plain pass.

    Both are timed in turns, so that each question finds the caches as a pass leaves them. Of each
    the lower quartile counts: a program that is busy now may be gone in a minute.
    """
    context = max(min(_CONTEXT, target.info.context_limit // 4), 2)
    questions = Questions(target, bank, context, growth)
    passes: list[float] = []
    asked: list[float] = []
    try:
        for _ in range(_WARMUP + repeats):
            passes.append(questions.run_pass())
            asked.append(questions.ask())
    finally:
        questions.close()
    return _quartile(asked[_WARMUP:]) / _quartile(passes[_WARMUP:])


def _quartile(samples: Sequence[float]) -> float:
    return sorted(samples)[len(samples) // 4]


def _no_ids(*_: Any) -> list[int]:
    """Nothing is sampled here."""
    return []


def _no_probs(*_: Any) -> torch.Tensor:
    return torch.zeros(1)

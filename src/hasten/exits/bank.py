"""The exit modules of one loaded model, and the reduced head they share.

A draft needs no probability for every id: the head keeps the rows of the ids that the model uses
most in its own text (FR-Spec's idea, arXiv 2502.14856), and each request adds the ids of its prompt
that aren't among them. Ids outside can't be drafted; that costs drafts, never text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from hasten.errors import CapabilityError, ModelError, OptionError
from hasten.exits.config import ExitConfig
from hasten.exits.modules import ExitModule, MakeProduct, Product
from hasten.exits.native_module import NativeModule, Pairs, native_module
from hasten.targets.base import Ends, Target
from hasten.targets.fused_native import NativeLinear

LOCAL_IDS = 256
"""Most ids a request's prompt adds to the head."""


class DraftHead:
    """Logits over a part of the vocabulary; shared by requests, each with a `LocalHead`.

    ids    the draft vocabulary, int64, increasing; None: every id
    rows   the target's whole head ``(vocab, hidden)``
    """

    def __init__(self, ids: torch.Tensor | None, rows: torch.Tensor, make: MakeProduct) -> None:
        self.rows, self.vocab_size = rows, len(rows)
        every = torch.arange(len(rows), device=rows.device)
        self.ids = every if ids is None else ids
        self.product: Product = make(rows if ids is None else rows[ids])
        self.known = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        self.known[self.ids] = True

    def local(self, prompt: Sequence[int]) -> LocalHead:
        """The head of a request with this prompt."""
        return LocalHead(self, local_ids(prompt, self.known))


def local_ids(prompt: Sequence[int], known: torch.Tensor) -> torch.Tensor:
    """The ids of a prompt that a draft vocabulary hasn't, the latest first, `LOCAL_IDS` at most:
    int64 ``(n,)``. `known` is bool ``(vocab,)``."""
    seen = torch.tensor(
        list(dict.fromkeys(reversed(prompt))), dtype=torch.int64, device=known.device
    )
    return seen[~known[seen]][:LOCAL_IDS]


class LocalHead:
    """A request's draft head: `ids` ``(draft_vocab,)`` int64 are the ids its logits stand for."""

    __slots__ = ("_extra", "_head", "_numbers", "ids")

    def __init__(self, head: DraftHead, extra: torch.Tensor) -> None:
        self._head = head
        self._extra = head.rows[extra] if len(extra) else None
        self.ids = torch.cat([head.ids, extra]) if len(extra) else head.ids
        self._numbers: list[int] | None = None

    @property
    def product(self) -> Product:
        """Of the ids that all requests have."""
        return self._head.product

    @property
    def extra(self) -> torch.Tensor | None:
        """The head's rows ``(n, hidden)`` of this request's own ids, the last ones."""
        return self._extra

    def __call__(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits of normed outputs ``(rows, hidden)``: float32 ``(rows, draft_vocab)``."""
        logits = self._head.product(normed)
        if self._extra is not None:
            logits = torch.cat([logits, F.linear(normed, self._extra)], 1)
        return logits.float()

    def id_of(self, place: int) -> int:
        """The id a logit stands for."""
        if self._numbers is None:
            self._numbers = self.ids.tolist()
        return self._numbers[place]

    def candidates(self, logits: torch.Tensor, width: int) -> list[Pairs]:
        """The `width` likeliest ids of each row of logits ``(rows, draft_vocab)`` with their
        probabilities; none for a row whose logits aren't finite."""
        top = torch.topk(logits, min(width, logits.shape[1]))
        chances = (top.values - torch.logsumexp(logits, -1, keepdim=True)).exp_().tolist()
        return [
            [(self.id_of(place), chance) for place, chance in zip(row, said, strict=True)]
            if all(map(math.isfinite, said))
            else []
            for row, said in zip(top.indices.tolist(), chances, strict=True)
        ]

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits ``(..., draft_vocab)`` as logits over all ids ``(..., vocab)``, -inf elsewhere."""
        wide = logits.new_full((*logits.shape[:-1], self._head.vocab_size), -torch.inf)
        return wide.index_copy_(-1, self.ids, logits)


class ExitBank:
    """Exit modules by layer, lowest first, over one target's embeddings and head.

    Raises ModelError when two stand at one layer.
    """

    def __init__(self, modules: Sequence[ExitModule], head: DraftHead, ends: Ends) -> None:
        self.modules = tuple(sorted(modules, key=lambda module: module.config.layer))
        if len(set(self.layers)) != len(self.modules):
            raise ModelError(f"one exit module a layer, got some at {self.layers}")
        self.head, self.ends = head, ends
        self.native: dict[int, NativeModule] = {}
        """Modules that hasten's own kernels run, by layer."""
        if isinstance(head.product, NativeLinear) and head.rows.dtype == ends.embeddings.dtype:
            for module in self.modules:
                made = native_module(module, ends.embeddings)
                if made is not None:
                    self.native[module.config.layer] = made

    @property
    def embeddings(self) -> torch.Tensor:
        """What a row is at layer 0: ``(vocab, hidden)``."""
        return self.ends.embeddings

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers the modules stand at."""
        return tuple(module.config.layer for module in self.modules)

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose outputs the modules need of every verified row."""
        wanted = {module.config.layer for module in self.modules if module.config.attends}
        wanted |= {layer for module in self.modules for layer in module.config.deep}
        return tuple(sorted(wanted - {0}))

    def normed(self, module: ExitModule, hidden: torch.Tensor) -> torch.Tensor:
        """What the head sees of a module's output: under its norm, or the model's own."""
        if module.norm is None:
            weight, eps = self.ends.norm, self.ends.eps
        else:
            weight, eps = module.norm, module.config.eps
        return F.rms_norm(hidden, (hidden.shape[-1],), weight, eps)

    def pick(self, layers: Sequence[int], option: str) -> ExitBank:
        """The bank with modules at `layers` only. Raises OptionError naming `option`."""
        chosen = [module for module in self.modules if module.config.layer in set(layers)]
        missing = sorted(set(layers) - {module.config.layer for module in chosen})
        if missing or not chosen:
            known = ", ".join(map(str, self.layers))
            raise OptionError(
                option, f"no exit module at {missing or 'no layer'}", f"There are some at {known}"
            )
        return ExitBank(chosen, self.head, self.ends)


@runtime_checkable
class HasEnds(Protocol):
    """A target that shows its first and last tensors."""

    def ends(self) -> Ends:
        """Embeddings, last norm and head."""
        ...


def require_exits(target: Target) -> Ends:
    """The target's first and last tensors; CapabilityError when it can't exit early."""
    if not target.capabilities.layer_ranges or not isinstance(target, HasEnds):
        raise CapabilityError(
            f"{target.info.name} can't exit early: early exits need a model of the fused "
            f"family (see `hasten info`), and this one runs in the {target.info.engine} engine. "
            "Choose another method"
        )
    return target.ends()


def own_head_bank(
    target: Target,
    layers: Sequence[int],
    ids: Sequence[int] | None,
    make: MakeProduct,
    *,
    option: str = "early-exit.exits",
) -> ExitBank:
    """Exits at `layers` with the model's own norm and head: what LayerSkip checkpoints are trained
    for (arXiv 2404.16710). `ids` is the draft vocabulary; None: every id.

    Raises CapabilityError, and OptionError naming `option` for a layer that has no exit.
    """
    require_exits(target)
    info = target.info
    for layer in layers:
        if not 1 <= layer < info.num_layers:
            raise OptionError(
                option,
                f"the model's own head has no exit at layer {layer} of {info.name}",
                f"Choose some of 1 to {info.num_layers - 1}",
            )
    modules = []
    for layer in layers:
        lens = ExitConfig("lens", layer, info.hidden_size)
        modules.append(ExitModule(lens, {}, make, dtype=info.dtype, device=info.device))
    return assemble(target, modules, ids, make)


def assemble(
    target: Target, modules: Sequence[ExitModule], ids: Sequence[int] | None, make: MakeProduct
) -> ExitBank:
    """A bank over the target's own embeddings and head rows; `ids` as in `own_head_bank`."""
    ends = require_exits(target)
    kept = None if ids is None else torch.tensor(sorted(set(ids)), device=target.info.device)
    with torch.inference_mode():
        head = DraftHead(kept, ends.head, make)
    return ExitBank(modules, head, ends)

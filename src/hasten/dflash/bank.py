"""A DFlash drafter on a loaded target: its network beside the target's own head and embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from hasten.dflash.config import DFlashConfig
from hasten.dflash.length_head import HostLengthHead
from hasten.dflash.native_net import NativeNet, NativeRun, native_net
from hasten.dflash.net import DFlashNet, DraftCache, pack
from hasten.dflash.store import Loaded
from hasten.errors import CapabilityError
from hasten.exits.bank import DraftHead, HasEnds, LocalHead
from hasten.exits.modules import MakeProduct
from hasten.exits.native_module import Pairs
from hasten.selection import argmax_rows
from hasten.targets.base import Target
from hasten.targets.fused_native import NativeLinear


@dataclass(frozen=True, slots=True)
class DFlashBank:
    """What the requests of a method share; nothing in it changes.

    net     packed for the device at hand, in the target's dtype
    head    of the draft vocabulary; a request adds ids of its prompt
    mask    embedding of the mask token ``(1, hidden_size)``
    native  the network on hasten's own kernels; None: they can't run it
    length  the length head on the host, for a drafter on a CPU that has one
    """

    config: DFlashConfig
    net: DFlashNet
    head: DraftHead
    mask: torch.Tensor
    native: NativeNet | None = None
    length: Callable[[torch.Tensor], float] | None = None

    def worth(self, hidden: torch.Tensor) -> float:
        """The length head's word on a block ``(1, block_size, hidden)``: which share of it is worth
        verifying, in (0, 1)."""
        return float(self.net.worth(hidden)) if self.length is None else self.length(hidden)

    def open(self, head: LocalHead, start: int) -> DraftRun:
        """A request's run, whose context is empty and starts at position `start`: in one call a
        block where hasten's kernels have the network and the head, else in torch's operations."""
        fits = isinstance(head.product, NativeLinear) and self.head.rows.dtype == self.mask.dtype
        if self.native is not None and fits:
            return NativeRun(self.native, head, start)
        return TorchRun(self.net, self.mask, head, start)


class DraftRun(Protocol):
    """A request's context in the network, and the block that stands behind it.

    Rows of the context come as the target's states side by side, ``(C, K * hidden)``, K those of
    `DFlashConfig.taps`; they are the ones behind those that the cache holds.
    """

    @property
    def cache(self) -> DraftCache:
        """Where the context starts and how many rows of it are in."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values allocated."""
        ...

    def catch_up(self, features: torch.Tensor) -> None:
        """Put rows into the cache without drafting anything."""
        ...

    def block(
        self, anchor: torch.Tensor, features: torch.Tensor, want: int, width: int = 0
    ) -> torch.Tensor:
        """Put rows into the cache and run a block behind them: its hidden states after the last
        norm ``(1, block_size, hidden)``, in the dtype of the mask's embedding.

        `anchor` ``(1, hidden)`` is the pending token's embedding. `likeliest` (or, with a `width`,
        `candidates`) is going to be asked about the first `want` slots behind it, as far as is
        known yet.
        """
        ...

    def likeliest(self, slots: torch.Tensor) -> list[int]:
        """Each slot's likeliest id, the lowest place of the draft vocabulary among equals; -1 for a
        slot that says nothing (NaN). `slots` ``(n, hidden)`` are the first n behind the anchor, of
        the last block."""
        ...

    def candidates(self, slots: torch.Tensor, width: int) -> list[Pairs]:
        """Each slot's `width` likeliest ids with their probabilities in the draft vocabulary,
        likeliest first; none for a slot whose logits aren't finite. `slots` as for `likeliest`."""
        ...


class TorchRun:
    """A run in torch's operations; see `DraftRun`."""

    def __init__(self, net: DFlashNet, mask: torch.Tensor, head: LocalHead, start: int) -> None:
        self.cache = DraftCache(start)
        self._net, self._mask, self._head = net, mask, head

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values allocated."""
        return self.cache.nbytes

    def catch_up(self, features: torch.Tensor) -> None:
        """Put rows into the cache."""
        self._net.remember(self._context(features), self._positions(len(features)), self.cache)

    def block(
        self, anchor: torch.Tensor, features: torch.Tensor, want: int, width: int = 0
    ) -> torch.Tensor:
        """Run a block; `want` and `width` make no difference."""
        size = self._net.config.block_size
        block = torch.cat([anchor.to(self._mask.dtype), self._mask.expand(size - 1, -1)])
        positions = self._positions(len(features) + size)
        context = self._context(features)
        hidden: torch.Tensor = self._net(block.unsqueeze(0), context, positions, self.cache)
        return hidden

    def likeliest(self, slots: torch.Tensor) -> list[int]:
        """The ids, from the slots' states."""
        places = argmax_rows(self._head(slots)) if len(slots) else []
        return [place if place < 0 else self._head.id_of(place) for place in places]

    def candidates(self, slots: torch.Tensor, width: int) -> list[Pairs]:
        """The ids with their chances, from the slots' states."""
        return self._head.candidates(self._head(slots), width) if len(slots) else []

    def _context(self, features: torch.Tensor) -> torch.Tensor:
        """Context rows ``(1, C, hidden)``."""
        if not len(features):
            return self._mask.new_empty(1, 0, self._mask.shape[1])
        return self._net.context(features.unsqueeze(0))

    def _positions(self, count: int) -> torch.Tensor:
        """``(1, count)``: those behind the cache."""
        first = self.cache.start + self.cache.length
        return torch.arange(first, first + count, device=self._mask.device).unsqueeze(0)


def assemble(target: Target, loaded: Loaded, make: MakeProduct) -> DFlashBank:
    """The drafter ready to work; `loaded` is used up: its network is packed in place.

    Raises CapabilityError when the target shows no head, or no states of its layers.
    """
    if not target.capabilities.taps:
        raise CapabilityError(
            f"{target.info.name} doesn't show the states of its layers, which a DFlash drafter "
            "reads (see `hasten info`). Choose another method"
        )
    device = target.info.device
    with torch.inference_mode():
        rows = _head_rows(target).to(target.info.dtype)
        ids = None if loaded.draft_ids is None else loaded.draft_ids.to(device)
        head = DraftHead(ids, rows, make)
        if loaded.head is not None:
            head.product = make(loaded.head.to(device=device, dtype=target.info.dtype))
        mask = target.embed([loaded.config.mask_token_id])
        net = pack(loaded.net, make)
        length: HostLengthHead | None = None
        if loaded.config.length_head and device.type == "cpu":
            length = HostLengthHead(net.thresh_head_two_model)
        return DFlashBank(loaded.config, net, head, mask, native_net(net, mask), length)


def _head_rows(target: Target) -> torch.Tensor:
    """The target's head ``(vocab, hidden_size)``; nobody changes it."""
    if isinstance(target, HasEnds):
        return target.ends().head
    from hasten.targets.transformers import TransformersTarget  # slow: only where it's needed

    if isinstance(target, TransformersTarget) and not target.facts.quantized:
        layer = target.facts.base.get_output_embeddings()
        weight: torch.Tensor | None = getattr(layer, "weight", None)
        if weight is not None and not weight.is_meta:
            return weight.detach().to(target.info.device)
    raise CapabilityError(
        f"a DFlash drafter shares its target's head, and {target.info.name} shows none that can be "
        "read (it is quantized, or lies on disk). Load it without quantization, or choose another "
        "method"
    )

"""A DFlash drafter on hasten's CPU kernels: a block is one call into C++ (``dflash.cpp``).

The arithmetic is that of `hasten.dflash.net` with the same products; what is between them is
float32. A request's keys and values live on the other side of the call.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Iterator

import torch

from hasten.dflash.config import FULL
from hasten.dflash.net import DFlashNet, DraftCache, Packed
from hasten.errors import ModelError
from hasten.exits.bank import LocalHead
from hasten.exits.native_module import Pairs, head_struct
from hasten.native import library as native
from hasten.targets.fused_native import NativeLinear

MOST_ROWS = 256
"""Rows of the context that one call takes; more come in several."""
_LAYER = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
_NORMS = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"
)  # fmt: skip
"""A layer's products and norms, in the order of `native.DFlashLayer`."""


class NativeNet:
    """A packed network `native_net` has found fit, and its mask token's embedding ``(1, hidden)``.

    Requests share it and keep a `NativeRun` each.
    """

    def __init__(self, net: DFlashNet, mask: torch.Tensor) -> None:
        config = net.config
        self.config, self.mask = config, mask.contiguous()
        self._keep: list[object] = [net]  # what the structs point to
        layers = (native.DFlashLayer * config.num_layers)(
            *(self._layer(net, f"layers.{i}.") for i in range(config.num_layers))
        )
        frequencies, scale = net._frequencies.float().contiguous(), net._rope_scale
        self._keep.append(frequencies)
        self.struct = native.DFlashModel(
            layers=config.num_layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            dim=config.head_dim,
            taps=len(config.taps),
            slots=config.block_size,
            half=int(mask.dtype == torch.bfloat16),
            eps=config.eps,
            rope_scale=scale,
            layer=layers,
            frequencies=frequencies.data_ptr(),
            context_norm=self._norm(net, "hidden_norm"),
            norm=self._norm(net, "norm"),
            mask=self.mask.data_ptr(),
            fuse=_product(net, "fc"),
        )

    def _layer(self, net: DFlashNet, name: str) -> native.DFlashLayer:
        products = [_product(net, name + each) for each in _LAYER]
        return native.DFlashLayer(*products, *(self._norm(net, name + each) for each in _NORMS))

    def _norm(self, net: DFlashNet, name: str) -> int:
        """Where a norm's weight lies, as float32."""
        weight = net.get_parameter(f"{name}.weight").detach().float().contiguous()
        self._keep.append(weight)
        return weight.data_ptr()


def native_net(net: DFlashNet, mask: torch.Tensor) -> NativeNet | None:
    """The network on the kernels; None where they haven't its sizes, layers, dtype or products.

    `net` is packed; `mask` ``(1, hidden)`` is in the dtype of the target's states.
    """
    config = net.config
    if mask.device.type != "cpu" or mask.dtype not in (torch.float32, torch.bfloat16):
        return None
    if config.head_dim % native.LANES or set(config.layer_types) != {FULL}:
        return None
    kinds: set[int] = set()
    for packed in _packed(net):
        product = packed._product
        if not isinstance(product, NativeLinear) or packed.bias is not None:
            return None
        kinds.add(product.kind)
    return NativeNet(net, mask) if len(kinds) == 1 else None


def _packed(net: DFlashNet) -> Iterator[Packed]:
    return (each for each in net.modules() if isinstance(each, Packed))


def _product(net: DFlashNet, name: str) -> native.Linear:
    packed = net.get_submodule(name)
    assert isinstance(packed, Packed)
    assert isinstance(packed._product, NativeLinear)
    return packed._product.struct


class NativeRun:
    """A request's context and blocks; see `hasten.dflash.bank.DraftRun`.

    Every method raises ModelError where memory is short.
    """

    def __init__(self, made: NativeNet, head: LocalHead, start: int) -> None:
        self.cache = DraftCache(start)
        """Counts the context's rows; keys and values are on the other side (`nbytes`)."""
        self._made, self._head = made, head
        self._ids, self._chances = array("q"), array("f")
        self._said = (0, 0)
        """Slots of the last block that have been asked about, and how many of each one's likeliest
        ids are known, with their chances; no number: the likeliest one, without."""
        self._kernels = native.library()
        self._run = self._kernels.dflash_open()
        if not self._run:
            raise ModelError("there is no memory for another request's DFlash drafter")
        weakref.finalize(self, self._kernels.dflash_close, self._run)
        self._model_at = ctypes.byref(made.struct)
        self._step = native.DFlashStep(start=start, head=ctypes.pointer(head_struct(head)))
        self._step_at = ctypes.byref(self._step)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values allocated."""
        held: int = self._kernels.dflash_bytes(self._run)
        return held

    def catch_up(self, features: torch.Tensor) -> None:
        """Put context rows into the cache: the target's states ``(C, K * hidden)``."""
        features = self._plain(features)
        for first in range(0, len(features), MOST_ROWS):
            self._go(features[first : first + MOST_ROWS])

    def block(
        self, anchor: torch.Tensor, features: torch.Tensor, want: int, width: int = 0
    ) -> torch.Tensor:
        """Run a block behind the context and these rows of it."""
        features = self._plain(features)
        if len(features) > MOST_ROWS:
            self.catch_up(features[:-MOST_ROWS])
            features = features[-MOST_ROWS:]
        config, dtype = self._made.config, self._made.mask.dtype
        anchor = anchor.to(dtype).contiguous()
        assert anchor.numel() == config.hidden_size
        hidden = torch.empty((1, config.block_size, config.hidden_size), dtype=dtype)
        self._step.anchor, self._step.hidden = anchor.data_ptr(), hidden.data_ptr()
        try:
            self._go(features, min(want, config.block_size - 1), self._fit(width))
        finally:
            self._step.anchor = self._step.hidden = None
        return hidden

    def likeliest(self, slots: torch.Tensor) -> list[int]:
        """The ids; `slots` only says how many."""
        self._ask(len(slots), 0)
        return self._ids[: len(slots)].tolist()

    def candidates(self, slots: torch.Tensor, width: int) -> list[Pairs]:
        """The ids with their chances; `slots` only says how many."""
        count, width = len(slots), self._fit(width)
        self._ask(count, width)
        ids, chances = self._ids[: count * width], self._chances[: count * width]
        pairs = list(zip(ids, chances, strict=True))
        return [
            pairs[at : at + width] if ids[at] >= 0 else [] for at in range(0, len(pairs), width)
        ]

    def _fit(self, width: int) -> int:
        """No more ids than there are."""
        return min(width, len(self._head.ids))

    def _ask(self, count: int, width: int) -> None:
        """About the first `count` slots, where they haven't been asked about like this."""
        assert count < self._made.config.block_size
        known, ids = self._said
        if ids != width or count > known:
            self._go(None, count, width)

    def _plain(self, features: torch.Tensor) -> torch.Tensor:
        """As they are read on the other side."""
        config = self._made.config
        width = len(config.taps) * config.hidden_size
        if features.shape[1] != width:
            raise ModelError(
                f"the drafter's context rows are of {features.shape[1]} numbers, {width} are read"
            )
        return features.to(self._made.mask.dtype).contiguous()

    def _go(self, features: torch.Tensor | None, want: int = 0, width: int = 0) -> None:
        rows, step = 0 if features is None else len(features), self._step
        if len(self._ids) < (room := want * max(width, 1)):
            self._ids, self._chances = array("q", bytes(8 * room)), array("f", bytes(4 * room))
        step.rows, step.want, step.threads = rows, want, torch.get_num_threads()
        step.states = None if features is None else features.data_ptr()
        step.width, step.ids = max(width, 1), self._ids.buffer_info()[0]
        step.chances = self._chances.buffer_info()[0] if width else None
        if self._kernels.dflash_step(self._model_at, self._run, self._step_at):
            raise ModelError("there is no memory for a step of a DFlash drafter")
        self.cache.keep(rows)
        self._said = want, width

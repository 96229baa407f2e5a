"""The fused decoder's weights: read from a checkpoint, checked, joined, and packed for the CPU.

q, k and v are one product, gate and up another. The features of q and k are reordered so that the
two halves that rotary embedding mixes are neighbours. On the CPU the weights of the two norms
inside a block are folded into the products that follow, unless hasten's own kernels run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F

from hasten.errors import ModelError
from hasten.targets.checkpoint import SafetensorsFolder
from hasten.targets.quantized import GGUFTensors, Quantized, joined, quantize

_ROWS_HINT = 8
"""Row count oneDNN packs for: the layout it picks for one row is slower, even for one row."""
_PIECE = 1024
"""Rows of the embeddings or the head that are read, rounded and packed at once."""
_LONG_ROW = 1024
"""Features from which oneDNN sums a single row in another order."""


class Linear(Protocol):
    """A product with a fixed weight."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``(rows, in) -> (rows, out)``, a new tensor."""
        ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The product plus `residual` ``(rows, out)``, as a new tensor."""
        ...

    def dense(self) -> torch.Tensor:
        """The weight ``(out, in)``, as it was given."""
        ...


class DenseLinear:
    """`torch.nn.functional.linear`: any device and dtype."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``(rows, in) -> (rows, out)``."""
        return F.linear(x, self.weight, self.bias)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The product plus `residual`."""
        return F.linear(x, self.weight, self.bias).add_(residual)

    def dense(self) -> torch.Tensor:
        """The weight."""
        return self.weight


class PackedLinear:
    """oneDNN's product with a weight laid out for it once; CPU, where `can_pack` says so.

    Over long rows it has another order of summation, slower in float32, for a single row: that one
    runs as two. So a row gets the same bits whatever the rows beside it.
    """

    __slots__ = ("_linear", "_linear_add", "_never_single", "bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        ops = torch.ops.mkldnn
        self.weight = ops._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
        self._never_single = weight.shape[1] > _LONG_ROW
        self.bias = bias
        self._linear = ops._linear_pointwise.default
        self._linear_add = ops._linear_pointwise.binary

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``(rows, in) -> (rows, out)``."""
        single = self._never_single and x.shape[0] == 1
        x = x.expand(2, -1) if single else x
        out: torch.Tensor = self._linear(x, self.weight, self.bias, "none", [], "")
        return out.narrow(0, 0, 1) if single else out

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The product plus `residual`, in one operation."""
        single = self._never_single and x.shape[0] == 1
        if single:
            x, residual = x.expand(2, -1), residual.expand(2, -1)
        out: torch.Tensor = self._linear_add(x, residual, self.weight, self.bias, "add")
        return out.narrow(0, 0, 1) if single else out

    def dense(self) -> torch.Tensor:
        """A plain copy of the weight."""
        weight: torch.Tensor = self.weight.to_dense()
        return weight


@cache
def can_pack(dtype: torch.dtype, device_type: str) -> bool:
    """Whether `PackedLinear` exists here and gives the products of `torch.nn.functional.linear`."""
    mkldnn = torch.backends.mkldnn
    if device_type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return False
    if not (mkldnn.is_available() and mkldnn.enabled):  # type: ignore[no-untyped-call]
        return False
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        with torch.inference_mode(), torch.device("cpu"):
            weight = (torch.arange(32 * 48) % 7 - 3).view(32, 48).to(dtype)
            x = (torch.arange(3 * 48) % 5 - 2).view(3, 48).to(dtype)
            residual = (torch.arange(3 * 32) % 9).view(3, 32).to(dtype)
            bias = torch.arange(32).to(dtype)
            packed, want = PackedLinear(weight, bias), F.linear(x, weight, bias)
            # Small whole numbers: exact in any dtype and order of summation.
            same = torch.equal(packed(x), want)
            return same and torch.equal(packed.add(x, residual), want + residual)
    except (AttributeError, RuntimeError):
        return False


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The fastest product that torch has on this device and in this dtype."""
    if can_pack(weight.dtype, weight.device.type):
        return PackedLinear(weight, bias)
    return DenseLinear(weight, bias)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder, and where and in what dtype it runs.

    inner       width of the MLP
    head_norm   whether q and k are normalised per head (Qwen3)
    rope_scale  multiplies cosines and sines (yarn)
    cache       dtype of keys and values; int8 with a scale for each slot of each head
    native      whether hasten's own kernels run it
    bits        of quantized weights: 8 or 4; 16 leaves each weight as it comes, 0 means dense ones
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    head_norm: bool
    rope_scale: float
    dtype: torch.dtype
    device: torch.device
    cache: torch.dtype
    native: bool = False
    bits: int = 0

    @property
    def folds_norms(self) -> bool:
        """Whether norm weights are folded into the products (float16 would underflow)."""
        return self.device.type == "cpu" and self.dtype != torch.float16 and not self.native


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block.

    attention_norm and mlp_norm ``(hidden,)`` are None when folded. head_norm, float32
    ``(heads + kv_heads, head_dim)``, is the weight of q's and k's norm.
    """

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    head_norm: torch.Tensor | None


class Checkpoint:
    """Tensors by name, of checked sizes, in the dtype and on the device of `shape`.

    With `copy` none of them shares memory with the tensors given.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor | Quantized], shape: Shape, *, copy: bool = False
    ) -> None:
        self._tensors, self._shape, self._copy = tensors, shape, copy
        self._read: set[str] = set()

    def __call__(self, name: str, *size: int) -> torch.Tensor:
        """The tensor `name`; `ModelError` when it is missing or not of this size."""
        tensor = self.weight(name, *size)
        if isinstance(tensor, Quantized):
            return tensor.dense().to(self._shape.dtype)
        return tensor

    def weight(self, name: str, *size: int) -> torch.Tensor | Quantized:
        """As a call, but quantized where the checkpoint holds it so or the shape asks for it."""
        tensor = self._checked(name, size)
        return self._ready(tensor)

    def pieces(self, name: str, *size: int) -> Iterator[torch.Tensor | Quantized]:
        """`weight` in pieces of `_PIECE` rows: a big one is never there as a whole."""
        lazy = (
            self._tensors if isinstance(self._tensors, (GGUFTensors, SafetensorsFolder)) else None
        )
        whole = None if lazy else self._checked(name, size)
        if lazy is not None:
            self._check(name, lazy.shape_of(name) if name in lazy else None, size)
        for first in range(0, size[0], _PIECE):
            last = min(first + _PIECE, size[0])
            if lazy is not None:
                yield self._ready(lazy.rows(name, first, last))
            elif isinstance(whole, Quantized):
                yield whole.rows(first, last)
            elif whole is not None:
                yield self._ready(whole[first:last])

    def _checked(self, name: str, size: tuple[int, ...]) -> torch.Tensor | Quantized:
        tensor = self._tensors.get(name)
        self._check(name, None if tensor is None else tuple(tensor.shape), size)
        assert tensor is not None
        return tensor

    def _check(self, name: str, found: tuple[int, ...] | None, size: tuple[int, ...]) -> None:
        if found is None:
            raise ModelError(
                f"the checkpoint has no tensor {name!r}: it is incomplete, or of another "
                "architecture than its config says"
            )
        if found != size:
            raise ModelError(
                f"tensor {name!r} is {found}, the config says {size}: config and "
                "weights don't belong together"
            )
        self._read.add(name)

    def _ready(self, tensor: torch.Tensor | Quantized) -> torch.Tensor | Quantized:
        shape = self._shape
        if isinstance(tensor, Quantized):
            return tensor
        if shape.bits in (4, 8) and tensor.dim() == 2:
            return quantize(tensor.detach(), shape.bits)
        return tensor.detach().to(device=shape.device, dtype=shape.dtype, copy=self._copy)

    def optional(self, name: str, *size: int) -> torch.Tensor | None:
        """The tensor `name`, or None when the checkpoint has none of that name."""
        return self(name, *size) if name in self._tensors else None

    def equal(self, name: str, other: str) -> bool:
        """Whether both tensors are there and hold the same numbers."""
        if name not in self._tensors or other not in self._tensors:
            return False
        x, y = self._tensors[name], self._tensors[other]
        if isinstance(x, Quantized) or isinstance(y, Quantized):
            return False
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        return (x.data_ptr() == y.data_ptr() and x.stride() == y.stride()) or torch.equal(x, y)

    def refuse_leftovers(self, prefix: str) -> None:
        """Raise `ModelError` when a tensor under `prefix` wasn't read: the block isn't ours."""
        names = [n for n in self._tensors if n.startswith(prefix) and n not in self._read]
        left = sorted(n for n in names if "rotary_emb" not in n)
        if left:
            raise ModelError(
                f"the fused decoder doesn't know these weights: {', '.join(left[:3])}. Use the "
                "transformers target"
            )


def load_layer(read: Checkpoint, index: int, shape: Shape) -> LayerWeights:
    """Block `index` from the checkpoint."""
    prefix = f"model.layers.{index}."
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention_norm = read(f"{prefix}input_layernorm.weight", shape.hidden)
    mlp_norm = read(f"{prefix}post_attention_layernorm.weight", shape.hidden)
    attention = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    mlp = {"gate_proj": shape.inner, "up_proj": shape.inner}
    weights = LayerWeights(
        qkv=_fused(read, f"{prefix}self_attn.", attention, attention_norm, shape),
        out=_plain(read, f"{prefix}self_attn.o_proj", q, shape),
        gate_up=_fused(read, f"{prefix}mlp.", mlp, mlp_norm, shape),
        down=_plain(read, f"{prefix}mlp.down_proj", shape.inner, shape),
        attention_norm=None if shape.folds_norms else attention_norm,
        mlp_norm=None if shape.folds_norms else mlp_norm,
        head_norm=_head_norm(read, f"{prefix}self_attn.", shape) if shape.head_norm else None,
    )
    read.refuse_leftovers(prefix)
    return weights


def pack(weight: torch.Tensor | Quantized, bias: torch.Tensor | None, shape: Shape) -> Linear:
    """A product for the kernels that `shape` runs on."""
    if shape.native:
        from hasten.targets.fused_native import NativeLinear

        return NativeLinear(weight, bias)
    assert not isinstance(weight, Quantized)
    return make_linear(weight, bias)


def _plain(read: Checkpoint, name: str, size: int, shape: Shape) -> Linear:
    weight = read.weight(f"{name}.weight", shape.hidden, size)
    return pack(weight, read.optional(f"{name}.bias", shape.hidden), shape)


def _fused(
    read: Checkpoint, prefix: str, sizes: Mapping[str, int], norm: torch.Tensor, shape: Shape
) -> Linear:
    """Several products of one input, after a norm, as one."""
    weights: list[torch.Tensor | Quantized] = []
    biases: list[torch.Tensor | None] = []
    for name, size in sizes.items():
        weight = read.weight(f"{prefix}{name}.weight", size, shape.hidden)
        bias = read.optional(f"{prefix}{name}.bias", size)
        if name in ("q_proj", "k_proj"):
            heads = size // shape.head_dim
            weight = _interleave_weight(weight, heads)
            bias = None if bias is None else _interleave(bias, heads)
        weights.append(weight)
        biases.append(bias)
    bias = _joined_bias(biases, list(sizes.values()))
    dense = [w for w in weights if not isinstance(w, Quantized)]
    if len(dense) < len(weights):
        parts = [w if isinstance(w, Quantized) else quantize(w, 8) for w in weights]
        return pack(joined(parts), bias, shape)
    whole = torch.cat(dense)
    if shape.folds_norms:
        # The decoder's norm leaves x / |x|: the root of the width belongs to the weight.
        whole = (whole.float() * (norm.float() * math.sqrt(shape.hidden))).to(shape.dtype)
    return pack(whole, bias, shape)


def _joined_bias(
    biases: Sequence[torch.Tensor | None], sizes: Sequence[int]
) -> torch.Tensor | None:
    known = [b for b in biases if b is not None]
    if not known:
        return None
    zeros = known[0].new_zeros
    return torch.cat([zeros(n) if b is None else b for b, n in zip(biases, sizes, strict=True)])


def _head_norm(read: Checkpoint, prefix: str, shape: Shape) -> torch.Tensor:
    dim, parts = shape.head_dim, []
    for name, heads in (("q_norm", shape.heads), ("k_norm", shape.kv_heads)):
        weight = _interleave(read(f"{prefix}{name}.weight", dim), 1)
        parts.append(weight.float().expand(heads, dim))
    return torch.cat(parts)


def _interleave_weight(weight: torch.Tensor | Quantized, heads: int) -> torch.Tensor | Quantized:
    if isinstance(weight, Quantized):
        return weight.by_rows(lambda rows: _interleave(rows, heads))
    return _interleave(weight, heads)


def _interleave(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Makes features i and i + head_dim/2 of each head neighbours (dim 0)."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)

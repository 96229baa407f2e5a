"""The arithmetic of the fused decoder: rotary embedding, attention over the KV, the blocks.

Choices worth some operations per layer each: rotation is one complex product over a whole q|k|v row
(v is multiplied by one, q's factor carries the softmax scale); the query heads of a KV head are one
matrix, so K and V are never expanded; a pass makes its views of all layers' KV at once. Rotation is
float32 everywhere, scores are too on the CPU: its float32 batched product is the faster one at few
rows, and rounds less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from hasten.targets.fused_weights import LayerWeights, Shape

# A row of a chain must get the same bits whatever else is in its pass, or a near tie falls the
# other way when drafts are verified. MKL's batched product has kernels of its own below four rows
# or twelve columns, torch's softmax below sixteen; and MKL adds up a sum of 193 to 383 terms in two
# halves, longer ones in blocks of 192 from the start.
_LEAST_ROWS = 4
_LEAST_SLOTS = 16
_SUM_BLOCK = 192


class Rotary:
    """Rotation factors of positions; `inv_freq` is float32 ``(head_dim / 2,)``."""

    def __init__(self, inv_freq: torch.Tensor, shape: Shape) -> None:
        self._heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        self._inv_freq = inv_freq.to(device=shape.device, dtype=torch.float32)
        self._length = _scalar(shape.rope_scale, shape.device)
        self._softmax_scale = shape.head_dim**-0.5

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Factors of whole q|k|v rows: complex64 ``(rows, (heads + 2 kv_heads) head_dim / 2)``."""
        turn = torch.polar(self._length, positions.unsqueeze(1) * self._inv_freq).unsqueeze(1)
        parts = (turn * self._softmax_scale, turn, torch.ones_like(turn))
        wide = [part.expand(-1, n, -1) for part, n in zip(parts, self._heads, strict=True)]
        return torch.cat(wide, 1).view(positions.shape[0], -1)


class Attention:
    """Attention of one sequence's rows in one pass: where they write, what they read, the mask.

    layers  the range the pass runs
    parts   ``(kv, slots)`` of the prefix segments and of the tail (`CachedSequence.parts`)
    slots   the rows' slots in the tail, increasing
    mask    float32 ``(rows, width)`` added to the scores of the last `width` slots, or None
    """

    def __init__(
        self,
        shape: Shape,
        layers: tuple[int, int],
        parts: Sequence[tuple[torch.Tensor, int]],
        slots: Sequence[int],
        mask: torch.Tensor | None,
    ) -> None:
        (lo, hi), heads, group = layers, shape.kv_heads, shape.heads // shape.kv_heads
        on_cpu = shape.device.type == "cpu"
        self.rows = len(slots)
        self._lo = lo
        self._sizes = (heads, group, shape.head_dim)
        self._padding = max(_LEAST_ROWS - self.rows * group, 0) if on_cpu else 0
        spare = max(_LEAST_SLOTS - parts[-1][1], 0) if on_cpu else 0
        if spare:
            parts = [*parts[:-1], (parts[-1][0], _LEAST_SLOTS)]
            if mask is None:
                mask = torch.zeros(self.rows, 0, dtype=torch.float32, device=shape.device)
            mask = F.pad(mask, (0, spare), value=-math.inf)
        self._slots: torch.Tensor | None = None
        self._writes = self._write_views(parts[-1][0][lo:hi], slots)
        pieces = [(kv[lo:hi], *cut) for kv, width in parts for cut in _cuts(width, on_cpu)]
        self._widths = [stop - start for _, start, stop in pieces]
        keys = (kv[lo:hi, :heads, :width].mT.unbind(0) for kv, width in parts)
        values = (kv[:, heads:, start:stop].unbind(0) for kv, start, stop in pieces)
        self._keys = list(zip(*keys, strict=True))
        self._values = list(zip(*values, strict=True))
        if mask is not None:
            # A KV head's rows are the pass's rows, each with all its query heads: so is the mask.
            mask = F.pad(mask.repeat_interleave(group, 0), (0, 0, 0, self._padding))
            mask = mask.to(shape.compute)
        self._mask = mask

    def _write_views(self, tail: torch.Tensor, slots: Sequence[int]) -> Sequence[torch.Tensor]:
        """Each layer's ``(slots, 2 * kv_heads, head_dim)`` to write: the rows' own, or all."""
        first, rows = slots[0], len(slots)
        if slots[-1] - first + 1 == rows:
            tail = tail[:, :, first : first + rows]
        else:
            self._slots = torch.tensor(list(slots), device=tail.device)
        return tail.transpose(1, 2).unbind(0)

    def __call__(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Store kv ``(rows, 2 kv_heads, head_dim)`` and attend with q ``(rows, heads, head_dim)``.

        q is scaled already. Gives ``(rows, heads * head_dim)`` in the dtype of scores.
        """
        layer -= self._lo
        rows, (heads, group, dim), padding = self.rows, self._sizes, self._padding
        if self._slots is None:
            self._writes[layer].copy_(kv)
        else:
            self._writes[layer].index_copy_(0, self._slots, kv.to(self._writes[layer].dtype))
        count = rows * group
        if rows == 1 and padding <= 2 * heads:
            # Padding rows are whatever comes next in the q|k|v row: no copy, and never looked at.
            q = q.as_strided((heads, count + padding, dim), (count * dim, dim, 1))
        else:
            q = q.view(rows, heads, group, dim).transpose(0, 1).reshape(heads, count, dim)
            q = F.pad(q, (0, 0, 0, padding)) if padding else q
        mixed = self._mix(layer, q)
        if padding:
            mixed = mixed.narrow(1, 0, count)
        if rows == 1:
            return mixed.reshape(1, heads * group * dim)
        mixed = mixed.reshape(heads, rows, group * dim)
        return mixed.transpose(0, 1).reshape(rows, heads * group * dim)

    def _mix(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        keys, values = self._keys[layer], self._values[layer]
        if len(keys) == 1:
            scores = torch.bmm(q, keys[0])
        else:
            scores = torch.cat([torch.bmm(q, part) for part in keys], 2)
        if self._mask is not None:
            width = self._mask.shape[1]
            scores.narrow(2, scores.shape[2] - width, width).add_(self._mask)
        weights = torch.softmax(scores, -1)
        if len(values) == 1:
            return torch.bmm(weights, values[0])
        pieces = weights.split_with_sizes(self._widths, 2)
        mixed = torch.bmm(pieces[0], values[0])
        for piece, value in zip(pieces[1:], values[1:], strict=True):
            mixed.baddbmm_(piece, value)
        return mixed


def _cuts(width: int, on_cpu: bool) -> list[tuple[int, int]]:
    """Where to cut a sum over `width` slots so that its order doesn't depend on the width."""
    if on_cpu and _SUM_BLOCK < width < 2 * _SUM_BLOCK:
        return [(0, _SUM_BLOCK), (_SUM_BLOCK, width)]
    return [(0, width)]


class Decoder:
    """The blocks: runs hidden states through some of them."""

    def __init__(self, shape: Shape, layers: Sequence[LayerWeights]) -> None:
        self.shape = shape
        self._layers = list(layers)
        self._split = [shape.heads, 2 * shape.kv_heads]
        # With x / sqrt(|x|^2 + n * eps) = x / hypot(|x|, c) a norm is three small operations.
        self._floor = _scalar(math.sqrt(shape.hidden * shape.eps), shape.device)
        self._head_floor = _scalar(math.sqrt(shape.head_dim * shape.eps), shape.device)

    def run(
        self,
        hidden: torch.Tensor,
        rotary: torch.Tensor,
        attention: Sequence[Attention],
        layers: tuple[int, int],
        keep: Callable[[int, torch.Tensor], None],
    ) -> torch.Tensor:
        """Runs `hidden` ``(rows, hidden)`` through layers lo..hi-1 and gives what comes out.

        The rows are those of `attention`, one sequence after another; `keep(i, x)` sees the output
        of layer i for each i in lo..hi, first what comes in.
        """
        shape, rows = self.shape, hidden.shape[0]
        heads, split, compute, dtype = sum(self._split), self._split, shape.compute, shape.dtype
        buffer = torch.empty_like(hidden)
        keep(layers[0], hidden)
        for index in range(*layers):
            layer = self._layers[index]
            qkv = layer.qkv(self._norm(hidden, layer.attention_norm, buffer)).float()
            if layer.head_norm is not None:
                self._normalize_heads(qkv.view(rows, heads, shape.head_dim), layer.head_norm)
            qkv.view(torch.complex64).mul_(rotary)
            q, kv = qkv.view(rows, heads, shape.head_dim).split_with_sizes(split, 1)
            if compute != torch.float32:
                q = q.to(compute)
            mixed = _attend(index, q, kv, attention)
            if compute != dtype:
                mixed = mixed.to(dtype)
            hidden = layer.out.add(mixed, hidden)
            gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm, buffer)).chunk(2, 1)
            hidden = layer.down.add(F.silu(gate).mul_(up), hidden)
            keep(index + 1, hidden)
        return hidden

    def _norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, buffer: torch.Tensor
    ) -> torch.Tensor:
        if weight is not None:
            return F.rms_norm(x, (self.shape.hidden,), weight, self.shape.eps)
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
        return torch.div(x, length.hypot_(self._floor), out=buffer)

    def _normalize_heads(self, qkv: torch.Tensor, weight: torch.Tensor) -> None:
        """Normalises q and k of qkv ``(rows, heads, head_dim)`` per head, in place."""
        qk = qkv.narrow(1, 0, weight.shape[0])
        length = torch.linalg.vector_norm(qk, 2, -1, True).hypot_(self._head_floor)
        qk.div_(length).mul_(weight)


def _scalar(value: float, device: torch.device) -> torch.Tensor:
    """A float32 scalar, whatever torch's default dtype is."""
    return torch.tensor(value, dtype=torch.float32, device=device)


def _attend(
    layer: int, q: torch.Tensor, kv: torch.Tensor, attention: Sequence[Attention]
) -> torch.Tensor:
    if len(attention) == 1:
        return attention[0](layer, q, kv)
    sizes = [part.rows for part in attention]
    pieces = zip(attention, q.split_with_sizes(sizes), kv.split_with_sizes(sizes), strict=True)
    return torch.cat([attend(layer, rows_q, rows_kv) for attend, rows_q, rows_kv in pieces])


def causal_mask(rows: int, device: torch.device) -> torch.Tensor | None:
    """The mask of `rows` consecutive rows over themselves; None for a single one."""
    if rows == 1:
        return None
    return torch.full((rows, rows), -math.inf, dtype=torch.float32, device=device).triu_(1)

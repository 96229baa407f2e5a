"""The fused decoder in torch: rotary embedding, attention over the KV, the blocks.

Choices worth some operations per layer each: rotation is one complex product over a whole q|k|v row
(v is multiplied by one, q's factor carries the softmax scale); the query heads of a KV head are one
matrix, so K and V are never expanded; a pass makes its views of all layers' KV at once. Rotation is
float32 everywhere, scores are too on the CPU: its float32 batched product is the faster one at few
rows, and rounds less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from hasten.targets.base import Ends
from hasten.targets.fused_weights import LayerWeights, Shape, make_linear

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
    mask    float32 ``(rows, width)`` added to the scores of the last `width` slots; None for a
            chain in the last slots
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
        mask = _causal(self.rows, shape.device) if mask is None else mask
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
            mask = mask.to(shape.cache)
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


class TorchDecoder:
    """The blocks, the embeddings and the head of a model, run by torch's operations.

    embeddings  ``(vocab, hidden)``
    norm        ``(hidden,)``: the last norm's weight
    head        ``(vocab, hidden)``; the embeddings themselves where the model ties them
    inv_freq    float32 ``(head_dim / 2,)``: rotary frequencies
    """

    tile = 1
    move = None

    def __init__(
        self,
        shape: Shape,
        layers: Sequence[LayerWeights],
        embeddings: torch.Tensor,
        norm: torch.Tensor,
        head: torch.Tensor,
        inv_freq: torch.Tensor,
    ) -> None:
        self.shape, self.embeddings = shape, embeddings
        self.rotary = Rotary(inv_freq, shape)
        self.layers = [self._with_root(layer) for layer in layers]
        self._last_norm, self._head, self._tied = norm, make_linear(head), head is embeddings
        self._split = [shape.heads, 2 * shape.kv_heads]
        # With x / sqrt(|x|^2 + n * eps) = x / hypot(|x|, c) a norm is three small operations.
        self._floor = _scalar(math.sqrt(shape.hidden * shape.eps), shape.device)
        self._head_floor = _scalar(math.sqrt(shape.head_dim * shape.eps), shape.device)

    def _with_root(self, layer: LayerWeights) -> LayerWeights:
        """With the root of the head's width in the weight of its norm, which leaves x / |x|."""
        if layer.head_norm is None:
            return layer
        return replace(layer, head_norm=layer.head_norm * math.sqrt(self.shape.head_dim))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of int64 ``(rows,)``: ``(rows, hidden)`` in the model's dtype."""
        return F.embedding(ids, self.embeddings)

    def ends(self) -> Ends:
        """The model's first and last tensors. A packed head that isn't the embeddings is unpacked:
        a copy of its own."""
        head = self.embeddings if self._tied else self._head.dense()
        return Ends(self.embeddings, head, self._last_norm, self.shape.eps)

    def attention(
        self,
        layers: tuple[int, int],
        parts: Sequence[tuple[torch.Tensor, int]],
        slots: Sequence[int],
        committed: int,
        mask: torch.Tensor | None,
    ) -> Attention:
        """What `run` needs of one sequence's rows, see `Attention`."""
        return Attention(self.shape, layers, parts, slots, mask)

    def run(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        spots: Sequence[Attention],
        layers: tuple[int, int],
        taps: Sequence[int],
        logits: int,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor], torch.Tensor | None]:
        """Rows through layers lo..hi-1: what comes out, the taps, and logits of the last `logits`.

        `hidden` ``(rows, hidden)`` holds the rows of `spots`, one sequence after another, positions
        int64 ``(rows,)``. All in the model's dtype; logits None when none are wanted.
        """
        shape, rows = self.shape, hidden.shape[0]
        heads, split, cache, dtype = sum(self._split), self._split, shape.cache, shape.dtype
        rotary, buffer = self.rotary(positions), torch.empty_like(hidden)
        kept = {layers[0]: hidden} if layers[0] in taps else {}
        for index in range(*layers):
            layer = self.layers[index]
            qkv = layer.qkv(self.normalize(hidden, layer.attention_norm, buffer)).float()
            if layer.head_norm is not None:
                self.normalize_heads(qkv.view(rows, heads, shape.head_dim), layer.head_norm)
            qkv.view(torch.complex64).mul_(rotary)
            q, kv = qkv.view(rows, heads, shape.head_dim).split_with_sizes(split, 1)
            if cache != torch.float32:
                q = q.to(cache)
            mixed = _attend(index, q, kv, spots)
            if cache != dtype:
                mixed = mixed.to(dtype)
            hidden = layer.out.add(mixed, hidden)
            gate, up = layer.gate_up(self.normalize(hidden, layer.mlp_norm, buffer)).chunk(2, 1)
            hidden = layer.down.add(F.silu(gate).mul_(up), hidden)
            if index + 1 in taps:
                kept[index + 1] = hidden
        return hidden, kept, self.logits(hidden[-logits:]) if logits else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``(rows, vocab)`` of rows that have passed all layers."""
        size, eps = (self.shape.hidden,), self.shape.eps
        return self._head(F.rms_norm(hidden, size, self._last_norm, eps))

    def normalize(
        self, x: torch.Tensor, weight: torch.Tensor | None, buffer: torch.Tensor
    ) -> torch.Tensor:
        """x over its root mean square times `weight`; folded (None): over its length."""
        if weight is not None:
            return F.rms_norm(x, (self.shape.hidden,), weight, self.shape.eps)
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
        return torch.div(x, length.hypot_(self._floor), out=buffer)

    def normalize_heads(self, qkv: torch.Tensor, weight: torch.Tensor) -> None:
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


def _causal(rows: int, device: torch.device) -> torch.Tensor | None:
    """The mask of `rows` consecutive rows over themselves; None for a single one."""
    if rows == 1:
        return None
    return torch.full((rows, rows), -math.inf, dtype=torch.float32, device=device).triu_(1)

"""Many prompts through the fused decoder in step: for throughput, not for answering.

Where `FusedTarget` has a cache a sequence and packs what a round needs, here all rows have one
cache of one width, and a row's slot is its position. Cache and scores have the model's dtype on
every device (in `FusedTarget` they are float32 on a CPU), so in 16 bits a near tie may fall
otherwise than in plain decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hasten.errors import CacheStateError
from hasten.targets.fused import FusedTarget

_STEP = 64
"""The cache's width grows by so many slots."""
_PASS_ROWS, _PASS_ROWS_CPU = 16384, 1024
"""Prompt tokens a pass: enough to keep the products busy, few enough for the memory."""


class FusedBatch:
    """Rows of `target` that run in step: `start`, then `step` and `keep` as often as wanted."""

    def __init__(self, target: FusedTarget) -> None:
        self._target, self._decoder = target, target.torch_decoder
        self._shape = shape = self._decoder.shape
        self._pass_rows = _PASS_ROWS_CPU if shape.device.type == "cpu" else _PASS_ROWS
        self._longest = 0
        self._lengths = torch.zeros(0, dtype=torch.int64, device=shape.device)
        empty = torch.zeros(0, dtype=shape.dtype, device=shape.device)
        # Keys of all layers, then values. Each tensor is a view of its piece of memory.
        self._memory = [empty] * (2 * shape.layers)
        self._caches = [empty.view(0, shape.kv_heads, 0, shape.head_dim)] * (2 * shape.layers)
        self._spare = empty
        self._room = 0

    def __len__(self) -> int:
        """Rows running."""
        return self._lengths.shape[0]

    def start(self, prompts: Sequence[Sequence[int]], room: int) -> torch.Tensor:
        """Run prompts of ids, the longest first; each becomes a row, in place of those before.

        `room` is how many tokens each row will get: memory for them is taken now. Gives the logits
        after each prompt, ``(rows, vocab)`` in the model's dtype. Raises CacheStateError for
        prompts that are empty or in another order.
        """
        lengths = [len(prompt) for prompt in prompts]
        if not lengths or lengths[-1] < 1 or lengths != sorted(lengths, reverse=True):
            raise CacheStateError("start: prompts must hold tokens, and come longest first")
        with torch.inference_mode(), self._no_autocast():
            self._reset(len(prompts), lengths[0] + 1, lengths[0] + room)
            shared = min(_shared_length(prompts), lengths[-1] - 1)
            device = self._shape.device
            padded = [[*prompt, *[0] * (lengths[0] - len(prompt))] for prompt in prompts]
            tokens = torch.tensor(padded, dtype=torch.int64, device=device)
            self._run_shared(tokens[:1, :shared])
            last = self._run_prompts(tokens, lengths, shared)
            self._lengths = torch.tensor(lengths, dtype=torch.int64, device=device)
            self._longest = lengths[0]
            return self._decoder.logits(last)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token to every row: int64 ``(rows,)`` on the device, gives ``(rows, vocab)``."""
        with torch.inference_mode(), self._no_autocast():
            if self._longest >= self._width:
                self._resize(len(self), self._longest + 1)
            hidden = self._run(tokens.unsqueeze(1), self._lengths.unsqueeze(1))
            self._lengths = self._lengths + 1
            self._longest += 1
            return self._decoder.logits(hidden)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""
        with torch.inference_mode():
            picked = torch.tensor(list(rows), dtype=torch.int64, device=self._shape.device)
            self._resize(len(rows), self._width, picked)
            self._lengths = self._lengths[picked]

    # -- prompts -----------------------------------------------------------------------------------

    def _run_shared(self, tokens: torch.Tensor) -> None:
        """Run what all prompts begin with, ``(1, shared)``, once, for all rows."""
        shared = tokens.shape[1]
        for first in range(0, shared, self._pass_rows):
            part = tokens[:, first : first + self._pass_rows]
            self._run(part, _positions(first, part))
        for cache in self._caches if shared else ():
            cache[1:, :, :shared] = cache[:1, :, :shared]

    def _run_prompts(
        self, tokens: torch.Tensor, lengths: Sequence[int], first: int
    ) -> torch.Tensor:
        """Run the columns of ``(rows, longest)`` from `first` on; the prompts' last hidden states.

        Beyond a prompt's end a row holds padding: its keys and values stand in slots that no row
        sees before its own tokens replace them.
        """
        last = torch.empty(
            len(lengths), self._shape.hidden, dtype=self._shape.dtype, device=self._shape.device
        )
        while first < lengths[0]:
            active = sum(length > first for length in lengths)
            part = tokens[:active, first : first + max(self._pass_rows // active, 1)]
            hidden = self._run(part, _positions(first, part))
            steps = part.shape[1]
            ended = [row for row in range(active) if lengths[row] <= first + steps]
            if ended:
                at = [row * steps + lengths[row] - 1 - first for row in ended]
                last[ended] = hidden[at]
            first += steps
        return last

    # -- the pass ----------------------------------------------------------------------------------

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run ``(rows, steps)`` new tokens of the first rows at their positions, same size.

        Gives what leaves the last layer, ``(rows * steps, hidden)``.
        """
        target, shape = self._target, self._shape
        decoder, (rows, steps) = self._decoder, tokens.shape
        heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
        hidden = decoder.embed(tokens.reshape(-1))
        rotary = decoder.rotary(positions.reshape(-1))
        mask = self._mask(positions)
        index = torch.arange(rows, device=shape.device).unsqueeze(1)
        buffer = torch.empty_like(hidden)
        for number, layer in enumerate(decoder.layers):
            qkv = layer.qkv(decoder.normalize(hidden, layer.attention_norm, buffer)).float()
            if layer.head_norm is not None:
                decoder.normalize_heads(qkv.view(rows * steps, -1, dim), layer.head_norm)
            qkv.view(torch.complex64).mul_(rotary)
            qkv = qkv.view(rows, steps, heads + 2 * kv_heads, dim).to(shape.dtype)
            q, k, v = qkv.split_with_sizes([heads, kv_heads, kv_heads], 2)
            keys = self._caches[number][:rows]
            values = self._caches[shape.layers + number][:rows]
            keys[index, :, positions] = k
            values[index, :, positions] = v
            mixed = _attend(q, keys, values, mask)
            hidden = layer.out.add(mixed, hidden)
            gate, up = layer.gate_up(decoder.normalize(hidden, layer.mlp_norm, buffer)).chunk(2, 1)
            hidden = layer.down.add(F.silu(gate).mul_(up), hidden)
        target.layer_rows += rows * steps * shape.layers
        return hidden

    def _mask(self, positions: torch.Tensor) -> torch.Tensor:
        """Added to scores, ``(rows, 1, steps, width)``: a token sees the slots up to its own."""
        slots = torch.arange(self._width, device=positions.device)
        mask = torch.zeros(
            *positions.shape, self._width, dtype=self._shape.dtype, device=positions.device
        )
        return mask.masked_fill_(slots > positions.unsqueeze(2), -math.inf).unsqueeze(1)

    def _no_autocast(self) -> torch.autocast:
        return torch.autocast(self._shape.device.type, enabled=False)

    # -- memory ------------------------------------------------------------------------------------

    @property
    def _width(self) -> int:
        return self._caches[0].shape[2]

    def _reset(self, rows: int, width: int, most: int) -> None:
        """Empty caches; the memory lasts for `most` slots a row."""
        shape = self._shape
        self._room = rows * shape.kv_heads * _rounded(most) * shape.head_dim
        self._caches = [cache[:0, :, :0] for cache in self._caches]
        self._resize(rows, width)

    def _resize(self, rows: int, width: int, picked: torch.Tensor | None = None) -> None:
        """Make every cache `rows` x `width` or a little wider; with `picked`, of those rows.

        The caches are no wider than they must be, as every slot costs in every pass. Each moves
        into the memory that the one before it has left, so none is freed while rows run. New slots
        are zero: what stood there before may be NaN, and the mask doesn't help against that.
        """
        shape, width = self._shape, _rounded(width)
        size = (rows, shape.kv_heads, width, shape.head_dim)
        for number, old in enumerate(self._caches):
            memory = self._claim(math.prod(size))
            new, held = memory[: math.prod(size)].view(size), min(old.shape[2], width)
            if picked is not None:
                torch.index_select(old, 0, picked, out=new)
            else:
                new[: len(old), :, :held] = old
                new[: len(old), :, held:] = 0
                new[len(old) :] = 0
            self._spare, self._memory[number] = self._memory[number], memory
            self._caches[number] = new

    def _claim(self, need: int) -> torch.Tensor:
        room = max(need, self._room)
        if self._spare.numel() >= room:
            return self._spare
        return torch.empty(room, dtype=self._shape.dtype, device=self._shape.device)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Attention of q ``(rows, steps, heads, dim)``, scaled already, over whole caches ``(rows,
    kv_heads, width, dim)``; gives ``(rows * steps, heads * dim)``.

    The query heads of a KV head, at all steps, are the rows of one product.
    """
    rows, steps, heads, dim = q.shape
    _, kv_heads, width, _ = keys.shape
    batch = rows * kv_heads
    q = q.transpose(1, 2).reshape(batch, heads // kv_heads * steps, dim)
    scores = torch.bmm(q, keys.view(batch, width, dim).mT)
    scores.view(rows, heads, steps, width).add_(mask)
    mixed = torch.bmm(torch.softmax(scores, -1), values.view(batch, width, dim))
    return mixed.view(rows, heads, steps, dim).transpose(1, 2).reshape(rows * steps, heads * dim)


def _positions(first: int, tokens: torch.Tensor) -> torch.Tensor:
    """Positions of consecutive ``(rows, steps)`` tokens from `first` on."""
    rows, steps = tokens.shape
    return torch.arange(first, first + steps, device=tokens.device).expand(rows, steps)


def _shared_length(prompts: Sequence[Sequence[int]]) -> int:
    """How many ids all prompts have in common at their beginning."""
    first, others = prompts[0], prompts[1:]
    for place, token in enumerate(first):
        if any(place == len(prompt) or prompt[place] != token for prompt in others):
            return place
    return len(first)


def _rounded(width: int) -> int:
    return -(-width // _STEP) * _STEP

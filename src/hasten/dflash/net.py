"""The drafter's network: context features in, the hidden states of a block out.

Every layer attends to keys and values of the *context* (made from the target's own states, the same
for all layers) and of the block's slots, all of which see each other. Parameters carry the names of
the published checkpoints. Serving and training run the same arithmetic: with a cache for one block
at a time, or without one for many blocks side by side under a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hasten.dflash.config import FULL, SLIDING, DFlashConfig
from hasten.errors import CacheStateError

_ROOM = 128
"""Caches grow by so many rows at least."""

Product = Callable[[torch.Tensor], torch.Tensor]
"""``(rows, in) -> (rows, out)``."""


class RMSNorm(nn.Module):
    """Root-mean-square norm, in float32 whatever it is given, over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape and dtype."""
        weight = self.weight.float()
        return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


class Packed(nn.Module):
    """A linear layer whose weight is laid out for the device at hand; nothing in it is trained."""

    bias: torch.Tensor | None

    def __init__(self, product: Product, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._product = product
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(..., in) -> (..., out)``."""
        out = self._product(x.reshape(-1, x.shape[-1]))
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], -1)


class DraftCache:
    """A request's keys and values of the context, in every layer of the drafter.

    start   position of its first row; length: rows held, those at start .. start + length - 1

    Keys and values of a block stand behind the context while it is drafted and are never counted,
    so there is nothing to crop afterwards.
    """

    __slots__ = ("_keys", "_values", "length", "start")

    def __init__(self, start: int = 0) -> None:
        self.start, self.length = start, 0
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put rows ``(batch, kv_heads, rows, head_dim)`` behind those held; all of them, views."""
        end = self.length + keys.shape[2]
        out = []
        for store, new in ((self._keys, keys), (self._values, values)):
            held = store.get(layer)
            if held is None or held.shape[2] < end:
                room = max(end + _ROOM, 2 * self.length)
                grown = new.new_empty(new.shape[0], new.shape[1], room, new.shape[3])
                if held is not None:
                    grown[:, :, : self.length] = held[:, :, : self.length]
                held = store[layer] = grown
            held[:, :, self.length : end] = new
            out.append(held[:, :, :end])
        return out[0], out[1]

    def keep(self, rows: int) -> None:
        """Count the first `rows` of those written last, in every layer."""
        self.length += rows

    def select(self, rows: Sequence[int]) -> None:
        """Become these rows of the batch, each a copy."""
        for store in (self._keys, self._values):
            for layer, held in store.items():
                store[layer] = held[list(rows)]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(each.nbytes for store in (self._keys, self._values) for each in store.values())


class DFlashNet(nn.Module):
    """The network of a drafter; see the module.

    Embeddings and head are the target's and not part of it.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        size, taps = config.hidden_size, len(config.target_layer_ids)
        self.fc = nn.Linear(taps * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, config.eps)
        self.layers = nn.ModuleList(_Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(size, config.eps)
        if config.length_head:
            self.thresh_head_two_model = LengthHead(size, config.length_head)
        # Not a buffer: those follow the network to lower precisions.
        self._frequencies, self._rope_scale = _frequencies(config)

    def context(self, features: torch.Tensor) -> torch.Tensor:
        """Context rows ``(..., C, H)`` from the target's states side by side ``(..., C, K * H)``,
        in the order of `DFlashConfig.target_layer_ids`."""
        out: torch.Tensor = self.hidden_norm(self.fc(features))
        return out

    def forward(
        self,
        block: torch.Tensor,
        context: torch.Tensor,
        positions: torch.Tensor,
        cache: DraftCache | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states of the block's slots after the last norm, ``(b, Q, H)``.

        block      embeddings of the anchor and of mask tokens ``(b, Q, H)``; in a packed training
                   pass Q = N * block_size slots of N blocks one after another
        context    ``(b, C, H)`` of `context`: rows that the cache doesn't hold yet
        positions  int64 ``(b, C + Q)``: of the context rows, then of the slots
        cache      holds the rows of earlier calls and takes those of `context`
        mask       bool ``(b, Q, rows)``: what each slot sees of the cache's rows, of `context` and
                   of the slots; None: everything. A slot must see something.
        """
        rotary = self._rotary(positions, block.dtype)
        masks = self._masks(block, context, positions, cache, mask)
        x = block
        for layer in self._stack():
            x = layer(x, context, rotary, cache, masks[layer.kind])
        if cache is not None:
            cache.keep(context.shape[1])
        out: torch.Tensor = self.norm(x)
        return out

    def remember(self, context: torch.Tensor, positions: torch.Tensor, cache: DraftCache) -> None:
        """Put context rows ``(b, C, H)`` at `positions` ``(b, C)`` into the cache without drafting
        anything."""
        rotary = self._rotary(positions, context.dtype)
        for layer in self._stack():
            layer.self_attn.remember(context, rotary, cache)
        cache.keep(context.shape[1])

    def worth(self, hidden: torch.Tensor) -> torch.Tensor:
        """The length head's word on blocks ``(b, block_size, H)`` of `forward`: which share of a
        block is worth verifying, the anchor's row included; float32 ``(b,)`` in (0, 1)."""
        out: torch.Tensor = self.thresh_head_two_model(hidden)
        return out

    def _stack(self) -> list[_Layer]:
        return [layer for layer in self.layers if isinstance(layer, _Layer)]

    def _rotary(self, positions: torch.Tensor, dtype: torch.dtype) -> _Rotary:
        self._frequencies = self._frequencies.to(positions.device)
        angles = positions.unsqueeze(-1).float() * self._frequencies
        both = torch.cat([angles, angles], -1).unsqueeze(1)
        return (both.cos() * self._rope_scale).to(dtype), (both.sin() * self._rope_scale).to(dtype)

    def _masks(
        self,
        block: torch.Tensor,
        context: torch.Tensor,
        positions: torch.Tensor,
        cache: DraftCache | None,
        mask: torch.Tensor | None,
    ) -> dict[str, torch.Tensor | None]:
        """What slots see, ``(b, 1, group * Q, rows)``, by kind of layer."""
        group = self.config.num_heads // self.config.num_kv_heads
        kinds = {FULL: mask}
        if SLIDING in self.config.layer_types:
            held = 0 if cache is None else cache.length
            near = self._near(positions, context.shape[1], held)
            kinds[SLIDING] = near if mask is None else near & mask
        return {
            kind: None if each is None else each.repeat(1, group, 1).unsqueeze(1)
            for kind, each in kinds.items()
        }

    def _near(self, positions: torch.Tensor, count: int, held: int) -> torch.Tensor:
        """What slots see in sliding layers, ``(b, Q, held + count + Q)``: the context from
        `sliding_window` rows before their anchor on, of their own block the slots before them and
        themselves, or all of it."""
        config, window = self.config, self.config.sliding_window
        assert window is not None
        slots = positions[:, count:]
        blocks = slots.shape[1] // config.block_size or 1
        anchors = slots.view(len(slots), blocks, -1)[:, :, :1]
        anchors = anchors.expand(-1, -1, slots.shape[1] // blocks).reshape(slots.shape)
        before = positions[:, :1] - held + torch.arange(held, device=positions.device)
        rows = torch.cat([before, positions[:, :count]], 1)
        context = rows.unsqueeze(1) >= anchors.unsqueeze(2) - window
        if config.sliding_window_non_causal:
            own = torch.ones_like(slots.unsqueeze(1) == slots.unsqueeze(2))
        else:
            own = slots.unsqueeze(1) <= slots.unsqueeze(2)
        return torch.cat([context, own], 2)


_Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines ``(b, 1, C + Q, head_dim)``, the context's rows first."""


class _Layer(nn.Module):
    """Attention, then a gated MLP, each behind a norm and added to what came in."""

    def __init__(self, config: DFlashConfig, index: int) -> None:
        super().__init__()
        self.kind = config.layer_types[index]
        self.input_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.self_attn = _Attention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.mlp = _MLP(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        rotary: _Rotary,
        cache: DraftCache | None,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rotary, cache, mask)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Attention(nn.Module):
    """Slots attend to the context and to each other. Context rows come as they are (no layer's
    norm), with the same key and value weights as slots."""

    def __init__(self, config: DFlashConfig, index: int) -> None:
        super().__init__()
        self.index, self.dim = index, config.head_dim
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        size, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(size, self.heads * self.dim, bias=bias)
        self.k_proj = nn.Linear(size, self.kv_heads * self.dim, bias=bias)
        self.v_proj = nn.Linear(size, self.kv_heads * self.dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.dim, size, bias=bias)
        self.q_norm = RMSNorm(self.dim, config.eps)
        self.k_norm = RMSNorm(self.dim, config.eps)

    def forward(
        self,
        y: torch.Tensor,
        context: torch.Tensor,
        rotary: _Rotary,
        cache: DraftCache | None,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        batch, slots, _ = y.shape
        cos, sin = rotary
        q = self.q_norm(self._split(self.q_proj(y), self.heads))
        q = _turned(q, cos[:, :, -slots:], sin[:, :, -slots:])
        keys, values = self._keys_values(torch.cat([context, y], 1), rotary)
        if cache is not None:
            keys, values = cache.write(self.index, keys, values)
        # All heads that share keys go through one product: rows of a group are stacked.
        grouped = q.reshape(batch, self.kv_heads, -1, self.dim)
        mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        mixed = mixed.view(batch, self.heads, slots, self.dim).transpose(1, 2)
        out: torch.Tensor = self.o_proj(mixed.reshape(batch, slots, -1))
        return out

    def remember(self, context: torch.Tensor, rotary: _Rotary, cache: DraftCache) -> None:
        """Keys and values of context rows alone."""
        cache.write(self.index, *self._keys_values(context, rotary))

    def _keys_values(
        self, rows: torch.Tensor, rotary: _Rotary
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = _turned(self.k_norm(self._split(self.k_proj(rows), self.kv_heads)), *rotary)
        return keys, self._split(self.v_proj(rows), self.kv_heads)

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """``(b, rows, heads * head_dim)`` as ``(b, heads, rows, head_dim)``."""
        return x.view(*x.shape[:2], heads, self.dim).transpose(1, 2)


class _MLP(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class LengthHead(nn.Module):
    """Says from a block's hidden states which share of it is worth verifying (AdaFlash's
    "two_model" head)."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(2 * size, width)
        self.res = nn.Sequential(nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 ``(b,)`` in (0, 1) of hidden states ``(b, B, H)``."""
        both = torch.cat([hidden.mean(1), hidden[:, -1]], 1)
        u = F.silu(self.down(both))
        u = u + self.res(u)
        return torch.sigmoid(self.out(u).float()).squeeze(1)


def pack(net: DFlashNet, make: Callable[[torch.Tensor], Product]) -> DFlashNet:
    """Lay the products of the drafter's body out for the device at hand, in place, and return it:
    for serving only. `make` turns a weight ``(out, in)`` into a product."""
    for parent in [net, *net.layers.modules()]:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                bias = None if child.bias is None else child.bias.detach()
                setattr(parent, name, Packed(make(child.weight.detach()), bias))
    return net


def check_frontier(cache: DraftCache, waiting: int, committed: int) -> None:
    """Raise CacheStateError unless the cache and the rows that wait make up the committed text:
    a block may see exactly what stands before its anchor."""
    if cache.start + cache.length + waiting != committed:
        raise CacheStateError(
            f"the drafter's context holds {cache.length} rows from {cache.start} on and {waiting} "
            f"wait, where {committed} tokens stand before the anchor: report this"
        )


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on ``(b, heads, rows, head_dim)``; the halves of a head are pairs."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def _frequencies(config: DFlashConfig) -> tuple[torch.Tensor, float]:
    """Rotary frequencies, float32 ``(head_dim / 2,)``, and what cosines and sines are scaled by."""
    if config.rope_scaling is None:
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
        return config.rope_theta ** -(steps / config.head_dim), 1.0
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    parameters: dict[str, Any] = {**config.rope_scaling, "rope_theta": config.rope_theta}
    made = Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rope_parameters=parameters,
    )
    with torch.no_grad(), torch.device("cpu"):
        rope = Qwen3RotaryEmbedding(made)
    frequencies: torch.Tensor = rope.inv_freq.float()
    return frequencies, float(rope.attention_scaling)

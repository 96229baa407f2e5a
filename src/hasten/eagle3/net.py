"""The drafter's network: features and embeddings in, out the state that says the next token.

A row is a *pair*: a feature of position i, and the embedding of the token at i + 1. Out comes the
state that says token i + 2, and that stands in for the feature of position i + 1 while that token
is only drafted. Parameters carry the published names. Serving (`forward`, with a cache) and
training (`hasten.train.eagle3.unroll`) run the same layers.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from hasten.dflash.config import SLIDING
from hasten.dflash.net import _MLP, DraftCache, RMSNorm, _frequencies, _turned
from hasten.eagle3.config import Eagle3Config

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines ``(b, 1, Q, head_dim)``."""


class Eagle3Net(nn.Module):
    """The network of a drafter; see the module. Its head is its own; embeddings aren't part of
    it."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        size, width, taps = config.hidden_size, config.target_hidden_size, len(config.taps)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(taps * width, config.eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, config.eps) for _ in range(taps))
        self.fc = nn.Linear(taps * width, size, bias=False)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(size, config.eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        # Not a buffer: those follow the network to lower precisions.
        self._frequencies, self._rope_scale = _frequencies(cast(Any, config))

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The target's states side by side ``(..., K * target_hidden_size)``, in the order of
        `Eagle3Config.taps`, as the drafter's features ``(..., H)``."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self.config.taps), -1)
            features = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1
            )
        out: torch.Tensor = self.fc(features)
        return out

    def forward(
        self,
        embeds: torch.Tensor,
        state: torch.Tensor,
        positions: torch.Tensor,
        cache: DraftCache,
        mask: torch.Tensor | None = None,
        near: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What the next step is fed, ``(b, Q, H)``; `logits` reads it.

        embeds     embeddings of the pairs' tokens ``(b, Q, H)``
        state      their features ``(b, Q, H)``: of `fuse`, or what this gave for the row before
        positions  int64 ``(b, Q)``
        cache      holds the rows that came before, and takes these
        mask       bool ``(b, Q, rows)``: what each row sees of the cache's rows and of these; None:
                   everything. near: the same for sliding layers, where there are some
        """
        rotary = self.rotary(positions, state.dtype)
        group = self.config.num_heads // self.config.num_kv_heads
        seen, slid = (
            None if each is None else each.repeat(1, group, 1).unsqueeze(1) for each in (mask, near)
        )
        for layer in self.stack:
            rows, residual = layer.enter(embeds, state)
            q, k, v = layer.self_attn.project(rows, rotary)
            keys, values = cache.write(layer.index, k, v)
            # All heads that share keys go through one product: rows of a group are stacked.
            grouped = q.reshape(len(q), keys.shape[1], -1, q.shape[3])
            mixed = F.scaled_dot_product_attention(
                grouped, keys, values, attn_mask=slid if layer.slides else seen
            )
            state = layer.leave(residual, mixed.reshape(q.shape))
        cache.keep(positions.shape[1])
        return self.fed_back(state)

    @property
    def stack(self) -> list[Layer]:
        """The layers, first to last."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def fed_back(self, state: torch.Tensor) -> torch.Tensor:
        """The last layer's output as the next step takes it."""
        return self.norm(state) if self.config.norm_output else state

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """Float32 logits ``(..., draft_vocab_size)`` of what `forward` gave."""
        normed = out if self.config.norm_output else self.norm(out)
        said: torch.Tensor = self.lm_head(normed)
        return said.float()

    def rotary(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotary:
        """Of `positions` ``(b, Q)``, computed in float32."""
        self._frequencies = self._frequencies.to(positions.device)
        angles = positions.unsqueeze(-1).float() * self._frequencies
        both = torch.cat([angles, angles], -1).unsqueeze(1)
        return (both.cos() * self._rope_scale).to(dtype), (both.sin() * self._rope_scale).to(dtype)


class Layer(nn.Module):
    """A decoder layer; the first one reads embedding and feature side by side."""

    def __init__(self, config: Eagle3Config, index: int) -> None:
        super().__init__()
        self.index, self.slides = index, config.layer_types[index] == SLIDING
        self._normed_residual = config.norm_before_residual
        size = config.hidden_size
        if index == 0:
            self.hidden_norm = RMSNorm(size, config.eps)
        self.input_layernorm = RMSNorm(size, config.eps)
        self.self_attn = Attention(config, 2 * size if index == 0 else size)
        self.post_attention_layernorm = RMSNorm(size, config.eps)
        self.mlp = _MLP(size, config.intermediate_size)

    def enter(self, embeds: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads ``(b, Q, 2 * H or H)``, and what its output is added to
        ``(b, Q, H)``."""
        if self.index:
            return self.input_layernorm(state), state
        normed = self.hidden_norm(state)
        rows = torch.cat([self.input_layernorm(embeds), normed], -1)
        return rows, normed if self._normed_residual else state

    def leave(self, residual: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The layer's output ``(b, Q, H)``, from what attention mixed ``(b, heads, Q,
        head_dim)``."""
        hidden = residual + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Attention(nn.Module):
    """The products of attention; what a row sees is decided by who calls."""

    def __init__(self, config: Eagle3Config, size: int) -> None:
        super().__init__()
        self.dim, self.heads, self.kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
        bias = config.attention_bias
        self.q_proj = nn.Linear(size, self.heads * self.dim, bias=bias)
        self.k_proj = nn.Linear(size, self.kv_heads * self.dim, bias=bias)
        self.v_proj = nn.Linear(size, self.kv_heads * self.dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.dim, config.hidden_size, bias=bias)
        if config.head_norms:
            self.q_norm = RMSNorm(self.dim, config.eps)
            self.k_norm = RMSNorm(self.dim, config.eps)
        self._normed = config.head_norms

    def project(
        self, rows: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q ``(b, heads, Q, head_dim)``, k and v ``(b, kv_heads, Q, head_dim)``; q and k are
        turned."""
        q = self._split(self.q_proj(rows), self.heads)
        k = self._split(self.k_proj(rows), self.kv_heads)
        if self._normed:
            q, k = self.q_norm(q), self.k_norm(k)
        v = self._split(self.v_proj(rows), self.kv_heads)
        return _turned(q, *rotary), _turned(k, *rotary), v

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """``(b, Q, heads * head_dim)`` as ``(b, heads, Q, head_dim)``."""
        return x.view(*x.shape[:2], heads, self.dim).transpose(1, 2)

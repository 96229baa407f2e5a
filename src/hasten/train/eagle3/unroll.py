"""Training-time test: several draft steps over whole texts at once (arXiv 2503.01840, section 3).

Row t of step s is what serving gives after pair t, when s tokens have been drafted behind it: it
has seen the pairs up to t as they are, and its own outputs in place of the features of the s
positions after. Tokens are the text's own at every step. A row of a later step sees the first
step's rows up to t, and of each later step its own row alone: one more column of scores for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from hasten.eagle3.net import Eagle3Net

KeyValue = tuple[torch.Tensor, torch.Tensor]
"""``(b, heads, W, head_dim)`` each."""


def unrolled(
    net: Eagle3Net, embeddings: torch.Tensor, ids: torch.Tensor, features: torch.Tensor, steps: int
) -> Iterator[torch.Tensor]:
    """What the network gives at each of `steps` draft steps, ``(b, W, H)``: row t of step s says
    token t + 2 + s. W = S - 2; rows whose tokens lie beyond the text are of no use.

    embeddings  the table that tokens are read from ``(vocab, H)``
    ids         the texts int64 ``(b, S)``; features: the target's states side by side
                ``(b, S, K * target_hidden_size)``

    Layers attend to everything before, whatever their kind: windows aren't trained.
    """
    width = ids.shape[1] - 2
    places = torch.arange(width, device=ids.device).unsqueeze(0)
    shifted = F.pad(ids, (0, steps))
    state = net.fuse(features[:, :width])
    held: list[list[KeyValue]] = [[] for _ in net.stack]
    for step in range(steps):
        tokens = shifted[:, 1 + step : 1 + step + width]
        embeds = F.embedding(tokens, embeddings).to(state.dtype)
        rotary = net.rotary(places + step, state.dtype)
        for layer, before in zip(net.stack, held, strict=True):
            rows, residual = layer.enter(embeds, state)
            q, k, v = layer.self_attn.project(rows, rotary)
            group = q.shape[1] // k.shape[1]
            before.append((k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
            state = layer.leave(residual, attended(q, before))
        state = net.fed_back(state)
        yield state


def attended(q: torch.Tensor, held: Sequence[KeyValue]) -> torch.Tensor:
    """Attention of the latest step's queries ``(b, heads, W, head_dim)``: to the rows of
    ``held[0]`` up to their own, and to their own row of each later step."""
    keys, values = held[0]
    if len(held) == 1:
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True)
    rows = q.shape[2]
    q = q * q.shape[-1] ** -0.5
    hidden = torch.full((rows, rows), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    columns = [(q * k).sum(-1, keepdim=True) for k, _ in held[1:]]
    weights = torch.softmax(torch.cat([q @ keys.mT + hidden, *columns], -1).float(), -1).to(q.dtype)
    mixed = weights[..., :rows] @ values
    for at, (_, v) in enumerate(held[1:], start=rows):
        mixed = mixed + weights[..., at, None] * v
    return mixed

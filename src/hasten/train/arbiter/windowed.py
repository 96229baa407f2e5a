"""An exit module's outputs at a few rows of each text, as `ExitNet.steps` gives them for all rows.

Where only an answer of a few tokens is learned from, most of a text is a prompt whose rows nobody
asks the module about: they need keys and values, and no more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hasten.train.exit_nets import ExitNet


@dataclass(slots=True)
class Window:
    """Texts, padded at their ends, and the rows that are asked about: runs of consecutive rows.

    state    states at the exit ``(texts, rows, hidden)``; deep: at the deep layers
    rows     which rows, int64 ``(texts, count)``
    places   where each stands in its run, from 0, int64 ``(texts, count)``
    """

    state: torch.Tensor
    deep: list[torch.Tensor]
    rows: torch.Tensor
    places: torch.Tensor

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """These rows ``(texts, count, size)`` of ``(texts, rows, size)``."""
        return x.gather(1, self.rows.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def outputs(net: ExitNet, window: Window, steps: int) -> list[torch.Tensor]:
    """For each of `steps` draft steps the outputs ``(texts, count, hidden)`` before the last norm.

    Step k (from 0) means nothing at the first k rows of a run: nothing was drafted before it.
    """
    config = net.config
    if config.kind == "affine":
        return [net.affine(window.of(window.state))]
    feature = None
    if config.deep:
        feature = F.pad(net.fused(window.deep), (0, 0, 1, 0))[:, :-1]
    every = torch.arange(window.state.shape[1], device=window.rows.device).unsqueeze(0)
    keys, values = _keys_values(net, window.state, feature, every)
    state = window.of(window.state)
    feature = None if feature is None else window.of(feature)
    made: list[torch.Tensor] = []
    own: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(steps):
        if step:
            feature = F.pad(made[-1], (0, 0, 1, 0))[:, :-1]
            own.append(_keys_values(net, state, feature, window.rows))
        made.append(_block(net, state, feature, window.rows, (keys, values), own))
        if feature is None:
            break
    return made


def _inputs(net: ExitNet, state: torch.Tensor, feature: torch.Tensor | None) -> torch.Tensor:
    """What q, k and v are made from."""
    x = _norm(net, state, net.input_norm)
    if feature is None:
        return x
    return torch.cat([x, _norm(net, feature, net.deep_norm)], -1)


def _keys_values(
    net: ExitNet, state: torch.Tensor, feature: torch.Tensor | None, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated keys, and values, each ``(texts, kv_heads, rows, head_dim)``; `rows` are their
    positions, ``(1 or texts, rows)``."""
    config = net.config
    weight = net.qkv[config.heads * config.head_dim :]
    both = F.linear(_inputs(net, state, feature), weight)
    both = both.view(*both.shape[:2], -1, config.head_dim).transpose(1, 2)
    keys, values = both.split_with_sizes([config.kv_heads, config.kv_heads], 1)
    return _rotate(net, keys, rows), values


def _block(
    net: ExitNet,
    state: torch.Tensor,
    feature: torch.Tensor | None,
    rows: torch.Tensor,
    first: tuple[torch.Tensor, torch.Tensor],
    own: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """One draft step at the window's rows, which see rows of the first step up to their own less
    the steps since, and one row of each step in between."""
    config = net.config
    x = _inputs(net, state, feature)
    if feature is None:
        residual = F.linear(state, net.skip)
    else:
        residual = feature + F.linear(x[..., : config.hidden], net.skip)
    q = F.linear(x, net.qkv[: config.heads * config.head_dim])
    q = q.view(*q.shape[:2], -1, config.head_dim).transpose(1, 2)
    q = _rotate(net, q, rows) * config.head_dim**-0.5
    group = config.heads // config.kv_heads
    scores = q @ first[0].repeat_interleave(group, 1).mT
    step = len(own)
    columns = torch.arange(scores.shape[-1], device=rows.device)
    hidden = columns.view(1, 1, -1) > (rows - step).unsqueeze(-1)
    scores = scores.masked_fill(hidden.unsqueeze(1), -math.inf)
    parts, kept = [scores], []
    for back, (k, v) in zip(range(step - 1, -1, -1), own, strict=True):
        k, v = (_back(x.repeat_interleave(group, 1), back) for x in (k, v))
        parts.append((q * k).sum(-1, keepdim=True))
        kept.append(v)
    weights = torch.softmax(torch.cat(parts, -1).float(), -1).to(q.dtype)
    seen = first[0].shape[2]
    mixed = weights[..., :seen] @ first[1].repeat_interleave(group, 1)
    for at, v in enumerate(kept):
        mixed = mixed + weights[..., seen + at, None] * v
    out = residual + F.linear(mixed.transpose(1, 2).flatten(2), net.out)
    if config.inner:
        gate, up = F.linear(_norm(net, out, net.mlp_norm), net.gate_up).chunk(2, -1)
        out = out + F.linear(F.silu(gate) * up, net.down)
    return out


def _norm(net: ExitNet, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x.float(), (net.config.hidden,), weight, net.config.eps)


def _rotate(net: ExitNet, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``(texts, heads, rows, head_dim)`` at these positions."""
    turn = (rows.unsqueeze(-1) * net.inv_freq).unsqueeze(1)
    cos, sin = turn.cos(), turn.sin()
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _back(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Row i holds what was in row i - rows."""
    return F.pad(x, (0, 0, rows, 0))[:, :, : x.shape[2]] if rows else x

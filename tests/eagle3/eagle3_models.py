"""Tiny EAGLE-3 drafters with random tensors, over the tiny fused target of the exits' tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from hasten.dflash.net import DraftCache
from hasten.eagle3 import store
from hasten.eagle3.bank import Eagle3Bank, assemble
from hasten.eagle3.config import Eagle3Config
from hasten.eagle3.net import Eagle3Net
from hasten.eagle3.store import Loaded
from hasten.targets.base import Target, TargetInfo
from hasten.targets.fused_weights import make_linear
from tests.exits import exit_models as tiny
from tests.exits.exit_tensors import VOCAB

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "vocab_size": VOCAB,
    "taps": (2, 3, 5),
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "qwen3": {"head_norms": True},
    "biases": {"attention_bias": True},
    "two layers": {"num_layers": 2, "norm_before_residual": True},
    "five taps": {"taps": (1, 2, 3, 4, 5)},
    "another head_dim": {"head_dim": 12},
    "sliding": {
        "num_layers": 2,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 3,
    },
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
}
"""Every variant of a description."""


def config(**changes: Any) -> Eagle3Config:
    return Eagle3Config(**{**SIZES, **changes})


def net(made: Eagle3Config, seed: int = 0) -> Eagle3Net:
    """Random tensors; nothing of the global generator is used."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        out = Eagle3Net(made)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in out.state_dict().items():
        drawn = torch.randn(value.shape, generator=generator)
        is_norm = "norm" in name
        tensors[name] = 1.0 + 0.2 * drawn if is_norm else 1.5 * drawn * value.shape[-1] ** -0.5
    out.load_state_dict(tensors, assign=True)
    return out.eval().requires_grad_(False)


def loaded(
    made: Eagle3Config,
    seed: int = 0,
    ids: Sequence[int] | None = None,
    embeddings: torch.Tensor | None = None,
) -> Loaded:
    known = None if ids is None else torch.tensor(sorted(ids))
    return Loaded(made, net(made, seed), known, embeddings, "", {})


def bank(
    over: Target | None = None, ids: Sequence[int] | None = None, seed: int = 0, **changes: Any
) -> Eagle3Bank:
    """A drafter on the tiny target, its products torch's own."""
    if ids is not None:
        changes["draft_vocab_size"] = len(ids)
    return assemble(over or tiny.target(), loaded(config(**changes), seed, ids), make_linear)


def save_for(folder: Path, info: TargetInfo, *, ids: Sequence[int] | None = None) -> Path:
    """A drafter for this target, in a folder."""
    made = config(
        hidden_size=info.hidden_size,
        vocab_size=info.vocab_size,
        taps=(1, info.num_layers - 1),
        draft_vocab_size=info.vocab_size if ids is None else len(ids),
    )
    known = None if ids is None else torch.tensor(sorted(ids))
    store.save(folder, made, net(made), known, {"target": info.fingerprint})
    return folder


def uncached(
    made: Eagle3Net,
    embeds: torch.Tensor,
    features: torch.Tensor,
    path: torch.Tensor,
    first: int = 0,
) -> torch.Tensor:
    """The drafter's logits after all of a text's pairs and a drafted path, from nothing:
    ``(draft_vocab,)``.

    embeds ``(n, H)`` and features ``(n, K * Ht)`` of the pairs, the first at position `first`;
    path ``(m, H)``: embeddings of the drafted tokens
    """
    count, cache = len(embeds), DraftCache()
    mask = torch.ones(count, count, dtype=torch.bool).tril()[None]
    positions = torch.arange(first, first + count)[None]
    state = made(embeds[None], made.fuse(features)[None], positions, cache, mask)[:, -1:]
    for at in range(len(path)):
        state = made(path[None, at : at + 1], state, positions[:, -1:] + 1 + at, cache)
    return made.logits(state[0, 0])


# -- the arithmetic once more, as the papers have it -----------------------------------------------


def reference(
    made: Eagle3Net,
    embeds: torch.Tensor,
    features: torch.Tensor,
    drafted: int = 0,
    first: int = 0,
    parents: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
) -> torch.Tensor:
    """What the network gives for a whole sequence of pairs, row by row without any cache,
    ``(n, H)``; in plain products over the published tensors.

    embeds    ``(n, H)``; features ``(n - drafted, K * Ht)`` of the rows that aren't drafted
    drafted   the last rows: each is fed with what came out of its parent's row
    first     position of the first row
    parents   of the drafted rows, among all rows; None: a chain. depths: from the last pair on
    """
    config, tensors = made.config, made.state_dict()
    count = len(embeds)
    known = count - drafted
    parents = list(parents) if parents is not None else list(range(known - 1, count - 1))
    depths = list(depths) if depths is not None else list(range(1, drafted + 1))
    positions = [first + i for i in range(known)] + [first + known - 1 + d for d in depths]
    seen = [list(range(i + 1)) for i in range(known)]
    for i, parent in enumerate(parents):
        seen.append([*seen[parent], known + i])
    outs: list[torch.Tensor] = []
    keys: list[list[torch.Tensor]] = [[] for _ in range(config.num_layers)]
    values: list[list[torch.Tensor]] = [[] for _ in range(config.num_layers)]
    for row in range(count):
        if row < known:
            parts = features[row].split(config.target_hidden_size)
            if config.fc_norm:
                parts = tuple(
                    rms(part, tensors[f"fc_norm.{i}.weight"], config.eps)
                    for i, part in enumerate(parts)
                )
            fused = torch.cat(parts)
            if config.norm_before_fc:
                fused = rms(fused, tensors["input_norm.weight"], config.eps)
            x = tensors["fc.weight"] @ fused
        else:
            x = outs[parents[row - known]]
        for layer in range(config.num_layers):
            x = _layer(made, layer, embeds[row], x, row, positions, seen[row], keys, values)
        outs.append(rms(x, tensors["norm.weight"], config.eps) if config.norm_output else x)
    return torch.stack(outs)


def _layer(
    made: Eagle3Net,
    layer: int,
    embed: torch.Tensor,
    x: torch.Tensor,
    row: int,
    positions: Sequence[int],
    seen: Sequence[int],
    keys: list[list[torch.Tensor]],
    values: list[list[torch.Tensor]],
) -> torch.Tensor:
    config = made.config
    own = {
        name.removeprefix(f"layers.{layer}."): value
        for name, value in made.state_dict().items()
        if name.startswith(f"layers.{layer}.")
    }

    def product(name: str, value: torch.Tensor) -> torch.Tensor:
        out = own[f"self_attn.{name}_proj.weight"] @ value
        return out + own.get(f"self_attn.{name}_proj.bias", torch.zeros_like(out))

    residual, a = x, rms(x, own["input_layernorm.weight"], config.eps)
    if layer == 0:
        normed = rms(x, own["hidden_norm.weight"], config.eps)
        a = torch.cat([rms(embed, own["input_layernorm.weight"], config.eps), normed])
        residual = normed if config.norm_before_residual else x
    q, k = product("q", a).view(-1, config.head_dim), product("k", a).view(-1, config.head_dim)
    if config.head_norms:
        q = rms(q, own["self_attn.q_norm.weight"], config.eps)
        k = rms(k, own["self_attn.k_norm.weight"], config.eps)
    q, k = turn(q, positions[row], config), turn(k, positions[row], config)
    keys[layer].append(k)
    values[layer].append(product("v", a).view(-1, config.head_dim))
    if config.layer_types[layer] == "sliding_attention":
        assert config.sliding_window is not None
        near = positions[row] - config.sliding_window
        seen = [i for i in seen if positions[i] > near]
    heads, group = [], config.num_heads // config.num_kv_heads
    for head in range(config.num_heads):
        k_all = torch.stack([keys[layer][i][head // group] for i in seen])
        v_all = torch.stack([values[layer][i][head // group] for i in seen])
        weights = torch.softmax(k_all @ q[head] * config.head_dim**-0.5, 0)
        heads.append(weights @ v_all)
    h = residual + product("o", torch.cat(heads))
    z = rms(h, own["post_attention_layernorm.weight"], config.eps)
    gate, up = own["mlp.gate_proj.weight"] @ z, own["mlp.up_proj.weight"] @ z
    return h + own["mlp.down_proj.weight"] @ (F.silu(gate) * up)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def turn(x: torch.Tensor, position: int, config: Eagle3Config) -> torch.Tensor:
    half = config.head_dim // 2
    angles = position * config.rope_theta ** -(torch.arange(half) / half)
    if config.rope_scaling is not None:
        angles = angles / config.rope_scaling["factor"]
    low, high = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def said(made: Eagle3Net, out: torch.Tensor) -> torch.Tensor:
    """Logits of what `reference` gave."""
    tensors = made.state_dict()
    if not made.config.norm_output:
        out = rms(out, tensors["norm.weight"], made.config.eps)
    return out @ tensors["lm_head.weight"].T

"""Which transformers configs the fused decoder can run, and why not the others."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hasten.targets.fused_weights import Shape

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Model types whose block is ours, and the class each must name."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes the decoder runs in."""

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Types whose frequencies don't depend on the length reached."""


def unsupported_reason(config: Any) -> str | None:
    """Why a model with this config can't run here, in plain words; None when it can."""
    kind = getattr(config, "model_type", None)
    if kind not in ARCHITECTURES:
        return f"model type {kind!r} isn't one of {', '.join(ARCHITECTURES)}"
    names = getattr(config, "architectures", None) or [ARCHITECTURES[kind]]
    if names[0] != ARCHITECTURES[kind]:
        return f"architecture {names[0]} isn't {ARCHITECTURES[kind]}"
    if getattr(config, "quantization_config", None) is not None:
        return "the weights are quantized"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r} isn't 'silu'"
    if config.num_attention_heads % config.num_key_value_heads:
        return "the query heads don't divide evenly among the key heads"
    if head_dim(config) % 2:
        return f"head size {head_dim(config)} is odd"
    bidirectional = getattr(config, "use_bidirectional_attention", False)
    if bidirectional or not getattr(config, "is_causal", True):
        return "attention isn't causal"
    return _window_reason(config) or _rope_reason(config)


def head_dim(config: Any) -> int:
    """Features of an attention head."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def _window_reason(config: Any) -> str | None:
    """Sliding windows are fine only where they are never reached."""
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if others:
        return f"it has layers of kind {', '.join(sorted(others))}"
    window = config.sliding_window if config.model_type == "mistral" else None
    if window is not None and window < config.max_position_embeddings:
        return f"attention slides over a window of {window} tokens"
    return None


def _rope_reason(config: Any) -> str | None:
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    if kind not in _ROPE_TYPES:
        return f"rotary embedding of type {kind!r} isn't one of {', '.join(_ROPE_TYPES)}"
    part = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
    if part not in (None, 1.0):
        return "only a part of each head is rotated"
    return None


def read_config(
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    native: bool = False,
    bits: int = 0,
    cache: torch.dtype | None = None,
) -> tuple[Shape, torch.Tensor]:
    """Sizes, and rotary frequencies float32 ``(head_dim / 2,)``, of a supported config.

    `native`, `bits` and `cache` are `Shape`'s; a cache of None is the kernels' own choice.
    """
    if cache is None:
        # torch's float32 product is the faster one for few rows, our own reads half as much.
        cache = torch.float32 if device.type == "cpu" and not native else dtype
    with torch.no_grad(), torch.device("cpu"):
        rope = LlamaRotaryEmbedding(copy.deepcopy(config))
    shape = Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
        eps=config.rms_norm_eps,
        head_norm=config.model_type == "qwen3",
        rope_scale=float(rope.attention_scaling),
        dtype=dtype,
        device=device,
        cache=cache,
        native=native,
        bits=bits,
    )
    frequencies: torch.Tensor = rope.inv_freq
    return shape, frequencies

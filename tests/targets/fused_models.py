"""Tiny models of the Llama family, and what the fused target's tests ask of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers as hf
from tests.targets import tiny_models as tiny

from hasten.targets.base import Rows
from hasten.targets.cache import CachedSequence
from hasten.targets.fused import FusedTarget

TOLERANCE = 1e-4
LONG = 600
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def llama(**changes: Any) -> Callable[[], Any]:
    return lambda: (hf.LlamaForCausalLM, hf.LlamaConfig(**{**tiny.SHAPE, **changes}))


def mistral() -> Any:
    return hf.MistralForCausalLM, hf.MistralConfig(**tiny.SHAPE, sliding_window=None)


def qwen2() -> Any:
    return hf.Qwen2ForCausalLM, hf.Qwen2Config(**tiny.SHAPE, tie_word_embeddings=True)


def qwen3(**changes: Any) -> Callable[[], Any]:
    shape = {**tiny.SHAPE, "head_dim": 12, **changes}
    return lambda: (hf.Qwen3ForCausalLM, hf.Qwen3Config(**shape))


KINDS: dict[str, Callable[[], Any]] = {
    "llama": llama(),
    "multi-query": llama(num_key_value_heads=1),
    "no-groups": llama(num_key_value_heads=4),
    "biases": llama(attention_bias=True, mlp_bias=True),
    "wide-heads": llama(head_dim=16),
    "tied": llama(tie_word_embeddings=True),
    "llama3-rope": llama(rope_parameters=LLAMA3),
    "linear-rope": llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
    ),
    "yarn-rope": llama(rope_parameters=YARN),
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3(),
    "qwen3-bias": qwen3(attention_bias=True),
}


WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {"kernels": "native"},
    "float32-half-cache": {"kernels": "native", "kv_dtype": torch.bfloat16},
    "bfloat16": {"kernels": "native", "dtype": torch.bfloat16},
    "bfloat16-wide-cache": {
        "kernels": "native",
        "dtype": torch.bfloat16,
        "kv_dtype": torch.float32,
    },
    "float32-int8-cache": {"kernels": "native", "kv_dtype": torch.int8},
    "bfloat16-int8-cache": {
        "kernels": "native",
        "dtype": torch.bfloat16,
        "kv_dtype": torch.int8,
    },
    "int8": {"dtype": torch.bfloat16, "quantize": "int8"},
    "int4": {"quantize": "int4"},
}
"""What the native kernels run: options of `fused`."""


def random_model(kind: Callable[[], Any] = KINDS["llama"], **changes: Any) -> Any:
    """A tiny model whose norms and biases are random too."""
    model = tiny.build(kind, **changes)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith("bias"):
            parameter.data.normal_(std=0.3, generator=generator)
    return model


def fused(
    model: Any, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any
) -> FusedTarget:
    return FusedTarget.from_tensors(
        model.config,
        model.state_dict(),
        name="tiny",
        dtype=dtype,
        device=torch.device(device),
        eos_ids=[2],
        **options,
    )


def close(got: torch.Tensor | None, want: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert got is not None
    # Kernels differ by CPU: a logit of 10 moved by 1.02e-4 on one with AMX.
    torch.testing.assert_close(got.float().cpu(), want.float(), atol=tolerance, rtol=1e-5)


def chain(sequence: CachedSequence, tokens: Sequence[int]) -> Rows:
    return Rows(sequence, tuple(tokens), tuple(range(-1, len(tokens) - 1)))


TREE = ((11, 12, 13, 14, 15, 16, 17), (-1, 0, 0, 1, 2, 2, 5))
PATHS = ([0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 5], [0, 2, 5, 6])
"""For each row of TREE its ancestors and itself."""

"""Tiny random models of many architectures; the global random generators stay as they were."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers as hf

FORWARD = inspect.signature(hf.LlamaForCausalLM.forward).parameters
CACHE_NAME = "cache" if "cache" in FORWARD else "past_key_values"
"""What this version of transformers calls a forward's cache."""
VOCAB = 199
WINDOW = 8
CONTEXT = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Weights are large for a transformer's, so that every position bears on every logit."""

ALTERNATING = {
    "head_dim": 8,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


def llama() -> Any:
    return hf.LlamaForCausalLM, hf.LlamaConfig(**SHAPE)


def qwen2() -> Any:
    return hf.Qwen2ForCausalLM, hf.Qwen2Config(**SHAPE)


def qwen3() -> Any:
    return hf.Qwen3ForCausalLM, hf.Qwen3Config(**SHAPE, head_dim=8)


def mistral() -> Any:
    """All layers slide, with a window of 8."""
    return hf.MistralForCausalLM, hf.MistralConfig(**SHAPE, sliding_window=WINDOW)


def gemma2() -> Any:
    return hf.Gemma2ForCausalLM, hf.Gemma2Config(**SHAPE, **ALTERNATING, query_pre_attn_scalar=8)


def gemma3() -> Any:
    return hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(
        **SHAPE, **ALTERNATING, query_pre_attn_scalar=8
    )


def llama4() -> Any:
    """Chunked attention, in chunks of 8, beside full attention."""
    return hf.Llama4ForCausalLM, hf.Llama4TextConfig(
        **SHAPE,
        head_dim=8,
        intermediate_size_mlp=48,
        attention_chunk_size=WINDOW,
        layer_types=["chunked_attention", "full_attention", "chunked_attention"],
        no_rope_layers=[1, 0, 1],
        num_local_experts=2,
        num_experts_per_tok=1,
    )


def mixtral() -> Any:
    return hf.MixtralForCausalLM, hf.MixtralConfig(
        **SHAPE, num_local_experts=4, num_experts_per_tok=2
    )


def gpt2() -> Any:
    return hf.GPT2LMHeadModel, hf.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=CONTEXT,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )


def mpt() -> Any:
    """ALiBi: positions are cache slots."""
    return hf.MptForCausalLM, hf.MptConfig(
        vocab_size=VOCAB,
        d_model=32,
        n_heads=4,
        n_layers=3,
        max_seq_len=CONTEXT,
        initializer_range=0.3,
    )


def bloom() -> Any:
    """ALiBi built from a 2-D mask: a 4-D mask raises."""
    return hf.BloomForCausalLM, hf.BloomConfig(
        vocab_size=VOCAB, hidden_size=32, n_head=4, n_layer=3, initializer_range=0.3
    )


def lfm2() -> Any:
    """Short convolutions beside attention: their state can be cut, but not bent into a tree."""
    return hf.Lfm2ForCausalLM, hf.Lfm2Config(
        **SHAPE, layer_types=["conv", "full_attention", "conv"], block_multiple_of=8
    )


def mamba2() -> Any:
    return hf.Mamba2ForCausalLM, hf.Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=3,
        num_heads=4,
        head_dim=16,
        state_size=8,
        n_groups=1,
        expand=2,
        chunk_size=8,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )


def falcon_mamba() -> Any:
    """Its forward ignores the state when several rows come at once."""
    return hf.FalconMambaForCausalLM, hf.FalconMambaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=3,
        state_size=4,
        expand=2,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )


def jamba() -> Any:
    return hf.JambaForCausalLM, hf.JambaConfig(
        **SHAPE,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
    )


def qwen3_next() -> Any:
    return hf.Qwen3NextForCausalLM, hf.Qwen3NextConfig(
        **SHAPE,
        head_dim=8,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )


def minimax() -> Any:
    """Insists on a cache class of its own."""
    return hf.MiniMaxForCausalLM, hf.MiniMaxConfig(
        **SHAPE,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=2,
        num_experts_per_tok=1,
        block_size=8,
    )


def build(
    kind: Callable[[], Any],
    *,
    attention: str | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    """A model in eval mode with weights drawn from `seed`; `changes` go to its config."""
    model_class, config = kind()
    for name, value in changes.items():
        setattr(config, name, value)
    if attention is not None:
        config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        return model_class(config).to(dtype).eval()


def random_ids(count: int, seed: int = 0) -> list[int]:
    """Ids above the special ones."""
    generator = random.Random(seed)
    return [generator.randrange(3, VOCAB) for _ in range(count)]


def fresh_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits ``(len(ids), vocab)`` of one pass without a cache."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        return logits


def greedy_ids(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers' own greedy `generate` answers, end-of-sequence ids ignored."""
    config = hf.GenerationConfig(
        max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    with torch.no_grad():
        out = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=config,
        )
    ids: list[int] = out[0, len(prompt) :].tolist()
    return ids

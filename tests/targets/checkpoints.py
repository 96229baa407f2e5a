"""Tiny random models for loading tests, and their logits by either way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hasten.targets.load import Loaded, load_target

Saved = Callable[..., tuple[Path, Any]]
"""The fixture `saved`: writes a model and a tokenizer, gives the folder and the model."""

VOCAB = 64
IDS = [5, 9, 3, 3, 41, 7, 60, 2]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "bos_token_id": 0,
}


def tiny_llama(seed: int = 0, **more: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **more})).eval()


def tiny_qwen3(**more: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 16, **more})).eval()


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(2)
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    config.eos_token_id = config.bos_token_id = 1
    return GPT2LMHeadModel(config).eval()


def logits_of(loaded: Loaded) -> torch.Tensor:
    sequence = loaded.target.open()
    logits = loaded.target.prefill(sequence, IDS, all_logits=True).logits
    loaded.target.close(sequence)
    assert logits is not None
    return logits.float().cpu()


def logits_of_model(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].float()


def load(model: Any, **options: Any) -> Loaded:
    if not isinstance(model, (torch.nn.Module, tuple)):
        options.setdefault("device", "cpu")
    return load_target(model, **options)

"""A tiny checkpoint in the layout of LayerSkip's, and exit modules in folders for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hasten.exits import store
from hasten.policies.cost_model import CostTable
from hasten.policies.exit_calibration import Calibration
from tests.exits import exit_models as tiny
from tests.tiny_llm import make_tokenizer

COSTS = CostTable("tiny", (1, 4, 16, 64), (64,), ((10.0, 11.0, 14.0, 26.0),))

LAYERSKIP: dict[str, Any] = {
    "_name_or_path": "",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": 257,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 16,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 512,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.2",
    "use_cache": True,
    "vocab_size": 258,
}
"""The fields of Llama-3.2-1B's config.json with its 16 layers, sizes apart. LayerSkip's checkpoint
of that model is gated and was not read; public code loads it as this ordinary Llama, without fields
of its own."""


def save_checkpoint(folder: Path) -> None:
    """A checkpoint in LayerSkip's layout with random weights; its upper layers change little."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    (folder / "config.json").write_text(json.dumps(LAYERSKIP, indent=2))
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    make_tokenizer().save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**LAYERSKIP, "initializer_range": 0.3}))
    tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":  # tied: not in the file
            continue
        small = name.endswith(("o_proj.weight", "down_proj.weight")) and ".0." not in name
        tensors[name] = ((0.2 if small else 1.0) * value).to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def save_modules(
    folder: Path, fingerprint: str, kinds: Sequence[tuple[str, int]], **facts: Any
) -> str:
    made = [tiny.config(kind, layer, 32, deep_at=(8, 16)) for kind, layer in kinds]
    tensors = [(each, tiny.near_tensors(each)) for each in made]
    store.save(folder, fingerprint, range(0, 258, 2), tensors, facts)
    return str(folder)


CALIBRATION = {
    "layers": [0, 2, 4],
    **json.loads(Calibration.constant([0.3, 0.5, 0.7]).to_json()),
}

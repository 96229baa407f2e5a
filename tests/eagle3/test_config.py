"""Descriptions of drafters: every variant seen is read, other drafters are refused by name."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from hasten.eagle3.config import Eagle3Config, read_config
from hasten.errors import ModelError
from tests.eagle3.eagle3_models import KINDS, config
from tests.exits.exit_tensors import LAYERS

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "bias": False,
    "bos_token_id": 128000,
    "draft_vocab_size": 32000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "vocab_size": 128256,
}
"""The authors' layout, with the sizes of the drafter of an 8B Llama."""

SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.2.0",
    "draft_vocab_size": 32000,
    "norm_before_residual": True,
    "norm_before_fc": False,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": None,
    "embed_requires_grad": False,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "vocab_size": 151936,
    },
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1,
             "accept_tolerance": 0.0}
        ],
        "verifier": {"name_or_path": "/private/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
    },
}  # fmt: skip
INNER: dict[str, Any] = SPECULATORS["transformer_layer_config"]


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`base` with keys set; those set to ``...`` are left out."""
    return {k: v for k, v in {**base, **changes}.items() if v is not ...}


def inner(**changes: Any) -> dict[str, Any]:
    return changed(SPECULATORS, transformer_layer_config=changed(INNER, **changes))


def test_the_authors_layout_is_read() -> None:
    made = read_config(LLAMA_8B, target_layers=32)
    assert made == Eagle3Config(
        hidden_size=4096,
        num_layers=1,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
        taps=(2, 16, 29),
        draft_vocab_size=32000,
        eps=1e-5,
        rope_theta=10_000.0,
    )
    assert not made.norm_before_residual
    assert made.target_hidden_size == 4096
    plain = changed(LLAMA_8B, architectures=["LlamaForCausalLM"], num_hidden_layers=...)
    assert read_config(plain, target_layers=32) == made


def test_the_layout_of_speculators_is_read() -> None:
    made = read_config(SPECULATORS, target_layers=36)
    assert made.taps == (2, 18, 33)
    assert made.norm_before_residual
    assert (made.rope_theta, made.head_dim, made.draft_vocab_size) == (1e6, 128, 32000)
    off = (made.norm_before_fc, made.fc_norm, made.norm_output, made.head_norms)
    assert off == (False,) * 4
    draft = changed(SPECULATORS, architectures=["Eagle3DraftModel"])
    assert read_config(draft, target_layers=36) == made


def test_taps_by_rule_are_the_published_ones() -> None:
    for layers, taps in (
        (32, (2, 16, 29)),
        (36, (2, 18, 33)),
        (30, (2, 15, 27)),
        (28, (2, 14, 25)),
    ):
        assert read_config(LLAMA_8B, target_layers=layers).taps == taps


AUX = "eagle_aux_hidden_state_layer_ids"
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tuple indices": ({**SPECULATORS, AUX: [2, 18, 33]}, {"taps": (2, 18, 33)}),
    "five of them": ({**SPECULATORS, AUX: [2, 8, 18, 26, 33]}, {"taps": (2, 8, 18, 26, 33)}),
    "layer outputs": ({**LLAMA_8B, "eagle_config": {AUX: [1, 17, 32]}}, {"taps": (2, 18, 33)}),
    "tuple indices at the top": ({**LLAMA_8B, AUX: [2, 18, 33]}, {"taps": (2, 18, 33)}),
    "embeddings too": ({**LLAMA_8B, "eagle_config": {AUX: [-1, 17, 32]}}, {"taps": (0, 18, 33)}),
    "norm_before_fc": ({**SPECULATORS, "norm_before_fc": True}, {"norm_before_fc": True}),
    "fc_norm": ({**SPECULATORS, "fc_norm": True}, {"fc_norm": True}),
    "norm_output": ({**SPECULATORS, "norm_output": True}, {"norm_output": True}),
    "no norm before the residual": ({**SPECULATORS, "norm_before_residual": False},
                                    {"norm_before_residual": False}),
    "qwen3 layers": (inner(model_type="qwen3"), {"head_norms": True}),
    "two layers": (inner(num_hidden_layers=2),
                   {"num_layers": 2, "layer_types": ("full_attention",) * 2}),
    "head_dim of its own": (inner(head_dim=64), {"head_dim": 64}),
    "head_dim by the sizes": (inner(head_dim=...), {"head_dim": 128}),
    "rope_theta": (inner(rope_parameters=..., rope_theta=5e5), {"rope_theta": 5e5}),
    "no theta": (inner(rope_parameters=...), {"rope_theta": 1e4}),
    "yarn": (inner(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}),
             {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "old spelling": (inner(rope_parameters=..., rope_theta=1e6,
                           rope_scaling={"type": "linear", "factor": 2.0}),
                     {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "another width": ({**SPECULATORS, "target_hidden_size": 5120}, {"target_hidden_size": 5120}),
    "the whole vocabulary": ({**SPECULATORS, "draft_vocab_size": 151936},
                             {"draft_vocab_size": 151936}),
    "sliding": (inner(sliding_window=2048, use_sliding_window=True,
                      layer_types=["sliding_attention"]),
                {"sliding_window": 2048, "layer_types": ("sliding_attention",)}),
    "a window that is off": (inner(sliding_window=2048, use_sliding_window=False,
                                   layer_types=["sliding_attention"]), {}),
    "biases": (inner(attention_bias=True), {"attention_bias": True}),
    "a key of its target's": ({**LLAMA_8B, "num_nextn_predict_layers": 1}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_read(name: str) -> None:
    data, differs = VARIANTS[name]
    first = "transformer_layer_config" not in data
    base = read_config(LLAMA_8B if first else SPECULATORS, target_layers=36)
    made = read_config(json.loads(json.dumps(data)), target_layers=36)
    for field in Eagle3Config.__dataclass_fields__:
        assert getattr(made, field) == differs.get(field, getattr(base, field)), field


def test_a_folder_that_does_not_say_norm_before_residual_is_talked_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "hasten"):
        read_config(SPECULATORS, target_layers=36)
        read_config(LLAMA_8B, target_layers=36)
        assert not caplog.records
        data = changed(SPECULATORS, norm_before_residual=...)
        assert not read_config(data, target_layers=36).norm_before_residual
    assert "norm_before_residual" in caplog.text


def lossy(**changes: Any) -> dict[str, Any]:
    own = SPECULATORS["speculators_config"]
    return changed(
        SPECULATORS,
        speculators_config={
            **own, "proposal_methods": [{**own["proposal_methods"][0], **changes}]
        },
    )  # fmt: skip


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "eagle": (changed(SPECULATORS, speculators_model_type="eagle"), "EAGLE-1 or EAGLE-2"),
    "an older class": (changed(LLAMA_8B, architectures=["LlamaForCausalLMEagle"]), "EAGLE-1"),
    "an older type": (changed(LLAMA_8B, model_type="eagle", architectures=["EAGLEModel"]),
                      "EAGLE-1"),
    "the last state alone": ({**LLAMA_8B, "eagle_config": {"use_aux_hidden_state": False}},
                             "EAGLE-1"),
    "dflash": (changed(SPECULATORS, speculators_model_type="dflash"), "DFlash.*--method dflash"),
    "dflash's keys": ({"model_type": "qwen3", "dflash_config": {"mask_token_id": 1}}, "DFlash"),
    "dspark": (changed(SPECULATORS, speculators_model_type="dspark"), "DSpark"),
    "peagle": (changed(SPECULATORS, speculators_model_type="peagle",
                       architectures=["PEagleSpeculator"]), "P-EAGLE"),
    "mtp": (changed(SPECULATORS, speculators_model_type="mtp"), "MTP"),
    "mtp's class": (changed(LLAMA_8B, architectures=["DeepSeekMTPModel"]), "MTP"),
    "medusa": (changed(LLAMA_8B, architectures=["MedusaModel"], model_type="medusa"), "Medusa"),
    "medusa's keys": ({"medusa_num_heads": 3, "base_model_name_or_path": "x"}, "Medusa"),
    "hydra": ({"hydra_num_heads": 3}, "Hydra"),
    "an MLP": (changed(LLAMA_8B, model_type="mlp_speculator"), "MLP speculator"),
    "something new": (changed(SPECULATORS, speculators_model_type="independent"), "'independent'"),
    "lossy by rank": (lossy(verifier_accept_k=2), "verifier_accept_k 2.*set it to 1"),
    "lossy by tolerance": (lossy(accept_tolerance=0.1), "accept_tolerance 0.1.*set it to 0"),
    "both norms": ({**SPECULATORS, "norm_before_fc": True, "fc_norm": True}, "exclude each other"),
    "the last state": ({**SPECULATORS, AUX: [2, 18, 36]}, "last state"),
    "a layer beyond": ({**SPECULATORS, AUX: [2, 18, 37]}, "that has 36"),
    "no layer": ({**SPECULATORS, AUX: []}, "tapped layers"),
    "another kind of layers": (inner(model_type="gpt_oss"), "'gpt_oss'"),
    "another activation": (inner(hidden_act="gelu"), "gelu"),
    "biases in the MLP": (inner(mlp_bias=True), "no bias"),
    "rope that grows": (inner(rope_parameters={"rope_type": "dynamic"}), "dynamic"),
    "no width": (inner(hidden_size=...), "hidden_size.* is missing"),
    "heads that don't fit": (inner(num_key_value_heads=5), "multiple of kv heads"),
    "too many ids": ({**SPECULATORS, "draft_vocab_size": 151937}, "draft_vocab_size"),
    "a number": ({**SPECULATORS, "transformer_layer_config": 3}, "not the description"),
    "a list": ([1], "not the description"),  # type: ignore[dict-item]
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_something_else_is_refused_by_name(name: str) -> None:
    data, words = REFUSED[name]
    with pytest.raises(ModelError, match=words):
        read_config(data, target_layers=36)


@pytest.mark.parametrize("kind", KINDS)
def test_a_description_is_read_back_as_it_was_written(kind: str) -> None:
    more = {"draft_vocab_size": 50, "target_hidden_size": 48, "eps": 1e-5, "max_positions": 77}
    for changes in ({}, more, {"rope_theta": 5e5}):
        made = config(**{**KINDS[kind], **changes})
        data = json.loads(json.dumps(made.to_json()))
        assert read_config(data, target_layers=LAYERS) == made
        assert data["speculators_model_type"] == "eagle3"
        assert "model_type" not in data

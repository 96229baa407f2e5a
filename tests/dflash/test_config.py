"""Descriptions of drafters: every variant seen is read, other algorithms are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hasten.dflash.config import DFlashConfig, default_layers, read_config
from hasten.errors import ModelError
from tests.dflash.dflash_models import config

QWEN3_8B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "attention_bias": False,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""What the drafter of Qwen3-8B says."""

SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "block_size": 8,
    "aux_hidden_state_layer_ids": [2, 18, 33],
    "mask_token_id": 151669,
    "draft_vocab_size": 32000,
    "transformer_layer_config": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 3,
        "head_dim": 128,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000000},
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 7}]},
}


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`base` with keys set; those set to ``...`` are left out."""
    return {k: v for k, v in {**base, **changes}.items() if v is not ...}


def test_the_first_layout_is_read() -> None:
    made = read_config(QWEN3_8B)
    assert made == DFlashConfig(
        hidden_size=4096,
        num_layers=5,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=151936,
        num_target_layers=36,
        block_size=16,
        mask_token_id=151669,
        target_layer_ids=(1, 9, 17, 25, 33),
        rope_theta=1e6,
        max_positions=40960,
    )
    assert made.taps == (2, 10, 18, 26, 34)
    assert made.draft_vocab_size == 151936
    assert made.layer_types == ("full_attention",) * 5


HEAD = {
    "use_thresh_head_two_model": True,
    "thresh_head_direct_len": True,
    "thresh_head_bottleneck_dim": 64,
}
BARE = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "block_size inside": ({"block_size": ..., "dflash_config": {**BARE, "block_size": 8}},
                          {"block_size": 8}),
    "all at the top": ({"dflash_config": ..., **BARE}, {}),
    "layers by rule": ({"dflash_config": {"mask_token_id": 151669}}, {}),
    "rope_parameters": ({"rope_theta": ..., "rope_scaling": ...,
                         "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {}),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 4.0}},
             {"rope_scaling": {"factor": 4.0, "rope_type": "yarn"}}),
    "no layer_types": ({"layer_types": ...}, {}),
    "no window keys": ({"sliding_window": ..., "use_sliding_window": ...}, {}),
    "a length head": ({"dflash_config": {**BARE, **HEAD}}, {"length_head": 64}),
    "its usual width": ({"dflash_config": {**BARE, **HEAD, "thresh_head_bottleneck_dim": ...}},
                        {"length_head": 256}),
    "a head of another kind": ({"dflash_config": {**BARE, **HEAD, "thresh_head_direct_len": False}},
                               {"length_head": 0}),
    "older heads": ({"dflash_config": {**BARE, "use_prob_head": True}}, {}),
    "sliding": ({"layer_types": ["sliding_attention"] * 4 + ["full_attention"],
                 "sliding_window": 2048, "use_sliding_window": True},
                {"layer_types": ("sliding_attention",) * 4 + ("full_attention",),
                 "sliding_window": 2048}),
    "a window that is off": ({"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048},
                             {}),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_of_the_first_layout_is_read(name: str) -> None:
    changes, differs = VARIANTS[name]
    if isinstance(changes.get("dflash_config"), dict):
        changes = {**changes, "dflash_config": changed(changes["dflash_config"])}
    made = read_config(changed(QWEN3_8B, **changes))
    plain = read_config(QWEN3_8B)
    for field in DFlashConfig.__dataclass_fields__:
        assert getattr(made, field) == differs.get(field, getattr(plain, field)), field


def test_the_layers_of_the_rule_are_the_published_ones() -> None:
    assert default_layers(36, 5) == (1, 9, 17, 25, 33)
    assert default_layers(28, 5) == (1, 7, 13, 19, 25)
    assert default_layers(32, 5) == (1, 8, 15, 22, 29)
    assert default_layers(48, 5) == (1, 12, 23, 34, 45)
    assert default_layers(30, 5) == (1, 8, 14, 20, 27)
    assert default_layers(30, 3) == (1, 14, 27)
    assert default_layers(30, 1) == (15,)


def test_speculators_layout_is_read_and_its_layers_are_one_less() -> None:
    made = read_config(SPECULATORS, target_layers=36)
    assert made.target_layer_ids == (1, 17, 32)
    assert made.taps == (2, 18, 33)
    assert (made.block_size, made.num_layers, made.draft_vocab_size) == (8, 3, 32000)
    assert made.rope_theta == 5e6
    assert not made.sliding_window_non_causal
    assert made.num_target_layers == 36


def test_speculators_layers_by_rule() -> None:
    made = read_config(changed(SPECULATORS, aux_hidden_state_layer_ids=None), target_layers=36)
    assert made.taps == (2, 18, 33)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (changed(QWEN3_8B, architectures=["DFlash2DraftModel"]), "dflash2"),
        (changed(QWEN3_8B, architectures="DFlash2DraftModel"), "dflash2"),
        (changed(QWEN3_8B, auto_map=["dspark.DSparkModel"]), "dspark"),
        (changed(QWEN3_8B, rms_norm_eps=-1.0), "rms_norm_eps"),
        (changed(QWEN3_8B, rope_theta=-1.0), "rope_theta"),
        (changed(QWEN3_8B, model_type="dflash_2"), "dflash2"),
        (changed(QWEN3_8B, auto_map={"AutoModel": "dspark.DSparkModel"}), "dspark"),
        (changed(SPECULATORS, speculators_model_type="dspark"), "dspark"),
        (changed(SPECULATORS, speculators_model_type="eagle3"), "eagle3"),
        (changed(SPECULATORS, sample_from_anchor=True), "sample_from_anchor"),
        (changed(QWEN3_8B, hidden_act="gelu"), "gelu"),
        (changed(QWEN3_8B, rope_scaling={"rope_type": "dynamic"}), "dynamic"),
        (changed(QWEN3_8B, block_size=...), "block_size"),
        (changed(QWEN3_8B, hidden_size=...), "hidden_size"),
        (changed(QWEN3_8B, num_target_layers=..., dflash_config={"mask_token_id": 1}),
         "num_target_layers"),
        (changed(QWEN3_8B, dflash_config={**BARE, "mask_token_id": 151936}), "mask_token_id"),
        (changed(QWEN3_8B, dflash_config={**BARE, "target_layer_ids": [1, 36]}),
         "target_layer_ids"),
        (changed(QWEN3_8B, block_size=1), "block_size must be at least 2"),
        (changed(QWEN3_8B, layer_types=["sliding_attention"], sliding_window=4,
                 use_sliding_window=True), "layer_types"),
        (changed(SPECULATORS, aux_hidden_state_layer_ids=[2, 36]), "last state"),
        ({"model_type": "qwen3"}, "not the description of a DFlash drafter"),
    ],
)  # fmt: skip
def test_what_is_something_else_is_refused_by_name(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_config(data, target_layers=36 if "transformer_layer_config" in data else 0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"length_head": 16, "lookahead": 2, "draft_vocab_size": 50},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4,
         "sliding_window_non_causal": False},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 5e5,
         "attention_bias": True, "eps": 1e-5, "max_positions": 77},
    ],
)  # fmt: skip
def test_a_description_is_read_back_as_it_was_written(changes: dict[str, Any]) -> None:
    made = config(**changes)
    assert read_config(json.loads(json.dumps(made.to_json()))) == made

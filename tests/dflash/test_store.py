"""Drafters on disk: the published names, every layout, and refusals that say what is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hasten.dflash import store
from hasten.errors import ModelError
from hasten.targets.base import TargetInfo
from hasten.targets.catalog import resolve
from tests.dflash.dflash_models import config, net, save_for
from tests.exits import exit_models as tiny
from tests.exits.exit_tensors import LAYERS, VOCAB

LAYER = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
    "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
PUBLISHED = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
    f"layers.{i}.{name}.weight" for i in range(2) for name in LAYER
}
"""Names in the published checkpoints."""
LENGTH_HEAD = {
    f"thresh_head_two_model.{part}.{kind}"
    for part in ("down", "res.0", "out")
    for kind in ("weight", "bias")
}


def info() -> TargetInfo:
    return tiny.target().info


def write(folder: Path, data: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """A folder as others may have written it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def speculators(**changes: Any) -> dict[str, Any]:
    inner = {
        "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
    }  # fmt: skip
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": inner,
        "block_size": 5,
        "mask_token_id": 3,
        "aux_hidden_state_layer_ids": [2, 5],
        "draft_vocab_size": VOCAB,
        **changes,
    }


def same(one: store.Loaded, tensors: Mapping[str, torch.Tensor]) -> None:
    found = one.net.state_dict()
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert torch.equal(found[name], value), name


def test_the_tensors_written_are_the_published_ones(tmp_path: Path) -> None:
    for length_head, extra in ((0, set()), (6, LENGTH_HEAD)):
        made = config(length_head=length_head)
        store.save(tmp_path, made, net(made), None, {"target": "tiny"})
        found = load_file(tmp_path / "model.safetensors")
        assert found.keys() == PUBLISHED | extra
        assert {value.dtype for value in found.values()} == {torch.bfloat16}
        data = json.loads((tmp_path / "config.json").read_text())
        assert data["architectures"] == ["DFlashDraftModel"]
        assert data["dflash_config"]["target_layer_ids"] == [1, 4]
        assert not (tmp_path / "draft_vocabulary.safetensors").exists()


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    ids = torch.tensor([0, 3, 50, 198])
    made = config(length_head=6, lookahead=2, draft_vocab_size=4)
    about = {"target": info().fingerprint, "seed": 7}
    store.save(tmp_path, made, net(made), ids, about, dtype=torch.float32)
    got = store.load(tmp_path, info())
    assert got.config == made
    assert got.draft_ids is not None
    assert torch.equal(got.draft_ids, ids)
    assert (got.fingerprint, got.about["seed"], got.head) == (info().fingerprint, 7, None)
    same(got, net(made).state_dict())
    assert not any(value.requires_grad for value in got.net.parameters())
    assert not got.net.training
    half = store.load(tmp_path, info(), dtype=torch.bfloat16)
    assert {value.dtype for value in half.net.parameters()} == {torch.bfloat16}


def test_a_later_save_with_all_ids_forgets_the_list(tmp_path: Path) -> None:
    save_for(tmp_path, info(), ids=range(0, VOCAB, 2))
    save_for(tmp_path, info())
    assert store.load(tmp_path, info()).draft_ids is None


def test_shards_are_read(tmp_path: Path) -> None:
    made = config()
    tensors, names = net(made).state_dict(), sorted(PUBLISHED)
    data = made.to_json()
    write(tmp_path, data, {name: tensors[name] for name in names[:9]})
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    save_file({name: tensors[name] for name in names[9:]}, tmp_path / "model-2.safetensors")
    places = {name: f"model-{1 + (at >= 9)}.safetensors" for at, name in enumerate(names)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    same(store.load(tmp_path, info()), tensors)
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(ModelError, match="outside the folder"):
        store.load(tmp_path, info())


def test_speculators_folders_are_read_with_their_vocabulary_and_head(tmp_path: Path) -> None:
    ids = torch.arange(1, VOCAB, 3)
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[ids] = True
    tensors = net(config()).state_dict()
    head = torch.randn(len(ids), 32, generator=torch.Generator().manual_seed(2))
    more = {
        "embed_tokens.weight": torch.zeros(VOCAB, 32),
        "lm_head.weight": head,
        "d2t": ids - torch.arange(len(ids)),
        "t2d": known,
    }
    data = speculators(draft_vocab_size=len(ids))
    got = store.load(write(tmp_path, data, {**tensors, **more}), info())
    same(got, tensors)
    assert got.config.taps == (2, 5)
    assert got.draft_ids is not None
    assert torch.equal(got.draft_ids, ids)
    assert got.head is not None
    assert torch.equal(got.head, head)
    assert got.fingerprint == ""
    more["t2d"] = ~known
    with pytest.raises(ModelError, match="d2t and t2d"):
        store.load(write(tmp_path, data, {**tensors, **more}), info())
    del more["d2t"], more["t2d"]
    with pytest.raises(ModelError, match="draft vocabulary of 66 ids is announced"):
        store.load(write(tmp_path, data, {**tensors, **more}), info())


def test_speculators_folders_with_the_whole_vocabulary_need_no_list(tmp_path: Path) -> None:
    tensors = {**net(config()).state_dict(), "lm_head.weight": torch.zeros(VOCAB, 32)}
    got = store.load(write(tmp_path, speculators(), tensors), info())
    assert got.draft_ids is None
    assert got.config.draft_vocab_size == VOCAB


def test_heads_that_the_description_does_not_ask_for_are_left_out(tmp_path: Path) -> None:
    tensors = net(config(length_head=6)).state_dict()
    older = {
        "thresh_head_subsequent.proj.0.weight": torch.zeros(3, 7),
        "prob_head.x": torch.ones(1),
    }
    got = store.load(write(tmp_path, config().to_json(), {**tensors, **older}), info())
    same(got, net(config()).state_dict())


FUSED = {"layers.0.self_attn.qkv_proj.weight": torch.zeros(64, 32)}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "fused weights": ({}, FUSED, "fused query, key and value"),
    "gated attention": ({}, {"layers.1.self_attn.g_proj.weight": torch.zeros(1)}, "gated"),
    "norms of taps": ({}, {"aux_hidden_norms.0.weight": torch.ones(32)}, "norm for each tapped"),
    "DSpark's": ({}, {"markov_head.w.weight": torch.ones(1)}, "DSpark"),
    "DFlash2's": ({}, {"layers.0.dynamic_conv.weight": torch.ones(1)}, "DFlash2"),
    "something new": ({}, {"layers.0.new.weight": torch.ones(1)}, "layers.0.new.weight"),
    "a missing tensor": ({}, {"fc.weight": None}, "tensors are missing: fc.weight"),
    "a layer too few": ({}, {f"layers.1.{n}.weight": None for n in LAYER}, "missing.*8 more"),
    "a wrong shape": ({}, {"fc.weight": torch.zeros(32, 32)}, r"fc.weight is \(32, 32\)"),
    "no length head": ({"length_head": 6}, {}, "thresh_head_two_model"),
    "another width": ({"hidden_size": 64}, {}, "hidden_size is 64, tiny has 32"),
    "another vocabulary": ({"vocab_size": 200}, {}, "vocab_size is 200, tiny has 199"),
    "another depth": ({"num_target_layers": 8}, {}, "num_target_layers is 8, tiny has 6"),
    "a tap beyond": (
        {"num_target_layers": 0, "target_layer_ids": (1, 6)}, {}, "target_layer_ids|taps layer 6"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_cannot_draft_for_the_target_is_refused(name: str, tmp_path: Path) -> None:
    changes, tensors, words = REFUSED[name]
    data = config(**changes).to_json()
    found = {**net(config()).state_dict(), **tensors}
    write(tmp_path, data, {k: v for k, v in found.items() if v is not None})
    with pytest.raises(ModelError, match=words) as refused:
        store.load(tmp_path, info())
    assert str(tmp_path) in str(refused.value)


def test_a_drafter_of_other_weights_is_refused(tmp_path: Path) -> None:
    made = config()
    store.save(tmp_path, made, net(made), None, {"target": "somebody else's"})
    with pytest.raises(ModelError, match=r"other weights than tiny's.*hasten train dflash"):
        store.load(tmp_path, info())


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no DFlash drafter can be read"):
        store.load(tmp_path / "nowhere", info())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="no DFlash drafter can be read"):
        store.load(tmp_path, info())
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="no DFlash drafter can be read"):
        store.load(tmp_path, info())
    write(tmp_path, config().to_json(), {})
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ModelError, match="no DFlash drafter can be read"):
        store.load(tmp_path, info())


def test_a_drafter_is_not_saved_without_saying_whose_it_is(tmp_path: Path) -> None:
    made = config(draft_vocab_size=4)
    with pytest.raises(ModelError, match="target"):
        store.save(tmp_path, made, net(made), torch.arange(4), {})
    for ids in (torch.arange(5), torch.tensor([0, 2, 1, 3]), torch.tensor([0, 1, 2, VOCAB]), None):
        with pytest.raises(ModelError, match="draft vocabulary"):
            store.save(tmp_path, made, net(made), ids, {"target": "tiny"})
    assert not list(tmp_path.iterdir())


def test_a_save_that_fails_says_so_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = config()
    with pytest.raises(ModelError, match=r"can't be written to .*file"):
        store.save(tmp_path / "file", made, net(made), None, {"target": "tiny"})
    (tmp_path / "out" / "model.safetensors").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"can't be written to .*out"):
        store.save(tmp_path / "out", made, net(made), None, {"target": "tiny"})
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_the_shipped_drafter_is_found_by_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "files", lambda package: tmp_path)
    assert store.shipped(info()) is None
    folder = tmp_path / "assets" / "some-model" / "dflash"
    save_for(folder, info())
    found = store.shipped(info())
    assert found == folder
    assert store.load(found, info()).config.num_target_layers == LAYERS


def test_a_drafter_is_shipped_for_the_embedded_models_weights() -> None:
    source = resolve("smollm2-135m")
    sizes = {"vocab_size": 49_152, "hidden_size": 576, "num_layers": 30}
    embedded = replace(info(), fingerprint=source.fingerprint, **sizes)
    folder = store.shipped(embedded)
    assert folder is not None
    loaded = store.load(folder, embedded)
    assert loaded.draft_ids is not None
    assert len(loaded.draft_ids) == 8192
    assert loaded.config.length_head
    assert all(bool(value.isfinite().all()) for value in loaded.net.state_dict().values())

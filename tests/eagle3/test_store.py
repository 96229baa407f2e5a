"""Drafters on disk: the published names in both layouts, and refusals that say what is wrong."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hasten.dflash import store as assets
from hasten.eagle3 import store
from hasten.errors import ModelError
from hasten.targets.base import TargetInfo
from tests.eagle3.eagle3_models import KINDS, config, net, save_for
from tests.exits import exit_models as tiny
from tests.exits.exit_tensors import VOCAB

BODY = (
    "input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn.q_proj",
    "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip
ENDS = {"fc.weight", "norm.weight", "lm_head.weight"}
PUBLISHED = ENDS | {f"layers.0.{name}.weight" for name in BODY}
FIRST = ENDS | {f"midlayer.{name}.weight" for name in BODY} | {"d2t", "t2d"}
"""Names in the checkpoints of speculators, and of the authors."""
IDS = torch.arange(1, VOCAB, 3)
EMBEDDINGS = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(9))


def info() -> TargetInfo:
    return tiny.target().info


def vocabulary(ids: torch.Tensor = IDS) -> dict[str, torch.Tensor]:
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known}


def write(folder: Path, data: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """A folder as others may have written it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data))
    save_file({k: v.clone() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def authors(**changes: Any) -> dict[str, Any]:
    """A description in the authors' layout."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "draft_vocab_size": len(IDS),
        "rms_norm_eps": 1e-6,
        "bias": False,
        **changes,
    }


def first_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}


def same(one: store.Loaded, tensors: Mapping[str, torch.Tensor]) -> None:
    found = one.net.state_dict()
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert torch.equal(found[name], value), name


def few(**changes: Any) -> dict[str, torch.Tensor]:
    """Tensors of a drafter over `IDS`."""
    return net(config(draft_vocab_size=len(IDS), **changes)).state_dict()


def test_the_tensors_written_are_the_published_ones(tmp_path: Path) -> None:
    made = config(draft_vocab_size=len(IDS))
    store.save(tmp_path, made, net(made), IDS, {"target": "tiny", "model": "tiny"}, tokens=5)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == PUBLISHED | {"d2t", "t2d"}
    assert (found["d2t"].dtype, found["t2d"].dtype) == (torch.int64, torch.bool)
    assert torch.equal(torch.arange(len(IDS)) + found["d2t"], IDS)
    assert {found[name].dtype for name in PUBLISHED} == {torch.bfloat16}
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["speculators_model_type"] == "eagle3"
    assert data["architectures"] == ["Eagle3Speculator"]
    assert data["speculators_config"]["verifier"]["name_or_path"] == "tiny"
    assert data["speculators_config"]["proposal_methods"] == [
        {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1,
         "accept_tolerance": 0.0}
    ]  # fmt: skip
    whole = config()
    store.save(tmp_path, whole, net(whole), None, {"target": "tiny"})
    assert load_file(tmp_path / "model.safetensors").keys() == PUBLISHED


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_loaded(kind: str, tmp_path: Path) -> None:
    made = config(draft_vocab_size=len(IDS), **KINDS[kind])
    about = {"target": info().fingerprint, "seed": 7}
    table = EMBEDDINGS if kind == "qwen3" else None
    store.save(tmp_path, made, net(made), IDS, about, embeddings=table, dtype=torch.float32)
    got = store.load(tmp_path, info())
    assert got.config == made
    assert got.draft_ids is not None
    assert torch.equal(got.draft_ids, IDS)
    assert (got.fingerprint, got.about["seed"]) == (info().fingerprint, 7)
    assert (got.embeddings is None) == (table is None)
    same(got, net(made).state_dict())
    assert not any(value.requires_grad for value in got.net.parameters())
    assert not got.net.training


def test_ids_stay_whole_numbers_in_any_precision(tmp_path: Path) -> None:
    ids = torch.arange(VOCAB - len(IDS), VOCAB)
    write(tmp_path, authors(), {**first_names(few()), **vocabulary(ids)})
    got = store.load(tmp_path, info(), dtype=torch.bfloat16)
    assert {value.dtype for value in got.net.parameters()} == {torch.bfloat16}
    assert got.draft_ids is not None
    assert got.draft_ids.dtype == torch.int64
    assert torch.equal(got.draft_ids, ids)
    tensors = {**first_names(few()), **vocabulary(ids)}
    write(tmp_path, authors(), {**tensors, "d2t": tensors["d2t"].bfloat16()})
    with pytest.raises(ModelError, match=r"d2t holds torch.bfloat16 .* it was cast"):
        store.load(tmp_path, info())


@pytest.mark.parametrize("own_table", [False, True])
@pytest.mark.parametrize("kind", ["bin", "safetensors", "bin shards", "safetensors shards"])
def test_the_authors_folders_are_read(kind: str, own_table: bool, tmp_path: Path) -> None:
    tensors = {**first_names(few()), **vocabulary()}
    assert tensors.keys() == FIRST
    if own_table:
        tensors["embed_tokens.weight"] = EMBEDDINGS
    tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    (tmp_path / "config.json").write_text(json.dumps(authors()))
    whole = "pytorch_model.bin" if kind.startswith("bin") else "model.safetensors"
    stem, suffix = whole.split(".")
    save: Any = torch.save if suffix == "bin" else save_file
    if kind.endswith("shards"):
        names = sorted(tensors)
        places = {name: f"{stem}-{1 + (at > 6)}.{suffix}" for at, name in enumerate(names)}
        for file in set(places.values()):
            save({n: tensors[n] for n in names if places[n] == file}, tmp_path / file)
        index = tmp_path / f"{whole}.index.json"
        index.write_text(json.dumps({"weight_map": places}))
    else:
        save(tensors, tmp_path / whole)
    got = store.load(tmp_path, info())
    same(got, few())
    assert got.config.taps == (2, 3, 3)
    assert not got.config.norm_before_residual
    assert got.draft_ids is not None
    assert torch.equal(got.draft_ids, IDS)
    assert got.fingerprint == ""
    assert (got.embeddings is not None) == own_table
    if own_table:
        assert got.embeddings is not None
        assert torch.equal(got.embeddings, EMBEDDINGS)


@pytest.mark.parametrize("kind", KINDS)
def test_folders_of_speculators_are_read_in_every_variant(kind: str, tmp_path: Path) -> None:
    made = config(draft_vocab_size=len(IDS), **KINDS[kind])
    tensors = net(made).state_dict()
    left_in = {
        "verifier_lm_head.weight": torch.zeros(VOCAB, 32),
        "verifier_norm.weight": torch.ones(32),
    }
    write(tmp_path, made.to_json(), {**tensors, **vocabulary(), **left_in})
    got = store.load(tmp_path, info())
    same(got, tensors)
    assert got.config == made


def test_a_drafter_of_another_width_brings_its_embeddings(tmp_path: Path) -> None:
    made = config(hidden_size=16, head_dim=4, target_hidden_size=32)
    tensors = net(made).state_dict()
    assert tuple(tensors["fc.weight"].shape) == (16, 96)
    folder = write(tmp_path, made.to_json(), tensors)
    with pytest.raises(ModelError, match=r"16 wide, tiny is 32, and embed_tokens.weight"):
        store.load(folder, info())
    table = EMBEDDINGS[:, :16]
    got = store.load(write(tmp_path, made.to_json(), {**tensors, "embed_tokens.weight": table}),
                     info())  # fmt: skip
    assert got.embeddings is not None
    assert torch.equal(got.embeddings, table)


def test_no_code_of_a_pickle_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return mark.write_text, ("ran",)

    (tmp_path / "config.json").write_text(json.dumps(authors()))
    weights = tmp_path / "pytorch_model.bin"
    torch.save({"x": Evil()}, weights)
    with pytest.raises(ModelError, match="no EAGLE-3 drafter can be read"):
        store.load(tmp_path, info())
    weights.write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(ModelError, match="no EAGLE-3 drafter can be read"):
        store.load(tmp_path, info())
    assert not mark.exists()


ONES = torch.ones(32)
EAGLE_1 = {
    "fc.weight": torch.zeros(32, 64),
    "fc.bias": ONES,
    **{f"layers.0.{n}.weight": ONES for n in BODY if n not in ("hidden_norm", "input_layernorm")},
}
"""Names in a checkpoint of EAGLE-1 or EAGLE-2."""
MEDUSA = {"0.0.linear.weight": torch.zeros(32, 32), "0.1.weight": torch.zeros(VOCAB, 32)}
UNSORTED = {**vocabulary(), "t2d": ~vocabulary()["t2d"]}
TWICE = {"d2t": torch.zeros(len(IDS), dtype=torch.int64) - torch.arange(len(IDS))}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "EAGLE-1": ({}, {**dict.fromkeys(FIRST), **EAGLE_1}, "EAGLE-1 or EAGLE-2.*no hidden_norm"),
    "Medusa": ({}, {**dict.fromkeys(FIRST), **MEDUSA, **vocabulary()}, "0.0.linear.weight"),
    "Medusa's names": ({}, {"medusa_head.0.weight": ONES}, "Medusa's heads"),
    "MTP's": ({}, {"eh_proj.weight": ONES}, "MTP"),
    "P-EAGLE's": ({}, {"mask_hidden": ONES}, "P-EAGLE"),
    "DSpark's": ({}, {"markov_head.weight": ONES}, "DSpark"),
    "something new": ({}, {"midlayer.new.weight": ONES}, "layers.0.new.weight are too many"),
    "a missing tensor": ({}, {"fc.weight": None}, "tensors are missing: fc.weight"),
    "no head": ({}, {"lm_head.weight": None}, "tensors are missing: lm_head.weight"),
    "no norm": ({"norm_before_fc": True}, {}, "tensors are missing: input_norm.weight"),
    "a wrong shape": ({}, {"fc.weight": torch.zeros(32, 64)}, r"fc.weight is \(32, 64\)"),
    "one name twice": ({}, {"layers.0.mlp.up_proj.weight": ONES}, "is there twice"),
    "no list of ids": ({}, {"d2t": None, "t2d": None}, "d2t, which says which ones, is missing"),
    "lists that differ": ({}, UNSORTED, "d2t and t2d name different ids"),
    "a short list": ({}, {"d2t": torch.zeros(3, dtype=torch.int64)}, "66 ids is announced, and 3"),
    "an id twice": ({}, TWICE, "must be different ids"),
    "an id beyond": ({}, {"d2t": torch.full((len(IDS),), 150)}, "must be different ids"),
    "a wrong table": ({}, {"embed_tokens.weight": ONES}, r"embed_tokens.weight is \(32,\)"),
    "another width": ({"hidden_size": 64, "target_hidden_size": 64}, {},
                      "hidden_size is 64, tiny has 32"),
    "another target": ({"target_hidden_size": 48}, {}, "target_hidden_size is 48, tiny has 32"),
    "another vocabulary": ({"vocab_size": 200}, {}, "vocab_size is 200, tiny has 199"),
    "deeper taps": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 30]}}, {},
                    r"taps layers \[2, 31\] of a target that has 6"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_cannot_draft_for_the_target_is_refused(name: str, tmp_path: Path) -> None:
    changes, tensors, words = REFUSED[name]
    found = {**first_names(few()), **vocabulary(), **tensors}
    write(tmp_path, authors(**changes), {k: v for k, v in found.items() if v is not None})
    with pytest.raises(ModelError, match=words) as refused:
        store.load(tmp_path, info())
    assert str(tmp_path) in str(refused.value)


def test_a_drafter_of_other_weights_is_refused(tmp_path: Path) -> None:
    made = config()
    store.save(tmp_path, made, net(made), None, {"target": "somebody else's"})
    with pytest.raises(ModelError, match=r"other weights than tiny's.*hasten train eagle3"):
        store.load(tmp_path, info())


def test_a_head_over_the_whole_vocabulary_needs_no_list(tmp_path: Path) -> None:
    tensors = net(config()).state_dict()
    for more in ({}, vocabulary(torch.arange(VOCAB))):
        got = store.load(write(tmp_path, config().to_json(), {**tensors, **more}), info())
        assert got.draft_ids is None
    turned = torch.arange(VOCAB).flip(0)
    got = store.load(write(tmp_path, config().to_json(), {**tensors, **vocabulary(turned)}), info())
    assert got.draft_ids is not None
    assert torch.equal(got.draft_ids, turned)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no EAGLE-3 drafter can be read"):
        store.load(tmp_path / "nowhere", info())
    for text in ("{", "[1]", "{}"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match="no EAGLE-3 drafter can be read"):
            store.load(tmp_path, info())
    (tmp_path / "config.json").write_text(json.dumps(authors()))
    with pytest.raises(ModelError, match=r"neither model.safetensors nor pytorch_model.bin"):
        store.load(tmp_path, info())
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"cut off")
        with pytest.raises(ModelError, match="no EAGLE-3 drafter can be read"):
            store.load(tmp_path, info())
        (tmp_path / name).unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(ModelError, match="outside the folder"):
        store.load(tmp_path, info())


def test_a_drafter_is_not_saved_without_saying_whose_it_is(tmp_path: Path) -> None:
    made = config(draft_vocab_size=4)
    with pytest.raises(ModelError, match="target"):
        store.save(tmp_path, made, net(made), torch.arange(4), {})
    for ids in (torch.arange(5), torch.tensor([0, 2, 2, 3]), torch.tensor([0, 1, 2, VOCAB]), None):
        with pytest.raises(ModelError, match="draft vocabulary"):
            store.save(tmp_path, made, net(made), ids, {"target": "tiny"})
    assert not list(tmp_path.iterdir())


def test_the_shipped_drafter_is_found_by_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assets, "files", lambda package: tmp_path)
    assert assets.shipped(info(), "eagle3") is None
    folder = save_for(tmp_path / "assets" / "some-model" / "eagle3", info())
    assert assets.shipped(info(), "eagle3") == folder
    assert assets.shipped(info()) is None, "another kind of drafter"
    assert assets.shipped(replace(info(), fingerprint="else"), "eagle3") is None
    assert store.load(folder, info()).config.taps == (1, 5)

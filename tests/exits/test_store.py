"""Exit modules on disk: what was saved comes back, and nothing else is taken for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hasten.errors import ModelError
from hasten.exits import store
from hasten.exits.modules import ExitState
from hasten.targets.fused_weights import make_linear
from tests.exits import exit_models as tiny
from tests.exits.exit_models import LAYERS, VOCAB

KINDS = (("deep", 0), ("affine", 1), ("adapter", 2), ("lens", 3))
IDS = [4, 2, 9, 150]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "exits")
    return tmp_path / "exits"


def save(folder: Path, **changes: Any) -> None:
    configs = [tiny.config(kind, layer, 32) for kind, layer in KINDS]
    given: dict[str, Any] = {
        "fingerprint": "tiny",
        "ids": IDS,
        "modules": [(each, tiny.random_tensors(each)) for each in configs],
        "facts": {"tokens": 7},
    }
    store.save(folder, **{**given, **changes})


def test_what_was_saved_comes_back(folder: Path) -> None:
    stored = store.read(folder)
    assert stored.fingerprint == "tiny"
    assert stored.ids == (2, 4, 9, 150)
    assert [(c.kind, c.layer) for c in stored.configs] == list(KINDS)
    assert stored.configs[0] == tiny.config("deep", 0, 32)
    assert stored.facts == {"tokens": 7}
    for config in stored.configs:
        for name, value in tiny.random_tensors(config).items():
            found = stored.tensors[f"{config.layer}.{name}"]
            assert found.dtype == torch.float32
            limit = value.abs().amax(-1, keepdim=True) / 254 if value.dim() == 2 else 1e-7
            assert ((found - value).abs() <= limit + 1e-7).all(), name
    assert sorted(p.name for p in folder.iterdir()) == [store.DESCRIPTION, store.TENSORS]


def test_matrices_take_a_byte_a_number(folder: Path) -> None:
    numbers = sum(
        value.numel()
        for kind, layer in KINDS
        for value in tiny.random_tensors(tiny.config(kind, layer, 32)).values()
    )
    assert (folder / store.TENSORS).stat().st_size < 1.4 * numbers


def test_stored_modules_work_over_the_target(folder: Path) -> None:
    made = store.build(tiny.target(), store.read(folder), make_linear)
    assert made.layers == (0, 1, 2, 3)
    row = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    before = tiny.module(tiny.config("adapter", 2, 32))
    with torch.inference_mode():
        out, wanted = (
            each.run(ExitState(), row, None, verified=1, want=1)
            for each in (made.modules[2], before)
        )
    torch.testing.assert_close(out, wanted, rtol=0.1, atol=0.1)  # 8 bits
    assert made.head.local(()).ids.tolist() == sorted(IDS)


def test_two_modules_at_one_layer_are_not_saved(tmp_path: Path) -> None:
    config = tiny.config("lens", 2, 32)
    with pytest.raises(ModelError, match="one exit module a layer"):
        save(tmp_path, modules=[(config, {}), (config, {})])


def test_a_note_replaces_the_facts_alone(folder: Path) -> None:
    before = store.read(folder)
    store.note(folder, {"reached": 0.4})
    after = store.read(folder)
    assert after.facts == {"reached": 0.4}
    assert (after.ids, after.configs) == (before.ids, before.configs)
    assert sorted(p.name for p in folder.iterdir()) == [store.DESCRIPTION, store.TENSORS]


# -- damaged, or of another model ------------------------------------------------------------------


def _edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / store.DESCRIPTION
    described = json.loads(path.read_text())
    changed = change(described)
    path.write_text(json.dumps(described if changed is None else changed))


def _tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / store.TENSORS)
    change(tensors)
    save_file(tensors, folder / store.TENSORS)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "no description": lambda f: (f / store.DESCRIPTION).unlink(),
    "no tensors": lambda f: (f / store.TENSORS).unlink(),
    "a description cut off": lambda f: (f / store.DESCRIPTION).write_text('{"format": 1, "mod'),
    "a description of bytes": lambda f: (f / store.DESCRIPTION).write_bytes(b"\xff\xfe\x00"),
    "a description that is a list": lambda f: _edit(f, lambda d: [1]),
    "a description without modules": lambda f: _edit(f, lambda d: d.pop("modules") and None),
    "another format": lambda f: _edit(f, lambda d: d.update(format=99)),
    "a module of no kind": lambda f: _edit(f, lambda d: d["modules"][0].update(kind="x")),
    "a module with an odd field": lambda f: _edit(f, lambda d: d["modules"][0].update(odd=1)),
    "no mapping": lambda f: (f / store.DESCRIPTION).write_text("[]"),
    "modules that are text": lambda f: _edit(f, lambda d: d.update(modules=["x"])),
    "a layer that is text": lambda f: _edit(f, lambda d: d["modules"][1].update(layer="1")),
    "tensors cut off": lambda f: (f / store.TENSORS).write_bytes(
        (f / store.TENSORS).read_bytes()[:-200]
    ),
    "tensors of another kind": lambda f: (f / store.TENSORS).write_bytes(b"no tensors"),
    "no ids": lambda f: _tensors(f, lambda t: t.pop("ids")),
    "scales that don't fit": lambda f: _tensors(
        f, lambda t: t.update({"1.up.scale": torch.ones(3)})
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused_by_name(damage: str, folder: Path) -> None:
    DAMAGE[damage](folder)
    with pytest.raises(ModelError, match="holds no exit modules that can be read") as caught:
        store.read(folder)
    assert str(folder) in str(caught.value)
    assert "hasten train exits" in str(caught.value)


def test_a_folder_is_found_from_the_home_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert store.read(f"~/{folder.name}").fingerprint == "tiny"


def test_a_folder_that_isnt_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere holds no exit modules"):
        store.read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("2.out"),
        lambda tensors: tensors.update({"2.norm": torch.ones(5)}),
    ],
)
def test_a_missing_or_misshapen_tensor_is_named(
    change: Callable[[dict[str, torch.Tensor]], Any], folder: Path
) -> None:
    _tensors(folder, change)
    with pytest.raises(ModelError, match=r"layer 2: tensor '(out|norm)'.*damaged"):
        store.build(tiny.target(), store.read(folder), make_linear)


def test_modules_of_other_weights_are_refused(folder: Path) -> None:
    info = tiny.target().info
    store.check_belongs(store.read(folder), info, "folder")
    for other in (replace(info, fingerprint="other"), replace(info, fingerprint="")):
        with pytest.raises(ModelError, match="in folder belong to other weights than tiny's"):
            store.check_belongs(store.read(folder), other, "folder")
    save(folder, fingerprint="")
    with pytest.raises(ModelError, match="other weights"):
        store.check_belongs(store.read(folder), replace(info, fingerprint=""), "folder")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("lens", {"layer": LAYERS}), ("deep", {"layer": 0, "deep_at": (LAYERS + 1,)})],
)
def test_modules_at_layers_the_model_hasnt_are_refused(
    kind: str, changes: dict[str, Any], folder: Path
) -> None:
    config = tiny.config(kind, hidden=32, **changes)
    save(folder, modules=[(config, tiny.random_tensors(config))])
    with pytest.raises(ModelError, match="don't fit tiny's sizes"):
        store.check_belongs(store.read(folder), tiny.target().info, "folder")


@pytest.mark.parametrize("ids", [[], [3], [-1, 3], [3, VOCAB]])
def test_a_draft_vocabulary_that_isnt_part_of_the_models_is_refused(
    ids: list[int], folder: Path
) -> None:
    save(folder, ids=ids)
    with pytest.raises(ModelError, match="draft vocabulary"):
        store.check_belongs(store.read(folder), tiny.target().info, "folder")


# -- shipped ---------------------------------------------------------------------------------------


def test_the_modules_shipped_for_these_weights_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "files", lambda package: tmp_path)
    info = tiny.target().info
    assert store.shipped(info) is None, "no assets at all"
    (tmp_path / "assets" / "empty").mkdir(parents=True)
    (tmp_path / "assets" / "note.txt").write_text("x")
    assert store.shipped(info) is None
    save(tmp_path / "assets" / "a-other", fingerprint="other")
    (tmp_path / "assets" / "a-other" / store.TENSORS).write_bytes(b"never read")
    save(tmp_path / "assets" / "mine")
    found = store.shipped(info)
    assert found is not None
    assert found.ids == tuple(sorted(IDS))
    assert store.shipped(replace(info, fingerprint="")) is None

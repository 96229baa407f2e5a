"""What ``early-exit`` and ``del`` refuse, by name and before anything has run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.exits.layerskip import CALIBRATION, COSTS, save_modules
from tests.targets import tiny_models
from tests.tiny_llm import make_tokenizer

import hasten
from hasten import methods
from hasten.api import LLM
from hasten.builtin import early_exit
from hasten.errors import CapabilityError, HastenError, ModelError, OptionError
from hasten.exits import store
from hasten.policies import cost


@pytest.fixture(autouse=True)
def _known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured here."""
    monkeypatch.setattr(cost, "load_or_measure", lambda target: COSTS)


# -- refusals --------------------------------------------------------------------------------------

REFUSED: list[tuple[str, type[HastenError], str]] = [
    ("early-exit", OptionError, r"early-exit\.modules: no exit modules.*hasten train exits.*own"),
    ("del", OptionError, r"del\.modules: no exit modules are shipped"),
    ("early-exit,exits=2", OptionError, r"early-exit\.modules: no exit modules are shipped"),
    ("early-exit,modules=NOWHERE", ModelError, "nowhere holds no exit modules"),
    ("early-exit,modules=OTHER", ModelError, "other belong to other weights"),
    ("del,modules=OTHER", ModelError, "other belong to other weights"),
    ("early-exit,modules=DAMAGED", ModelError, "damaged holds no exit modules"),
    ("early-exit,modules=FOLDER,head=own", OptionError, r"early-exit\.modules: contradicts head"),
    ("early-exit,head=mine", OptionError, r"early-exit\.head: must be modules or own"),
    ("early-exit:layerskip,exits=16", OptionError, r"early-exit\.exits.*has 16 layers.*0 to 15"),
    ("early-exit:layerskip,exits=-1", OptionError, r"early-exit\.exits.*0 to 15"),
    ("early-exit:layerskip,exits=0", OptionError, r"early-exit\.exits.*layer 0.*1 to 15"),
    ("del,head=own,exits=0+2", OptionError, r"del\.exits.*layer 0.*1 to 15"),
    ("del,head=own,exits=2+2", OptionError, r"del\.exits: '2\+2' names a layer twice"),
    ("early-exit:layerskip,exits=two", OptionError, r"early-exit\.exits: must be layers joined"),
    ("early-exit:layerskip,exits=2+", OptionError, r"early-exit\.exits: must be layers joined"),
    ("early-exit:layerskip,exits=2+4", OptionError, r"early-exit\.exits.*one exit, got '2\+4'"),
    ("early-exit,modules=FOLDER,exits=3", OptionError, r"early-exit\.exits.*\[3\].*0, 2, 4"),
    ("early-exit:layerskip,length=0", OptionError, r"early-exit\.length: must be 1 to 12, got 0"),
    ("early-exit:layerskip,length=13", OptionError, r"early-exit\.length: must be 1 to 12, got 13"),
    ("early-exit:layerskip,length=two", OptionError, r"early-exit\.length: must be a whole"),
    ("del,head=own,length=0", OptionError, r"del\.length: must be 1 to 12, got 0"),
    ("del,head=own,ending=never", OptionError, r"del\.ending: must be one of confidence"),
    ("early-exit:layerskip,rule=best", OptionError, r"early-exit\.rule: must be one of fixed"),
    ("early-exit:layerskip,rule=del", OptionError, r"early-exit\.rule: must be one of fixed"),
    ("early-exit:layerskip,threshold=0.5", OptionError, r"early-exit\.threshold: rule=fixed has"),
    (
        "early-exit,modules=FOLDER,rule=myopic,threshold=0.5",
        OptionError,
        r"early-exit\.threshold: rule=myopic has",
    ),
    (
        "early-exit,head=own,rule=kangaroo,threshold=1.5",
        OptionError,
        r"early-exit\.threshold: must be in \[0, 1\], got 1\.5",
    ),
    ("early-exit:layerskip,keep=on", OptionError, r"early-exit\.keep: rule=fixed"),
    ("early-exit,head=own,rule=lite,keep=on", OptionError, r"early-exit\.keep: rule=lite"),
    ("early-exit,head=own,rule=myopic", OptionError, r"early-exit\.rule: myopic needs a calibr"),
    ("early-exit:layerskip,lookup=on", OptionError, r"early-exit\.lookup: goes with tree=on"),
    ("early-exit:layerskip,steps=2", OptionError, r"early-exit\.steps: goes with tree=on"),
    ("early-exit:layerskip,most=2", OptionError, r"early-exit\.most: goes with tree=on"),
    ("early-exit:tree,modules=FOLDER,steps=0", OptionError, r"early-exit\.steps: must be 1 to 8"),
    ("early-exit:tree,modules=FOLDER,most=-1", OptionError, r"early-exit\.most: must be"),
    ("early-exit:tree,modules=FOLDER,length=2", OptionError, r"early-exit\.length: is for chains"),
    ("early-exit:tree,modules=FOLDER,rule=svip", OptionError, r"early-exit\.rule: is for chains"),
    ("early-exit:tree,modules=FOLDER,exits=2", OptionError, r"early-exit\.exits: trees are"),
    ("early-exit:tree,modules=FOLDER,exits=0+2", OptionError, r"early-exit\.exits: trees are"),
    ("early-exit,tree=on,modules=SHALLOW", OptionError, r"early-exit\.exits: trees are"),
    ("early-exit,tree=on,head=own", OptionError, r"early-exit\.exits: trees are"),
    ("early-exit:kangaroo,modules=SHALLOW", OptionError, r"early-exit\.exits.*\[2\].*some at 4"),
    ("early-exit:paper", OptionError, "has no variant 'paper'.*layerskip"),
]


@pytest.fixture(scope="module")
def folders(
    layerskip: LLM, exits_folder: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    root, mine = tmp_path_factory.mktemp("folders"), layerskip.target.info.fingerprint
    damaged = root / "damaged"
    shutil.copytree(exits_folder, damaged)
    (damaged / store.TENSORS).write_bytes(b"?")
    return {
        "FOLDER": exits_folder,
        "NOWHERE": str(root / "nowhere"),
        "DAMAGED": str(damaged),
        "OTHER": save_modules(root / "other", "another model", (("affine", 2),)),
        "SHALLOW": save_modules(root / "shallow", mine, (("affine", 4),)),
    }


@pytest.mark.parametrize(("method", "error", "words"), REFUSED)
def test_what_makes_no_sense_is_refused_by_name_before_any_pass(
    method: str, error: type[HastenError], words: str, layerskip: LLM, folders: dict[str, str]
) -> None:
    for name, folder in folders.items():
        method = method.replace(f"={name}", f"={folder}")
    target: Any = layerskip.target
    before = target.layer_rows
    with pytest.raises(error, match=words):
        layerskip.generate("x", method=method)
    assert target.layer_rows == before


def test_a_calibration_for_other_exits_is_none(layerskip: LLM, tmp_path: Path) -> None:
    kinds = (("affine", 2), ("affine", 4))
    some = {**CALIBRATION, "layers": [0, 2, 6]}
    folder = save_modules(tmp_path, layerskip.target.info.fingerprint, kinds, calibration=some)
    with pytest.raises(OptionError, match=r"none is stored for exits at \(2, 4\)"):
        layerskip.prepare(f"early-exit,modules={folder},rule=myopic")
    layerskip.prepare(f"early-exit,modules={folder},rule=myopic,exits=2")


@pytest.mark.parametrize("kind", [tiny_models.gemma3, tiny_models.lfm2, tiny_models.mamba2])
@pytest.mark.parametrize("method", ["early-exit:layerskip", "del,head=own"])
def test_models_outside_the_fused_family_are_refused_before_any_pass(
    kind: Any, method: str
) -> None:
    model = tiny_models.build(kind)
    other = hasten.load((model, make_tokenizer()), method="ar")
    passes: list[Any] = []
    model.register_forward_pre_hook(lambda *inputs: passes.append(inputs))
    with pytest.raises(CapabilityError, match=r"needs a target with .*lacks"):
        other.generate("x", method=method)
    assert not passes


def test_a_model_in_the_transformers_engine_is_refused_and_told_so(layerskip_folder: Path) -> None:
    with pytest.raises(CapabilityError, match=r"layer ranges.*transformers engine"):
        hasten.load(str(layerskip_folder), method="early-exit:layerskip", engine="transformers")


def test_a_layerskip_id_that_cant_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name, method = "facebook/layerskip-llama3.2-1B", "early-exit:layerskip"
    monkeypatch.setenv("HASTEN_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"layerskip-llama3\.2-1B.*offline.*local folder"):
        hasten.load(name, method=method)

    def gated(*args: Any, **options: Any) -> Any:
        raise OSError("401 Client Error: access to this model is restricted")

    monkeypatch.delenv("HASTEN_OFFLINE")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", gated)
    with pytest.raises(ModelError, match=r"layerskip-llama3\.2-1B.*restricted.*hf auth login"):
        hasten.load(name, method=method)


def test_the_rules_that_options_name_are_those_there_are() -> None:
    helped = methods.option_help(methods.get("early-exit"))
    (text,) = [help for name, _, help in helped if name == "rule"]
    assert all(rule in text for rule in early_exit.RULES)

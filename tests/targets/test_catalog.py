"""Names become folders: resolving, converting once, and surviving damage and company.

Only the `smollm2_dir` tests touch the real embedded model; the others use a tiny wheel made here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.targets.tiny_wheel import CONTENT, leftovers, sha256, stand_in_convert

from hasten import _cache
from hasten.errors import ModelError
from hasten.targets import catalog, gguf_file
from hasten.targets.fetch import PackagedFile

EXACT = "  Hello,  world 🙂🦄 . 你好，世界！\n\n\tx = 1 ; don't\n"


# -- resolve ---------------------------------------------------------------------------------------


def test_nothing_named_means_the_embedded_model_in_float32() -> None:
    source = catalog.resolve(None)
    assert (source.kind, source.name, source.default_dtype) == (
        "embedded",
        "smollm2-135m",
        torch.float32,
    )
    assert source.fingerprint == catalog.EMBEDDED["smollm2-135m"].member_sha256
    assert catalog.resolve("smollm2-135m") == source


def test_owner_and_name_is_a_hub_id_unless_such_a_folder_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert catalog.resolve("acme/rocket-1.5B").kind == "hub"
    folder = tmp_path / "acme" / "rocket-1.5B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    source = catalog.resolve("acme/rocket-1.5B")
    assert (source.kind, source.location) == ("folder", str(folder))


@pytest.mark.parametrize("name", ["gpt-17", "", "  ", "a/b/c", "./nowhere", "x.gguf", "a\0b"])
def test_an_unknown_name_is_refused_naming_what_would_do(name: str) -> None:
    with pytest.raises(ModelError, match=r"no such .*smollm2-135m.*folder.*\.gguf.*Hugging Face"):
        catalog.resolve(name)


def test_a_path_object_is_never_taken_for_a_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        catalog.resolve(Path("acme/rocket"))


def test_a_folder_without_config_is_refused_naming_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        catalog.resolve(tmp_path)
    (tmp_path / "model.gguf").write_bytes(CONTENT)
    with pytest.raises(ModelError, match=r"holds model\.gguf: give the path of that file"):
        catalog.resolve(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="PEFT adapter"):
        catalog.resolve(tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_text("hello")
    with pytest.raises(ModelError, match="must be GGUF"):
        catalog.resolve(path)


def test_two_gguf_files_of_one_name_do_not_share_a_folder(
    tmp_path: Path, tiny: catalog.ModelSource
) -> None:
    paths = [tmp_path / "a" / "m.gguf", tmp_path / "b" / "m.gguf"]
    for n, path in enumerate(paths):
        path.parent.mkdir()
        path.write_bytes(CONTENT + bytes([n]))
    first, second = (catalog.resolve(path) for path in paths)
    assert first.fingerprint == sha256(CONTENT + b"\0")
    assert first.fingerprint != second.fingerprint
    assert catalog._place(first) != catalog._place(second)
    paths[0].write_bytes(CONTENT + b"\1")  # the remembered hash must not outlive the content
    os.utime(paths[0], ns=(1, 1))
    assert catalog.resolve(paths[0]).fingerprint == second.fingerprint


# -- the cache -------------------------------------------------------------------------------------


def test_the_cache_is_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("HASTEN_CACHE", raising=False)
    assert _cache.cache_dir() == tmp_path / "xdg" / "hasten"
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "mine"))
    assert _cache.cache_dir() == tmp_path / "mine"


def test_a_cache_that_cannot_be_made_is_an_error_that_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="Set HASTEN_CACHE"):
        _cache.cache_dir()


def test_a_model_is_converted_once_and_then_needs_no_wheel(
    tiny: catalog.ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = catalog.prepare(tiny)
    marker = json.loads((folder / "hasten.json").read_text())
    assert marker["fingerprint"] == tiny.fingerprint
    assert marker["dtype"] == "float32"
    assert set(marker["files"]) == {"config.json", "model.safetensors"}
    assert catalog.verify_cache("tiny") == []
    assert leftovers(_cache.cache_dir()) == []
    monkeypatch.setattr(gguf_file, "convert", None)
    monkeypatch.setattr(catalog, "obtain", None)
    monkeypatch.setenv("HASTEN_OFFLINE", "1")
    assert catalog.prepare(tiny) == folder


@pytest.mark.parametrize("damage", ["truncate", "delete", "marker", "older"])
def test_a_damaged_cache_is_made_again_from_the_kept_file(
    damage: str, tiny: catalog.ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = catalog.prepare(tiny)
    weights, marker = folder / "model.safetensors", folder / "hasten.json"
    whole = weights.read_bytes()
    if damage == "truncate":
        weights.write_bytes(whole[:-1])
    elif damage == "delete":
        weights.unlink()
    elif damage == "marker":
        marker.write_text(marker.read_text()[:40])
    else:
        marker.write_text(marker.read_text().replace(tiny.fingerprint, "0" * 64))
    monkeypatch.setenv("HASTEN_OFFLINE", "1")
    assert catalog.prepare(tiny) == folder
    assert weights.read_bytes() == whole
    assert catalog.verify_cache("tiny") == []
    assert leftovers(_cache.cache_dir()) == []


def test_a_flipped_byte_is_found_by_the_full_check_and_repaired(
    tiny: catalog.ModelSource,
) -> None:
    weights = catalog.prepare(tiny) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:9] + b"!" + whole[10:])
    assert catalog.verify_cache("tiny") == ["model.safetensors"]
    assert catalog.repair(tiny)
    assert weights.read_bytes() == whole
    assert not catalog.repair(tiny)


def test_a_damaged_kept_file_is_fetched_again(tiny: catalog.ModelSource) -> None:
    kept = catalog.source_gguf("tiny")
    assert kept.read_bytes() == CONTENT
    kept.write_bytes(CONTENT[:-1] + b"?")
    assert catalog.source_gguf("tiny").read_bytes() == CONTENT


@pytest.mark.parametrize("error", [KeyboardInterrupt, ModelError, OSError])
def test_an_interrupted_conversion_leaves_nothing_behind(
    error: type[BaseException], tiny: catalog.ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf: Path, into: Path, name: str) -> None:
        stand_in_convert(gguf, into, name)
        raise error("now")

    monkeypatch.setattr(gguf_file, "convert", interrupted)
    with pytest.raises(ModelError if error is OSError else error):
        catalog.prepare(tiny)
    assert leftovers(_cache.cache_dir()) == []
    assert not (_cache.cache_dir() / "models" / "tiny").exists()
    monkeypatch.setattr(gguf_file, "convert", stand_in_convert)
    assert catalog.verify_cache("tiny") == ["hasten.json"]
    catalog.prepare(tiny)
    assert catalog.verify_cache("tiny") == []


SLOW_PROCESS = """
import sys, time
from pathlib import Path
from hasten.targets import catalog, gguf_file
from hasten.targets.fetch import PackagedFile

log, spec = Path(sys.argv[1]), eval(sys.argv[2])

def slow(gguf, into, name):
    with log.open("a") as file:
        file.write("start\\n")
    for n in range(20):
        (into / f"part-{n}").write_bytes(b"x" * 1000)
        time.sleep(float(sys.argv[3]))
    (into / "config.json").write_text("{}")

catalog.EMBEDDED["tiny"] = spec
gguf_file.convert = slow
folder = catalog.prepare(catalog.resolve("tiny"))
assert len(list(folder.iterdir())) == 22, list(folder.iterdir())
assert catalog.verify_cache("tiny") == []
"""


def start(log: Path, packaged: PackagedFile, pause: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW_PROCESS, str(log), repr(packaged), str(pause)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_two_processes_at_once_convert_once_and_both_get_the_whole_folder(
    tmp_path: Path, tiny: catalog.ModelSource, packaged: PackagedFile
) -> None:
    log = tmp_path / "log"
    processes = [start(log, packaged, 0.1) for _ in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert log.read_text() == "start\n"
    assert leftovers(_cache.cache_dir()) == []


def test_a_killed_process_neither_blocks_nor_litters_the_next(
    tmp_path: Path, tiny: catalog.ModelSource, packaged: PackagedFile
) -> None:
    log = tmp_path / "log"
    process = start(log, packaged, 60)
    while not log.exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(leftovers(_cache.cache_dir())) == 1
    catalog.prepare(tiny)
    assert catalog.verify_cache("tiny") == []
    assert leftovers(_cache.cache_dir()) == []


# -- the real thing --------------------------------------------------------------------------------


def test_the_embedded_model_is_prepared_whole(smollm2_dir: Path) -> None:
    assert catalog.verify_cache() == []
    config = json.loads((smollm2_dir / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["eos_token_id"] == 2
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config


def test_the_embedded_models_tokenizer_is_exact_and_has_its_chat_template(
    smollm2_dir: Path,
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    assert tokenizer.decode(tokenizer(EXACT).input_ids) == EXACT
    assert tokenizer.eos_token_id == 2
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[:3] == [1, 9690, 198]

"""The kernels are compiled where they run; without a compiler everything else goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.targets.fused_models import fused, llama, random_model
from tests.tiny_llm import make_model, make_tokenizer

import hasten
from hasten.errors import CapabilityError, OptionError
from hasten.native import build, library

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in build._COMPILERS), reason="needs a C++ compiler"
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whether there are kernels is asked once a process: ask again around each test."""
    monkeypatch.delenv("HASTEN_NATIVE", raising=False)
    library._load.cache_clear()
    yield
    library._load.cache_clear()


def test_without_a_compiler_torchs_operations_run_and_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_COMPILERS", ("no-such-compiler",))
    monkeypatch.delenv("CXX", raising=False)
    model = random_model(llama(head_dim=16))
    assert fused(model).info.kernels == "torch"
    reason = library.why_not_native(torch.float32, torch.device("cpu"), 16)
    assert reason is not None
    assert "install g++" in reason
    for options in ({"kernels": "native"}, {"quantize": "int8"}):
        with pytest.raises(CapabilityError, match="needs hasten's CPU kernels, and there is no C"):
            fused(model, **options)


def stand_in(folder: Path, body: str) -> Path:
    """A compiler that isn't one."""
    script = folder / "compiler"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return script


def test_a_compiler_that_fails_is_quoted_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path))
    said = "In file decoder.cpp:\\ndecoder.cpp:1: error: no room\\n 1 | code\\n"
    compiler = stand_in(tmp_path, f"printf '{said}' >&2\nexit 1")
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(CapabilityError, match=r"can't be compiled by .*error: no room$"):
        build.compiled()
    assert not list((tmp_path / "native").glob("*/*"))


def test_a_compiler_named_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(CapabilityError, match="CXX names, 'no-such-compiler'"):
        build.compiled()


def test_the_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASTEN_NATIVE", "0")
    assert fused(random_model(llama(head_dim=16))).info.kernels == "torch"


@needs_compiler
def test_other_sizes_and_dtypes_run_in_torch() -> None:
    cpu = torch.device("cpu")
    assert library.why_not_native(torch.float32, cpu, 16) is None
    assert "float16" in str(library.why_not_native(torch.float16, cpu, 16))
    assert "multiple of 16" in str(library.why_not_native(torch.float32, cpu, 24))
    assert "not for cuda" in str(library.why_not_native(torch.float32, torch.device("cuda"), 16))
    assert fused(random_model(llama(head_dim=8))).info.kernels == "torch"


def test_options_that_contradict_each_other_are_refused_by_name() -> None:
    model = random_model(llama(head_dim=16))
    with pytest.raises(OptionError, match="kernels"):
        fused(model, kernels="torch", quantize="int8")
    for stored in (torch.bfloat16, torch.int8):
        with pytest.raises(OptionError, match="kv_dtype: is a choice of the native kernels"):
            fused(model, kernels="torch", kv_dtype=stored)
        with pytest.raises(OptionError, match="kv_dtype: is a choice of the native kernels"):
            fused(random_model(llama(head_dim=8)), kv_dtype=stored)
        with pytest.raises(CapabilityError, match="head size 8 is no multiple of 16"):
            fused(random_model(llama(head_dim=8)), kernels="native", kv_dtype=stored)
    for unknown in (torch.float16, torch.int16):
        with pytest.raises(OptionError, match="kv_dtype"):
            fused(model, kv_dtype=unknown)
    with pytest.raises(OptionError, match="quantize"):
        fused(model, quantize="int3")
    with pytest.raises(OptionError, match="kernels"):
        fused(model, kernels="metal")


def test_a_cache_that_cannot_be_written_means_torchs_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "file" / "cache"))
    model = random_model(llama(head_dim=16))
    assert fused(model).info.kernels == "torch"
    with pytest.raises(CapabilityError, match="Set HASTEN_CACHE"):
        fused(model, kernels="native")


def test_a_library_that_is_none_means_torchs_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    # The last argument is where the library is to be.
    compiler = stand_in(tmp_path, 'for last; do :; done\necho no library > "$last"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", str(compiler))
    assert fused(random_model(llama(head_dim=16))).info.kernels == "torch"
    with pytest.raises(CapabilityError, match="can't be loaded"):
        library.library()


def test_two_processes_at_once_compile_once(tmp_path: Path) -> None:
    compiler = stand_in(
        tmp_path,
        f'case "$*" in *--version) exit ;; esac\necho once >> {tmp_path}/log\nsleep 1\n'
        'for last; do :; done\necho a library > "$last"',
    )
    environment = {**os.environ, "CXX": str(compiler), "HASTEN_CACHE": str(tmp_path / "cache")}
    code = "from hasten.native.build import compiled; print(compiled().read_text())"
    command = [sys.executable, "-c", code]
    both = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [each.communicate(timeout=60)[0].strip() for each in both] == ["a library"] * 2
    assert (tmp_path / "log").read_text() == "once\n"
    assert not list((tmp_path / "cache").glob(".building-*"))


def test_what_the_kernels_are_made_of_is_in_their_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = [str(stand_in(tmp_path, "echo version 1"))]
    sources = tmp_path / "sources"
    shutil.copytree(build.SOURCES, sources)
    monkeypatch.setattr(build, "SOURCES", sources)
    first = build._key(compiler, ["-O1"])
    assert build._key(compiler, ["-O1"]) == first
    keys = [first, build._key(compiler, ["-O2"])]
    with (sources / "simd.h").open("a", encoding="utf-8") as file:
        file.write("\n")
    keys.append(build._key(compiler, ["-O1"]))
    stand_in(tmp_path, "echo version 2")
    keys.append(build._key(compiler, ["-O1"]))
    monkeypatch.setattr(build, "_processor", lambda: "another")
    keys.append(build._key(compiler, ["-O1"]))
    assert len(set(keys)) == len(keys)


@needs_compiler
def test_the_library_is_kept_by_its_key() -> None:
    assert build.compiled() == build.compiled()
    assert build.compiled().parent != build.compiled(portable=True).parent


def test_where_they_are_not_quick_they_run_only_when_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if (reason := library.why_not_native(torch.float32, torch.device("cpu"), 16)) is not None:
        pytest.skip(f"no CPU kernels here: {reason}")
    monkeypatch.setattr(library.library(), "features", 0)
    model = random_model(llama(head_dim=16))
    assert "AVX-512" in str(library.why_not_quick(torch.float32, torch.device("cpu"), 16))
    assert fused(model).info.kernels == "torch"
    assert fused(model, kernels="native").info.kernels == "native"
    assert fused(model, quantize="int8").info.kernels == "native"
    pair = (make_model(head_dim=16), make_tokenizer())
    assert hasten.load(pair, method="ar").target.info.kernels == "torch"
    assert hasten.load(pair, method="ar", exact=True).target.info.kernels == "native"

"""The kernels are compiled where they run; without a compiler everything else goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.targets.fused_models import fused, llama, random_model

from hasten.errors import CapabilityError, OptionError
from hasten.native import build, library


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Whether there are kernels is asked once a process: ask again around each test."""
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


def test_a_compiler_that_fails_is_quoted_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path))
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'decoder.cpp:1: error: no room' >&2\nexit 1\n")
    compiler.chmod(0o755)
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
    with pytest.raises(OptionError, match="kv_dtype"):
        fused(model, kernels="torch", kv_dtype=torch.bfloat16)
    with pytest.raises(OptionError, match="quantize"):
        fused(model, quantize="int3")
    with pytest.raises(OptionError, match="kernels"):
        fused(model, kernels="metal")

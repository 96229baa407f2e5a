"""``hasten info``: facts about a model, the engine and why, and what works."""

from __future__ import annotations

import json
from pathlib import Path

import hasten
from hasten.methods import all_methods
from tests.cli.conftest import Hasten
from tests.cli.tiny import CONTEXT, save_tiny


def test_the_facts_are_the_target_s(run: Hasten, tiny_model: str, llm: hasten.LLM) -> None:
    facts = json.loads(run("info", tiny_model, "--device", "cpu", "--json").stdout)
    info = llm.target.info
    assert facts["architecture"] == info.architecture
    assert facts["engine"] == info.engine == "fused"
    assert facts["vocab_size"] == info.vocab_size
    assert facts["context_limit"] == info.context_limit == CONTEXT
    assert facts["eos_ids"] == sorted(info.eos_ids)
    assert facts["fingerprint"] == info.fingerprint
    assert set(facts["methods"]) == set(all_methods())


def test_the_weights_are_counted(run: Hasten, tiny_model: str) -> None:
    from transformers import AutoModelForCausalLM

    count = AutoModelForCausalLM.from_pretrained(tiny_model).num_parameters()
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        facts = json.loads(run("info", tiny_model, "--dtype", dtype, "--json").stdout)
        assert (facts["parameters"], facts["weight_bytes"]) == (count, size * count)


def test_the_reason_for_the_engine_is_given(run: Hasten, tiny_model: str, tmp_path: Path) -> None:
    asked = json.loads(run("info", tiny_model, "--engine", "transformers", "--json").stdout)
    assert (asked["engine"], asked["engine_reason"]) == ("transformers", "as asked")
    other = str(save_tiny(tmp_path / "gpt2", family="gpt2"))
    facts = json.loads(run("info", other, "--json").stdout)
    assert facts["engine"] == "transformers"
    assert "gpt2" in facts["engine_reason"].lower()
    assert facts["capabilities"]["notes"]


def test_the_page_fits_80_columns_and_names_what_is_off(run: Hasten, tiny_model: str) -> None:
    result = run("info", tiny_model, "--engine", "transformers")
    assert result.exit_code == 0
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    for words in ("transformers: as asked", "context", "can't", "layer ranges", "fingerprint"):
        assert words in result.stdout


def test_the_reason_for_the_kernels_is_given(run: Hasten, tiny_model: str) -> None:
    def facts(*flags: str) -> tuple[str, str]:
        shown = json.loads(run("info", tiny_model, "--device", "cpu", "--json", *flags).stdout)
        return shown["kernels"], shown["kernels_reason"]

    kernels, why = facts()
    assert kernels == "torch"
    assert "head size 8 is no multiple of 16" in why
    assert facts("--kernels", "torch") == ("torch", "as asked")
    assert facts("--engine", "transformers") == ("", "")


def test_packed_weights_are_counted_and_named(run: Hasten, native_model: str) -> None:
    flags = ["--device", "cpu", "--quantize", "int4"]
    facts = json.loads(run("info", native_model, *flags, "--json").stdout)
    assert (facts["kernels"], facts["quantize"], facts["dtype"]) == ("native", "int4", "float32")
    target = hasten.load(native_model, device="cpu", method="ar", quantize="int4").target
    assert facts["weight_bytes"] == getattr(target, "weight_bytes", None)
    assert 0 < facts["weight_bytes"] < 2 * facts["parameters"]
    page = run("info", native_model, *flags).stdout
    assert "native: hasten's own" in page
    assert "float32, int4 weights" in page
    assert all(len(line) <= 80 for line in page.splitlines())


def test_kernels_and_weights_are_told(run: Hasten, tiny_model: str) -> None:
    from hasten.native.library import why_not_quick

    facts = json.loads(run("info", tiny_model, "--kernels", "torch", "--json").stdout)
    assert (facts["kernels"], facts["kernels_reason"]) == ("torch", "as asked")
    assert (facts["precision"], facts["quantize"]) == ("float32", "")
    facts = json.loads(run("info", tiny_model, "--json").stdout)
    if facts["kernels"] == "torch":  # its heads' size, or no compiler here
        import torch

        reason = why_not_quick(torch.float32, torch.device("cpu"), 8)
        assert facts["kernels_reason"] == f"not hasten's own: {reason}"

"""``hasten verify``: counts, explanations and the exit code."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hasten import verify as verifiers
from hasten.verify import Verdict
from tests.cli.conftest import Hasten


@pytest.fixture
def verify(run: Hasten, tiny_model: str, suite: str) -> Hasten:
    """Runs ``hasten verify`` on the tiny model and suite."""

    def call(*args: str) -> Any:
        return run("verify", "--model", tiny_model, "--suite", suite, "-n", "24", *args)

    return call


def believe_drafts(tree: Any, q: Any, judge: Any) -> Verdict:
    """A broken verifier: the first drafted token is taken unchecked."""
    if len(tree) == 1:
        return verifiers.walk(tree, q, judge)
    drafted = tree.tokens[1]
    return Verdict((0, 1), (drafted, judge.choose(1, (drafted,))))


def test_a_lossless_method_passes(verify: Hasten) -> None:
    result = verify("--method", "prompt-lookup")
    assert result.exit_code == 0, result.stderr
    assert "greedy: 2/2 identical" in result.stdout
    assert "sampled, temperature 0.8: 2/2 identical" in result.stdout
    assert "every answer is identical" in result.stdout


@pytest.mark.parametrize("rule", ["greedy", "match"])
def test_a_biased_verifier_fails(
    verify: Hasten, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    monkeypatch.setitem(verifiers.VERIFIERS, rule, believe_drafts)
    result = verify()
    assert result.exit_code == 1
    assert "NOT lossless" in result.stdout
    assert "a fault, please report it" in result.stdout
    other = "sampled, temperature 0.8" if rule == "greedy" else "greedy"
    assert f"{other}: 2/2 identical" in result.stdout


def test_json_tells_each_difference(verify: Hasten, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verifiers.VERIFIERS, "greedy", believe_drafts)
    result = verify("--json")
    value = json.loads(result.stdout)
    assert (result.exit_code, value["ok"]) == (1, False)
    assert value["sampled"] == {"identical": 2, "total": 2}
    assert value["greedy"]["total"] == 2
    assert value["faults"] == len(value["differences"]) == 2 - value["greedy"]["identical"]
    assert {d["rule"] for d in value["differences"]} == {"greedy"}


def test_a_text_file_is_a_prompt_a_line(verify: Hasten, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("abcabc\n\nxyzxyz\nlast\n")
    assert "greedy: 3/3" in verify("--suite", str(path)).stdout
    assert "greedy: 2/2" in verify("--suite", str(path), "--limit", "2").stdout


def test_prompts_without_room_are_skipped_and_told(verify: Hasten, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("abc\n" + "a" * 400 + "\n")
    result = verify("--suite", str(path))
    assert result.exit_code == 0
    assert "greedy: 1/1" in result.stdout
    assert "skipped prompt 1" in result.stderr


def test_nothing_compared_is_no_proof(verify: Hasten, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a" * 400 + "\n")
    result = verify("--suite", str(path))
    assert result.exit_code == 1
    assert "nothing was compared" in result.stdout


def test_the_package_s_suite_of_random_prompts_works(verify: Hasten) -> None:
    result = verify("--suite", "adversarial", "--limit", "3", "-n", "4", "--json")
    value = json.loads(result.stdout)
    assert value["greedy"]["total"] + len(value["skipped"]) == 3


@pytest.fixture
def verify_native(run: Hasten, native_model: str, suite: str) -> Hasten:
    """Runs ``hasten verify`` on native kernels in bfloat16."""

    def call(*args: str) -> Any:
        line = ["verify", native_model, "--suite", suite, "-n", "24", "--device", "cpu"]
        return run(*line, "--dtype", "bfloat16", "--kernels", "native", *args)

    return call


@pytest.mark.parametrize("flags", [[], ["--quantize", "int8"], ["--quantize", "int4"]])
def test_answers_on_native_kernels_are_identical(verify_native: Hasten, flags: list[str]) -> None:
    result = verify_native("--method", "prompt-lookup", *flags)
    assert result.exit_code == 0, result.stderr
    assert "native kernels" in result.stdout
    assert "every answer is identical" in result.stdout


@pytest.mark.parametrize("flags", [[], ["--quantize", "int8"]])
def test_a_difference_on_native_kernels_is_not_excused(
    verify_native: Hasten, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.setitem(verifiers.VERIFIERS, "greedy", believe_drafts)
    monkeypatch.setattr("hasten.divergence.NEAR_TIE_ULPS", math.inf)
    monkeypatch.setattr("hasten.targets.load.load_target", lambda *a, **k: pytest.fail("loaded"))
    result = verify_native(*flags)
    assert result.exit_code == 1
    assert "native kernels excuse no difference" in " ".join(result.stdout.split())
    value = json.loads(verify_native("--json", *flags).stdout)
    assert value["faults"] == len(value["differences"]) > 0
    assert (value["kernels"], value["quantize"]) == ("native", "int8" if flags else "")


def test_a_population_is_told_how_far_it_may_be_off(verify: Hasten) -> None:
    method = "smc,draft=self,particles=4,length=2"
    result = verify("--method", method)
    assert result.exit_code == 0, result.stderr
    assert "not lossless" in result.stdout
    assert "E[Z]" in result.stdout
    made = json.loads(verify("--method", method, "--json").stdout)
    assert len(made["prompts"]) == 2
    for found in made["prompts"]:
        # the draft is the model itself: nothing is weighed
        assert found["rel_var"] == pytest.approx(0, abs=1e-6)
        assert found["evidence"] == pytest.approx(1, abs=1e-3)

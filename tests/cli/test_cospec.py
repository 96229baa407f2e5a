"""``cospec`` on the command line: what can be proven, what is told, how overrides are marked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hasten.arbitration.loop import Arbitration
from tests.cli.conftest import Hasten

OPEN = "head=own,exits=1,gate=0,consecutive=0"


@pytest.fixture
def verify(run: Hasten, tiny_model: str, suite: str) -> Hasten:
    def call(*args: str) -> Any:
        how = ("--model", tiny_model, "--suite", suite, "-n", "24", "--device", "cpu")
        return run("verify", *how, *args)

    return call


def test_verify_proves_the_loop_and_counts_the_overrides(verify: Hasten) -> None:
    result = verify("--method", f"cospec:random,{OPEN}")
    assert result.exit_code == 0, result.stderr
    assert "not lossless, by design" in result.stdout
    assert "with the rule target: 2/2 identical" in result.stdout
    assert "lossless where the rule keeps nothing" in result.stdout
    assert "with its own rule: 0/2 identical" in result.stdout
    assert "the draft's token was kept at" in " ".join(result.stdout.split())
    value = json.loads(verify("--json", "--method", f"cospec:random,{OPEN}").stdout)
    assert value["ok"] is True
    assert value["greedy"] == {"identical": 2, "total": 2}
    own = value["own_rule"]
    assert own["total"] == 2
    assert own["identical"] == 0
    assert own["tokens"] == 48
    assert 0 < own["overrides"] < own["mismatches"]


def test_verify_finds_a_loop_that_overrides_by_itself(
    verify: Hasten, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arbitration, "_admits", lambda self, m: True)
    from hasten.arbitration.rules import Target

    monkeypatch.setattr(Target, "keep", lambda self, m: True)
    result = verify("--method", f"cospec:target,{OPEN}")
    assert result.exit_code == 1
    assert "NOT lossless" in result.stdout


def test_trace_marks_what_was_kept_against_the_model(generate: Hasten, llm: Any) -> None:
    how = f"cospec:draft,{OPEN.replace(',gate=0,consecutive=0', '')}"
    wanted = llm.generate("abcabc", max_new_tokens=24, method=how)
    assert wanted.overrides
    result = generate("abcabc", "-n", "24", "--method", how, "--trace")
    assert result.exit_code == 0, result.stderr
    assert "kept against the model: in « »" in result.stdout
    text = result.stdout.partition("\n")[2].partition("\n\nround")[0]
    assert wanted.text in text.translate({ord(c): "" for c in "‹›«»"})
    assert "«" in text
    lossless = generate("abcabc", "-n", "24", "--method", "prompt-lookup", "--trace")
    assert "against" not in lossless.stdout.partition("\n")[0]


def test_stats_tell_how_often_the_draft_was_kept(generate: Hasten, llm: Any) -> None:
    how = f"cospec:draft,{OPEN}"
    figures = llm.generate("abcabc", max_new_tokens=24, method=how).metrics
    result = generate("abcabc", "-n", "24", "--method", how, "--stats")
    told = " ".join(result.stderr.split())
    assert f"{figures.overrides} of {figures.mismatches} mismatches" in told
    value = json.loads(generate("abcabc", "-n", "24", "--method", how, "--json").stdout)
    assert value["metrics"]["overrides"] == figures.overrides > 0
    plain = generate("abcabc", "-n", "24", "--method", "prompt-lookup", "--stats")
    assert "overrides" not in plain.stderr


def test_methods_say_that_it_is_lossy_by_design(run: Hasten) -> None:
    value = json.loads(run("methods", "cospec", "--json").stdout)
    assert value["lossless"] == "no (by design)"
    assert {"target", "draft", "typical", "fuzzy", "mentored", "cascade", "bild"} <= set(
        value["variants"]
    )
    told = run("methods", "cospec")
    assert told.exit_code == 0
    assert "no (by design)" in told.stdout


def test_without_an_arbiter_one_line_says_what_to_do(generate: Hasten, told: Any) -> None:
    line = told(generate("abc", "--method", "cospec,head=own,exits=1"))
    assert line.startswith("cospec.arbiter: no arbiter is shipped for")
    assert "cospec:typical" in line

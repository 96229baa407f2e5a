"""What lossy methods refuse of any request is told before a model is loaded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.conftest import Hasten

WARM = ("--temperature", "1")
REFUSED = [
    (("--method", "smc"), "--temperature: smc needs at least 1e-05"),
    (("--method", "smc", *WARM, "--verify", "match"), "--verify: plays no part in smc"),
    (("--method", "cospec:typical", "--verify", "greedy"), "--verify: plays no part in cospec"),
    (("--method", "smc,particles=few", *WARM), "smc.particles: must be a whole number"),
]


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **options: Any) -> Any:
        raise AssertionError("a model was loaded")

    for command in ("generate", "chat"):
        monkeypatch.setattr(f"hasten.cli.{command}.load_model", load)


@pytest.mark.parametrize("command", [("generate", "abc"), ("chat",)], ids=lambda c: str(c[0]))
@pytest.mark.parametrize(("flags", "line"), REFUSED)
def test_a_lossy_method_refuses_before_a_model_is_loaded(
    run: Hasten, told: Any, nothing_loads: None, command: Any, flags: Any, line: str
) -> None:
    assert told(run(*command, *flags)).startswith(line)


def test_a_trace_of_particles_is_refused_before_a_model_is_loaded(
    run: Hasten, told: Any, nothing_loads: None
) -> None:
    line = told(run("generate", "abc", "--method", "smc", *WARM, "--trace"))
    assert line.startswith("--trace: marks kept drafts, and smc weighs them instead")


def test_json_has_where_the_draft_overrode_and_the_population(run: Hasten) -> None:
    some = ("generate", "Count from one to nine:", "-n", "12", "--json", "--method")
    value = json.loads(run(*some, "cospec:draft,bonus=off").stdout)
    assert len(value["overrides"]) == value["metrics"]["overrides"] > 0
    for each in value["overrides"]:
        assert value["tokens"][each["position"]] == each["drafted"] != each["target"]
    assert value["lossless"] == "no (by design)"
    value = json.loads(run(*some, "smc", *WARM, "--seed", "1").stdout)
    answers, picked = value["population"]["answers"], value["population"]["picked"]
    assert sum(each["weight"] for each in answers) == pytest.approx(1)
    assert answers[picked]["tokens"] == value["tokens"]
    assert answers[picked]["text"] == value["text"]


@pytest.mark.parametrize("command", [("generate", "abc"), ("chat",)], ids=lambda c: str(c[0]))
def test_a_lossy_method_says_so_beside_its_answers(run: Hasten, command: Any) -> None:
    told = "note: cospec:typical is lossy"
    some = ("-n", "8", "--method")
    assert told in run(*command, *some, "cospec:typical", input="abc\n").stderr
    assert "lossy" not in run(*command, *some, "prompt-lookup", input="abc\n").stderr

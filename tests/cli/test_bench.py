"""``hasten bench``: the tables, the file, and how a run ends."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hasten.bench import Report, Row
from tests.cli.conftest import Hasten

ROW = Row(
    method="prompt-lookup,max_ngram=4,nodes=12",
    category="overall",
    prompts=24,
    tokens=3072,
    target_passes=1500,
    mean_accepted_length=2.04,
    tokens_per_s=81.25,
    speedup_macro=1.4,
    speedup_micro=1.36,
    identical=24,
    draft_ms_per_round=0.05,
    verify_ms_per_round=20.0,
    extra={"pass_ms": 20.1},
)
PEER = replace(
    ROW,
    method="peer:transformers-prompt-lookup",
    mean_accepted_length=None,
    speedup_macro=None,
    speedup_micro=None,
    draft_ms_per_round=None,
    extra={},
)


@pytest.fixture
def bench(run: Hasten, tiny_model: str, suite: str) -> Hasten:
    """Runs ``hasten bench`` on the tiny model and suite."""

    def call(*args: str) -> Any:
        return run("bench", "--model", tiny_model, "--suite", suite, "-n", "8", *args)

    return call


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the runner give a report (or raise) without measuring; counts its calls."""
    calls: list[Any] = []

    def set_to(outcome: Report | BaseException) -> list[Any]:
        def run(config: Any, progress: Any) -> Report:
            calls.append(config)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr("hasten.bench.runner.run", run)
        return calls

    return set_to


def test_a_run_prints_each_group_and_writes_the_file(bench: Hasten, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = bench(
        *("--methods", "ar,prompt-lookup,nodes=4", "--device", "cpu", "--json", str(path))
    )
    assert result.exit_code == 0, result.output
    for words in (
        "one (prompts: 1)",
        "two (prompts: 1)",
        "overall (prompts: 2)",
        "prompt-lookup,nodes=4",
        " in float32 on cpu: fused engine, torch kernels; suite",
    ):
        assert words in result.stdout
    value = json.loads(path.read_text())
    methods = {row["method"] for row in value["rows"]}
    assert methods == {"ar", "prompt-lookup,nodes=4"}
    assert all(row["identical"] == row["prompts"] for row in value["rows"])
    assert [p.name for p in tmp_path.iterdir() if "out.json" in p.name] == ["out.json"]


def test_options_reach_the_runner(bench: Hasten, reported: Any) -> None:
    calls = reported(Report({}, (ROW,)))
    bench(
        *("--methods", "prompt-lookup,nodes=4,ar", "--methods", "prompt-lookup:hf"),
        *("--limit", "2", "--turns", "all", "--repeats", "3", "--peers", "transformers"),
        *("--dtype", "bfloat16", "--engine", "fused", "--device", "cpu", "--seed", "5"),
        *("--quantize", "int8", "--kernels", "native", "--kv-dtype", "float32", "--exact"),
    )
    (config,) = calls
    assert config.methods == ("prompt-lookup,nodes=4", "ar", "prompt-lookup:hf")
    assert (config.limit, config.turns, config.repeats, config.seed) == (2, "all", 3, 5)
    assert (config.dtype, config.engine, config.device) == ("bfloat16", "fused", "cpu")
    assert (config.quantize, config.kernels) == ("int8", "native")
    assert (config.kv_dtype, config.exact) == ("float32", True)
    assert (config.peers, config.max_new_tokens) == (("transformers",), 8)


def test_a_path_that_can_not_be_written_is_told_before_the_run(
    bench: Hasten, told: Any, reported: Any, tmp_path: Path
) -> None:
    calls = reported(Report({}, (ROW,)))
    assert told(bench("--json", str(tmp_path / "none" / "out.json"))).startswith("--json: ")
    assert "is a folder" in told(bench("--json", str(tmp_path)))
    assert calls == []


@pytest.mark.parametrize(
    "end", [RuntimeError("broke"), KeyboardInterrupt()], ids=["fault", "ctrl-c"]
)
def test_a_run_that_ends_early_leaves_the_old_file_alone(
    bench: Hasten, reported: Any, tmp_path: Path, end: BaseException
) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "out.json").write_text("old")
    reported(end)
    result = bench("--json", str(folder / "out.json"))
    assert result.exit_code == (130 if isinstance(end, KeyboardInterrupt) else 2)
    assert [(p.name, p.read_text()) for p in folder.iterdir()] == [("out.json", "old")]


def test_an_interrupted_run_keeps_what_was_measured(
    bench: Hasten, reported: Any, tmp_path: Path
) -> None:
    reported(Report({}, (ROW,), ("interrupted",), partial=True))
    result = bench("--json", str(tmp_path / "out.json"))
    assert result.exit_code == 130
    assert json.loads((tmp_path / "out.json").read_text())["environment"]["partial"] is True
    assert "prompt-lookup" in result.stdout


def test_the_table_fits_80_columns_and_leaves_unknown_figures_out(
    bench: Hasten, reported: Any
) -> None:
    reported(Report({}, (ROW, PEER), ("the machine is busy: 2.1 of 2 cores",)))
    result = bench()
    assert result.exit_code == 0
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    assert all(text in result.stdout for text in ("1.40x", "1.36x", "2.04", "81.2", "24/24"))
    assert result.stderr == "note: the machine is busy: 2.1 of 2 cores\n"


def test_the_first_line_names_weights_and_kernels(bench: Hasten, reported: Any) -> None:
    facts = {"model": "m", "dtype": "bfloat16", "device": "cpu", "engine": "fused", "suite": "mini"}
    facts |= {"kernels": "native", "quantize": "int8", "exact": True}
    reported(Report(facts, (ROW,)))
    line = "m in bfloat16, int8 weights on cpu: fused engine, native kernels, exact; suite mini"
    assert " ".join(bench().stdout.split()).startswith(line)


def test_differences_without_excuse_fail_the_run(bench: Hasten, reported: Any) -> None:
    extra = {**ROW.extra, "faults": 1, "differences": ["prompt 3: NOT a near tie"]}
    reported(Report({}, (replace(ROW, identical=23, extra=extra),)))
    result = bench()
    assert result.exit_code == 1
    assert "prompt 3: NOT a near tie" in result.stdout


# -- the page --------------------------------------------------------------------------------------


def test_a_run_writes_a_page_into_a_folder_made_for_it(bench: Hasten, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "results"
    result = bench("--methods", "prompt-lookup", "--report", str(folder))
    assert result.exit_code == 0, result.output
    page = (folder / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    for words in ("prompt-lookup", "one", "two", "overall"):
        assert words in page
    assert "report.html" in result.stderr
    assert [path.name for path in folder.iterdir()] == ["report.html"]


def test_a_page_is_written_of_an_interrupted_run_too(
    bench: Hasten, reported: Any, tmp_path: Path
) -> None:
    reported(Report({}, (ROW,), ("interrupted",), partial=True))
    assert bench("--report", str(tmp_path)).exit_code == 130
    assert "Interrupted." in (tmp_path / "report.html").read_text()


def test_a_folder_that_can_not_be_written_is_told_before_the_run(
    bench: Hasten, told: Any, reported: Any, tmp_path: Path
) -> None:
    calls = reported(Report({}, (ROW,)))
    (tmp_path / "file").write_text("")
    (tmp_path / "busy" / "report.html").mkdir(parents=True)
    assert told(bench("--report", str(tmp_path / "file"))).startswith("--report: ")
    assert told(bench("--report", str(tmp_path / "file" / "below"))).startswith("--report: ")
    assert told(bench("--report", str(tmp_path / "busy"))).startswith("--report: ")
    assert calls == []


def test_a_page_without_matplotlib_is_refused_before_the_run(
    bench: Hasten, told: Any, reported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = reported(Report({}, (ROW,)))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = told(bench("--report", str(tmp_path / "out")))
    assert line.startswith("--report: needs matplotlib")
    assert "pip install 'hasten[report]'" in line
    assert calls == []
    assert not (tmp_path / "out").exists()


def test_figures_are_kept_when_the_page_fails(
    bench: Hasten, reported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported(Report({}, (ROW,)))
    monkeypatch.setattr("hasten.bench.report.render", lambda report: 1 / 0)
    result = bench("--json", str(tmp_path / "out.json"), "--report", str(tmp_path))
    assert result.exit_code == 2
    assert json.loads((tmp_path / "out.json").read_text())["rows"]
    assert "1.36x" in result.stdout
    assert not (tmp_path / "report.html").exists()


def test_the_state_reaches_the_runner_and_a_wrong_one_is_named(
    bench: Hasten, told: Any, reported: Any
) -> None:
    calls = reported(Report({}, (ROW,)))
    bench("--state", "both")
    bench()
    assert [config.state for config in calls] == ["both", "cold"]
    assert told(bench("--state", "hot")).startswith("--state: ")

from __future__ import annotations

import json
from typing import Any

import pytest

import hasten
from hasten.api import LLM
from hasten.bench.config import BenchConfig
from hasten.bench.throughput import (
    ThroughputReport,
    _rows,
    _Run,
    check_levels,
    run_throughput,
)
from hasten.errors import ContextError, OptionError
from hasten.metrics import Summary
from tests.tiny_llm import make_model, make_tokenizer


@pytest.fixture(scope="module")
def llm() -> LLM:
    return hasten.load((make_model(), make_tokenizer()), method="ar", engine="fused")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("suite") / "s.jsonl"
    rows = [{"question_id": i, "category": "a", "turns": [f"{i} abc abc"]} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def report(llm: LLM, suite: str) -> ThroughputReport:
    config = BenchConfig(methods=("racer,nodes=6",), suite=suite, max_new_tokens=20, repeats=2)
    return run_throughput(config, [4, 1, 2], llm=llm)


def test_every_method_is_measured_at_every_level_plain_decoding_included(
    report: ThroughputReport,
) -> None:
    assert [(row.concurrency, row.method) for row in report.rows] == [
        (level, name) for level in (1, 2, 4) for name in ("ar", "racer,nodes=6")
    ]


def test_all_answers_are_those_of_the_prompts_alone(report: ThroughputReport) -> None:
    assert all(row.identical == row.prompts == 5 for row in report.rows)
    assert len({row.tokens for row in report.rows}) == 1


def runs(*seconds: float) -> list[_Run]:
    return [_Run(each, [(1, 2)], Summary()) for each in seconds]


def test_ratios_are_within_a_repeat_to_plain_decoding_at_the_level_and_to_one_at_a_time() -> None:
    """The machine is slower now and then; runs that follow each other share its mood."""
    made = _rows(
        {
            (1, "ar"): runs(4.0, 8.0, 12.0),
            (1, "racer"): runs(2.0, 2.0, 6.0),
            (2, "ar"): runs(1.0, 2.0, 3.0),
            (2, "racer"): runs(1.0, 4.0, 1.5),
        },
        ("ar", "racer"),
        (1, 2),
    )
    by = {(row.concurrency, row.method): row for row in made}
    assert by[2, "racer"].seconds == 1.5
    assert by[2, "racer"].tokens_per_s == pytest.approx(2 / 1.5)
    assert by[2, "racer"].against_plain == 1.0  # of 1, 0.5 and 2
    assert by[2, "racer"].against_one == 2.0  # of 2, 0.5 and 4
    assert by[1, "racer"].against_plain == 2.0
    assert by[1, "racer"].against_one == by[2, "ar"].against_plain == 1.0


def test_the_json_says_how_it_was_measured(report: ThroughputReport) -> None:
    made: dict[str, Any] = json.loads(json.dumps(report.as_json()))
    assert made["environment"]["max_new_tokens"] == 20
    assert made["environment"]["repeats"] == 2
    assert len(made["rows"]) == 6


def test_without_one_at_a_time_there_is_no_ratio_to_it(llm: LLM, suite: str) -> None:
    config = BenchConfig(methods=(), suite=suite, limit=2, max_new_tokens=4)
    (row,) = run_throughput(config, [2], llm=llm).rows
    assert row.against_one is None


@pytest.mark.parametrize("levels", [[], [0], [1, 1000], [1.5]])
def test_bad_levels_are_refused_by_name(levels: Any) -> None:
    with pytest.raises(OptionError, match="concurrency"):
        check_levels(levels)


def test_a_suite_without_a_prompt_that_fits_is_an_error(llm: LLM, tmp_path: Any) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps({"question_id": 1, "category": "a", "turns": ["x" * 500]}) + "\n")
    with pytest.raises(ContextError, match="room"):
        run_throughput(BenchConfig(suite=str(path), methods=()), [1], llm=llm)

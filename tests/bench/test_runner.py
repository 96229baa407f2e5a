from __future__ import annotations

import gc
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hasten
from hasten.bench import BenchConfig, Progress, Report
from hasten.bench.output import OVERALL
from hasten.bench.prompts import load_suite
from hasten.bench.runner import run
from hasten.bench.session import Session, first_ids
from hasten.bench.stats import Answer
from hasten.errors import ContextError, OptionError
from hasten.types import SamplingParams

METHODS = ("prompt-lookup,nodes=6",)
ROW_KEYS = {
    "method", "category", "prompts", "tokens", "target_passes", "mean_accepted_length",
    "tokens_per_s", "speedup_macro", "speedup_micro", "identical", "draft_ms_per_round",
    "verify_ms_per_round", "extra",
}  # fmt: skip
EXTRA_KEYS = {
    "decode_tokens", "decode_s", "speedup_micro_interval", "e2e_speedup_micro", "ttft_ms",
    "pass_ms", "topk_ms", "host_ms", "host_share", "topk_share", "distinct_4gram_share",
    "near_ties", "faults", "unexplained", "accepted_length_histogram", "acceptance_by_depth",
    "acceptance_by_source",
}  # fmt: skip
ENVIRONMENT_KEYS = {
    "hasten", "python", "torch", "transformers", "cpu", "cores", "threads", "dtype", "device",
    "model", "fingerprint", "suite", "row_ids", "limit", "max_new_tokens", "repeats", "seed",
    "temperature", "load_average_before", "busy", "date", "command", "partial", "warnings",
}  # fmt: skip


@pytest.fixture(scope="module")
def small() -> BenchConfig:
    return BenchConfig(methods=METHODS, suite="mini", limit=6, max_new_tokens=10)


@pytest.fixture(scope="module")
def steps() -> list[Progress]:
    return []


@pytest.fixture(scope="module")
def report(small: BenchConfig, steps: list[Progress], tiny: hasten.LLM) -> Report:
    return run(replace(small, repeats=2, command="bench"), steps.append, llm=tiny)


# -- the report ------------------------------------------------------------------------------------


def test_the_json_holds_environment_and_rows_with_every_key(report: Report) -> None:
    made = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert set(made) == {"environment", "rows", "prompts"}
    assert set(made["environment"]) >= ENVIRONMENT_KEYS
    for row in made["rows"]:
        assert set(row) == ROW_KEYS
        assert set(row["extra"]) >= EXTRA_KEYS


def test_every_method_has_a_row_per_category_and_an_overall_one(report: Report) -> None:
    assert report.methods == ("ar", *METHODS)
    assert len(report.categories) == 6
    assert len(report.rows) == 2 * 7
    assert [row.category for row in report.rows[:7]] == [*report.categories, OVERALL]


def test_categories_add_up_to_overall_for_every_method(report: Report) -> None:
    for method in report.methods:
        parts = [report.row(method, category) for category in report.categories]
        overall = report.row(method)
        for name in ("prompts", "tokens", "target_passes", "identical"):
            assert sum(getattr(row, name) for row in parts) == getattr(overall, name)


def test_the_prompts_of_a_method_add_up_to_its_overall_row(report: Report) -> None:
    for method in report.methods:
        row = report.row(method)
        mine = [entry for entry in report.prompts if entry["method"] == method]
        assert len(mine) == row.prompts
        assert sum(e["decode_tokens"] for e in mine) == row.extra["decode_tokens"]
        assert sum(e["decode_s"] for e in mine) == pytest.approx(row.extra["decode_s"])
        assert sum(e["target_passes"] for e in mine) == row.target_passes
        assert sum(e["identical"] for e in mine) == row.identical


def test_plain_decoding_has_speedup_one_and_one_token_a_pass(report: Report) -> None:
    for row in report.rows:
        if row.method == "ar":
            assert row.speedup_macro == row.speedup_micro == row.mean_accepted_length == 1.0
            assert row.extra["speedup_micro_interval"] in (None, (1.0, 1.0))


def test_a_lossless_method_gives_plain_decodings_ids_in_float32(report: Report) -> None:
    row = report.row(METHODS[0])
    assert row.identical == row.prompts == 6
    assert row.tokens == report.row("ar").tokens
    assert row.extra["faults"] == 0 == report.faults
    assert row.extra["differences"] == []


def test_tokens_after_the_first_are_what_the_histogram_sums_to(report: Report) -> None:
    for row in report.rows:
        histogram = row.extra["accepted_length_histogram"]
        assert sum(int(k) * v for k, v in histogram.items()) == row.extra["decode_tokens"]
        assert sum(histogram.values()) == row.target_passes
        assert row.tokens == row.extra["decode_tokens"] + row.prompts


def test_the_conditions_are_recorded(report: Report) -> None:
    facts = report.to_json()["environment"]
    assert facts["row_ids"][0] == "multi_turn-1"
    assert len(facts["row_ids"]) == 6
    assert (facts["dtype"], facts["repeats"], facts["command"]) == ("float32", 2, "bench")
    assert facts["fingerprint"]
    assert facts["partial"] is False
    assert (facts["kernels"], facts["quantize"]) == ("torch", "")
    assert (facts["kv_dtype"], facts["exact"]) == (None, False)


def test_progress_runs_through_the_phases_and_ends_full(
    report: Report, steps: list[Progress]
) -> None:
    assert list(dict.fromkeys(step.phase for step in steps))[:3] == ["load", "warm-up", "measure"]
    measuring = [step for step in steps if step.phase == "measure"]
    assert [step.done for step in measuring] == list(range(6 * 2 * 2 + 1))
    assert measuring[0].total == measuring[-1].total == 24
    assert {step.method for step in measuring} == {"ar", METHODS[0], ""}


def test_the_report_is_written_as_json(report: Report, tmp_path: Path) -> None:
    report.write(tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["environment"]["suite"] == "mini"
    with pytest.raises(OptionError, match="json: can't write"):
        report.write(tmp_path / "no" / "out.json")


# -- how it measures -------------------------------------------------------------------------------


def test_no_contestant_always_goes_first(steps: list[Progress], report: Report) -> None:
    measuring = [step.method for step in steps if step.phase == "measure" and step.method]
    first = measuring[::2]
    assert first.count("ar") == first.count(METHODS[0]) == 6
    # the second repeat runs each prompt in another order than the first did
    assert all(a != b for a, b in zip(first[:6], first[6:], strict=True))


def test_baseline_and_repeated_methods_are_measured_once(
    small: BenchConfig, tiny: hasten.LLM
) -> None:
    config = replace(small, limit=1, methods=("prompt-lookup", "ar", "prompt-lookup"))
    assert run(config, llm=tiny).methods == ("ar", "prompt-lookup")


def test_garbage_collection_is_off_while_timed_and_on_afterwards(
    small: BenchConfig, tiny: hasten.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    real = hasten.LLM.stream

    def stream(self: hasten.LLM, *args: Any, **options: Any) -> Any:
        seen.append(gc.isenabled())
        return real(self, *args, **options)

    monkeypatch.setattr(hasten.LLM, "stream", stream)
    run(replace(small, limit=1, methods=()), llm=tiny)
    assert seen[-1] is False
    assert gc.isenabled()


def test_all_turns_are_measured_after_plain_decodings_own_answers(
    small: BenchConfig, tiny: hasten.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[Any] = []
    real = hasten.LLM.tokenize

    def tokenize(self: hasten.LLM, prompt: Any, **options: Any) -> list[int]:
        prompts.append(prompt)
        return real(self, prompt, **options)

    monkeypatch.setattr(hasten.LLM, "tokenize", tokenize)
    report = run(replace(small, limit=1, turns="all"), llm=tiny)
    assert report.row("ar").prompts == report.row(METHODS[0]).identical == 2
    assert report.environment["row_ids"] == ["multi_turn-1"]
    talk = next(p for p in prompts if isinstance(p, list) and isinstance(p[0], dict))
    assert [m["role"] for m in talk] == ["user", "assistant", "user"]
    said = tiny.generate(talk[0]["content"], method="ar", max_new_tokens=10)
    assert talk[1]["content"] == tiny.tokenizer.decode(said.tokens, skip_special_tokens=True)


def test_a_sampled_run_gives_identical_ids_under_match(
    small: BenchConfig, tiny: hasten.LLM
) -> None:
    report = run(replace(small, temperature=0.7, seed=3), llm=tiny)
    assert report.row(METHODS[0]).identical == 6
    assert report.environment["verify"] == "match"


def test_the_adversarial_suite_runs(small: BenchConfig, tiny: hasten.LLM) -> None:
    report = run(replace(small, suite="adversarial", limit=3), llm=tiny)
    assert report.categories == ("random_ids", "no_repeats", "decoys")
    assert report.row(METHODS[0]).identical == 3


def test_noise_comes_before_a_rows_prompt_and_holds_no_special_token(tiny: hasten.LLM) -> None:
    row = next(r for r in load_suite("adversarial").rows if r.random_tokens == 384)
    ids, prompt = first_ids(tiny, row), tiny.tokenize(row.turns[0])
    assert ids[-len(prompt) :] == prompt
    assert len(ids) == 384 + len(prompt)
    assert tiny.tokenizer.eos_token_id not in ids[:384]
    assert ids == first_ids(tiny, row)


def test_answers_of_one_token_make_a_report_without_ratios(
    small: BenchConfig, tiny: hasten.LLM
) -> None:
    report = run(replace(small, max_new_tokens=1), llm=tiny)
    row = report.row(METHODS[0])
    assert (row.tokens, row.target_passes, row.tokens_per_s) == (6, 0, 0.0)
    assert row.speedup_micro is None
    json.dumps(report.to_json(), allow_nan=False)


def test_prompts_without_room_are_left_out_and_named(tiny: hasten.LLM, tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    rows = [{"question": "x" * 5000}, {"question": "short"}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    config = BenchConfig(methods=(), suite=str(path), max_new_tokens=4)
    report = run(config, llm=tiny)
    assert report.row("ar").prompts == 1
    assert any("left out" in warning and "set 1" in warning for warning in report.warnings)
    path.write_text(json.dumps(rows[0]))
    with pytest.raises(ContextError, match="no prompt"):
        run(config, llm=tiny)


# -- interruption ----------------------------------------------------------------------------------


def interrupted_at(step: int) -> Any:
    """A progress callback that presses Ctrl-C before that measured answer."""

    def callback(at: Progress) -> None:
        if at.phase == "measure" and at.method and at.done == step:
            raise KeyboardInterrupt

    return callback


def test_an_interrupted_run_reports_the_complete_prompts(
    small: BenchConfig, tiny: hasten.LLM
) -> None:
    report = run(small, interrupted_at(5), llm=tiny)
    assert report.partial
    assert report.row("ar").prompts == report.row(METHODS[0]).prompts == 2
    assert len(report.environment["row_ids"]) == 2
    assert any("interrupted" in warning for warning in report.warnings)


def test_an_interruption_before_the_first_prompt_is_raised(
    small: BenchConfig, tiny: hasten.LLM
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(small, interrupted_at(1), llm=tiny)


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("limit", 0),
        ("limit", True),
        ("repeats", 0),
        ("max_new_tokens", 0),
        ("max_new_tokens", 2.5),
        ("turns", "last"),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("seed", -1),
        ("quantize", "int3"),
        ("kernels", "cuda"),
        ("kv_dtype", "float16"),
        ("engine", "steam"),
        ("dtype", "int3"),
    ],
)
def test_a_bad_option_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        BenchConfig(**{option: value})
    assert caught.value.option == option


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"methods": ("no-such",)}, "method"),
        ({"suite": "no-such"}, "suite"),
        ({"peers": ("no-such",)}, "peers"),
        ({"verify": "no-such"}, "verify"),
        ({"verify": "greedy", "temperature": 0.5}, "verify"),
    ],
)
def test_a_bad_choice_is_refused_before_the_model_is_loaded(
    options: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hasten.bench.runner.load", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(OptionError) as caught:
        run(BenchConfig(**options))
    assert caught.value.option == named


def test_all_turns_need_a_chat_template(
    small: BenchConfig, tiny: hasten.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny.tokenizer, "chat_template", None)
    with pytest.raises(OptionError, match="turns: 'all' needs a chat template"):
        run(replace(small, turns="all"), llm=tiny)


# -- differences -----------------------------------------------------------------------------------


class Wrong:
    """A contestant whose last token is off by one."""

    name = METHODS[0]

    def __init__(self, right: Any) -> None:
        self.right = right

    def run(self, ids: Sequence[int], params: SamplingParams) -> Answer:
        answer: Answer = self.right.run(ids, params)
        tokens = (*answer.tokens[:-1], (answer.tokens[-1] + 1) % 250)
        return replace(answer, tokens=tokens)


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the second contestant wrong."""
    real = Session.__post_init__

    def broken(self: Session) -> None:
        real(self)
        self.contestants = [self.contestants[0], Wrong(self.contestants[1])]

    monkeypatch.setattr(Session, "__post_init__", broken)


@pytest.mark.usefixtures("wrong")
def test_a_difference_in_float32_is_a_fault_and_listed(
    small: BenchConfig, tiny: hasten.LLM
) -> None:
    report = run(replace(small, limit=2), llm=tiny)
    row = report.row(METHODS[0])
    assert (row.identical, row.extra["faults"], report.faults) == (0, 2, 2)
    assert "multi_turn multi_turn-1: token 9" in row.extra["differences"][0]
    assert "NOT a near tie" in row.extra["differences"][0]


@pytest.mark.usefixtures("wrong")
def test_an_interruption_while_explaining_keeps_the_figures(
    small: BenchConfig, tiny: hasten.LLM
) -> None:
    def interrupt(at: Progress) -> None:
        if at.phase == "explain":
            raise KeyboardInterrupt

    report = run(replace(small, limit=2), interrupt, llm=tiny)
    assert report.partial
    assert report.row("ar").prompts == report.row(METHODS[0]).extra["faults"] == 2


@pytest.mark.usefixtures("wrong")
def test_a_difference_in_bfloat16_is_scored_against_float32(
    small: BenchConfig, tiny_folder: Path
) -> None:
    llm = hasten.load(str(tiny_folder), method="ar", dtype="bfloat16", device="cpu")
    report = run(replace(small, limit=2, max_explained=1), llm=llm)
    row = report.row(METHODS[0])
    kinds = {k: row.extra[k] for k in ("near_ties", "faults", "unexplained")}
    assert sum(kinds.values()) == row.prompts - row.identical == 2
    assert kinds["unexplained"] == 1
    assert "ulp in float32" in row.extra["differences"][0]
    assert "not looked into" in row.extra["differences"][1]
    unscored = run(replace(small, limit=1, explain=False), llm=llm).row(METHODS[0])
    assert unscored.extra["unexplained"] == 1

"""``hasten generate``: the answer, where the prompt comes from, and what else is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hasten
from tests.cli.conftest import Hasten

PROMPT = "abcabc abcabc abc"


def answer(llm: hasten.LLM, prompt: str = PROMPT, **options: Any) -> str:
    return llm.generate(prompt, max_new_tokens=24, **options).text


@pytest.mark.parametrize("how", [[], ["--stream"], ["--no-stream"]])
def test_the_answer_alone_goes_to_stdout(generate: Hasten, llm: hasten.LLM, how: list[str]) -> None:
    result = generate(PROMPT, "-n", "24", *how)
    assert (result.exit_code, result.stdout) == (0, answer(llm) + "\n")
    assert result.stderr == ""


@pytest.mark.parametrize("method", ["ar", "prompt-lookup,nodes=4", "prompt-lookup:hf"])
def test_the_method_changes_nothing_in_the_answer(
    generate: Hasten, llm: hasten.LLM, method: str
) -> None:
    assert generate(PROMPT, "-n", "24", "--method", method).stdout == answer(llm) + "\n"


def test_every_way_to_give_a_prompt_gives_the_same_answer(
    generate: Hasten, llm: hasten.LLM, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    wanted = answer(llm) + "\n"
    assert generate("-", "-n", "24", input=PROMPT).stdout == wanted
    assert generate("-n", "24", input=PROMPT + "\n").stdout == wanted
    assert generate("-n", "24", "--prompt-file", str(file)).stdout == wanted


def test_system_and_no_template_reach_the_model(generate: Hasten, llm: hasten.LLM) -> None:
    system = generate(PROMPT, "-n", "24", "--system", "Be brief.").stdout
    plain = generate(PROMPT, "-n", "24", "--no-template").stdout
    assert system == answer(llm, system="Be brief.") + "\n"
    assert plain == answer(llm, template=False) + "\n"
    assert len({system, plain, answer(llm) + "\n"}) == 3


def test_sampling_options_reach_the_model(generate: Hasten, llm: hasten.LLM) -> None:
    flags = ["-t", "0.9", "--top-k", "20", "--top-p", "0.95", "--min-p", "0.01", "--seed", "7"]
    options = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "seed": 7}
    assert generate(PROMPT, "-n", "24", *flags).stdout == answer(llm, **options) + "\n"


def test_stop_strings_may_be_repeated(generate: Hasten, llm: hasten.LLM) -> None:
    text = answer(llm)
    late, early = text[12:14], text[4:6]
    result = generate(PROMPT, "-n", "24", "--stop", late, "--stop", early, "--json")
    value = json.loads(result.stdout)
    assert value["text"] == answer(llm, stop=[late, early])
    assert value["finish_reason"] == "stop"
    assert value["stop_reason"] in (late, early)


def test_json_holds_the_whole_result(generate: Hasten, llm: hasten.LLM) -> None:
    wanted = llm.generate(PROMPT, max_new_tokens=24, logprobs=2)
    value = json.loads(generate(PROMPT, "-n", "24", "--json", "--logprobs", "2").stdout)
    assert value["text"] == wanted.text
    assert value["tokens"] == list(wanted.tokens)
    assert value["prompt_tokens"] == len(wanted.prompt_tokens)
    assert value["metrics"]["new_tokens"] == len(wanted.tokens)
    assert 1.0 <= value["metrics"]["mean_accepted_length"] <= 24
    assert [entry["token"] for entry in value["logprobs"]] == list(wanted.tokens)
    assert all(len(entry["top"]) == 2 for entry in value["logprobs"])


def test_logprobs_are_a_table_with_a_line_for_each_token(generate: Hasten) -> None:
    result = generate(PROMPT, "-n", "3", "--logprobs", "1")
    lines = result.stdout.splitlines()
    rule = next(i for i, line in enumerate(lines) if "───" in line)
    assert len([line for line in lines[rule + 1 :] if line.strip()]) == 3


def test_stats_go_to_stderr(generate: Hasten, llm: hasten.LLM) -> None:
    result = generate(PROMPT, "-n", "24", "--stats")
    assert result.stdout == answer(llm) + "\n"
    for words in (
        "mean accepted length",
        "tokens/s",
        "first token",
        "passes",
        "drafted tokens",
        "target",
    ):
        assert words in result.stderr
    assert all(len(line) <= 80 for line in result.stderr.splitlines())


def test_trace_marks_the_kept_tokens_and_loses_no_text(generate: Hasten, llm: hasten.LLM) -> None:
    how = "prompt-lookup"  # rounds of auto depend on what passes happen to cost
    wanted = llm.generate(PROMPT, max_new_tokens=40, method=how)
    assert wanted.metrics.accepted > 0
    result = generate(PROMPT, "-n", "40", "--method", how, "--trace")
    text, _, table = result.stdout.partition("\n")[2].partition("\n\nround")
    assert text.translate({ord("‹"): "", ord("›"): ""}) == wanted.text
    assert "‹" in text
    rows = [
        line.split()
        for line in table.splitlines()[2:]
        if line.split()[:1] and line.split()[0].isdigit()
    ]
    assert sum(int(row[2]) for row in rows[1:]) == wanted.metrics.accepted
    assert len(rows) == wanted.metrics.rounds


def test_no_tokens_are_an_empty_answer(generate: Hasten) -> None:
    result = generate(PROMPT, "-n", "0")
    assert (result.exit_code, result.stdout) == (0, "\n")


def test_help_tells_the_library_s_defaults() -> None:
    """The flags pass on only what was given, so a default told in the help may not drift."""
    from dataclasses import fields

    import typer

    from hasten.api import DEFAULT_METHOD
    from hasten.cli import app
    from hasten.types import SamplingParams

    params = {f.name: f.default for f in fields(SamplingParams)}
    command = typer.main.get_command(app).commands["generate"]  # type: ignore[attr-defined]
    told = {
        p.name: p.show_default
        for p in command.params
        if isinstance(getattr(p, "show_default", None), str)
    }
    shown = {name: text for name, text in told.items() if name in params and name != "seed"}
    assert len(shown) >= 6
    assert shown == {name: str(params[name]) for name in shown}
    assert told["method"] == DEFAULT_METHOD


def test_stats_and_json_name_how_weights_are_quantized(run: Hasten, native_model: str) -> None:
    line = ["generate", PROMPT, "-n", "4", "--model", native_model, "--device", "cpu"]
    flags = ["--quantize", "int8", "--kernels", "native", "--dtype", "bfloat16"]
    stats = run(*line, *flags, "--method", "ar", "--stats").stderr
    assert "ar in bfloat16, int8 weights" in stats
    value = json.loads(run(*line, *flags, "--json").stdout)
    facts = (value["dtype"], value["quantize"], value["kernels"])
    assert facts == ("bfloat16", "int8", "native")
    plain = json.loads(run(*line, "--kernels", "torch", "--json").stdout)
    assert (plain["dtype"], plain["quantize"], plain["kernels"]) == ("float32", "", "torch")

"""Answers to prompts that make a model copy, as rows; and the command that uses them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hasten
from hasten.api import LLM
from hasten.cli import app
from hasten.errors import CapabilityError, OptionError
from hasten.payoff.predictor import read
from hasten.train.payoff import collect as made
from hasten.train.payoff import prompts
from hasten.train.payoff.collect import CollectOptions
from hasten.train.payoff.prompts import Task
from hasten.train.rows import read as read_rows
from hasten.train.rows import split_of
from tests.cli.tiny import save_tiny
from tests.tiny_llm import make_model, make_tokenizer
from tests.train.payoff import cases

SMALL = CollectOptions(answers=8, max_new_tokens=12, max_prompt_tokens=150, collect_batch=3)


def listed(seed: int, root: Path | None = None) -> Any:
    for n in range(30):
        yield Task("rewrite", "pkg", (f"one {n + seed}",))
        yield Task("second-turn", "pkg", (f"first {n + seed}", "and again"))
        yield Task("log", "pkg", ("x" * 170,))


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "tasks", listed)


@pytest.fixture(scope="module")
def llm() -> LLM:
    model = (make_model(max_position_embeddings=400), make_tokenizer())
    return hasten.load(model, method="ar", kernels="torch")


def test_greedy_answers_become_rows_and_second_turns_hold_the_first_answer(
    llm: LLM, tmp_path: Path
) -> None:
    told: list[int] = []
    there = made.collect(llm, tmp_path, SMALL, lambda what, done, total: told.append(done))
    rows = list(read_rows(tmp_path))
    assert len(rows) == there >= 8
    assert told[-1] == there
    assert {row.temperature for row in rows} == {0.0}
    assert {(row.domain, row.source) for row in rows} == {
        ("code", "rewrite/pkg"), ("code", "second-turn/pkg")
    }  # fmt: skip
    texts = [llm.tokenizer.decode(row.prompt) for row in rows]
    seconds = [n for n, text in enumerate(texts) if "and again" in text]
    assert seconds
    for n in seconds:
        number = re.findall(r"first (\d+)", texts[n])[0]
        first = next(m for m, text in enumerate(texts) if text.count(f"first {number}<") == 1
                     and m not in seconds)  # fmt: skip
        answer = llm.tokenizer.decode(rows[first].output, skip_special_tokens=True)
        assert answer in texts[n]
        assert rows[n].split == rows[first].split == split_of(rows[first].prompt)


def test_the_same_call_goes_on_and_asks_nothing_twice(llm: LLM, tmp_path: Path) -> None:
    made.collect(llm, tmp_path, CollectOptions(answers=4, max_new_tokens=8, collect_batch=2))
    before = (tmp_path / "rows.jsonl").read_bytes()
    made.collect(llm, tmp_path, CollectOptions(answers=9, max_new_tokens=8, collect_batch=2))
    assert (tmp_path / "rows.jsonl").read_bytes().startswith(before)
    asked = [tuple(row.prompt) for row in read_rows(tmp_path)]
    assert len(asked) == len(set(asked)) >= 9


def test_what_cannot_collect_is_refused_before_anything_runs(llm: LLM, tmp_path: Path) -> None:
    slow = hasten.load((make_model(), make_tokenizer()), method="ar", engine="transformers")
    with pytest.raises(CapabilityError, match="can't collect answers"):
        made.collect(slow, tmp_path / "a")
    with pytest.raises(OptionError, match="max_new_tokens: 400 fill the context"):
        made.collect(llm, tmp_path / "a", CollectOptions(max_new_tokens=400))
    assert not (tmp_path / "a").exists()
    with pytest.raises(OptionError, match="collect_batch"):
        CollectOptions(collect_batch=0)
    with pytest.raises(OptionError, match="minutes"):
        CollectOptions(minutes=0)


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def _allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    from hasten.train import batched

    monkeypatch.setattr(batched, "keep_freed_memory", lambda: True)


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["train", "payoff", *args])


TINY = ("--device", "cpu", "--dtype", "float32")


def test_the_command_writes_a_predictor_that_the_method_takes(folder: str, tmp_path: Path) -> None:
    data, out = cases.save(tmp_path / "rows.jsonl", cases.rows()), tmp_path / "payoff.npz"
    quick = ("--kind", "mlp", "--epochs", "3", "--longest", "16")
    done = run("-o", str(out), "--data", data, "--model", folder, *TINY, *quick)
    assert done.exit_code == 0, done.output
    for words in ("precision", "payoff", "score>=4", "always", "never", "oracle", "held out"):
        assert words in done.output
    assert read(out, "here").cache.longest == 16
    assert json.loads((tmp_path / "payoff.npz.json").read_text())["kind"] == "mlp"
    llm = hasten.load(folder, method="ar", device="cpu", dtype="float32")
    method = f"hvd,predictor={out},longest=16,model=none"
    asked = {"max_new_tokens": 12, "ignore_eos": True}
    assert llm.generate("a b a b", method=method, **asked).tokens == (
        llm.generate("a b a b", **asked).tokens
    )


def test_the_command_collects_alone_where_no_file_is_named(folder: str, tmp_path: Path) -> None:
    place = ("--collect", str(tmp_path / "rows"))
    done = run("--model", folder, *TINY, *place, "--answers", "6", "-n", "8")
    assert done.exit_code == 0, done.output
    assert re.search(r"\d answers are in", done.output)
    assert len(list(read_rows(tmp_path / "rows"))) >= 6


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "out: is missing"),
        (["-o", "x.npz"], "data: is missing"),
        (["-o", "x.npz", "--data", "d", "--tau", "0"], "--tau: must"),
        (["-o", "x.npz", "--data", "d", "--kind", "forest"], "kind"),
        (["-o", "x.npz", "--data", "d", "--longest", "0"], "--longest: must"),
        (["--collect", "d", "--answers", "0"], "--answers: must"),
    ],
)
def test_options_that_make_no_sense_are_told_in_a_line(args: list[str], words: str) -> None:
    done = run(*args)
    assert done.exit_code == 2
    assert words in done.output


def test_every_kind_of_task_has_a_domain_of_rows() -> None:
    assert set(prompts.DOMAINS) <= set(prompts.KINDS)

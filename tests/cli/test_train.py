"""``hasten train``: the options of its commands, what they print and how they end."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Hasten
from tests.cli.tiny import save_tiny


@pytest.fixture(autouse=True)
def allocator(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Notes that the allocator is set, which in this process it must not be."""
    from hasten.train import batched

    calls: list[bool] = []
    monkeypatch.setattr(batched, "keep_freed_memory", lambda: calls.append(True))
    return calls


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "some_train.jsonl"
    path.write_text("".join(f'{{"question": "question {at}"}}\n' for at in range(60)))
    return str(path)


@pytest.fixture
def make(run: Hasten, tiny_model: str, tmp_path: Path, prompts: str) -> Hasten:
    """Runs ``hasten train data`` on the tiny model, 60 prompts, into ``tmp_path/out``."""

    def call(*args: str) -> Any:
        usual = ["--model", tiny_model, "--device", "cpu", "--dtype", "float32", "-n", "8"]
        place = ["--out", str(tmp_path / "out"), "--source", f"math={prompts}", "--batch", "8"]
        return run("train", "data", *usual, *place, *args)

    return call


def test_train_alone_shows_its_commands(run: Hasten) -> None:
    result = run("train")
    assert result.exit_code == 0
    assert "data" in result.stdout
    assert "train" in run("--help").stdout


def test_rows_are_made_and_counted(make: Hasten, tmp_path: Path, allocator: list[bool]) -> None:
    from hasten.train.data import read

    result = make("--tokens", "100", "--temperature", "0.5", "--greedy-share", "0.5", "--seed", "3")
    assert result.exit_code == 0, result.output
    rows = list(read(tmp_path / "out"))
    tokens = sum(len(row.output) for row in rows)
    assert tokens >= 100
    assert {row.temperature for row in rows} == {0.0, 0.5}
    assert re.search(rf"math +{len(rows)} +{tokens}\b", result.stdout)
    assert f"{tokens} tokens made" in result.stdout
    assert allocator == [True]


def test_progress_is_a_line_a_wave_where_nobody_watches(make: Hasten) -> None:
    lines = make("--tokens", "150").stderr.splitlines()
    assert len(lines) >= 2
    for line in lines:
        assert re.fullmatch(r"\d+ of 150 tokens, [\d,]+ tokens/s, [\d,]+ s: math 100%", line)


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from hasten.cli import train
    from hasten.train.data import Progress

    screen = Console(file=io.StringIO(), force_terminal=True, width=200)
    monkeypatch.setattr(train, "err", lambda: screen)
    with train._shown(2000) as show:
        show(Progress({"math": 600, "code": 200}, {}, made=800, running=50, seconds=10.0))
        show(Progress({}, {}, note="math has no more prompts"))
    shown = screen.file.getvalue()
    for words in ("85 tokens/s", "code 25%, math 75%", "850 of 2,000 tokens", "note: ", "no more"):
        assert words in shown


def test_the_same_command_goes_on(make: Hasten, tmp_path: Path) -> None:
    first = make("--tokens", "60")
    before = (tmp_path / "out" / "rows.jsonl").read_bytes()
    second = make("--tokens", "160")
    assert first.exit_code == second.exit_code == 0
    after = (tmp_path / "out" / "rows.jsonl").read_bytes()
    assert after.startswith(before)
    assert len(after) > len(before)
    again = make("--tokens", "160")
    assert "0 tokens made" in again.stdout
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == after


def test_what_is_missing_is_told_when_the_sources_end(make: Hasten) -> None:
    result = make("--tokens", "100000")
    assert result.exit_code == 0
    assert re.search(r"are missing: the same command goes on", result.stdout)
    assert "note: math=" in result.stderr
    assert "has no more prompts" in result.stderr


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(
    make: Hasten, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hasten.train import data

    whole = data.make

    def stopped(llm: Any, folder: Path, options: Any, report: Callable[[Any], None]) -> Any:
        def stop(at: Any) -> None:
            report(at)
            if at.total:
                raise KeyboardInterrupt

        return whole(llm, folder, options, stop)

    monkeypatch.setattr(data, "make", stopped)
    result = make("--tokens", "1000")
    assert result.exit_code == 130
    assert "keeps all finished waves; the same command goes on" in result.stderr
    assert "Traceback" not in result.output
    assert len(list(data.read(tmp_path / "out"))) == 8


def test_several_sources_and_their_shares(make: Hasten, prompts: str, tmp_path: Path) -> None:
    from hasten.train.data import read

    other = tmp_path / "other.jsonl"
    other.write_text("".join(f'{{"turns": ["turn {at}"]}}\n' for at in range(60)))
    shares = ["--domain-share", "math=3", "--domain-share", "chat = 1"]
    result = make("--source", f"chat={other}", *shares, "--tokens", "300", "--greedy-share", "0")
    assert result.exit_code == 0, result.output
    tokens = {"math": 0, "chat": 0}
    for row in read(tmp_path / "out"):
        tokens[row.domain] += len(row.output)
    assert 2 < tokens["math"] / tokens["chat"] < 4.5


def test_excluded_rows_are_not_asked_again(make: Hasten, tmp_path: Path) -> None:
    make("--tokens", "100000")
    (tmp_path / "out").rename(tmp_path / "old")
    result = make("--exclude", str(tmp_path / "old"), "--tokens", "10")
    assert "0 tokens made" in result.stdout
    assert "has no more prompts" in result.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--source", "poetry"], "--source: no such domain"),
        (["--source", "math"], "--source: math needs a file"),
        (["--source", "chat=/no/file"], "--source: chat: there is no /no/file"),
        (["--domain-share", "math"], "--domain-share: must be DOMAIN=NUMBER"),
        (["--domain-share", "math=much"], "--domain-share: must be DOMAIN=NUMBER"),
        (["--domain-share", "code=1"], "--domain-share: 'code' has no source"),
        (["--domain-share", "math=-1"], "--domain-share: of math"),
        (["--tokens", "0"], "--tokens: "),
        (["--tokens", "many"], "'--tokens'"),
        (["--minutes", "0"], "--minutes: "),
        (["--max-new-tokens", "0"], "--max-new-tokens: "),
        (["--max-new-tokens", "999"], "--max-new-tokens: 999 fill the context"),
        (["--max-prompt-tokens", "0"], "--max-prompt-tokens: "),
        (["--greedy-share", "2"], "--greedy-share: "),
        (["--temperature", "0"], "--temperature: "),
        (["--batch", "0"], "--batch: "),
        (["--dtype", "int3"], "--dtype: "),
        (["--exclude", "nothing.jsonl"], "there is no nothing.jsonl"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_option_is_named(
    make: Hasten, told: Callable[[Any], str], tmp_path: Path, flags: list[str], words: str
) -> None:
    assert words in told(make(*flags))
    assert not (tmp_path / "out").exists()


def test_a_measuring_set_is_refused(
    make: Hasten, told: Callable[[Any], str], tmp_path: Path
) -> None:
    path = tmp_path / "gsm8k_test_dev.jsonl"
    path.write_text('{"question": "x"}\n')
    assert "results are measured on" in told(make("--source", f"math={path}"))


def test_out_is_needed(run: Hasten, told: Callable[[Any], str]) -> None:
    assert "'--out'" in told(run("train", "data"))


def test_a_folder_of_another_model_is_refused(
    make: Hasten, told: Callable[[Any], str], tmp_path: Path
) -> None:
    make("--tokens", "10")
    rows = (tmp_path / "out" / "rows.jsonl").read_bytes()
    assert "--out: " in told(make("--dtype", "bfloat16", "--tokens", "100"))
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == rows


def test_a_model_without_the_fused_decoder_is_refused(
    run: Hasten, told: Callable[[Any], str], tmp_path: Path, prompts: str
) -> None:
    model = save_tiny(tmp_path / "gpt2", family="gpt2")
    flags = ["--model", str(model), "--source", f"math={prompts}", "--out", str(tmp_path / "out")]
    assert "can't make training text" in told(run("train", "data", *flags, "--device", "cpu"))


def test_help_tells_the_library_s_defaults() -> None:
    from dataclasses import fields

    import typer

    from hasten.cli import app
    from hasten.train.data import Options

    group = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    told = {
        p.name: p.show_default
        for p in group.commands["data"].params
        if isinstance(getattr(p, "show_default", None), str)
    }
    given = {f.name: str(f.default) for f in fields(Options) if f.name in told}
    assert len(given) >= 6
    del given["batch"]
    assert {name: told[name] for name in given} == given
    assert told["source"] == ", ".join(Options().sources)


@pytest.mark.parametrize("command", ["data", "exits"])
def test_the_model_is_loaded_on_the_kernels_that_training_runs_by_hand(
    run: Hasten, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    import hasten

    asked: list[dict[str, Any]] = []

    def load(model: Any, **options: Any) -> None:
        asked.append(options)
        raise hasten.ModelError("that is all")

    monkeypatch.setattr(hasten, "load", load)
    flags = ["--data", str(tmp_path)] if command == "exits" else []
    run("train", command, "--model", tiny_model, "--out", str(tmp_path / "out"), *flags)
    assert [options["kernels"] for options in asked] == ["torch"]

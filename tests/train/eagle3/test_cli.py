"""``hasten train eagle3``: what it prints, writes and refuses."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hasten.cli import app, train_eagle3
from hasten.train import batched
from hasten.train.eagle3.options import SFT, Options
from tests.train.dflash.cases import llm, write_rows

USUAL = ("--taps", "1,2,4", "--vocabulary", 60, "--length", 3)
SHORT = ("--steps", 20, "--texts", 4, "--unroll", 2)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_eagle3, "load_model", lambda *args, **options: llm())
    monkeypatch.setattr(batched, "keep_freed_memory", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl")


def hasten(*args: object) -> Any:
    return CliRunner().invoke(app, ["train", "eagle3", *map(str, args)])


def test_it_trains_says_how_far_it_got_and_measures_what_it_wrote(
    data: Path, tmp_path: Path
) -> None:
    made = hasten("--data", data, "--out", tmp_path, *USUAL, *SHORT)
    assert made.exit_code == 0, made.output
    assert re.search(r"after sft, tokens a pass on held-out text: all \d", made.stderr)
    assert "sft: step 10" in made.stderr
    assert "after 20 steps" in made.stdout
    assert "of chains of 3" in made.stdout
    assert re.search(r"steps right: \d\.\d{3} \d\.\d{3} \d\.\d{3}\n", made.stdout)
    assert f"the drafter is in {tmp_path}" in made.stdout
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"config.json", "model.safetensors", "curve.json", "report.json"}
    shown = hasten("--data", data, "--out", tmp_path, "--evaluate", "--length", 2)
    assert shown.exit_code == 0, shown.output
    assert re.search(r"^all +5 ", shown.stdout, re.MULTILINE)
    assert re.search(r"steps right: \d\.\d{3} \d\.\d{3}\n", shown.stdout)


def test_a_run_that_is_interrupted_says_that_the_command_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hasten.train.eagle3 import run

    def stop(*args: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run", stop)
    made = hasten("--data", data, "--out", tmp_path, *USUAL)
    assert made.exit_code == 130
    assert "the same command goes on" in made.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--taps", "one"), "--taps"),
        (("--steps", -1), "--steps"),
        (("--unroll", 0), "--unroll"),
        (("--decay", 0), "--decay"),
        (("--length", 0), "--length"),
        (("--states", "cloud"), "--states"),
        (("--split", "all"), "--split"),
        (("--share", 0), "--share"),
        (("--lr-end", 1), "--lr-end"),
    ],
)
def test_options_that_make_no_sense_are_named(
    flags: tuple[object, ...], named: str, data: Path, tmp_path: Path
) -> None:
    made = hasten("--data", data, "--out", tmp_path / "out", *flags)
    assert made.exit_code == 2
    assert named in made.stderr
    assert not (tmp_path / "out").exists()


def test_help_tells_the_librarys_defaults() -> None:
    told = {name: each.default for name, each in signature(train_eagle3.eagle3).parameters.items()}
    sft, whole = SFT(), Options()
    for name in ("steps", "minutes", "texts", "unroll", "decay", "lr", "lr_end"):
        assert told[name] == getattr(sft, name), name
    for name in ("states", "test", "length", "share", "init", "seed", "autocast"):
        assert told[name] == getattr(whole, name), name
    assert told["vocabulary"] == whole.shape.vocabulary

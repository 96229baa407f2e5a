"""``hasten train dflash``: what it prints, writes and refuses."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hasten.cli import app, train_dflash
from hasten.train import batched
from hasten.train.dflash.options import SFT, Head, Options, Rounds
from tests.train.dflash.cases import MASK, llm, ruled, write_rows

USUAL = ("--layers", 1, "--block", 4, "--taps", "1,2,4", "--mask-token", MASK, "--vocabulary", 60)
SHORT = ("--steps", 20, "--head-blocks", 200, "--length-head", 8, "--texts", 4, "--anchors", 6)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_dflash, "load_model", lambda *args, **options: llm())
    monkeypatch.setattr(batched, "keep_freed_memory", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", ruled())


def hasten(*args: object) -> Any:
    return CliRunner().invoke(app, ["train", "dflash", *map(str, args)])


def test_it_trains_says_how_far_it_got_and_measures_what_it_wrote(
    data: Path, tmp_path: Path
) -> None:
    rounds = ("--rounds", 2, "--round-prompts", 4, "--writer", "rows")
    made = hasten("--data", data, "--out", tmp_path, *USUAL, *SHORT, *rounds)
    assert made.exit_code == 0, made.output
    for stage in ("sft", "length", "rounds"):
        assert re.search(rf"after {stage}, tokens a pass on held-out text: all \d", made.stderr)
        assert f"after {stage}, " in made.stdout
    assert "round 1: 4 answers" in made.stderr
    assert "sft: step 10" in made.stderr
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"config.json", "model.safetensors", "curve.json", "report.json"}
    shown = hasten("--data", data, "--out", tmp_path, "--evaluate")
    assert shown.exit_code == 0, shown.output
    assert re.search(r"^all +5 ", shown.stdout, re.MULTILINE)
    assert re.search(r"^chat +\d ", shown.stdout, re.MULTILINE)


def test_a_run_that_is_interrupted_says_that_the_command_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hasten.train.dflash import run

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
        (("--writer", "nobody"), "--writer"),
        (("--objective", "kl"), "--objective"),
        (("--alpha", 2), "--alpha"),
        (("--states", "cloud"), "--states"),
        (("--split", "all"), "--split"),
        (("--split", "policy"), "--split"),
        (("--taps", "²"), "--taps"),
        (("--work", "there", "--states", "fly"), "--work"),
        (("--round-data", "there"), "--round-data"),
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
    from inspect import signature

    told = {name: each.default for name, each in signature(train_dflash.dflash).parameters.items()}
    sft, rounds, head, whole = SFT(), Rounds(), Head(), Options()
    assert (told["layers"], told["block"]) == (whole.shape.layers, whole.shape.block)
    assert (told["vocabulary"], told["length_head"]) == (whole.shape.vocabulary, whole.shape.head)
    for name in ("steps", "minutes", "texts", "anchors", "gamma", "lr", "lr_end"):
        assert told[name] == getattr(sft, name), name
    for name in ("passes", "max_new_tokens", "writer", "objective", "alpha", "temperature"):
        assert told[name] == getattr(rounds, name), name
    for name in ("minutes", "steps", "prompts", "lr"):
        assert told[f"round_{name}"] == getattr(rounds, name), name
    assert (told["clip"], told["clip_before_norm"]) == (rounds.clip, rounds.clip_before_norm)
    for name in ("blocks", "minutes", "everywhere"):
        assert told[f"head_{name}"] == getattr(head, name), name
    for name in ("states", "test", "share", "init", "seed", "autocast"):
        assert told[name] == getattr(whole, name), name


def test_progress_is_a_bar_on_a_terminal() -> None:
    from rich.console import Console
    from rich.progress import Progress

    screen = Console(file=io.StringIO(), force_terminal=True, width=200)
    with Progress(console=screen) as bar:
        show = train_dflash._Show(bar, Options())
        show({"stage": "states", "done": 10, "total": 40})
        show({"stage": "sft", "step": 850, "minutes": 5.0, "loss": 4.25})
        show({"stage": "rounds", "round": 0, "step": 10, "minutes": 1.5, "loss": 2.0})
        done = {task.description: (task.completed, task.total) for task in bar.tasks}
    assert done == {
        "states": (10, 40),
        "sft loss 4.250": (50, 100),
        "rounds loss 2.000": (10, 100),
    }

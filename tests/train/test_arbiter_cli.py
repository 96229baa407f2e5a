"""``hasten train arbiter``: what its commands print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hasten.cli import app, train_arbiter
from hasten.train.arbiter import evaluate, lessons, run, speed
from tests.train.arbiter_cases import DRAFT, asked, tiny
from tests.train.test_arbiter_specialist import made_up


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(families: Any, split: str, count: int, seed: int, *more: Any) -> list[Any]:
        return asked(count, split)

    monkeypatch.setattr(train_arbiter, "load_model", lambda *args, **options: tiny())
    monkeypatch.setattr(run, "ask", ask)
    monkeypatch.setattr(evaluate, "ask", ask)
    monkeypatch.setattr(lessons, "problems", made_up)
    monkeypatch.setattr(lessons, "available", lambda family, split: 4)
    monkeypatch.setattr("hasten.train.arbiter.fit.THRESHOLDS", 3)
    monkeypatch.setattr("hasten.train.arbiter.arms.MENTORED", (0.3,))


def hasten(*args: object) -> Any:
    return CliRunner().invoke(app, ["train", "arbiter", *map(str, args)])


def test_alone_it_shows_its_commands() -> None:
    shown = hasten()
    assert shown.exit_code == 0
    assert all(name in shown.stdout for name in ("fit", "specialist", "evaluate"))


def test_fit_then_evaluate(tmp_path: Path) -> None:
    usual = ("--families", "parity", "--draft", DRAFT, "--length", 3)
    made = hasten("fit", "--out", tmp_path, *usual, "--problems", 4, "--validation", 4,
                  "--kinds", "linear", "--iterations", 0, "--force")  # fmt: skip
    assert made.exit_code == 0, made.stderr
    assert str(tmp_path) in made.stdout
    assert "headroom: target only" in made.stderr
    assert (tmp_path / "arbiter.safetensors").is_file()
    stages = [
        json.loads(line)["stage"] for line in (tmp_path / "log.jsonl").read_text().splitlines()
    ]
    assert stages[:2] == ["headroom", "branches"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert ("a negative result" in made.stdout) == report["fallback"]
    shown = hasten("evaluate", "--arbiter", tmp_path, *usual, "--test", 4, "--validation", 4,
                   "--json", tmp_path / "made.json")  # fmt: skip
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.startswith("| rule | setting | accuracy |")
    assert evaluate.markdown(json.loads((tmp_path / "made.json").read_text())) in shown.stdout


def test_the_specialist_is_called_constructed(tmp_path: Path) -> None:
    made = hasten("specialist", "--out", tmp_path, "--families", "parity", "--others", "sort",
                  "--kind", "adapter", "--layer", 1, "--inner", 8, "--init", "",
                  "--epochs", 2, "--vocabulary", 100)  # fmt: skip
    assert made.exit_code == 0, made.stderr
    assert "constructed specialist" in made.stdout
    assert "parity" in made.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("fit", "--families", "nothing"), "--families: no such family: 'nothing'"),
        (("fit", "--families", "parity", "--problems", "0"), "--problems: must be at least 1"),
        (("fit", "--families", "parity", "--kinds", "forest"), "no such arbiter: 'forest'"),
        (("fit", "--families", "parity", "--draft", "draft=nothing"), "cospec.draft"),
        (("specialist", "--families", "parity", "--init", "shipped"), "--init: no exit modules"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    args: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    made = hasten(*args, "--out", tmp_path)
    assert made.exit_code == 2
    assert made.stderr.startswith("error: ")
    assert said in made.stderr
    assert made.stderr.count("\n") == 1
    assert not (tmp_path / "arbiter.json").exists()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--iterations", "-1"), "--iterations: must be at least 0"),
        (("--rollouts", "0"), "--rollouts: must be at least 1"),
        (("--speed", "nan"), "--speed: must be finite"),
    ],
)
def test_a_second_stage_that_cannot_be_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], line: str
) -> None:
    def load(*args: Any, **options: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(train_arbiter, "load_model", load)
    got = CliRunner().invoke(app, ["train", "arbiter", "fit", "--out", str(tmp_path), *flags])
    assert got.exit_code == 2
    assert got.stderr.startswith(f"error: {line}")


def test_a_file_is_no_folder_to_write_to(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    out = str(tmp_path / "taken")
    got = CliRunner().invoke(app, ["train", "arbiter", "fit", "--out", out, "--draft", DRAFT])
    assert got.exit_code == 2
    assert got.stderr.startswith("error: --out: can't make the folder")


@pytest.mark.slow
def test_every_arm_of_a_table_but_the_oracle_is_timed_at_its_setting(tmp_path: Path) -> None:
    usual = ("--families", "parity", "--draft", DRAFT, "--length", 3)
    hasten("fit", "--out", tmp_path, *usual, "--problems", 4, "--validation", 4, "--kinds",
           "linear", "--iterations", 1, "--force")  # fmt: skip
    file = tmp_path / "made.json"
    hasten("evaluate", "--arbiter", tmp_path, *usual, "--test", 3, "--validation", 4,
           "--json", file)  # fmt: skip
    made = json.loads(file.read_text())
    llm, problems = tiny(), asked(3, "test")
    arms = speed.timed_arms(llm, tmp_path, made)
    assert list(arms) == [evaluate.ALONE, *(a["name"] for a in made["arms"][:-1])]
    assert evaluate.SPEED not in evaluate.table(made)[0]
    runs = speed.measure(llm, arms, problems, repeats=1)
    heads, *rows = evaluate.table({**made, "speed": runs})
    assert heads[-1] == evaluate.SPEED
    assert [bool(row[-1]) for row in rows] == [True] * (len(rows) - 1) + [False]
    for name, answers in ((arm["name"], arm["answers"]) for arm in made["arms"][:-1]):
        if not name.startswith("random"):  # which tosses other coins live
            assert [run[0] for run in runs[name]] == [row[1] for row in answers], name

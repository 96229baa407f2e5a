"""``hasten train lede`` from the command line, over experience of a tiny target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hasten.cli import app
from hasten.policies.lede_agent import LedeAgent
from hasten.train.lede import logs
from tests.policies.exit_cases import costs
from tests.train.lede import cases

AT = (0, 2, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experience of twelve documents and a cost table in which drafts are cheap."""
    folder = tmp_path_factory.mktemp("cli")
    exits = cases.found(folder / "modules")
    docs = cases.documents(exits.target, exits, count=12, length=16)
    there = cases.experience(folder / "e", exits, docs, depths=3)
    priced = costs(AT, 6, probe=0.01, row=0.01, rows=cases.STEPS + 4)
    logs.write_costs(there.folder / logs.COSTS, priced)
    return folder


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["train", "lede", *args])


@pytest.fixture(scope="module")
def agent(folder: Path) -> Path:
    out = folder / "agent"
    made = run("fit", "-e", str(folder / "e"), "-o", str(out), "--updates", "24", "--prices", "1")
    assert made.exit_code == 0, made.output
    return out


def test_fit_writes_an_agent_that_belongs_to_the_model_and_its_curve(
    folder: Path, agent: Path
) -> None:
    names = {path.name for path in agent.iterdir()}
    assert names >= {"agent.npz", "curve.jsonl", "fit.json", "curve.png"}
    made = LedeAgent.load(agent / "agent.npz")
    meta = logs.Experience(folder / "e").meta
    assert (made.facts.fingerprint, made.facts.modules) == ("tiny", meta.modules)
    assert made.facts.layers == AT
    assert made.facts.notes["domains"] == "all"
    rows = [json.loads(line) for line in (agent / "curve.jsonl").read_text().splitlines()]
    assert rows[-1]["updates"] == 24


def test_replay_tells_the_headroom_first_and_scores_everything(folder: Path, agent: Path) -> None:
    table = folder / "table.json"
    made = run(
        "replay", "-e", str(folder / "e"), "--agent", f"mine={agent / 'agent.npz'}",
        "--json", str(table),
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    assert made.output.startswith("headroom:")
    rows = {row["policy"]: row for row in json.loads(table.read_text())["rows"]}
    assert {"fixed-oracle", "foresight", "clairvoyant", "del", "mine"} <= set(rows)
    assert any(name.startswith("myopic") for name in rows)
    assert rows["clairvoyant"]["rho"] == max(row["rho"] for row in rows.values())
    assert set(rows["mine"]["domains"]) == {"math", "chat"}
    for row in rows.values():
        assert row["low"] <= row["rho"] <= row["high"]


def test_ablated_agents_are_scored_beside_whole_ones(folder: Path) -> None:
    named = []
    for name, more in {
        "one-exit": ["--exits", "4"],
        "one-length": ["--length", "2"],
        "minimal": ["--state", "minimal", "--steps", "2"],
        "without": ["--leave-out", "chat", "--reward", "match"],
    }.items():
        out = folder / name
        made = run("fit", "-e", str(folder / "e"), "-o", str(out), "--updates", "8",
                   "--prices", "1", *more)  # fmt: skip
        assert made.exit_code == 0, made.output
        named += ["--agent", f"{name}={out / 'agent.npz'}"]
    table = folder / "ablations.json"
    made = run("replay", "-e", str(folder / "e"), "--no-rules", *named, "--json", str(table))
    assert made.exit_code == 0, made.output
    rows = {row["policy"]: row for row in json.loads(table.read_text())["rows"]}
    assert rows["one-exit"]["exit"] in (0.0, 4.0)
    assert rows["one-length"]["length"] <= 2.0
    assert rows["minimal"]["length"] <= 2.0
    minimal = LedeAgent.load(folder / "minimal" / "agent.npz")
    assert np.count_nonzero(np.abs(minimal.weights[0]).sum(0)) == 5


def test_a_domain_left_out_is_the_one_reported_on(folder: Path, agent: Path) -> None:
    table = folder / "chat.json"
    path = str(agent / "agent.npz")
    made = run("replay", "-e", str(folder / "e"), "--leave-out", "chat", "--no-rules", "--agent",
               path, "--json", str(table))  # fmt: skip
    assert made.exit_code == 0, made.output
    rows = json.loads(table.read_text())["rows"]
    assert all(set(row["domains"]) == {"chat"} for row in rows)
    assert rows[-1]["policy"] == "agent"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--preset", "slow"], "preset"),
        (["--state", "huge"], "state"),
        (["--reward", "money"], "reward"),
        (["--exits", "3"], "--exits: must be neighbours among 0+2+4"),
        (["--exits", "0+4"], "neighbours"),
        (["--steps", "40"], "--steps"),
        (["--domains", "poetry"], "no such domain"),
        (["--domains", "code"], "no documents"),
        (["--costs", "nowhere.json"], "nowhere.json"),
    ],
)
def test_options_that_make_no_sense_are_told_in_a_line(
    folder: Path, tmp_path: Path, args: list[str], words: str
) -> None:
    made = run("fit", "-e", str(folder / "e"), "-o", str(tmp_path / "out"), *args)
    assert made.exit_code == 2
    assert words in made.output
    assert not (tmp_path / "out").exists()


def test_a_folder_without_experience_is_told(tmp_path: Path) -> None:
    made = run("replay", "-e", str(tmp_path))
    assert made.exit_code == 2
    assert "hasten train lede collect" in made.output

"""A run that was stopped goes on, and only its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.errors import OptionError
from hasten.train.dflash.loop import CHECKPOINT, Trainer
from hasten.train.dflash.objectives import Objective
from hasten.train.dflash.options import SFT, Rounds
from tests.train.dflash.cases import everything, options, train, weights, write_rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl")


class Stop(Exception):
    """A run is killed."""


@pytest.mark.parametrize("stop", [("sft", 0, 10), ("length", 0, 10), ("rounds", 1, 10)])
def test_a_run_that_was_killed_ends_with_the_weights_of_one_that_was_not(
    stop: tuple[str, int, int], data: Path, tmp_path: Path
) -> None:
    chosen = everything(
        sft=SFT(20, 10.0, 4, 6, lr=5e-3), rounds=Rounds(2, 10.0, 12, 3, writer="rows")
    )
    whole = train(data, tmp_path / "whole", chosen)

    def kill(row: dict[str, Any]) -> None:
        if (row.get("stage"), row.get("round"), row.get("step")) == stop:
            raise Stop

    with pytest.raises(Stop):
        train(data, tmp_path / "killed", chosen, log=kill, every_s=0.0)
    assert (tmp_path / "killed" / CHECKPOINT).is_file()
    again = train(data, tmp_path / "killed", chosen)
    wanted, found = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    for made in (whole, again):
        for stage in made.values():
            del stage["minutes"]
    assert again == whole


def test_a_finished_run_is_not_run_again(data: Path, tmp_path: Path) -> None:
    chosen = everything()
    first = train(data, tmp_path, chosen)
    rows: list[dict[str, Any]] = []
    assert train(data, tmp_path, chosen, log=rows.append) == first
    assert rows == []


def test_more_rounds_go_on_where_the_last_ended(data: Path, tmp_path: Path) -> None:
    chosen = everything()
    train(data, tmp_path / "two", chosen)
    more = replace(chosen, rounds=replace(chosen.rounds, count=3))
    train(data, tmp_path / "two", more)
    train(data, tmp_path / "three", more)
    for name, value in weights(tmp_path / "three").items():
        assert torch.equal(weights(tmp_path / "two")[name], value)


def test_another_run_does_not_go_on_in_the_folder(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path, options(sft=SFT(2)))
    with pytest.raises(OptionError, match="other options"):
        train(data, tmp_path, options(sft=SFT(2), seed=1))


@pytest.mark.parametrize(
    "held", [b"half a file", b"", b".", b"X\x01\x00\x00\x00\xff.", [1], {"digest": 1}]
)
def test_a_checkpoint_that_is_none_is_refused_with_what_to_do(
    held: object, data: Path, tmp_path: Path
) -> None:
    if isinstance(held, bytes):
        (tmp_path / CHECKPOINT).write_bytes(held)
    else:
        torch.save(held, tmp_path / CHECKPOINT)
    with pytest.raises(OptionError, match=r"^out: .*Remove it to begin anew|^out: .*other options"):
        train(data, tmp_path, options(sft=SFT(2)))


@pytest.mark.parametrize("stage", ["sft", "length", "distil"])
def test_ctrl_c_keeps_the_steps_done(
    stage: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a step; checkpoints are far apart."""
    chosen = everything()
    whole = train(data, tmp_path / "whole", chosen)
    compute, asked = getattr(Objective, stage), [0]

    def interrupted(self: Objective, *args: Any) -> Any:
        asked[0] += 1
        if asked[0] == 4:
            raise KeyboardInterrupt
        return compute(self, *args)

    monkeypatch.setattr(Objective, stage, interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(data, tmp_path / "stopped", chosen)
    at = torch.load(tmp_path / "stopped" / CHECKPOINT)["place"]
    assert (at["stage"], at["step"]) == ({"distil": "rounds"}.get(stage, stage), 3)
    again = train(data, tmp_path / "stopped", chosen)
    assert asked[0] - 1 == whole[at["stage"]]["step"], "no step is made twice"
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "stopped")[name], value), name
    assert [each["step"] for each in again.values()] == [each["step"] for each in whole.values()]


def test_a_stage_that_is_over_is_not_trained_again_when_measuring_is_interrupted(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hasten.train.dflash import run

    measure, steps = run.evaluate, [0]
    update = Trainer._apply

    def counted(self: Trainer) -> None:
        steps[0] += 1
        update(self)

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_apply", counted)
    monkeypatch.setattr(run, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(data, tmp_path, options(sft=SFT(3)))
    monkeypatch.setattr(run, "evaluate", measure)
    assert train(data, tmp_path, options(sft=SFT(3)))["sft"]["step"] == 3
    assert steps[0] == 3

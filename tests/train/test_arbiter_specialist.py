"""The constructed specialist learns right answers, and drafts them in the real loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hasten.errors import OptionError
from hasten.exits import store
from hasten.tasks import Problem
from hasten.train.arbiter import lessons, run_specialist
from hasten.train.arbiter.run_specialist import Module
from hasten.train.arbiter.specialist import SpecialistOptions
from tests.train.arbiter_cases import tiny

ANSWERS = ("odd", "even", "three", "no")


def made_up(families: Any, split: str, count: int, *, seed: int = 0) -> list[Problem]:
    """The same few questions in every split: can it learn at all?"""
    return [
        Problem(f"{name}/t/{at}", name, "t", split, f"{name}/{at}", f"{name} {at}?", answer)
        for name in families
        for at, answer in enumerate(ANSWERS[:count])
    ]


@pytest.fixture(autouse=True)
def _problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lessons, "problems", made_up)
    monkeypatch.setattr(lessons, "available", lambda family, split: len(ANSWERS))


OPTIONS = SpecialistOptions(
    families=("parity",), problems=4, vocabulary=200, epochs=150, batch=4, rate=1e-2, steps=3
)


def test_the_draft_alone_says_what_it_has_learned(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    module = Module("adapter", 1, 24, "")
    made = run_specialist.run(tiny(), tmp_path, module, OPTIONS, others=("sort",), log=rows.append)
    assert made.figures["parity"].draft == 1.0
    assert made.figures["parity"].target == 0.0
    assert made.figures["sort"].count == 4
    losses = [row["loss"] for row in rows if row["stage"] == "train"]
    assert losses[-1] < 0.2 * losses[0]
    facts = store.read(tmp_path).facts
    assert "demonstration" in facts["constructed"]
    assert facts["families"] == ["parity"]
    assert facts["held_out"]["parity"]["draft_before"] < 1.0
    method = f"cospec:draft,draft=early-exit,modules={tmp_path},exits=1,length=4"
    for problem in made_up(["parity"], "test", 4):
        result = tiny().generate(problem.prompt, method=method, max_new_tokens=16)
        assert result.text == problem.answer


def test_the_targets_states_are_kept_between_runs(tmp_path: Path) -> None:
    module = Module("adapter", 1, 24, "")
    stages = []
    for out in ("a", "b"):
        rows: list[dict[str, Any]] = []
        run_specialist.run(
            tiny(), tmp_path / out, module, OPTIONS, work=tmp_path / "states", log=rows.append
        )
        stages.append({row["stage"] for row in rows})
    assert stages == [{"states", "train"}, {"train"}]
    a, b = (store.read(tmp_path / out) for out in ("a", "b"))
    assert all((a.tensors[name] == b.tensors[name]).all() for name in a.tensors)


def test_a_family_is_learned_or_measured_as_unlearned_not_both(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="parity"):
        run_specialist.run(
            tiny(), tmp_path, Module("adapter", 1, 24, ""), OPTIONS, others=("parity",)
        )


def test_a_start_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="init"):
        run_specialist.run(tiny(), tmp_path, Module("deep", 0), OPTIONS)


def test_answers_end_as_the_chat_template_ends_them() -> None:
    study = lessons.gold_study(tiny(), made_up(["parity"], "train", 1)[0], examples=True)
    assert study.text.output[-1] == 257
    assert tiny().tokenizer.decode(study.text.output[:-1]) == "odd"


def test_examples_in_a_prompt_are_answers_to_learn_from_too() -> None:
    problem = replace(made_up(["parity"], "train", 1)[0], examples=(("a?", "yes"), ("b?", "so")))
    study = lessons.gold_study(tiny(), problem, examples=True)
    ids, texts = (*study.text.prompt, *study.text.output), []
    for start in study.starts:
        answer = ids[start : ids.index(257, start)]
        texts.append(tiny().tokenizer.decode(answer))
    assert texts == ["yes", "so", "odd"]
    alone = lessons.gold_study(tiny(), problem, examples=False)
    assert alone.starts == study.starts[-1:]

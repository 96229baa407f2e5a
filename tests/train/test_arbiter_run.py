"""`hasten train arbiter fit` from problems to an arbiter that runs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hasten.arbitration.arbiter import Arbiter
from hasten.errors import ModelError, OptionError
from hasten.tasks import problems
from hasten.tasks.screening import MAX_NEW_TOKENS
from hasten.train.arbiter import evaluate, run
from hasten.train.arbiter.episodes import Job, never
from hasten.train.arbiter.nets import Gate
from hasten.train.arbiter.policy import PolicyOptions
from tests.train.arbiter_cases import DRAFT, asked, tiny

ASK = run.ask

OPTIONS = run.Options(
    families=("even",),
    draft=DRAFT,
    problems=8,
    validation=8,
    kinds=("linear",),
    length=3,
    gate=Gate(1e-5, 8),
    stage_b=PolicyOptions(iterations=0),
)


@pytest.fixture(autouse=True)
def _problems(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(families: Any, split: str, count: int, seed: int, *more: Any) -> list[Any]:
        return asked(count, split)

    monkeypatch.setattr("hasten.train.arbiter.fit.THRESHOLDS", 4)
    monkeypatch.setattr(run, "ask", ask)
    monkeypatch.setattr(evaluate, "ask", ask)


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_the_arbiter_that_is_written_decides_as_it_was_measured(tmp_path: Path) -> None:
    made = run.run(tiny(), tmp_path, replace(OPTIONS, force=True))
    arbiter = Arbiter.load(tmp_path)
    best = max(made.stages, key=lambda s: (s.choice.accuracy, -s.choice.passes))
    assert arbiter.fallback == (not best.choice.better)
    for name, value in best.net.arbiter(0.5, Gate(), fallback=False, meta={}).weights.items():
        assert torch.equal(arbiter.weights[name], value)
    if arbiter.fallback:  # what the net says is tested all the same
        replace_fallback(tmp_path)
    prompts = [each.prompt for each in asked(8, "validation")]
    method = f"cospec,{DRAFT},length=3,arbiter={tmp_path}"
    results = tiny().generate_many(
        prompts, method=method, max_new_tokens=MAX_NEW_TOKENS, temperature=0.0
    )
    right = sum(len(each.text) % 2 == 0 for each in results)
    assert right / 8 == pytest.approx(best.choice.accuracy)
    kept = sum(each.metrics.overrides for each in results)
    met = sum(each.metrics.mismatches for each in results)
    assert kept / met == pytest.approx(best.choice.kept)


def replace_fallback(folder: Path) -> None:
    path = folder / "arbiter.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "fallback": False}))


@pytest.mark.slow
def test_the_same_command_goes_on_and_ends_in_the_same_arbiter(tmp_path: Path) -> None:
    options = replace(
        OPTIONS, force=True, stage_b=PolicyOptions(iterations=1, problems=4, rollouts=3, every=1)
    )
    pytest.importorskip("torchrl", reason="stage B's loss is torchrl's")
    rows: list[dict[str, Any]] = []
    run.run(tiny(), tmp_path / "a", options, log=rows.append)
    first = Arbiter.load(tmp_path / "a")
    report = json.loads((tmp_path / "a/report.json").read_text())
    measured = {row["name"]: (row["plain"], row["problems"]) for row in report["stages"]}
    assert len(set(measured.values())) == 1, "every stage is measured on the same problems"
    answers = {
        split: lines(tmp_path / f"a/answers/{split}.jsonl") for split in ("train", "validation")
    }
    again: list[dict[str, Any]] = []
    run.run(tiny(), tmp_path / "a", options, log=again.append)
    second = Arbiter.load(tmp_path / "a")
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)
    assert first.theta == second.theta
    assert not any(row["stage"] == "answers" for row in again), "everything was known"
    assert answers == {
        split: lines(tmp_path / f"a/answers/{split}.jsonl") for split in ("train", "validation")
    }
    stages = [row["stage"] for row in rows if row["stage"] != "answers"]
    assert stages[0] == "headroom", "what could be gained is measured first"
    run.run(tiny(), tmp_path / "b", options)
    other = Arbiter.load(tmp_path / "b")
    assert all(torch.equal(first.weights[name], other.weights[name]) for name in first.weights)


def test_no_headroom_means_no_training_and_a_file_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hasten.train.arbiter.oracle.LEAST_GAIN", 2.0)
    made = run.run(tiny(), tmp_path, OPTIONS)
    assert made.stages == []
    arbiter = Arbiter.load(tmp_path)
    assert arbiter.fallback
    assert json.loads((tmp_path / "report.json").read_text())["fallback"] is True
    prompt = asked(1)[0].prompt
    method = f"cospec,{DRAFT},length=3,arbiter={tmp_path}"
    mine = tiny().generate(prompt, method=method, max_new_tokens=MAX_NEW_TOKENS)
    plain = tiny().generate(prompt, method="ar", max_new_tokens=MAX_NEW_TOKENS)
    assert mine.tokens == plain.tokens


def test_what_a_specialist_was_trained_on_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"options": {"families": ["spell", "reverse"], "problems": 30, "seed": 0}}
    stored = SimpleNamespace(facts=facts)
    monkeypatch.setattr(run, "ask", ASK)
    monkeypatch.setattr(run.store, "read", lambda folder: stored)
    known = run.studied(tiny(), "cospec:target,draft=early-exit,modules=somewhere")
    trained_on = {p.item for f in ("spell", "reverse") for p in problems([f], "train", 30, seed=0)}
    assert known == trained_on
    families = ("spell", "reverse", "plural")
    without = ASK(families, "train", 60, 0, known)
    assert len(without) == 60
    assert not known & {p.item for p in without}
    counts = Counter(p.family for p in without)
    assert set(counts.values()) == {20}, "the families take turns"
    assert known & {p.item for p in ASK(families, "train", 60, 0)}, "they would have been"
    assert run.studied(tiny(), f"cospec:target,{DRAFT}") == frozenset()


def test_an_arbiter_of_another_draft_is_refused(tmp_path: Path) -> None:
    run.run(tiny(), tmp_path, replace(OPTIONS, force=True))
    said = json.loads((tmp_path / "arbiter.json").read_text())
    said["meta"]["draft"] = "another"
    (tmp_path / "arbiter.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match="another draft"):
        tiny().generate("a", method=f"cospec,{DRAFT},length=3,arbiter={tmp_path}")


def test_a_draft_longer_than_any_is_refused_before_anything_runs() -> None:
    with pytest.raises(OptionError, match="length: must be at most"):
        replace(OPTIONS, length=99)


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(OptionError, match="problems"):
        replace(OPTIONS, problems=0)
    with pytest.raises(OptionError, match="families"):
        replace(OPTIONS, families=())


# -- the table


@pytest.mark.slow
def test_every_arm_answers_the_same_problems_and_the_table_prints_again_from_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hasten.train.arbiter.arms.MENTORED", (0.3,))
    run.run(tiny(), tmp_path, replace(OPTIONS, force=True))
    options = evaluate.Options(("even",), DRAFT, validation=6, test=8, length=3)
    made = evaluate.measure(tiny(), tmp_path, options, work=tmp_path / "w", say=lambda text: None)
    evaluate.save(made, tmp_path / "made.json")
    again = json.loads((tmp_path / "made.json").read_text())
    assert evaluate.markdown(again) == evaluate.markdown(made)
    arms = {arm.name: arm for arm in evaluate.arms_of(again)}
    assert {"target only", "draft only", "draft always", "KL judge", "mentored", "CoSpec A",
            "random, same rate", "linear judge", "oracle, first 4"} <= arms.keys()  # fmt: skip
    assert all(len(arm.answers) == 8 for arm in arms.values())
    plain = arms["target only"]
    assert plain.override_rate == 0.0
    assert arms["draft always"].override_rate == 1.0
    assert arms["oracle, first 4"].accuracy >= max(plain.accuracy, 0.5)
    shown = next(row for row in evaluate.table(made) if row[0] == "draft always")
    gap = 100 * (arms["draft always"].accuracy - plain.accuracy)
    assert shown[3].startswith(f"{gap:+.1f} (")


def test_a_rule_from_memory_answers_as_the_rule_itself(tmp_path: Path) -> None:
    from hasten.arbitration.rules import KL
    from hasten.train.arbiter.arms import OPEN, voting
    from hasten.train.arbiter.engine import Engine
    from hasten.train.arbiter.episodes import Memory

    some = asked(8, "test")
    engine = Engine(tiny(), some, OPTIONS.method, voters={"kl": KL(1.0)})
    memory = Memory(engine, [each.id for each in some], voters=("kl",))
    memory.run([Job(at, never) for at in range(8)])
    voted = memory.run([Job(at, voting("kl")) for at in range(8)])
    real = engine.live(KL(1.0), OPEN)
    assert [each.text for each in voted] == [each.text for each in real]
    assert [each.passes for each in voted] == [each.metrics.target_passes for each in real]
    assert [each.overrides for each in voted] == [each.metrics.overrides for each in real]
    memory.close()


def test_knobs_are_chosen_without_the_test_problems(tmp_path: Path) -> None:
    from hasten.train.arbiter.arms import Bench, grid, voters
    from hasten.train.arbiter.engine import Engine
    from hasten.train.arbiter.episodes import Memory

    rules = grid()
    some, others = asked(4, "validation"), asked(4, "test")

    class Closed:
        def run(self, jobs: Any) -> Any:
            raise AssertionError("a test problem was looked at")

        def close(self) -> None:
            pass

    names = tuple(voters(rules))
    engine = Engine(tiny(), some, OPTIONS.method, voters=voters(rules))
    chosen = Memory(engine, [each.id for each in some], voters=names)
    closed = Memory(Closed(), [each.id for each in others], voters=names)
    bench = Bench(some, others, engine, engine, chosen, closed)
    best = bench.best(list(rules["KL judge"]))
    assert best in rules["KL judge"]
    chosen.close()

"""What is remembered of problems answered over and over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hasten.errors import ModelError, OptionError
from hasten.train.arbiter.episodes import Decisions, Episode, Job, Memory, Point, always, never
from tests.train.arbiter_toy import Toy

NAMES = [f"family/{at}" for at in range(20)]


def by_first_scalar(point: Point, before: Decisions) -> bool:
    return point.scalars[0] > 0


def test_what_is_known_is_not_run_again() -> None:
    toy = Toy(20)
    memory = Memory(toy, NAMES)
    first = memory.run([Job(at, by_first_scalar) for at in range(20)])
    assert toy.ran == 20
    assert memory.run([Job(at, by_first_scalar) for at in range(20)]) == first
    assert toy.ran == memory.ran == 20


def test_a_remembered_answer_is_the_one_the_models_give() -> None:
    toy = Toy(20)
    memory = Memory(toy, NAMES)
    memory.run([Job(at, rule) for at in range(20) for rule in (never, always)])
    jobs = [Job(at, by_first_scalar, (True, False)) for at in range(20)]
    assert memory.run(jobs) == Toy(20).run(jobs)


def test_jobs_that_go_the_same_way_run_once() -> None:
    toy = Toy(2)
    Memory(toy, NAMES[:2]).run([Job(1, by_first_scalar)] * 5)
    assert toy.ran == 1


def test_a_file_keeps_it_between_runs_also_when_the_last_line_is_half_written(
    tmp_path: Path,
) -> None:
    path, toy = tmp_path / "known.jsonl", Toy(20)
    jobs = [Job(at, rule) for at in range(20) for rule in (never, by_first_scalar)]
    memory = Memory(toy, NAMES, path=path, identity={"draft": "a"})
    made = memory.run(jobs)
    memory.close()
    asked = toy.ran
    with path.open("a") as file:
        file.write('{"problem":"family/3","decis')
    again = Memory(toy, NAMES, path=path, identity={"draft": "a"})
    assert again.run(jobs) == made
    assert toy.ran == asked
    again.run([Job(0, always)])
    again.close()
    last = Memory(toy, NAMES, path=path, identity={"draft": "a"})
    assert last.run(jobs) == made
    last.close()


def test_a_file_of_another_draft_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "known.jsonl"
    Memory(Toy(20), NAMES, path=path, identity={"draft": "a"}).close()
    with pytest.raises(OptionError, match="other models, drafts"):
        Memory(Toy(20), NAMES, path=path, identity={"draft": "b"})


def test_votes_are_kept(tmp_path: Path) -> None:
    class Voting(Toy):
        def point(self, problem: int, at: int) -> Point:
            made = super().point(problem, at)
            votes = {"first": made.scalars[0] > 0, "never": False}
            return Point(made.scalars, at, made.block, 7, 9, votes)

    path = tmp_path / "known.jsonl"
    memory = Memory(Voting(3), NAMES[:3], path=path, voters=("first", "never"))
    made = memory.run([Job(at, never) for at in range(3)])
    memory.close()
    again = Memory(Voting(3), NAMES[:3], path=path, voters=("first", "never"))
    assert again.run([Job(at, never) for at in range(3)]) == made
    again.close()
    assert {point.votes["first"] for each in made for point in each.points} == {True, False}


def test_models_that_do_not_repeat_themselves_are_found_out() -> None:
    class Fickle(Toy):
        def run(self, jobs: Sequence[Job]) -> list[Episode]:
            made = super().run(jobs)
            return [
                Episode(e.problem, e.points[:1], (not e.decisions[0],), e.correct, e.tokens, 1)
                for e in made
            ]

    with pytest.raises(ModelError, match="repeatable"):
        Memory(Fickle(2), NAMES[:2]).run([Job(0, never)])

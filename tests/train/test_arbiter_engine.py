"""Problems answered in the real loop, with decisions from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hasten.arbitration.rules import KL, Rule, Threshold
from hasten.tasks.screening import MAX_NEW_TOKENS
from hasten.train.arbiter.engine import Engine, lucky_for
from hasten.train.arbiter.episodes import Decisions, Episode, Job, Memory, Point, always, never
from hasten.train.arbiter.oracle import branches
from tests.tiny_llm import meter, metered
from tests.train.arbiter_cases import DRAFT, METHOD, asked, tiny

COUNT = 6
JOBS = [Job(at, rule) for at in range(COUNT) for rule in (never, always)]


def by_entropy(point: Point, before: Decisions) -> bool:
    return point.scalars[6] > 0.3 and len(before) % 3 != 2


def run(jobs: Sequence[Job], method: str = METHOD, **more: Any) -> list[Episode]:
    made = Engine(tiny(), asked(COUNT, parity=more.pop("parity", 0)), method, **more)
    try:
        return made.run(jobs)
    finally:
        made.close()


def test_never_is_plain_decoding() -> None:
    prompts = [each.prompt for each in asked(COUNT)]
    plain = tiny().generate_many(
        prompts, method="ar", max_new_tokens=MAX_NEW_TOKENS, temperature=0.0
    )
    with metered(tiny()):
        made = run([Job(at, never) for at in range(COUNT)])
    assert [each.tokens for each in made] == [each.tokens for each in plain]
    assert [each.text for each in made] == [each.text for each in plain]
    assert sum(len(each.points) for each in made) > COUNT
    assert not any(any(each.decisions) for each in made)


def test_an_answer_is_a_function_of_its_problem_and_its_decisions() -> None:
    memory = Memory(Engine(tiny(), asked(COUNT), METHOD), [str(at) for at in range(COUNT)])
    jobs = [Job(at, by_entropy) for at in range(COUNT)]
    memory.run(JOBS)  # so that some of what follows is remembered
    found = memory.run(jobs)
    memory.close()
    fresh = run(jobs)
    assert found == fresh
    assert any(any(each.decisions) for each in found)
    again = run([Job(each.problem, never, each.decisions) for each in fresh])
    assert again == fresh


def test_the_answers_own_mismatches_only() -> None:
    for each in run(JOBS):
        assert len(each.points) == len(each.decisions)
        assert all(point.position < len(each.tokens) for point in each.points)
        for point, kept in zip(each.points, each.decisions, strict=True):
            assert each.tokens[point.position] == (point.draft if kept else point.target)


def test_keeping_more_drafts_takes_no_more_passes_on_the_same_way() -> None:
    for each in run([Job(at, always) for at in range(COUNT)]):
        assert each.passes * (3 + 1) >= len(each.tokens)
        assert 0 <= each.saved < 1


def test_the_right_answer_is_unknown_to_a_mismatch() -> None:
    here = run(JOBS)
    there = run(JOBS, parity=1)
    assert [each.points for each in here] == [each.points for each in there]
    assert [each.correct for each in here] == [not each.correct for each in there]


def test_votes_are_the_rules_own_answers() -> None:
    rules: dict[str, Rule] = {"p": Threshold(0.01), "kl": KL(1.0)}
    found = run([Job(at, never) for at in range(COUNT)], voters=rules)
    points = [point for each in found for point in each.points]
    for point in points:
        assert point.votes["kl"] == (point.scalars[8] <= 1.0)
        assert point.votes["p"] == (point.scalars[1] >= -4.60517)
    assert {point.votes["kl"] for point in points} == {True, False}


def test_a_draft_that_is_its_target_never_disagrees() -> None:
    llm = tiny()
    llm._models["itself"] = llm._loaded
    same = "cospec:target,draft=draft-model,model=itself,length=3"
    found = run(JOBS, same)
    assert all(each.points == () for each in found)
    plain = run([Job(at, never) for at in range(COUNT)])
    assert [each.tokens for each in found[::2]] == [each.tokens for each in plain]
    assert all(len(some) == 1 for some in branches(Memory(_Known(found), list("abcdef")), range(6)))


class _Known:
    """Answers that were made."""

    def __init__(self, episodes: list) -> None:  # type: ignore[type-arg]
        self._episodes = episodes

    def run(self, jobs):  # type: ignore[no-untyped-def]
        return [self._episodes[2 * job.problem] for job in jobs]

    def close(self) -> None:
        pass


def test_luck_is_looked_for_in_answers_to_others_of_the_family() -> None:
    from hasten.tasks import problems

    some = problems(["parity"], "train", 6) + problems(["sum1"], "train", 6)
    right_for = lucky_for(some, others=3)
    for at, problem in enumerate(some):
        n = 0
        while right_for(at, n) is not None:
            n += 1
        unlike = sum(p.family == problem.family and p.answer != problem.answer for p in some)
        assert n == min(unlike, 3)
    assert DRAFT in METHOD


def test_a_prompt_is_read_once_for_all_answers_to_it_and_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hasten.train.arbiter.engine.KEPT", COUNT)
    length = len(tiny().tokenize(asked(1)[0].prompt))
    with metered(tiny()) as llm:
        made = Engine(llm, asked(COUNT), METHOD)
        made.run([Job(at, never) for at in range(COUNT)])
        rows = meter(llm).rows
        assert rows == pytest.approx(COUNT * (length - 1), abs=COUNT)
        made.run([Job(at, always) for at in range(COUNT)])
        assert meter(llm).rows == rows
        assert meter(llm).live == COUNT
        made.close()
        assert meter(llm).live == 0


def test_only_the_last_prompts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.train.arbiter.engine.KEPT", 2)
    with metered(tiny()) as llm:
        made = Engine(llm, asked(COUNT), METHOD)
        found = made.run([Job(at, never) for at in range(COUNT)])
        assert meter(llm).live == 2
        made.close()
    assert found == run([Job(at, never) for at in range(COUNT)])

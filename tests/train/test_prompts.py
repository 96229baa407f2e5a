"""Which prompt is next: shares, no repeats, sources that end, and user turns of the model's own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import hasten
from hasten.api import LLM
from hasten.errors import OptionError
from hasten.train.batched import Job
from hasten.train.prompts import Prompts, UserTurns
from hasten.train.rows import Known
from tests.tiny_llm import make_model, make_tokenizer
from tests.train.cases import END, make_llm, prompt_file


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm()


def prompts(llm: LLM, listed: list[str], **more: Any) -> Prompts:
    options: dict[str, Any] = {"seed": 0, "longest": 150, "typical": 10.0, "known": Known()}
    return Prompts(llm, listed, more.pop("shares", {}), **{**options, **more})


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [f"{name}={prompt_file(tmp_path, name, 40)}" for name in ("math", "chat", "code")]


def test_domains_come_to_their_shares_of_tokens(llm: LLM, files: list[str]) -> None:
    made = prompts(llm, files, shares={"math": 2.0})
    found = Counter(question.domain for question in made.take({}, {}, 400, 1000))
    assert found == {"math": 20, "chat": 10, "code": 10}


def test_a_domain_of_short_answers_is_asked_more_often(llm: LLM, files: list[str]) -> None:
    had = {"math": 1000, "chat": 1000, "code": 1000}
    rows = {"math": 10, "chat": 100, "code": 100}
    found = Counter(q.domain for q in prompts(llm, files).take(had, rows, 600, 1000))
    assert found["math"] < found["chat"] == found["code"]


def test_a_domain_that_is_behind_comes_first(llm: LLM, files: list[str]) -> None:
    had = {"math": 300, "chat": 100, "code": 300}
    found = [q.domain for q in prompts(llm, files).take(had, {}, 1e9, 12)]
    assert set(found[:2]) == {"chat"}


def test_no_more_is_taken_than_is_missing_or_allowed(llm: LLM, files: list[str]) -> None:
    made = prompts(llm, files)
    assert len(list(made.take({}, {}, 45, 1000))) == 5
    assert len(list(made.take({}, {}, 1e9, 7))) == 7
    assert list(made.take({}, {}, 0, 7)) == []


def test_no_prompt_comes_twice_whoever_knew_it(llm: LLM, files: list[str]) -> None:
    known = Known()
    first = prompts(llm, files, known=known)
    one = [tuple(q.ids or ()) for q in first.take({}, {}, 1e9, 50)]
    two = [tuple(q.ids or ()) for q in first.take({}, {}, 1e9, 1000)]
    assert len(set(one + two)) == len(one + two) == 120
    assert list(prompts(llm, files, known=known).take({}, {}, 1e9, 1000)) == []


def test_prompts_are_ids_with_the_template_around_them(llm: LLM, files: list[str]) -> None:
    (question,) = prompts(llm, files[:1]).take({}, {}, 1, 1)
    assert question.source == "math"
    text = llm.tokenizer.decode(question.ids)
    assert text.startswith("<|im_start|>user\nmath ")
    assert text.endswith("x<|im_end|>\n<|im_start|>assistant\n")


def test_long_prompts_are_passed_over(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"question": "%s"}\n{"question": "short"}\n' % ("long" * 40))
    (question,) = prompts(llm, [f"chat={path}"], longest=60).take({}, {}, 1e9, 9)
    assert "short" in llm.tokenizer.decode(question.ids)


def test_a_source_that_has_ended_leaves_its_part_to_the_others(llm: LLM, tmp_path: Path) -> None:
    listed = [f"math={prompt_file(tmp_path, 'few', 3)}", f"chat={prompt_file(tmp_path, 'c', 40)}"]
    made = prompts(llm, listed)
    found = Counter(question.domain for question in made.take({}, {}, 200, 1000))
    assert found == {"math": 3, "chat": 17}
    assert list(made.open) == ["chat"]
    assert made.notes() == [f"{listed[0]} has no more prompts"]
    assert made.notes() == []


def test_sources_of_one_domain_take_turns(llm: LLM, tmp_path: Path) -> None:
    listed = [f"chat={prompt_file(tmp_path, name, 20)}" for name in "ab"] + ["chat=self"]
    found = [q.source for q in prompts(llm, [*listed, listed[0]]).take({}, {}, 1e9, 9)]
    assert found == ["a", "b", "self"] * 3


# -- the model's own user turns --------------------------------------------------------------------


def answered(turns: UserTurns, output: list[int]) -> Job:
    job = turns.job("tag")
    job.output.extend(output)
    return job


def test_a_turn_goes_where_the_users_words_do(llm: LLM) -> None:
    turns = UserTurns(llm, 150, Known())
    job = turns.job("tag")
    assert llm.tokenizer.decode(job.prompt) == "<|im_start|>user\n"
    words = llm.tokenizer("Why so?", add_special_tokens=False)["input_ids"]
    assert turns.prompt(answered(turns, [*words, END])) == llm.tokenize("Why so?")


@pytest.mark.parametrize(
    "output",
    [[65] * 79 + [END], [65] * 80, [65] * 10, [65, END], [END], [65, 256, 65, 65, 65, END]],
    ids=["too-long", "unended", "cut", "short", "nothing", "template"],
)
def test_a_turn_that_is_no_good_is_dropped(llm: LLM, output: list[int]) -> None:
    turns = UserTurns(llm, 150, Known())
    assert turns.prompt(answered(turns, output)) is None
    assert turns.failed_in_a_row == 1


def test_a_turn_is_taken_once_and_only_when_it_fits(llm: LLM) -> None:
    turns = UserTurns(llm, 150, Known())
    assert turns.prompt(answered(turns, [65] * 9 + [END])) is not None
    assert turns.prompt(answered(turns, [65] * 9 + [END])) is None
    assert turns.failed_in_a_row == 0
    assert UserTurns(llm, 20, Known()).prompt(answered(turns, [66] * 9 + [END])) is None


def test_a_model_that_ends_no_turn_is_given_up(llm: LLM, tmp_path: Path) -> None:
    made = prompts(llm, ["chat=self", f"math={prompt_file(tmp_path, 'math', 9)}"])
    assert made.turns is not None
    assert {q.domain for q in made.take({}, {}, 1e9, 4)} == {"chat", "math"}
    for _ in range(200):
        made.turns.prompt(answered(made.turns, [65] * 80))
    assert {q.domain for q in made.take({}, {}, 1e9, 4)} == {"math"}
    assert "doesn't end user turns" in made.notes()[0]


def test_without_a_chat_template_there_are_no_user_turns() -> None:
    bare = hasten.load((make_model(), make_tokenizer(template=None)), method="ar")
    with pytest.raises(OptionError, match="source: chat=self needs a model with a chat template"):
        prompts(bare, ["chat=self"])


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "fixed <|im_end|>"])
def test_a_template_without_a_place_for_the_user_is_refused(template: str) -> None:
    odd = hasten.load((make_model(), make_tokenizer(template=template)), method="ar")
    with pytest.raises(OptionError, match="can't find the user's place"):
        prompts(odd, ["chat=self"])

"""That the answers are right, worked out anew from the questions."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from hasten.tasks import FAMILIES, SPLITS, Problem, available, problems
from hasten.tasks.base import normalise
from hasten.tasks.words import KINDS, MONTHS, WEEKDAYS


def numbers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", text)]


def quoted(text: str) -> list[str]:
    return re.findall(r'"([^"]*)"', text)


def words_of(problem: Problem) -> list[str]:
    found = re.findall(r"[a-z]+, [a-z]+(?:, [a-z]+)+", problem.question)
    return [word.strip() for word in found[0].split(",")]


def missing(text: str) -> str:
    row = re.findall(r"(?:\d+|_)(?:, (?:\d+|_)){4}", text)[0].split(", ")
    at = row.index("_")
    known = [(i, int(each)) for i, each in enumerate(row) if each != "_"]
    (i, first), (j, second) = known[0], known[1]
    return str(first + (at - i) * (second - first) // (j - i))


def moved(names: tuple[str, ...], text: str) -> str:
    far = next((n for n, w in enumerate(("two", "three", "four", "five"), 2) if w in text), 1)
    name = next(name for name in names if name in text)
    return names[(names.index(name) + (far if "after" in text else -far)) % len(names)]


def odd_one(words: list[str]) -> str:
    kinds = [next(kind for kind, members in KINDS.items() if word in members) for word in words]
    return next(word for word, kind in zip(words, kinds, strict=True) if kinds.count(kind) == 1)


def place(problem: Problem) -> str:
    words = words_of(problem)
    names = {"first": 0, "second": 1, "third": 2, "last": 3}
    return next(words[at] for name, at in names.items() if f" {name}" in problem.question)


def letter(problem: Problem) -> str:
    (word,) = quoted(problem.question)
    names = {"first": 0, "second": 1, "last": -1}
    return next(word[at] for name, at in names.items() if name in problem.question)


def count(problem: Problem) -> str:
    found = quoted(problem.question)
    return str(max(found, key=len).count(min(found, key=len)))


WORKED: dict[str, Callable[[Problem], str]] = {
    "sum1": lambda p: str(sum(numbers(p.question))),
    "sum2": lambda p: str(sum(numbers(p.question))),
    "difference1": lambda p: str(abs(numbers(p.question)[0] - numbers(p.question)[1])),
    "difference2": lambda p: str(abs(numbers(p.question)[0] - numbers(p.question)[1])),
    "larger": lambda p: str(max(numbers(p.question))),
    "maximum": lambda p: str(max(numbers(p.question))),
    "parity": lambda p: ("even", "odd")[numbers(p.question)[0] % 2],
    "sequence": lambda p: missing(p.question),
    "weekday": lambda p: moved(WEEKDAYS, p.question),
    "month": lambda p: moved(MONTHS, p.question),
    "days_later": lambda p: WEEKDAYS[
        (next(i for i, d in enumerate(WEEKDAYS) if d in p.question) + numbers(p.question)[0]) % 7
    ],
    "count_letters": count,
    "spell": letter,
    "reverse": lambda p: ", ".join(reversed(words_of(p))),
    "sort": lambda p: ", ".join(sorted(words_of(p))),
    "position": place,
    "odd_one_out": lambda p: odd_one(words_of(p)),
}


@pytest.mark.parametrize("family", WORKED)
def test_the_answer_follows_from_the_question(family: str) -> None:
    for split in SPLITS:
        for problem in problems([family], split, min(300, available(family, split))):
            assert problem.answer == WORKED[family](problem), problem.question


@pytest.mark.parametrize("family", ["replace", "capitals"])
def test_a_copy_differs_in_one_word(family: str) -> None:
    for problem in problems([family], "test", 200):
        shown = re.findall(r"the [a-z ]+", problem.question)
        source = max(shown, key=lambda text: len(set(text.split()))).split()
        given = quoted(problem.question)
        (changed,) = [w for w in problem.answer.split() if w not in source] or [given[0]]
        assert changed in given or changed.lower() in given
        assert len(problem.answer.split()) in (4, 6)


@pytest.mark.parametrize("family", ["antonym", "plural", "past", "capital", "kind"])
def test_a_lookup_has_one_answer_for_each_word(family: str) -> None:
    asked = [item.values["word"] for item in FAMILIES[family].make()]
    assert len(asked) == len(set(asked))
    for item in FAMILIES[family].make():
        assert item.answer
        assert item.answer == item.answer.strip()


def test_a_kind_is_among_those_offered() -> None:
    for item in FAMILIES["kind"].make():
        offered = [item.values[name] for name in "xyz"]
        assert len(set(offered)) == 3
        assert item.answer in offered


def problem(answer: str, *, exact_case: bool = False) -> Problem:
    return Problem("x/y/z", "x", "y", "test", "x/z", "?", answer, exact_case=exact_case)


@pytest.mark.parametrize("text", ["12", " 12 ", "12.", "\n12\n", "12\nBecause 5 + 7 is 12."])
def test_the_answer_alone_is_right(text: str) -> None:
    assert problem("12").correct(text)


@pytest.mark.parametrize(
    "text",
    ["", ".", "123", "112", "The answer is 12.", "12 apples", "12..", "13\n12", "1 2"],
)
def test_a_lucky_substring_is_not(text: str) -> None:
    assert not problem("12").correct(text)


def test_case_matters_where_it_is_what_was_asked_for() -> None:
    assert problem("Paris").correct("PARIS.")
    assert problem("the small CAT", exact_case=True).correct("the small CAT.")
    assert not problem("the small CAT", exact_case=True).correct("the small cat")


def test_normalising_twice_changes_nothing() -> None:
    for text in ("A.", " b \n c", "", "  ", "x. ."):
        assert normalise(normalise(text)).rstrip(".") == normalise(text).rstrip(".").rstrip()


def test_a_prompt_is_a_conversation_that_ends_with_the_question() -> None:
    (made,) = problems(["sum1"], "train", 1)
    roles = [turn["role"] for turn in made.prompt]
    assert roles == ["user", "assistant"] * 3 + ["user"]
    assert made.prompt[-1]["content"] == made.question
    assert made.answer not in [turn["content"] for turn in made.prompt[-1:]]

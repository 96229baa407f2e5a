"""Which texts are learned from, measured on and asked about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hasten.errors import OptionError
from hasten.train.dflash.options import Rounds
from hasten.train.dflash.texts import Corpus, measured_texts, read_corpus, round_texts
from tests.train.dflash.cases import llm, texts


def rows(path: Path, made: list[dict[str, Any]]) -> Path:
    usual = {"domain": "chat", "source": "toy", "temperature": 0.0, "split": "modules"}
    path.write_text("".join(json.dumps({**usual, **row}) + "\n" for row in made))
    return path


def mixed(path: Path) -> Path:
    """Ten prompts to learn from, every second one drawn; two texts of each other split."""
    made: list[dict[str, Any]] = [
        {"prompt": [at, 1], "output": [7, 8, 9], "temperature": 0.8 * (at % 2)} for at in range(10)
    ]
    for at, split in enumerate(("policy", "test")):
        made += [{"prompt": [30 + at, 2], "output": [4, 5], "split": split}]
        drawn = {"prompt": [40 + at, 2], "output": [4, 5], "split": split, "temperature": 0.8}
        made += [drawn]
    return rows(path, made)


def read(path: Path, *more: Path, **changes: Any) -> Corpus:
    usual: dict[str, Any] = {"share": 1.0, "test": 10, "seed": 0, "limit": 100}
    return read_corpus([path], more, **{**usual, **changes})


def test_no_prompt_is_in_two_splits_and_only_greedy_answers_are_measured_on(tmp_path: Path) -> None:
    found = read(mixed(tmp_path / "rows.jsonl"))
    assert sorted(text.prompt[0] for text in found.modules) == list(range(10))
    assert [text.prompt for text in found.policy] == [(30, 2)]
    assert [text.prompt for text in found.test] == [(31, 2)]
    assert {text.prompt for text in found.asked} == {text.prompt for text in found.modules}


def test_a_split_is_measured_on_its_greedy_answers_whatever_else_the_data_holds(
    tmp_path: Path,
) -> None:
    usual: dict[str, Any] = {"count": 10, "seed": 0, "limit": 100}
    whole = mixed(tmp_path / "rows.jsonl")
    assert measured_texts([whole], "test", **usual) == read(whole).test
    assert measured_texts([whole], "policy", **usual) == read(whole).policy
    learned = measured_texts([whole], "modules", **usual)
    assert sorted(text.prompt[0] for text in learned) == [0, 2, 4, 6, 8]
    assert measured_texts([whole], "modules", **{**usual, "count": 2}) == learned[:2]
    alone = rows(tmp_path / "t.jsonl", [{"prompt": [1], "output": [2, 3], "split": "test"}])
    assert [text.prompt for text in measured_texts([alone], "test", **usual)] == [(1,)]
    with pytest.raises(OptionError, match=r"^split: there is no greedy answer of .*'policy'"):
        measured_texts([alone], "policy", **usual)


def test_prompts_that_were_not_learned_from_are_asked_first(tmp_path: Path) -> None:
    found = read(mixed(tmp_path / "rows.jsonl"), share=0.4)
    known = {text.prompt for text in found.modules}
    assert len(known) == 4
    assert [text.prompt in known for text in found.asked] == [False] * 6 + [True] * 4
    assert read(tmp_path / "rows.jsonl", share=0.4).asked == found.asked


def test_prompts_of_rounds_may_come_from_elsewhere_and_never_from_another_split(
    tmp_path: Path,
) -> None:
    more: list[dict[str, Any]] = [{"prompt": [90], "output": [1, 2]}]
    more += [{"prompt": [91], "output": [1, 2], "split": "test"}]
    other = rows(tmp_path / "more.jsonl", more)
    found = read(mixed(tmp_path / "rows.jsonl"), other)
    assert [text.prompt for text in found.asked] == [(90,)]


def test_texts_without_an_anchor_or_beyond_the_context_are_left_out(tmp_path: Path) -> None:
    made: list[dict[str, Any]] = [
        {"prompt": [1], "output": [2]},
        {"prompt": [2], "output": [3] * 60},
        {"prompt": [3], "output": [3, 4]},
        {"prompt": [4], "output": [3, 4], "split": "test"},
    ]
    assert [text.prompt for text in read(rows(tmp_path / "r.jsonl", made), limit=50).modules] == [
        (3,)
    ]


def test_rounds_take_prompts_in_turn_and_begin_again_at_the_end(tmp_path: Path) -> None:
    asked, rounds = texts(5), Rounds(3, prompts=3, writer="rows")
    taken = [
        round_texts(llm(), asked, number, rounds, tmp_path, tmp_path / f"{number}.jsonl")
        for number in range(3)
    ]
    assert [asked.index(text) for each in taken for text in each] == [0, 1, 2, 3, 4, 0, 1, 2, 3]


def test_a_round_that_was_answered_is_not_answered_again(tmp_path: Path) -> None:
    rounds = Rounds(1, prompts=3, writer="rows")
    first = round_texts(llm(), texts(5), 0, rounds, tmp_path, tmp_path / "kept.jsonl")
    again = round_texts(llm(), [], 0, rounds, tmp_path, tmp_path / "kept.jsonl")
    assert again == first


def test_a_round_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="round_data"):
        round_texts(llm(), [], 0, Rounds(1), tmp_path, tmp_path / "kept.jsonl")

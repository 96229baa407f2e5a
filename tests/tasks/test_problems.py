"""Every problem there is, over the whole range of the generators."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from hasten.errors import OptionError
from hasten.tasks import FAMILIES, SPLITS, Problem, available, problems
from hasten.tasks.screening import MAX_NEW_TOKENS

LONGEST_ANSWER = 12


@lru_cache
def everything(family: str, split: str) -> list[Problem]:
    return problems([family], split, available(family, split))


def told(problem: Problem) -> set[str]:
    """All questions a prompt shows."""
    return {problem.question, *(question for question, _ in problem.examples)}


def test_there_are_families_enough() -> None:
    assert len(FAMILIES) >= 14
    for family in FAMILIES.values():
        assert len(family.templates) >= 3
        assert any(each.held_out for each in family.templates)
        for split in SPLITS:
            assert available(family.name, split) >= 10, (family.name, split)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_question_of_a_split_is_seen_in_the_others(family: str) -> None:
    asked = {s: {p.question for p in everything(family, s)} for s in SPLITS}
    shown = {s: set().union(*(told(p) for p in everything(family, s))) for s in SPLITS}
    assert not asked["test"] & (shown["train"] | shown["validation"])
    assert not asked["validation"] & (shown["train"] | asked["test"])
    assert not asked["validation"] & shown["test"]


@pytest.mark.parametrize("family", FAMILIES)
def test_items_are_divided_whatever_the_wording(family: str) -> None:
    parts = [{p.item for p in everything(family, s)} for s in SPLITS]
    assert sum(map(len, parts)) == len(set().union(*parts)) == len(FAMILIES[family].make())


@pytest.mark.parametrize("family", FAMILIES)
def test_held_out_wordings_are_in_the_test_split_only(family: str) -> None:
    held = {each.name for each in FAMILIES[family].templates if each.held_out}
    for split in SPLITS:
        used = {p.template for p in everything(family, split)}
        assert used & held == (held if split == "test" else set())
        assert all(p.held_out == (p.template in held) for p in everything(family, split))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_id_names_one_problem_and_examples_never_tell_its_answer(family: str) -> None:
    for split in SPLITS:
        made = everything(family, split)
        assert len({p.id for p in made}) == len(made)
        assert len({p.question for p in made}) == len(made)
        for each in made:
            assert len(each.examples) == FAMILIES[family].shots
            assert each.question not in dict(each.examples)
            assert len({question for question, _ in each.examples}) == len(each.examples)


def test_what_is_asked_the_other_way_round_is_in_the_same_split() -> None:
    split = {p.item: p.split for s in SPLITS for p in everything("sum2", s)}
    assert all(split[f"sum2/{a},{b}"] == split[f"sum2/{b},{a}"] for a in (10, 37) for b in (42, 99))
    split = {p.item: p.split for s in SPLITS for p in everything("antonym", s)}
    assert split["antonym/hot"] == split["antonym/cold"]


def test_the_seed_chooses_problems_but_changes_none() -> None:
    one, same, other = (problems(["sum2", "sort"], "train", 60, seed=s) for s in (1, 1, 2))
    assert one == same
    assert {p.id for p in one} != {p.id for p in other}
    by_id = {p.id: p for p in problems(["sum2"], "train", available("sum2", "train"), seed=9)}
    assert all(by_id[p.id] == p for p in one if p.family == "sum2")


def test_families_take_turns_and_items_come_once_before_they_come_again() -> None:
    made = problems(["sum2", "weekday"], "test", 20)
    assert [p.family for p in made[:4]] == ["sum2", "weekday", "sum2", "weekday"]
    few = len({p.item for p in everything("weekday", "test")})
    alone = problems(["weekday"], "test", few + 1)
    assert len({p.item for p in alone[:few]}) == few
    assert alone[few].item in {p.item for p in alone[:few]}


def test_a_small_family_leaves_its_share_to_the_others() -> None:
    made = problems(["weekday", "sum2"], "validation", 300)
    assert len(made) == 300
    assert sum(p.family == "weekday" for p in made) == available("weekday", "validation")


def test_one_wording_can_be_asked_for() -> None:
    assert {p.template for p in problems(["sum1"], "test", 10, template="order")} == {"order"}
    with pytest.raises(OptionError, match="template"):
        problems(["sum1"], "train", 10, template="order")


@pytest.mark.parametrize(
    ("families", "split", "count", "named"),
    [
        (["sums"], "train", 1, "families"),
        ("sum1", "train", 1, "families"),
        ([], "train", 1, "families"),
        (["sum1"], "dev", 1, "split"),
        (["sum1"], "train", 0, "count"),
        (["sum1"], "test", 10_000, "count"),
    ],
)
def test_what_can_t_be_given_is_refused_by_name(
    families: Any, split: str, count: int, named: str
) -> None:
    with pytest.raises(OptionError) as caught:
        problems(families, split, count)
    assert caught.value.option == named


def test_answers_are_short_and_prompts_are_not_long(smollm2_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    for family in FAMILIES:
        made = problems([family], "test", min(60, available(family, "test")))
        answers = tokenizer([p.answer for p in made])["input_ids"]
        # With the token that ends it.
        assert max(map(len, answers)) + 1 <= LONGEST_ANSWER <= MAX_NEW_TOKENS
        text = tokenizer.apply_chat_template(
            made[0].prompt, add_generation_prompt=True, tokenize=False
        )
        assert len(tokenizer(text)["input_ids"]) < 200

"""Features of a copied draft: kinds of tokens, recent rounds, match statistics."""

from __future__ import annotations

import numpy as np
import pytest

from hasten.payoff import features as made
from hasten.payoff.features import CLASSES, FEATURES, LONG_AGO, STATIC, WINDOW, History
from tests.payoff.cases import query
from tests.tiny_llm import make_tokenizer


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("word", ""),
        (" word", "space"),
        ("\n", "space"),
        ("7", "digit"),
        ("(", "punctuation bracket"),
        ("<", "bracket"),
        (",", "punctuation delimiter"),
        ("=", "delimiter"),
        ("x.y", "punctuation"),
        ('": 3', "space punctuation delimiter digit"),
        ("", ""),
    ],
)
def test_texts_have_the_kinds_of_their_characters(text: str, kinds: str) -> None:
    said = made.classes_of(text)
    assert {name for name, has in zip(CLASSES, said, strict=True) if has} == set(kinds.split())


def test_the_table_is_made_once_for_a_tokenizer_and_knows_its_ids() -> None:
    tokenizer = make_tokenizer()
    table = made.class_table(tokenizer, 300)
    assert table.shape == (300, 5)
    assert table.dtype == np.uint8
    space, digit = CLASSES.index("space"), CLASSES.index("digit")
    (blank,), (seven,) = tokenizer(" ")["input_ids"], tokenizer("7")["input_ids"]
    assert table[blank, space]
    assert not table[blank, digit]
    assert table[seven].tolist() == [0, 0, 0, 0, 1]
    assert not table[290:].any(), "rows that are no token's"
    assert made.class_table(tokenizer, 300) is table
    other = make_tokenizer()
    assert made.digest_of(made.class_table(other, 300)) == made.digest_of(table)
    assert made.digest_of(made.class_table(other, 299)) != made.digest_of(table)


def test_a_name_that_shows_a_space_counts_as_one() -> None:
    class Pieces:
        def get_vocab(self) -> dict[str, int]:
            return {"▁and": 0, "and": 1}

        def decode(self, ids: list[int], **_: object) -> str:
            return "and"

    table = made.class_table(Pieces(), 2)
    assert table[:, CLASSES.index("space")].tolist() == [1, 0]


def test_without_a_tokenizer_no_id_is_of_any_kind() -> None:
    assert not made.class_table(None, 7).any()


def columns(history: History) -> dict[str, float]:
    return dict(zip(FEATURES[STATIC:], history.columns(), strict=True))


def test_history_says_how_the_last_rounds_went() -> None:
    history = History()
    empty = columns(history)
    assert empty["since_cache"] == pytest.approx(np.log1p(LONG_AGO))
    assert sum(empty.values()) == pytest.approx(empty["since_cache"])
    for cached, drafted, kept in ((True, 8, 8), (False, 4, 1), (True, 6, 2), (False, 4, 3)):
        history.add(cached, drafted, kept)
    said = columns(history)
    assert said["cache_rate"] == 0.5
    assert said["cache_mean"] == 5.0
    assert said["cache_last"] == 2.0
    assert said["mean"] == 3.5
    assert said["last"] == 3.0
    assert said["since_cache"] == pytest.approx(np.log1p(1))
    assert said["cache_whole"] == 0.0
    history.add(True, 5, 5)
    assert columns(history)["cache_whole"] == 1.0


def test_history_forgets_rounds_beyond_its_window_and_stops_counting() -> None:
    history = History()
    history.add(True, 9, 9)
    for _ in range(WINDOW):
        history.add(False, 1, 1)
    said = columns(history)
    assert (said["cache_rate"], said["cache_mean"], said["mean"]) == (0.0, 0.0, 1.0)
    assert said["cache_last"] == 9.0, "the last draft of the cache, however long ago"
    for _ in range(200):
        history.add(False, 1, 1)
    assert columns(history)["since_cache"] == pytest.approx(np.log1p(LONG_AGO))


def test_columns_are_what_their_names_say() -> None:
    table = np.zeros((40, 5), np.uint8)
    table[1:5, 0], table[1, 4] = 1, 1
    asked = query(10, score=3.0, match=5)
    static = made.static_features(asked, 99, 25, table)
    said = dict(zip(FEATURES, made.features(static, range(7)), strict=True))
    assert said["score"] == 3.0
    assert (said["match"], said["length"]) == (5, 10)
    assert said["token_score"] == pytest.approx(0.3)
    assert said["match_share"] == 0.5
    assert said["least"] == pytest.approx(asked.probs[-1])
    assert said["first"] == 0.5
    assert said["prompt"] == pytest.approx(np.log1p(99))
    assert said["answer"] == pytest.approx(np.log1p(25))
    assert said["place"] == pytest.approx(25 / 124)
    assert said["head_space"] == 0.5, "four of the first eight"
    assert said["all_space"] == pytest.approx(0.4)
    assert (said["first_space"], said["first_digit"]) == (1.0, 1.0)
    assert said["all_digit"] == pytest.approx(0.1)
    assert said["head_bracket"] == said["all_delimiter"] == 0.0
    assert [said[name] for name in FEATURES[STATIC:]] == list(range(7))


def test_a_draft_shorter_than_the_head_is_all_head() -> None:
    table = np.zeros((9, 5), np.uint8)
    table[2, 1] = 1
    said = dict(zip(FEATURES, made.static_features(query(2), 5, 5, table), strict=False))
    assert said["head_punctuation"] == said["all_punctuation"] == 0.5

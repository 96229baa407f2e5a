"""How many rows of a block are verified: the paper's rule, and the one that weighs costs."""

from __future__ import annotations

import random

import pytest

from hasten.errors import OptionError
from hasten.policies.length import LengthPolicy, SurvivalBook, expected_tokens

FLAT = [10.0] * 8
STEEP = [10.0 * rows for rows in range(1, 9)]


@pytest.mark.parametrize(
    ("fraction", "rate", "rows"),
    [(0.5, 1.0, 4), (0.5, 1.3, 5), (0.01, 1.0, 1), (0.99, 1.3, 8), (0.3125, 1.0, 2)],
)
def test_the_papers_rule_scales_rounds_and_clamps(fraction: float, rate: float, rows: int) -> None:
    assert LengthPolicy(8, rate=rate).rows(fraction) == rows


def test_a_rate_beyond_all_bounds_verifies_the_whole_block() -> None:
    assert LengthPolicy(8, rate=1e308, most=6).rows(0.9) == 6


def test_rows_that_the_labels_look_ahead_are_not_expected_to_be_kept() -> None:
    """Labels are the drafts kept and `lookahead` more rows; a pass emits the former and one."""
    for lookahead, emitted in ((0, 5.0), (1, 4.0), (3, 2.0)):
        tokens = expected_tokens(8, 0.5, lookahead=lookahead)
        assert tokens[-1] == pytest.approx(emitted, abs=1e-3)
    curve = [10.0 + 2.0 * rows for rows in range(8)]
    near, far = (LengthPolicy(8, "cost", lookahead=n).rows(0.5, curve=curve) for n in (1, 3))
    assert far < near


def test_least_and_most_bound_what_the_head_asks_for() -> None:
    policy = LengthPolicy(8, least=2, most=5)
    assert [policy.rows(x) for x in (0.0, 0.5, 1.0)] == [2, 4, 5]


def test_without_a_head_the_ratio_is_the_fixed_length() -> None:
    assert LengthPolicy(8, "ratio", most=6).rows(None) == 6
    assert LengthPolicy(8, "fixed", most=6).rows(0.1) == 6


@pytest.mark.parametrize("block", [2, 8, 16])
def test_expected_tokens_of_the_whole_block_are_what_the_fraction_says(block: int) -> None:
    for fraction in (0.25, 0.5, 0.75, 1.0):
        tokens = expected_tokens(block, fraction)
        assert len(tokens) == block
        assert tokens[0] == 1.0
        assert tokens == sorted(tokens)
        assert tokens[-1] == pytest.approx(max(fraction * block, 1.0), abs=1e-3)


def test_free_rows_are_all_verified_and_dear_ones_are_not() -> None:
    policy = LengthPolicy(8, "cost")
    assert policy.rows(0.5, curve=FLAT) == 8
    assert policy.rows(0.5, curve=STEEP) == 1
    assert policy.rows(1.0, curve=STEEP, draft_ms=30.0) == 8


def test_a_more_hopeful_head_never_verifies_fewer_rows() -> None:
    policy = LengthPolicy(16, "cost")
    curve = [10.0 + 1.5 * rows for rows in range(16)]
    rows = [policy.rows(step / 40, curve=curve) for step in range(41)]
    assert rows == sorted(rows)
    assert rows[0] == 1
    assert rows[-1] == 16


def test_counts_correct_what_the_head_promises() -> None:
    book, random_ = SurvivalBook(), random.Random(0)
    for _ in range(300):  # the first two slots are nearly always right, the third never
        drafted = [1, 2, 3, 4]
        emitted = [1, 2, 9] if random_.random() < 0.95 else [9]
        book.learn(0.9, drafted, emitted)
    curve = [10.0 + 1.0 * rows for rows in range(8)]
    policy = LengthPolicy(8, "cost")
    assert policy.rows(0.9, curve=curve) == 8
    assert policy.rows(0.9, curve=curve, book=book) == 3
    assert policy.rows(0.2, curve=curve, book=book) == policy.rows(0.2, curve=curve)


def test_a_round_tells_of_the_slot_after_the_last_verified_one_and_of_none_beyond() -> None:
    book = SurvivalBook()
    book.learn(0.5, [5, 6, 7, 8], [5, 6])  # one row verified beside the anchor, both kept
    assert {slot: count for (_, slot), count in book.counts.items()} == {1: [1, 1], 2: [1, 1]}
    book.learn(0.5, [5, 6, 7, 8], [4])
    assert book.counts[4, 1] == [1, 2]


def test_old_counts_fade_and_copies_share_nothing() -> None:
    book = SurvivalBook()
    for _ in range(2000):
        book.learn(None, [1], [1])
    copy = book.fork()
    for _ in range(600):
        book.learn(None, [1], [2])
    assert book.rate(None, 1, 0.5) < 0.3
    assert copy.rate(None, 1, 0.5) > 0.9
    book.reset()
    assert book.rate(None, 1, 0.5) == 0.5


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"policy": "ema"}, "policy"),
        ({"rate": 0.0}, "rate"),
        ({"least": 0}, "least"),
        ({"most": 9}, "length"),
        ({"least": 6, "most": 5}, "least"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(changes: dict[str, object], name: str) -> None:
    with pytest.raises(OptionError, match=f"^{name}:"):
        LengthPolicy(8, **changes)  # type: ignore[arg-type]

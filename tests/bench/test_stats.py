from __future__ import annotations

import numpy as np
import pytest

from hasten.bench.output import OVERALL
from hasten.bench.stats import (
    Answer,
    Cell,
    Difference,
    Item,
    bootstrap_interval,
    build_rows,
    distinct_share,
    micro_ratio,
)
from hasten.metrics import Summary
from hasten.types import DraftTree, Round, Times

IDS = (1, 2, 3, 4, 5, 6, 7, 8, 9)


def summary(*blocks: int) -> Summary:
    """A prefill, then rounds that emit so many tokens each, all drafted from one source."""
    rounds = [Round(0, (1,), times=Times(total=0.5))]
    for at, count in enumerate(blocks, 1):
        rounds.append(
            Round(
                at,
                tuple(range(count)),
                tree=DraftTree.chain(0, range(1, 5)),
                accepted=tuple(range(count)),
                sources=("", *["copy"] * 4),
                times=Times(total=0.010, draft=0.001, target=0.007, topk=0.001),
                layer_rows=5 * 30,
            )
        )
    return Summary.of(rounds)


def answer(seconds: float, tokens: tuple[int, ...] = IDS, *, ttft: float = 0.5) -> Answer:
    return Answer(tokens, len(tokens) - 1, seconds, ttft, passes=len(tokens) - 1)


def items(*categories: str) -> list[Item]:
    return [Item(i, f"r{i}", category, 1, (1,)) for i, category in enumerate(categories)]


# -- rows ------------------------------------------------------------------------------------------


def test_plain_decoding_is_exactly_as_fast_as_itself() -> None:
    measured = {"ar": [[answer(1.0)], [answer(3.0)]]}
    for row in build_rows(items("a", "b"), measured, plain="ar", seed=0):
        assert row.speedup_macro == row.speedup_micro == row.extra["e2e_speedup_micro"] == 1.0
        assert row.identical == row.prompts


def test_categories_add_up_to_overall() -> None:
    measured = {"ar": [[answer(1.0)], [answer(2.0, IDS[:4])], [answer(3.0)]]}
    *parts, overall = build_rows(items("a", "b", "a"), measured, plain="ar", seed=0)
    assert [row.category for row in parts] == ["a", "b"]
    assert overall.category == OVERALL
    for name in ("prompts", "tokens", "target_passes", "identical"):
        assert sum(getattr(row, name) for row in parts) == getattr(overall, name)
    assert overall.tokens == 9 + 4 + 9


def test_macro_is_the_mean_of_ratios_and_micro_the_ratio_of_totals() -> None:
    measured = {"ar": [[answer(1.0)], [answer(9.0)]], "fast": [[answer(0.25)], [answer(9.0)]]}
    row = build_rows(items("a", "a"), measured, plain="ar", seed=0)[-1]
    assert row.speedup_macro == pytest.approx((4 + 1) / 2)
    assert row.speedup_micro == pytest.approx(10 / 9.25)
    assert row.tokens_per_s == pytest.approx(16 / 9.25)


def test_prefill_counts_in_the_end_to_end_speedup_only() -> None:
    measured = {"ar": [[answer(1.0, ttft=1.0)]], "fast": [[answer(0.5, ttft=1.0)]]}
    row = build_rows(items("a"), measured, plain="ar", seed=0)[-1]
    assert row.speedup_micro == pytest.approx(2.0)
    assert row.extra["e2e_speedup_micro"] == pytest.approx(2.0 / 1.5)
    assert row.extra["ttft_ms"] == pytest.approx(1000)


def test_answers_of_a_single_token_give_no_ratio_and_no_nan() -> None:
    one = Answer((5,), 0, 0.0, 0.1, passes=0)
    row = build_rows(items("a", "a"), {"ar": [[one], [one]]}, plain="ar", seed=0)[-1]
    assert row.tokens == 2
    assert row.tokens_per_s == 0.0
    assert row.mean_accepted_length == 1.0
    assert row.speedup_macro is row.speedup_micro is row.extra["speedup_micro_interval"] is None


def test_a_single_token_answer_beside_others_changes_no_speedup() -> None:
    one = Answer((5,), 0, 0.0, 0.1, passes=0)
    measured = {"ar": [[answer(2.0)], [one]], "fast": [[answer(1.0)], [one]]}
    row = build_rows(items("a", "a"), measured, plain="ar", seed=0)[-1]
    assert row.speedup_macro == row.speedup_micro == 2.0


def test_a_peer_that_tells_no_passes_has_no_accepted_length() -> None:
    silent = Answer(IDS, 8, 1.0, 0.1)
    row = build_rows(items("a"), {"ar": [[answer(1.0)]], "peer:x": [[silent]]}, plain="ar", seed=0)[
        -1
    ]
    assert row.target_passes is row.mean_accepted_length is row.draft_ms_per_round is None
    assert row.speedup_micro == 1.0


# -- repeats ---------------------------------------------------------------------------------------


def test_a_prompt_counts_with_its_median_time() -> None:
    cell = Cell.of([answer(9.0), answer(1.0), answer(2.0)], IDS)
    assert cell.decode_s == 2.0
    assert cell.chosen.decode_s == 2.0


def test_a_prompt_is_identical_only_when_every_repeat_is() -> None:
    other = answer(1.0, (1, 2, 99))
    assert Cell.of([answer(1.0), answer(1.0)], IDS).identical
    assert not Cell.of([answer(1.0), other, answer(1.0)], IDS).identical


# -- what rounds tell ------------------------------------------------------------------------------


def test_draft_and_verify_times_add_up_to_the_round() -> None:
    made = summary(3, 2)
    told = Answer(IDS[:6], 5, 0.02, 0.5, made.target_passes, made)
    row = build_rows(items("a"), {"ar": [[told]]}, plain="ar", seed=0)[-1]
    assert row.draft_ms_per_round == pytest.approx(1.0)
    assert row.verify_ms_per_round == pytest.approx(9.0)
    assert row.extra["pass_ms"] == pytest.approx(7.0)
    assert row.extra["host_ms"] == pytest.approx(2.0)
    assert row.extra["host_share"] == pytest.approx(2 / 7)
    assert row.extra["topk_share"] == pytest.approx(1 / 7)


def test_acceptance_is_told_by_length_depth_and_source() -> None:
    made = summary(3, 1, 3)
    told = Answer((1,) * 8, 7, 0.03, 0.5, made.target_passes, made)
    row = build_rows(items("a"), {"ar": [[told]]}, plain="ar", seed=0)[-1]
    assert row.mean_accepted_length == pytest.approx(7 / 3)
    assert row.extra["accepted_length_histogram"] == {"1": 1, "3": 2}
    assert row.extra["acceptance_by_depth"]["1"] == {"drafted": 3, "accepted": 2, "rate": 2 / 3}
    assert row.extra["acceptance_by_depth"]["4"]["accepted"] == 0
    assert row.extra["acceptance_by_source"]["copy"] == {
        "drafted": 12,
        "accepted": 4,
        "rate": 4 / 12,
    }
    assert row.extra["drafted_per_round"] == 4.0
    assert row.extra["layer_rows_per_round"] == 150.0


def test_repeats_do_not_multiply_counts() -> None:
    made = summary(3)
    told = Answer(IDS[:4], 3, 0.01, 0.5, made.target_passes, made)
    row = build_rows(items("a"), {"ar": [[told, told, told]]}, plain="ar", seed=0)[-1]
    assert (row.tokens, row.target_passes) == (4, 1)
    assert row.extra["accepted_length_histogram"] == {"3": 1}
    assert row.draft_ms_per_round == pytest.approx(1.0)


def test_looping_answers_have_a_low_share_of_distinct_4grams() -> None:
    assert distinct_share([(1, 2) * 8], 4) == pytest.approx(2 / 13)
    assert distinct_share([IDS], 4) == 1.0
    assert distinct_share([IDS, IDS], 4) == 1.0
    assert distinct_share([(1, 2, 3)], 4) is None


def test_differences_are_counted_where_they_are_and_listed_overall() -> None:
    measured = {"ar": [[answer(1.0)]] * 2, "x": [[answer(1.0, (3, 4))]] * 2}
    found = [Difference("x", 0, "near tie", "one"), Difference("x", 1, "fault", "two")]
    rows = build_rows(items("a", "b"), measured, plain="ar", seed=0, differences=found)
    a, b, overall = rows[-3:]
    assert (a.extra["near_ties"], a.extra["faults"]) == (1, 0)
    assert (b.extra["near_ties"], b.extra["faults"]) == (0, 1)
    assert overall.extra["differences"] == ["one", "two"]
    assert "differences" not in a.extra
    assert overall.identical == 0


# -- bootstrap -------------------------------------------------------------------------------------


def table(*seconds: float) -> np.ndarray:
    return np.array([(8, s, 8, 1.0) for s in seconds])


def test_the_interval_is_the_same_for_the_same_seed_and_holds_the_ratio() -> None:
    made = table(*(0.4 + 0.37 * i % 0.71 for i in range(1, 30)))
    first = bootstrap_interval(made, range(29), 7)
    assert first == bootstrap_interval(made, range(29), 7)
    assert first != bootstrap_interval(made, range(29), 8)
    ratio = micro_ratio(made.sum(0))
    assert first is not None
    assert ratio is not None
    assert first[0] < ratio < first[1]


def test_equal_prompts_give_an_interval_without_width() -> None:
    assert bootstrap_interval(table(0.5, 0.5, 0.5), range(3), 0) == pytest.approx((2.0, 2.0))


def test_turns_of_one_conversation_are_resampled_together() -> None:
    made = table(0.5, 2.0, 0.5, 2.0)
    assert bootstrap_interval(made, (0, 0, 1, 1), 0) == pytest.approx((0.8, 0.8))
    assert bootstrap_interval(made, (0, 0, 0, 0), 0) is None

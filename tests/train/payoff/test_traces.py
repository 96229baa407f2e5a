"""Labels by replay: what the text goes on with, and nothing of it known before."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hasten.drafters.suffix import Suffix
from hasten.payoff.features import FEATURES, STATIC
from hasten.payoff.predictor import CacheOptions
from hasten.train.payoff import traces as made
from hasten.train.payoff.traces import Trace
from hasten.train.rows import Row
from hasten.types import RowSignals
from tests.train.payoff import cases
from tests.train.payoff.cases import EOS

CACHE = CacheOptions()
FREE = CacheOptions(longest=9, max_spec_factor=0.0, min_token_prob=0.01)


def texts() -> list[tuple[list[int], list[int]]]:
    dice = random.Random(7)
    few = [[dice.randrange(2, 6) for _ in range(40)] for _ in range(2)]
    return [cases.copying(3), cases.babbling(4), (few[0], few[1]), ([5], [5, 5, 5, 5, 5, 5])]


def drafted(prompt: list[int], known: list[int], options: CacheOptions) -> tuple[int, ...]:
    """The cache's draft after a text, by a cache that has seen just that."""
    cache: Suffix = options.cache(frozenset({EOS}))
    cache.begin([*prompt, *known], RowSignals())
    return cache.guess(options.longest, options.longest).tokens


@pytest.mark.parametrize("options", [CACHE, FREE], ids=["paper", "free"])
def test_labels_are_what_the_text_goes_on_with_and_drafts_dont_know_it(
    options: CacheOptions,
) -> None:
    found = 0
    for prompt, output in texts():
        trace = made.trace_of(prompt, output, options, cases.table(), eos_ids={EOS})
        known = dict(zip(trace.at.tolist(), range(len(trace)), strict=True))
        for place in range(len(output) - 1):
            draft = drafted(prompt, output[: place + 1], options)
            kept = 0
            while kept < len(draft) and draft[kept : kept + 1] == tuple(
                output[place + 1 + kept : place + 2 + kept]
            ):
                kept += 1
            unknown = output[-1] != EOS and kept < len(draft) and place + kept + 1 == len(output)
            assert (place in known) == (bool(draft) and not unknown), place
            if place in known:
                state = known[place]
                assert (trace.kept[state], trace.drafted[state]) == (kept, len(draft))
                found += 1
    assert found > 100


def test_an_answer_that_was_cut_off_has_no_labels_that_nobody_knows() -> None:
    prompt, output = cases.copying(3, every=1000)
    whole = made.trace_of(prompt, output, CACHE, cases.table(), eos_ids={EOS})
    cut = made.trace_of(prompt, output[:50], CACHE, cases.table(), eos_ids={EOS})
    assert len(whole) > len(cut) > 10
    shared = dict(zip(whole.at, whole.kept, strict=True))
    assert all(shared[place] == kept for place, kept in zip(cut.at, cut.kept, strict=True))


def test_nothing_is_drafted_after_the_end() -> None:
    trace = made.trace_of([5, 6, EOS, 7, 8], [5, 6, EOS], CACHE, cases.table(), eos_ids={EOS})
    assert (trace.drafted <= 2).all()


def test_columns_are_those_of_the_state() -> None:
    prompt, output = cases.copying(3)
    trace = made.trace_of(prompt, output, CACHE, cases.table(), eos_ids={EOS})
    assert trace.x.shape == (len(trace), STATIC)
    at = FEATURES.index("answer")
    assert trace.x[:, at] == pytest.approx(np.log1p(trace.at + 1))
    assert trace.x[:, FEATURES.index("length")].tolist() == trace.drafted.tolist()
    assert trace.x[:, FEATURES.index("score")] == pytest.approx(trace.score)


def test_an_empty_answer_and_one_without_drafts_have_no_states() -> None:
    for output in ([], [7], [7, 8, 9]):
        trace = made.trace_of([1, 2, 3], output, CACHE, cases.table())
        assert len(trace) == 0
        assert made.play(trace, made.always, lambda place: 0).cached == 0


def test_rows_are_grouped_by_what_they_are() -> None:
    row = Row("chat", "rewrite/pkg", "test", 0.0, [1], [2])
    assert made.group_of(row) == "rewrite"
    assert made.group_of(Row("math", "gsm8k", "test", 0.0, [1], [2])) == "math"


# -- rounds ----------------------------------------------------------------------------------------


def invented(kept: list[int], drafted: int = 8) -> Trace:
    """A state at every place, whose draft keeps so many."""
    count = len(kept)
    return Trace(
        "x",
        count + 1,
        np.arange(count),
        np.zeros((count, STATIC), np.float32),
        np.array(kept),
        np.full(count, drafted),
        np.array(kept, np.float32),
    )


def test_rounds_jump_over_what_was_kept_and_know_only_what_came_before() -> None:
    trace = invented([3, 9, 9, 9, 0, 2, 9, 9])
    played = made.play(trace, made.by_score(2.0), lambda place: 1)
    # 0 copies 3; 4 is the model's (score 0), which keeps 1; 6 would copy 9, cut by nothing here
    assert played.starts.tolist() == [True, False, False, False, True, False, True, False]
    assert played.routed.tolist() == [True, False, False, False, False, False, True, False]
    assert (played.rounds, played.cached) == (3, 2)
    last = FEATURES[STATIC:].index("last")
    assert played.history[:, last].tolist() == [0, 0, 0, 0, 3, 3, 1, 1]


def test_never_is_the_model_arm_alone_and_its_rounds_end_with_the_answer() -> None:
    trace = invented([9] * 10)
    played = made.play(trace, made.never, lambda place: 3)
    assert (played.rounds, played.cached) == (3, 0)  # 0-3, 4-7, 8-9
    assert not played.routed.any()
    assert played.starts.sum() == 3


def test_the_guessed_model_arm_keeps_its_mean_and_is_the_same_for_all_rules() -> None:
    model = made.guessed_model(2.0, "a")
    some = [model(place) for place in range(3000)]
    assert sum(some) / len(some) == pytest.approx(2.0, abs=0.15)
    assert some[:50] == [made.guessed_model(2.0, "a")(place) for place in range(50)]
    assert some[:50] != [made.guessed_model(2.0, "b")(place) for place in range(50)]
    assert made.guessed_model(0.0, "a")(7) == 0


def test_stacked_rows_are_states_beside_their_history() -> None:
    some = [invented([3, 1]), invented([2])]
    played = [made.play(trace, made.always, lambda place: 0) for trace in some]
    x, y = made.stacked(some, played)
    assert x.shape == (3, len(FEATURES))
    assert x.dtype == y.dtype == np.float32
    assert y.tolist() == [3, 1, 2]

"""Prompt lookup: which occurrence is copied, against plain scans and transformers' own code."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hasten.drafters.base import DraftContext
from hasten.drafters.prompt_lookup import PromptLookup
from hasten.errors import OptionError
from hasten.types import Budget, Round, RowSignals

WIDE = Budget(nodes=1000, depth=1000)


def _copy(drafter: PromptLookup, budget: Budget = WIDE) -> list[int]:
    ids = drafter._ids
    context = DraftContext(
        ids=ids, sample=lambda p, n, c: [], warp=lambda p, logits: logits, greedy=True
    )
    draft = drafter.propose(context, budget)
    assert draft.tree.is_chain
    assert draft.tree.tokens[0] == ids[-1]
    assert not draft.q
    return list(draft.tree.tokens[1:])


def _grown(drafter: PromptLookup, ids: Sequence[int], rng: random.Random) -> Iterator[list[int]]:
    """The drafter after a prompt and after each of several rounds of 1 to 4 tokens."""
    at = rng.randint(1, 6)
    drafter.begin(ids[:at], RowSignals())
    drafter.observe(Round(0, ()))
    index = 0
    while True:
        yield list(ids[:at])
        if at >= len(ids):
            return
        index, size = index + 1, rng.randint(1, 4)
        drafter.observe(Round(index, tuple(ids[at : at + size])))
        at = min(at + size, len(ids))


def scan_original(ids: list[int], most: int, count: int) -> list[int]:
    """Saxena 2023: left to right, full continuations only, never the end itself."""
    for n in range(most, 0, -1):
        if n > len(ids):
            continue
        for at in range(len(ids) - n + 1):
            start = at + n
            if ids[at:start] == ids[-n:] and start + count <= len(ids) and start < len(ids) - n:
                return ids[start : start + count]
    return []


def scan_hf(ids: list[int], most: int, count: int, eos: frozenset[int]) -> list[int]:
    """transformers 5.24: leftmost, shorter continuations allowed, cut before an end id."""
    for n in range(min(most, len(ids) - 1), 0, -1):
        for at in range(len(ids) - n):
            start = at + n
            if ids[at:start] == ids[-n:]:
                copy = ids[start : start + count]
                return copy[: next((i for i, t in enumerate(copy) if t in eos), len(copy))]
    return []


def scan_latest(ids: list[int], least: int, most: int, count: int) -> list[int]:
    """The longest n-gram's most recent occurrence before the end; the text so copied goes on."""
    for n in range(min(most, len(ids) - 1), least - 1, -1):
        for at in range(len(ids) - n - 1, -1, -1):
            if ids[at : at + n] == ids[-n:]:
                text = list(ids)
                for place in range(at + n, at + n + count):
                    text.append(text[place])
                return text[len(ids) :]
    return []


def _cases() -> Iterator[tuple[list[int], random.Random]]:
    for seed in range(60):
        rng = random.Random(seed)
        letters = rng.randint(1, 4)
        yield [rng.randrange(letters) for _ in range(rng.randint(3, 60))], rng


@pytest.mark.parametrize("count", [1, 2, 3, 10])
@pytest.mark.parametrize("most", [1, 3])
def test_original_mode_is_the_original_scan(most: int, count: int) -> None:
    copied = 0
    for ids, rng in _cases():
        drafter = PromptLookup(num_tokens=count, max_ngram=most, mode="original")
        for now in _grown(drafter, ids, rng):
            want = scan_original(now, most, count)
            assert _copy(drafter) == want
            copied += bool(want)
    assert copied > 100


@pytest.mark.parametrize("eos", [frozenset[int](), frozenset({0}), frozenset({0, 2})])
@pytest.mark.parametrize("count", [1, 10])
@pytest.mark.parametrize("most", [1, 2, 4])
def test_hf_mode_is_transformers_scan(most: int, count: int, eos: frozenset[int]) -> None:
    copied = 0
    for ids, rng in _cases():
        drafter = PromptLookup(num_tokens=count, max_ngram=most, mode="hf", eos_ids=eos)
        for now in _grown(drafter, ids, rng):
            want = scan_hf(now, most, count, eos)
            assert _copy(drafter) == want
            copied += bool(want)
    assert copied > 100


def test_the_scan_is_what_transformers_itself_proposes() -> None:
    eos = frozenset({0})
    for ids, _ in _cases():
        theirs = PromptLookupCandidateGenerator(
            eos_token_id=torch.tensor(sorted(eos)), num_output_tokens=6, max_matching_ngram_size=2
        )
        theirs.max_length = 10_000
        got, _logits = theirs.get_candidates(torch.tensor([ids]))
        assert got[0, len(ids) :].tolist() == scan_hf(ids, 2, 6, eos)


@pytest.mark.parametrize(("least", "most"), [(1, 3), (2, 3), (2, 2)])
def test_latest_mode_copies_from_the_most_recent_longest_match(least: int, most: int) -> None:
    for ids, rng in _cases():
        drafter = PromptLookup(num_tokens=5, min_ngram=least, max_ngram=most)
        for now in _grown(drafter, ids, rng):
            assert _copy(drafter) == scan_latest(now, least, most, 5)


def test_a_longer_match_beats_a_more_recent_one() -> None:
    drafter = PromptLookup(num_tokens=2)
    drafter.begin([1, 2, 3, 7, 8, 9, 3, 4, 5, 1, 2, 3], RowSignals())
    assert _copy(drafter) == [7, 8]


def test_no_earlier_occurrence_means_no_draft() -> None:
    for mode in ("latest", "hf", "original"):
        drafter = PromptLookup(mode=mode)
        drafter.begin([1], RowSignals())
        assert _copy(drafter) == []
        drafter.observe(Round(0, (2, 3)))
        assert _copy(drafter) == []


@pytest.mark.parametrize("mode", ["latest", "hf", "original"])
def test_a_copy_keeps_to_the_budget(mode: str) -> None:
    drafter = PromptLookup(num_tokens=6, mode=mode)
    drafter.begin([1, 2, 3, 4, 5, 6, 7, 8, 1], RowSignals())
    assert _copy(drafter) == [2, 3, 4, 5, 6, 7]
    assert _copy(drafter, Budget(nodes=4, depth=9)) == [2, 3, 4]
    assert _copy(drafter, Budget(nodes=9, depth=2)) == [2, 3]


def test_a_request_begins_with_an_empty_index() -> None:
    drafter = PromptLookup()
    drafter.begin([1, 2, 3, 1], RowSignals())
    drafter.end()
    drafter.begin([5, 1], RowSignals())
    assert _copy(drafter) == []


class Counted(int):
    """An id that counts how often it is hashed or compared."""

    work = 0

    def __hash__(self) -> int:
        Counted.work += 1
        return int(self)

    def __eq__(self, other: object) -> bool:
        Counted.work += 1
        return int(self) == int(other)  # type: ignore[call-overload]


def _work(mode: str, length: int) -> tuple[int, int]:
    """Work for a prompt of one token repeated, and for one round after it."""
    Counted.work = 0
    drafter = PromptLookup(mode=mode)
    drafter.begin([Counted(7) for _ in range(length)], RowSignals())
    indexing, Counted.work = Counted.work, 0
    drafter.propose(DraftContext([7], lambda p, n, c: [], lambda p, x: x, True), Budget(8, 8))
    drafter.observe(Round(0, (Counted(7),)))
    return indexing, Counted.work


@pytest.mark.parametrize("mode", ["latest", "hf", "original"])
def test_one_token_repeated_costs_linear_time(mode: str) -> None:
    short, long = _work(mode, 400), _work(mode, 4000)
    assert long[0] < 10.5 * short[0], "ten times the prompt, ten times the work"
    assert long[1] == short[1] < 100, "a round's work doesn't grow with the context"


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "newest"},
        {"num_tokens": 0},
        {"min_ngram": 0},
        {"min_ngram": 3, "max_ngram": 2},
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(OptionError, match="prompt-lookup"):
        PromptLookup(**options)  # type: ignore[arg-type]

"""The loop: what it asks of targets, hands to drafters, and how requests share passes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import hasten.decode
import hasten.decoding
import hasten.opening
import hasten.readback
from hasten.decode import decode
from hasten.decoding import Decoding
from hasten.drafters.base import DraftContext
from hasten.drafters.draft_model import DraftModel
from hasten.errors import ContextError, OptionError
from hasten.policies.base import FixedPolicy
from hasten.types import (
    Budget,
    Draft,
    FinishReason,
    Round,
    SamplingParams,
)
from hasten.verify import VERIFIERS
from tests.conformance.drafters import Flaky, Oracle, Resuming, TestDrafter, Wide
from tests.conformance.harness import check_cache, prompt_of, request, run
from tests.conformance.toy_target import ToyTarget

GREEDY = SamplingParams(max_new_tokens=20)


# -- prompts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ([2] * 16, "no room"),
        ([2] * 99, "99 tokens"),
        ([2, 24], "0..23"),
        ([-1, 2], "0..23"),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_refused_before_any_pass(
    prompt: list[int], words: str
) -> None:
    target = ToyTarget(context_limit=16)
    with pytest.raises(ContextError, match=words):
        request(target, prompt, GREEDY, Oracle())
    assert target.live == []
    assert target.passes == 0


def test_a_prompt_one_short_of_the_limit_gets_one_token() -> None:
    target = ToyTarget(context_limit=13)
    got = run(target, prompt_of(1), GREEDY, Oracle(), nodes=4)
    assert len(got.tokens) == 1
    assert got.end == (FinishReason.LENGTH, None)


def test_no_new_tokens_means_no_pass_and_no_drafter() -> None:
    target, drafter = ToyTarget(), Oracle()
    asked = request(target, prompt_of(1), SamplingParams(max_new_tokens=0), drafter)
    assert asked.finish is FinishReason.LENGTH
    assert list(decode([asked])) == []
    assert target.passes == 0
    assert drafter.calls == []


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    target = ToyTarget()
    with pytest.raises(OptionError, match="stop"):
        Decoding(
            target,
            prompt_of(1),
            SamplingParams(stop=("x",)),
            drafter=Oracle(),
            policy=FixedPolicy(4),
            verifier=VERIFIERS["greedy"],
        )


# -- batches ---------------------------------------------------------------------------------------

ROWS = [
    SamplingParams(max_new_tokens=20),
    SamplingParams(max_new_tokens=3),
    SamplingParams(max_new_tokens=14, temperature=1.1, top_p=0.9),
    SamplingParams(max_new_tokens=0),
    SamplingParams(max_new_tokens=17, repetition_penalty=1.3, logprobs=2),
    SamplingParams(max_new_tokens=1),
]


def _batch(target: ToyTarget, kinds: Sequence[type[TestDrafter]]) -> list[Decoding]:
    asked = []
    for row, params in enumerate(ROWS):
        prompt = prompt_of(row, length=5 + row)
        truth = prompt + target.plain(prompt, params, seed=row)
        drafter = kinds[row % len(kinds)](truth, 24, row)
        asked.append(request(target, prompt, params, drafter, nodes=2 + row, seed=row))
    return asked


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "in turns"])
def test_a_row_of_a_batch_is_answered_as_alone(packed: bool) -> None:
    target = ToyTarget(packed=packed)
    kinds = (Wide, Flaky, Resuming)
    tokens: list[list[int]] = [[] for _ in ROWS]
    rounds: list[list[Round]] = [[] for _ in ROWS]
    for index, made in decode(_batch(target, kinds)):
        tokens[index].extend(made.emitted)
        rounds[index].append(made)
    assert target.live == []
    for row, params in enumerate(ROWS):
        prompt = prompt_of(row, length=5 + row)
        assert tokens[row] == target.plain(prompt, params, seed=row)
        alone = request(
            target,
            prompt,
            params,
            kinds[row % 3](prompt + tokens[row], 24, row),
            nodes=2 + row,
            seed=row,
        )
        same = [made for _, made in decode([alone])]
        for mine, theirs in zip(rounds[row], same, strict=True):
            assert (mine.emitted, mine.tree, mine.logprobs) == (
                theirs.emitted,
                theirs.tree,
                theirs.logprobs,
            )
            assert (mine.finish, mine.stop_reason) == (theirs.finish, theirs.stop_reason)


def test_packed_rows_share_passes_and_finished_rows_stop_costing() -> None:
    passes = {}
    for packed in (True, False):
        target = ToyTarget(packed=packed, eos_ids=())
        rounds = [0] * len(ROWS)
        for index, _ in decode(_batch(target, (Flaky,))):
            rounds[index] += 1
        prefills = sum(1 for p in ROWS if p.max_new_tokens)
        passes[packed] = target.passes - prefills
        assert passes[packed] == (
            max(r - 1 for r in rounds) if packed else sum(max(r - 1, 0) for r in rounds)
        )
    assert passes[True] < passes[False]


def test_a_finished_row_is_closed_while_the_others_go_on() -> None:
    target = ToyTarget(packed=True, eos_ids=())
    short, long = SamplingParams(max_new_tokens=2), SamplingParams(max_new_tokens=9)
    asked = [request(target, prompt_of(i), p, Oracle()) for i, p in enumerate((short, long))]
    open_at = {}
    for index, made in decode(asked):
        if made.finish:
            open_at[index] = len(target.live)
    assert open_at == {0: 1, 1: 0}


# -- lent sequences --------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [0, 1, 7, 11, 12])
def test_a_lent_sequence_runs_only_what_it_lacks_and_is_left_open(held: int) -> None:
    target = ToyTarget(eos_ids=())
    prompt = prompt_of(1)
    plain = target.plain(prompt, GREEDY)
    sequence = target.open()
    if held:
        target.prefill(sequence, prompt[:held])
    before = target.prefilled
    asked = request(target, prompt, GREEDY, Oracle(prompt + plain))
    asked.lend(sequence)
    emitted = [t for _, made in decode([asked]) for t in made.emitted]
    assert emitted == plain
    assert target.prefilled - before == 12 - min(held, 11)
    assert target.live == [sequence]
    check_cache(sequence, [*prompt, *plain[:-1]])


# -- times -----------------------------------------------------------------------------------------


class Clock:
    """A clock that only tests move."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Slow(Oracle):
    """Drafts for 3 seconds, 1 of them in a model of its own."""

    clock: Clock

    def draft(self, ctx: DraftContext, budget: Budget) -> Draft:
        self.clock.now += 3
        ctx.model_seconds += 1
        return super().draft(ctx, budget)

    def observe(self, round: Round) -> None:
        self.clock.now += 0.5
        super().observe(round)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_time_goes_where_it_was_spent(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(hasten.decode, "time", clock)
    monkeypatch.setattr(hasten.decoding, "time", clock)
    monkeypatch.setattr(hasten.opening, "time", clock)
    monkeypatch.setattr(hasten.readback, "time", clock)
    target = ToyTarget(packed=True, eos_ids=())

    def slow(passes: int) -> None:
        clock.now += 8

    target.before_pass = slow
    asked = []
    for _ in range(size):
        drafter = Slow()
        drafter.clock = clock
        asked.append(request(target, prompt_of(1), SamplingParams(max_new_tokens=4), drafter))
    total = 0.0
    for _, made in decode(asked):
        times = made.times
        total += times.total
        if made.tree is None:
            assert (times.total, times.target, times.draft) == (8.5, 8, 0)
        elif times.draft:
            assert times.draft == 3
            assert times.draft_model == 1
            assert times.target == 8 / size
            assert times.total == 3 + 8 / size + 0.5
            assert times.host == 3 - 1 + 0.5
        else:  # the last token: nothing to draft
            assert times.total == 8 / size + 0.5
    assert total == clock.now


# -- faults ----------------------------------------------------------------------------------------


def test_what_a_requests_processor_raises_is_not_the_drafters_fault() -> None:
    prompt = prompt_of(1)

    class Mine(Exception):
        pass

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > len(prompt):  # the drafter asks about drafted tokens first
            raise Mine("here")
        return scores

    params = SamplingParams(max_new_tokens=20, temperature=0.9, processors=(processor,))
    drafter = DraftModel(ToyTarget(bigram=0.7), vocab_size=24, num_tokens=4)
    target = ToyTarget()
    with pytest.raises(Mine, match="here"):
        list(decode([request(target, prompt, params, drafter)]))
    assert target.live == []

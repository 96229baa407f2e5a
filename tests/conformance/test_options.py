"""Stops inside blocks, logprobs and sampling options: as in plain decoding for every drafter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from hasten.decode import decode
from hasten.types import FinishReason, SamplingParams
from tests.conformance.drafters import KINDS, KNOWING, Oracle, ResumingTree
from tests.conformance.harness import (
    DRAWING,
    TREE_DRAFTERS,
    Answer,
    check_cache,
    prompt_of,
    request,
    run,
)
from tests.conformance.toy_target import ToyTarget, ToyTokenizer


class Plain(Oracle):
    """Never drafts: the loop's own plain decoding."""

    name = "plain"

    def next_truth(self, count: int) -> list[int]:
        return []


def _same_as_plain(
    name: str, target: ToyTarget, prompt: Sequence[int], params: SamplingParams, **how: object
) -> Answer:
    """Run plainly and drafted: everything a user sees must be equal. Gives the plain answer."""
    plain = run(target, prompt, params, Plain(), nodes=1, **how)
    truth = [*prompt, *plain.tokens, *target.plain([*prompt, *plain.tokens], params)]
    for nodes in (3, 9):
        for verifier in ("greedy", "rejection") if params.is_greedy else ("match", "rejection"):
            if verifier == "rejection" and not params.is_greedy and name in DRAWING:
                continue
            drafter = TREE_DRAFTERS[name](target, truth, 2)
            got = run(target, prompt, params, drafter, nodes=nodes, verifier=verifier, **how)
            assert got.tokens == plain.tokens
            assert got.end == plain.end
            assert got.text == plain.text
            assert got.logprobs == plain.logprobs
    return plain


@pytest.mark.parametrize("name", TREE_DRAFTERS)
def test_an_end_id_inside_a_block_ends_the_answer_there(name: str) -> None:
    reasons = set()
    for case in range(8):
        target = ToyTarget(seed=case, eos_ids=(1, 3))
        got = _same_as_plain(name, target, prompt_of(case), SamplingParams(max_new_tokens=40))
        reasons.add(got.end)
        assert got.finish is FinishReason.LENGTH or got.tokens[-1] == got.end[1]
    assert {(FinishReason.STOP, 1), (FinishReason.STOP, 3)} <= reasons


@pytest.mark.parametrize("name", TREE_DRAFTERS)
def test_a_stop_string_across_tokens_inside_a_block_ends_the_answer_there(name: str) -> None:
    target = ToyTarget(eos_ids=())
    prompt = prompt_of(1)
    whole = target.plain(prompt, SamplingParams(max_new_tokens=30))
    text = ToyTokenizer().decode(whole)
    for start, length in ((0, 1), (4, 3), (11, 2)):
        stop = text[start : start + length]
        params = SamplingParams(max_new_tokens=30, stop=("~", stop))
        got = _same_as_plain(name, target, prompt, params)
        assert got.end == (FinishReason.STOP, stop)
        assert got.text == text[: text.index(stop)]
        assert len(got.tokens) < len(whole)


@pytest.mark.parametrize("name", TREE_DRAFTERS)
def test_a_stop_counts_before_the_length_on_the_same_token(name: str) -> None:
    target = ToyTarget(eos_ids=())
    prompt = prompt_of(1)
    whole = target.plain(prompt, SamplingParams(max_new_tokens=7))
    got = _same_as_plain(
        name, target, prompt, SamplingParams(max_new_tokens=7, stop_token_ids=(whole[-1],))
    )
    assert got.end[0] is FinishReason.STOP


@pytest.mark.parametrize("name", TREE_DRAFTERS)
def test_logprobs_are_plain_decodings(name: str) -> None:
    target = ToyTarget()
    prompt = prompt_of(2)
    for params in (
        SamplingParams(max_new_tokens=20, logprobs=3),
        SamplingParams(max_new_tokens=20, logprobs=0, temperature=1.3, repetition_penalty=1.4),
    ):
        got = _same_as_plain(name, target, prompt, params)
        ids = list(prompt)
        for token, logprob in zip(got.tokens, got.logprobs, strict=True):
            raw = target.logits_after(ids).log_softmax(-1)
            assert logprob.token == token
            assert math.isclose(logprob.logprob, float(raw[token]), abs_tol=1e-6)
            assert len(logprob.top) == params.logprobs
            ids.append(token)


def _odd_ids_after_even(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A prefix-pure processor: the next id's parity must differ from the last one's."""
    out = scores.clone()
    out[:, int(ids[0, -1]) % 2 :: 2] = -math.inf
    return out


OPTIONS: dict[str, dict[str, object]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "logit_bias": {"logit_bias": {5: 2.0, 6: -math.inf}},
    "bad_words_ids": {"bad_words_ids": ((7,), (4, 5), (8, 9, 10))},
    "min_new_tokens": {"min_new_tokens": 9, "stop_token_ids": (2, 5)},
    "ignore_eos": {"ignore_eos": True},
    "processors": {"processors": (_odd_ids_after_even,)},
    "several": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "no_repeat_ngram_size": 3,
        "logit_bias": {3: 1.0},
        "min_new_tokens": 5,
        "processors": (_odd_ids_after_even,),
    },
}
SAMPLING: dict[str, dict[str, object]] = {
    "greedy": {},
    "temperature": {"temperature": 1.5},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", [k.name for k in (*KNOWING, *KINDS, ResumingTree)])
def test_an_option_acts_as_in_plain_decoding(name: str, option: str) -> None:
    target = ToyTarget(seed=3, bigram=0.85)
    shows = False
    for case, sampling in enumerate(({}, {"temperature": 1.2, "top_p": 0.9})):
        params = SamplingParams(max_new_tokens=30, **OPTIONS[option], **sampling)  # type: ignore[arg-type]
        prompt = prompt_of(3 + case)
        got = _same_as_plain(name, target, prompt, params, seed=4)
        assert got.tokens == target.plain(prompt, params, seed=4)
        without = SamplingParams(max_new_tokens=30, **sampling)  # type: ignore[arg-type]
        shows |= got.tokens != target.plain(prompt, without, seed=4)
    assert shows, "the option changes nothing here, so this shows nothing"


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", TREE_DRAFTERS)
def test_every_way_of_sampling_gives_plain_decodings_answer(name: str, sampling: str) -> None:
    target = ToyTarget(scale=1.0)
    params = SamplingParams(max_new_tokens=25, **SAMPLING[sampling])  # type: ignore[arg-type]
    for seed in (0, -3, 2**70):
        got = _same_as_plain(name, target, prompt_of(5), params, seed=seed)
        assert got.tokens == target.plain(prompt_of(5), params, seed=seed)


def test_another_seed_gives_another_answer() -> None:
    target = ToyTarget(scale=1.0, eos_ids=())
    params = SamplingParams(max_new_tokens=20, temperature=1.0)
    answers = {tuple(target.plain(prompt_of(5), params, seed=s)) for s in range(5)}
    assert len(answers) == 5


def test_an_answer_depends_on_its_seed_only_whatever_ran_before() -> None:
    target = ToyTarget(scale=1.0)
    params = SamplingParams(max_new_tokens=20, temperature=1.0)
    first = run(target, prompt_of(5), params, Plain(), seed=7).tokens
    run(target, prompt_of(6), params, Oracle(first, 24), seed=3)
    torch.rand(3)
    assert run(target, prompt_of(5), params, Plain(), seed=7).tokens == first


def test_the_cache_after_a_stop_inside_a_block_holds_only_what_was_kept() -> None:
    target = ToyTarget(eos_ids=())
    prompt = prompt_of(1)
    whole = target.plain(prompt, SamplingParams(max_new_tokens=30))
    params = SamplingParams(max_new_tokens=30, stop_token_ids=(whole[5],))
    sequence = target.open()
    asked = request(target, prompt, params, Oracle(prompt + whole), nodes=9)
    asked.lend(sequence)
    emitted = [t for _, made in decode([asked]) for t in made.emitted]
    assert emitted == whole[: whole.index(whole[5]) + 1]
    check_cache(sequence, [*prompt, *emitted[:-1]])

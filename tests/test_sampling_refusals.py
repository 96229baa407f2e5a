"""Processors and rows that sampling takes, refuses by name, or tells as broken."""

from __future__ import annotations

import ast
import inspect
import math
from collections import Counter

import pytest
import torch
from transformers.generation import logits_process as hf

from hasten.errors import ModelError, OptionError
from hasten.sampling import REFUSED_PROCESSORS
from tests.sampling_cases import VOCAB, prefixes, rows, sampler


def test_processors_see_the_prefix_and_run_before_the_options():
    seen = []

    def double(ids, scores):
        seen.append((ids.tolist(), ids.dtype, scores.shape, scores.dtype))
        return scores * 2

    row = rows(1)[0].bfloat16()
    got = sampler(processors=[double], logit_bias={4: 1.0}).process([5, 6], row)
    assert seen == [([[5, 6]], torch.int64, (1, VOCAB), torch.float32)]
    expected = row.float() * 2
    expected[4] += 1
    assert torch.equal(got, expected)


def test_a_processor_that_writes_into_its_scores_leaves_the_logits_alone():
    def ban(ids, scores):
        scores[:, 5] = -math.inf
        return scores

    row = rows(1)[0]
    before = row.clone()
    assert sampler(processors=[ban]).process([1], row)[5] == -math.inf
    assert torch.equal(row, before)


def test_a_list_of_transformers_processors_is_taken_apart():
    inner = hf.LogitsProcessorList([hf.SuppressTokensLogitsProcessor([5])])
    assert sampler(processors=[inner]).process([1], rows(1)[0])[5] == -math.inf
    refused = hf.LogitsProcessorList([object.__new__(hf.SynthIDTextWatermarkLogitsProcessor)])
    with pytest.raises(OptionError, match="SynthIDText"):
        sampler(processors=[refused])


def test_a_processor_that_gives_something_else_is_named():
    def shorten(ids, scores):
        return scores[:, :5]

    def forget(ids, scores):
        scores[:, 5] = 0

    for processor, message in ((shorten, r"shorten gave \(1, 5\)"), (forget, "forget gave None")):
        with pytest.raises(OptionError, match=f"^processors: {message}"):
            sampler(processors=[processor]).process([1], rows(1)[0])


@pytest.mark.parametrize("name", sorted(REFUSED_PROCESSORS))
def test_transformers_processors_with_state_are_refused_by_name(name):
    processor = object.__new__(getattr(hf, name))
    with pytest.raises(OptionError, match=f"^processors: {name} "):
        sampler(processors=[processor])


def test_every_transformers_processor_with_state_is_known():
    """Those that assign to self while running are refused, or looked at and found harmless."""
    harmless = {
        "RepetitionPenaltyLogitsProcessor",  # moves a tensor to the device
        "ExponentialDecayLengthPenalty",  # likewise
        "SequenceBiasLogitsProcessor",  # prepares tensors once
    }
    stateful = set()
    for node in ast.parse(inspect.getsource(hf)).body:
        if not isinstance(node, ast.ClassDef) or "Processor" not in "".join(
            map(ast.unparse, node.bases)
        ):
            continue
        for method in node.body:
            if not isinstance(method, ast.FunctionDef):
                continue
            if method.name == "__init__" or method.name.startswith("set_"):
                continue
            stored = [n for n in ast.walk(method) if isinstance(getattr(n, "ctx", None), ast.Store)]
            if any(ast.unparse(n).startswith("self.") for n in stored):
                stateful.add(node.name)
    assert "SynthIDTextWatermarkLogitsProcessor" in stateful
    assert stateful - harmless <= set(REFUSED_PROCESSORS)


def test_the_reseeding_watermark_is_prefix_pure_and_allowed():
    mark = hf.WatermarkLogitsProcessor(VOCAB, "cpu")
    ours = sampler(processors=[mark])
    asked = list(zip(prefixes(5, 8, 50), rows(5), strict=True))
    first = [ours.process(*a) for a in asked]
    again = [ours.process(*a) for a in reversed(asked)][::-1]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_processor_may_say_that_it_is_not_pure():
    class Counting:
        hasten_prefix_pure = False

        def __call__(self, ids, scores):
            return scores

    with pytest.raises(OptionError, match=r"^processors: Counting .*hasten_prefix_pure"):
        sampler(processors=[Counting()])


@pytest.mark.parametrize("wrong", [3, "upper", Counter])
def test_what_is_not_a_processor_is_refused(wrong):
    with pytest.raises(OptionError, match=r"^processors: "):
        sampler(processors=(wrong,))


# bad input


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("logit_bias", {VOCAB: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: "much"}),
        ("bad_words_ids", [[1, VOCAB]]),
        ("bad_words_ids", [[-2]]),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [1.5]),
    ],
)
def test_options_that_do_not_fit_the_vocabulary_are_named(option, value):
    with pytest.raises(OptionError, match=f"^{option}: ") as caught:
        sampler(**{option: value})
    assert caught.value.option == option


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banning_every_token_is_an_error(temperature):
    ours = sampler(
        temperature=temperature, top_p=0.9, logit_bias=dict.fromkeys(range(VOCAB), -math.inf)
    )
    for call in (ours.choose, ours.probs):
        with pytest.raises(OptionError, match=r"^logit_bias: every token is banned after 3 tokens"):
            call([1, 2, 3], rows(1)[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_an_error(temperature):
    row = rows(1)[0]
    row[9] = math.nan
    ours = sampler(temperature=temperature, top_p=0.9)
    for call in (ours.choose, ours.probs):
        with pytest.raises(ModelError, match="NaN"):
            call([1], row)


def test_infinite_logits_are_an_error_when_sampling():
    row = rows(1)[0]
    row[9] = math.inf
    assert sampler().choose([1], row) == 9
    with pytest.raises(ModelError, match="infinity"):
        sampler(temperature=1.0).choose([1], row)


def test_a_single_allowed_token_is_always_chosen():
    bias = {i: -math.inf for i in range(VOCAB) if i != 42}
    ours = sampler(temperature=1.5, top_p=0.5, logit_bias=bias)
    assert {ours.choose(range(p), rows(1)[0]) for p in range(1, 30)} == {42}

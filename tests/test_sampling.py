"""Sampling options: transformers' definitions, pure in (prefix, logits), drawn by position."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from transformers.generation import logits_process as hf

from hasten import warpers
from hasten.sampling import Sampler
from hasten.types import SamplingParams
from tests.sampling_cases import EOS, VOCAB, apply, prefixes, rows, sampler


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_repetition_penalty_equals_transformers(penalty):
    ours = sampler(repetition_penalty=penalty)
    theirs = [hf.RepetitionPenaltyLogitsProcessor(penalty)]
    for prefix, row in zip(prefixes(10, 40, 80), rows(10), strict=True):
        assert torch.equal(ours.process(prefix, row), apply(theirs, prefix, row))


def test_repetition_penalty_allows_prompt_ids_that_the_head_lacks():
    ours, theirs = sampler(repetition_penalty=1.5), [hf.RepetitionPenaltyLogitsProcessor(1.5)]
    prefix = [VOCAB + 3, 1, 2, VOCAB, 4, 9]
    row = rows(1)[0]
    assert torch.equal(ours.process(prefix, row), apply(theirs, prefix, row))


def test_prompt_ids_that_the_head_lacks_need_no_ban():
    prefix = [VOCAB + 3, 1, VOCAB + 3]
    row = rows(1)[0]
    for size, banned in ((1, [1]), (2, [1])):
        got = sampler(no_repeat_ngram_size=size).process(prefix, row)
        assert got.isinf().nonzero().squeeze(1).tolist() == banned


def test_repetition_penalty_follows_a_changed_prompt():
    # the prompt's ids are remembered: another prompt must not see them
    ours = sampler(repetition_penalty=1.5, prompt_len=2)
    row = rows(1)[0]
    first = ours.process([3, 4, 5], row)
    ours.process([8, 9, 5], row)
    assert torch.equal(ours.process([3, 4, 5], row), first)
    assert ours.process([8, 9, 5], row)[3] == row[3]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_repeat_ngram_equals_transformers(size):
    ours, theirs = sampler(no_repeat_ngram_size=size), [hf.NoRepeatNGramLogitsProcessor(size)]
    banned = 0
    for length in (1, 2, 3, 4, 30, 60):
        for prefix, row in zip(prefixes(10, length, 3), rows(10), strict=True):
            got = ours.process(prefix, row)
            assert torch.equal(got, apply(theirs, prefix, row))
            banned += int(torch.isinf(got).sum())
    assert banned


def test_bad_words_equal_transformers():
    words = [[5], [2], [1, 0], [1, 0, 2], [0, 0, 1], [1, 7], [7]]
    ours = sampler(bad_words_ids=words)
    theirs = [hf.NoBadWordsLogitsProcessor(words, eos_token_id=sorted(EOS))]
    for length in (1, 2, 3, 10):
        for prefix, row in zip(prefixes(20, length, 3), rows(20), strict=True):
            assert torch.equal(ours.process(prefix, row), apply(theirs, prefix, row))


def test_logit_bias_equals_transformers():
    bias = {3: 2.5, 9: -1.0, 11: -math.inf}
    theirs = [hf.SequenceBiasLogitsProcessor({(k,): v for k, v in bias.items()})]
    row = rows(1)[0]
    assert torch.equal(sampler(logit_bias=bias).process([1], row), apply(theirs, [1], row))


@pytest.mark.parametrize("new", [0, 1, 2, 3, 4])
def test_min_new_tokens_equals_transformers(new):
    ours = sampler(min_new_tokens=3, stop_token_ids=(11,))
    theirs = [hf.MinNewTokensLengthLogitsProcessor(5, 3, [2, 7, 11])]
    prefix, row = list(range(20, 25 + new)), rows(1)[0]
    assert torch.equal(ours.process(prefix, row), apply(theirs, prefix, row))


def test_presence_and_frequency_follow_openai_and_count_the_answer_only():
    ours = sampler(presence_penalty=0.5, frequency_penalty=0.25, prompt_len=3)
    prefix, row = [1, 2, 3, 4, 4, 5, 4, 1], rows(1)[0]
    expected = row.clone()
    for token, times in Counter(prefix[3:]).items():
        expected[token] -= 0.25 * times + 0.5
    got = ours.process(prefix, row)
    torch.testing.assert_close(got, expected)
    assert got[2] == row[2]


def test_options_combine_in_transformers_order():
    words, bias = [[4], [0, 1]], {8: 1.5}
    ours = sampler(
        repetition_penalty=1.2,
        logit_bias=bias,
        no_repeat_ngram_size=2,
        bad_words_ids=words,
        min_new_tokens=100,
    )
    theirs = [
        hf.RepetitionPenaltyLogitsProcessor(1.2),
        hf.SequenceBiasLogitsProcessor({(8,): 1.5}),
        hf.NoRepeatNGramLogitsProcessor(2),
        hf.NoBadWordsLogitsProcessor(words, eos_token_id=sorted(EOS)),
        hf.MinNewTokensLengthLogitsProcessor(5, 100, sorted(EOS)),
    ]
    for prefix, row in zip(prefixes(10, 30, 12), rows(10), strict=True):
        assert torch.equal(ours.process(prefix, row), apply(theirs, prefix, row))


WARPS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 0.9},
    {"top_p": 0.1},
    {"top_p": 0.999},
    {"top_p": 0.9999999},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 0.7},
    {"top_p": 0.95, "min_p": 0.1, "temperature": 2.5},
]


def warped_by_transformers(options: dict, row: torch.Tensor) -> torch.Tensor:
    theirs = [hf.TemperatureLogitsWarper(options.get("temperature", 1.0))]
    if "top_k" in options:
        theirs.append(hf.TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        theirs.append(hf.TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        theirs.append(hf.MinPLogitsWarper(options["min_p"]))
    return apply(theirs, [1], row).softmax(0)


def many_rows(vocab: int) -> list[torch.Tensor]:
    """Peaked and flat rows; rows in bfloat16 are full of ties."""
    out = [r for scale in (0.0, 0.1, 1.0, 4.0, 15.0) for r in rows(3, vocab, scale)]
    out += [r.bfloat16() for r in rows(4, vocab, 2.0, seed=1)]
    out += [r.half() for r in rows(2, vocab, 4.0, seed=2)]
    out.append(rows(1, vocab)[0].masked_fill(torch.arange(vocab) % 3 == 0, -math.inf))
    return out


@pytest.mark.parametrize("options", WARPS, ids=str)
@pytest.mark.parametrize("vocab", [4, 10, VOCAB, 3000])
def test_probs_equal_transformers_warpers_to_the_last_survivor(options, vocab):
    ours = sampler(vocab=vocab, **{"temperature": 1.0, **options})
    for row in many_rows(vocab):
        expected = warped_by_transformers(options, row)
        got = ours.probs([1], row)
        assert got.dtype == torch.float32
        # of equal tokens at the border of top_p transformers keeps any
        keeps_any = "top_p" in options and row.unique().numel() < vocab
        if not keeps_any:
            assert torch.equal(got > 0, expected > 0)
        torch.testing.assert_close(got.sort().values, expected.sort().values, rtol=2e-5, atol=1e-7)
        assert torch.equal(row[got > 0].sort().values, row[expected > 0].sort().values)


def test_top_p_keeps_the_lowest_ids_among_equals():
    row = torch.zeros(VOCAB)
    row[[17, 30, 250, 599]] = 30.0
    for top_p, kept in ((1e-9, [17]), (0.5, [17, 30]), (0.7, [17, 30, 250])):
        probs = sampler(temperature=1.0, top_p=top_p).probs([1], row)
        assert probs.nonzero().squeeze(1).tolist() == kept


def test_top_p_rarely_sorts_the_whole_vocabulary(monkeypatch):
    calls = []
    sort = warpers._top_p_by_sorting
    monkeypatch.setattr(warpers, "_top_p_by_sorting", lambda *a: calls.append(1) or sort(*a))
    ours = sampler(vocab=20_000, temperature=1.0, top_p=0.95)
    for row in rows(100, 20_000, 4.0):
        ours.probs([1], row)
    assert len(calls) <= 5


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-40, 5e-324, 1e30])
@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_extreme_temperatures_give_finite_probabilities(temperature, shift):
    row = rows(1)[0]
    row = row - row.max() + shift
    got = sampler(temperature=temperature).probs([1], row)
    assert torch.isfinite(got).all()
    assert float(got.sum()) == pytest.approx(1, abs=1e-4)
    if temperature <= 1e-20:
        assert got[row.argmax()] == 1


# choosing and drawing


def test_greedy_takes_the_lowest_id_among_equals():
    row = torch.zeros(VOCAB)
    row[[17, 30, 599]] = 4.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ours = sampler()
        assert ours.choose([1], row.to(dtype)) == 17
        probs = ours.probs([1], row.to(dtype))
        assert probs[17] == 1
        assert probs.sum() == 1


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 30, "top_p": 0.9}],
    ids=str,
)
def test_choices_follow_probs(options):
    row = rows(1, scale=2.0)[0]
    chosen, expected = np.zeros(VOCAB), np.zeros(VOCAB)
    for seed in range(4):
        ours = sampler(temperature=1.1, seed=seed, **options)
        for position in range(1, 1001):
            chosen[ours.choose(range(position), row)] += 1
        expected += ours.probs([1], row).double().numpy() * 1000
    assert chosen[expected == 0].sum() == 0
    big = expected >= 8
    counts = [*chosen[big], chosen[~big].sum()]
    wanted = [*expected[big], expected[~big].sum()]
    if wanted[-1] < 1e-9:
        counts, wanted = counts[:-1], wanted[:-1]
    wanted = np.array(wanted) * (sum(counts) / sum(wanted))
    assert stats.chisquare(counts, wanted).pvalue > 1e-4


def test_a_biased_rule_fails_the_distribution_test():
    # the chi-square above has power: the same counts against a slightly warmer distribution
    row = rows(1, scale=2.0)[0]
    cool, warm = (sampler(temperature=t) for t in (1.0, 1.25))
    counts = np.bincount([cool.choose(range(p), row) for p in range(1, 4001)], minlength=VOCAB)
    wanted = warm.probs([1], row).double().numpy() * 4000
    big = wanted >= 8
    wanted = np.array([*wanted[big], wanted[~big].sum()])
    counts = np.array([*counts[big], counts[~big].sum()])
    assert stats.chisquare(counts, wanted * (4000 / wanted.sum())).pvalue < 1e-6


ALL_OPTIONS = {
    "temperature": 0.9,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "no_repeat_ngram_size": 3,
    "logit_bias": {5: 1.0},
    "bad_words_ids": [[1, 2]],
    "min_new_tokens": 4,
}


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, ALL_OPTIONS], ids=str)
def test_answers_depend_on_arguments_only(options):
    """Asked in any order, about branches too, and after a change of the global generator."""
    asked = list(zip(prefixes(30, 20, 30), rows(30), strict=True))
    ours = sampler(**options)
    torch.manual_seed(0)
    first = [(ours.choose(p, r), ours.probs(p, r)) for p, r in asked]
    torch.manual_seed(1)
    state = torch.get_rng_state()
    ours = sampler(**options)
    again = [(ours.choose(p, r), ours.probs(p, r)) for p, r in reversed(asked)][::-1]
    assert torch.equal(torch.get_rng_state(), state)
    for (a, p), (b, q) in zip(first, again, strict=True):
        assert a == b
        assert torch.equal(p, q)
    assert asked[0][1].equal(rows(30)[0]), "logits were changed"


def test_seed_and_position_change_the_draw():
    row = torch.zeros(VOCAB)
    draws = {sampler(temperature=1.0, seed=s).choose([1], row) for s in range(20)}
    assert len(draws) > 10
    ours = sampler(temperature=1.0)
    assert len({ours.choose(range(p), row) for p in range(20)}) > 10


def test_drafts_are_drawn_independently_of_the_target():
    ours, row = sampler(temperature=1.0, vocab=8), torch.zeros(8)
    probs = row.softmax(0)
    same = sum(ours.draw(probs, p, 1) == [ours.choose(range(p), row)] for p in range(2000))
    assert 200 < same < 300  # one in eight


def test_draw_gives_distinct_ids_of_the_support():
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    drawn = [sampler(vocab=6).draw(probs, p, 5) for p in range(50)]
    assert all(sorted(d) == [1, 3, 4] for d in drawn)
    assert len({tuple(d) for d in drawn}) > 1


def test_uniform_depends_on_every_argument():
    ours = sampler()
    values = {
        ours.uniform(1, "accept"),
        ours.uniform(2, "accept"),
        ours.uniform(1, "resample"),
        ours.uniform(1, "accept", 1),
        sampler(seed=2).uniform(1, "accept"),
    }
    assert len(values) == 5
    assert all(0 < v < 1 for v in values)


def test_logprobs_come_from_the_raw_logits_best_first():
    ours = sampler(temperature=0.5, top_k=1, logit_bias={3: 100.0})
    row = rows(1)[0].bfloat16()
    expected = row.float().log_softmax(0)
    got = ours.logprob(row, 3, 4)
    assert got.token == 3
    assert got.logprob == float(expected[3])
    assert [v for _, v in got.top] == expected.sort(descending=True).values[:4].tolist()
    assert all(v == float(expected[i]) for i, v in got.top)
    assert ours.logprob(row, 3, 0).top == ()
    assert len(ours.logprob(row, 3, VOCAB + 9).top) == VOCAB


def test_equal_logprobs_are_listed_by_id():
    row = torch.zeros(VOCAB)
    row[[9, 4, 70]] = 5.0
    assert [i for i, _ in sampler().logprob(row, 0, 3).top] == [4, 9, 70]


# what the loop may do by itself


@pytest.mark.parametrize(
    ("options", "plain", "free"),
    [
        ({}, True, True),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.9, "min_p": 0.1}, False, True),
        ({"logit_bias": {1: 2.0}}, False, True),
        ({"bad_words_ids": [[5]]}, False, True),
        ({"bad_words_ids": [[2]]}, True, True),  # a lone EOS isn't a bad word
        ({"bad_words_ids": [[5, 6]]}, False, False),
        ({"repetition_penalty": 1.1}, False, False),
        ({"presence_penalty": 0.1}, False, False),
        ({"frequency_penalty": -0.1}, False, False),
        ({"no_repeat_ngram_size": 2}, False, False),
        ({"min_new_tokens": 2}, False, False),
        ({"processors": [lambda ids, scores: scores]}, False, False),
        ({"stop": "x", "stop_token_ids": (3,), "seed": 4, "logprobs": 2}, True, True),
    ],
    ids=str,
)
def test_plain_greedy_and_prefix_free_are_told(options, plain, free):
    ours = sampler(**options)
    assert ours.is_plain_greedy is plain
    assert ours.prefix_free is free


def test_min_new_tokens_without_final_ids_changes_nothing():
    ours = Sampler(SamplingParams(min_new_tokens=3), VOCAB, frozenset(), 5, 1)
    assert ours.is_plain_greedy


# processors

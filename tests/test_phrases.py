"""Phrases: n-gram counts of a model's own text, made once, kept, shipped, and drafted."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hasten import methods, phrases
from hasten.methods import MethodContext
from hasten.phrases import BREADTH, FEWEST, LEAST, Phrases
from hasten.targets.catalog import resolve
from hasten.types import SamplingParams
from tests.conformance.harness import COSTS, load_other, prompt_of, run
from tests.conformance.toy_target import ToyTarget, ToyTokenizer

TEXTS = [([1, 2], [3, 4, 5, 3, 4, 6])] * 3


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def texts(count: int = 30, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    rng = random.Random(seed)
    return [
        (rng.choices(range(5), k=rng.randrange(4)), rng.choices(range(5), k=rng.randrange(1, 40)))
        for _ in range(count)
    ]


def of_toy(target: ToyTarget, temperature: float = 0.0) -> Phrases:
    params = SamplingParams(max_new_tokens=40, temperature=temperature)
    return phrases.build([(prompt_of(3), target.plain(prompt_of(3), params))] * 3)


# -- making ----------------------------------------------------------------------------------------


def test_followers_and_shares_are_counts_of_answers_after_their_contexts() -> None:
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for prompt, answer in texts():
        ids = [*prompt, *answer]
        for i in range(len(prompt), len(ids)):
            for n in (2, 3):
                if i >= n:
                    counts[tuple(ids[i - n : i])][ids[i]] += 1
    made = phrases.build(texts())
    seen = 0
    for context, followers in counts.items():
        total = followers.total()
        wanted = {
            token: round(255 * count / (total + 1))
            for token, count in followers.items()
            if count > 1 and count / (total + 1) >= FEWEST and total >= LEAST
        }
        length, ids, shares = made.after(*((-1, *context) if len(context) == 2 else context))
        found = {t: s for t, s in zip(ids, shares, strict=True) if s}
        if not wanted:
            assert length < len(context)
            continue
        seen += 1
        assert length == len(context)
        assert shares == sorted(shares, reverse=True)
        assert found.items() <= wanted.items()
        assert len(found) == min(len(wanted), BREADTH)
        assert min(found.values()) >= max(
            [s for t, s in wanted.items() if t not in found], default=0
        )
    assert seen == len(made) > 100


def test_the_longest_known_context_is_asked_then_the_shorter_one() -> None:
    made = phrases.build(TEXTS)
    assert made.after(1, 2, 3)[:1] == (3,)
    assert made.after(9, 3, 4)[0] == 2
    assert made.after(-1, 3, 4)[0] == 2
    assert made.after(9, 9, 9) == (0, [], [])
    assert made.after(-1, -1, 3) == (0, [], [])
    # after (3, 4) came 5 three times and 6 three times
    assert made.after(9, 3, 4)[1][:2] == [5, 6]
    assert made.after(9, 3, 4)[2] == [round(255 * 3 / 7)] * 2 + [0, 0]


def test_prompts_are_context_and_never_followers() -> None:
    made = phrases.build([([7, 8, 9, 7, 8, 9], [1, 2])] * 5)
    assert made.after(7, 8, 9)[1][0] == 1
    assert made.after(-1, 7, 8) == (0, [], [])


def test_rare_contexts_and_followers_seen_once_are_left_out() -> None:
    assert len(phrases.build([([1, 2], [3])] * 2)) == 0
    assert len(phrases.build([([1, 2], [n]) for n in range(3, 9)])) == 0
    assert len(phrases.build([])) == 0
    assert len(phrases.build([([], [1])] * 9)) == 0


# -- keeping ---------------------------------------------------------------------------------------


def test_kept_phrases_come_back_for_these_weights_only() -> None:
    info = ToyTarget().info
    made = phrases.build(TEXTS)
    assert phrases.load(info) is None
    path = phrases.save(info, made)
    loaded = phrases.load(info)
    assert loaded is not None
    for name in ("contexts", "ids", "shares"):
        assert np.array_equal(getattr(loaded, name), getattr(made, name))
    assert loaded.after(1, 2, 3) == made.after(1, 2, 3)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert phrases.load(replace(info, fingerprint="other")) is None
    assert phrases.load(replace(info, fingerprint="")) is None
    assert phrases.load(replace(info, vocab_size=6)) is None
    assert phrases.load(replace(info, dtype=torch.bfloat16)) is not None


def test_arrays_that_do_not_fit_together_are_left_out() -> None:
    info = ToyTarget().info
    made = phrases.build(TEXTS)
    phrases.save(info, Phrases(made.contexts, made.ids[:-1], made.shares[:-1]))
    assert phrases.load(info) is None
    phrases.save(info, Phrases(made.contexts, made.ids, made.shares.astype(np.int64)))
    assert phrases.load(info) is None


def test_large_vocabularies_are_kept_whole() -> None:
    info = replace(ToyTarget().info, vocab_size=70_000)
    made = phrases.build([([69_998, 69_997], [69_999, 69_996])] * 3)
    phrases.save(info, made)
    loaded = phrases.load(info)
    assert loaded is not None
    assert loaded.after(-1, 69_998, 69_997) == (2, [69_999, 0, 0, 0], [191, 0, 0, 0])


def test_the_embedded_models_phrases_are_shipped_for_its_weights() -> None:
    info = replace(
        ToyTarget().info, fingerprint=resolve("smollm2-135m").fingerprint, vocab_size=49_152
    )
    made = phrases.load(info)
    assert made is not None
    assert len(made) > 50_000


# -- methods ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["racer", "auto", "racer,scope=session"])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_methods_draft_phrases_where_there_are_some_and_answers_stay_plain(
    method: str, temperature: float
) -> None:
    target = ToyTarget(eos_ids=())
    prepared = MethodContext(target, ToyTokenizer(), load_other, COSTS)
    params = SamplingParams(max_new_tokens=40, temperature=temperature)
    passes: dict[bool, int] = {}
    sources: dict[bool, set[str]] = {}
    for kept in (False, True):
        if kept:
            phrases.save(target.info, of_toy(target, temperature))
        drafter, policy = methods.prepare(methods.parse(method), prepared)()
        got = run(target, prompt_of(3), params, drafter, policy=policy)
        assert got.tokens == target.plain(prompt_of(3), params)
        sources[kept] = {source for r in got.rounds for source in r.sources}
        passes[kept] = len(got.rounds)
    assert "phrase" not in sources[False]
    assert "phrase" in sources[True]
    assert passes[True] < passes[False]


@pytest.mark.parametrize(
    "method",
    ["racer,phrases=off", "auto,phrases=off", "racer:paper", "racer:retrieval", "racer:logits"],
)
def test_phrases_can_be_switched_off_and_papers_and_ablations_have_none(method: str) -> None:
    target = ToyTarget(eos_ids=())
    phrases.save(target.info, of_toy(target))
    prepared = MethodContext(target, ToyTokenizer(), load_other, COSTS)
    drafter, policy = methods.prepare(methods.parse(method), prepared)()
    got = run(target, prompt_of(3), SamplingParams(max_new_tokens=40), drafter, policy=policy)
    assert "phrase" not in {source for r in got.rounds for source in r.sources}

"""Streams and conversations over a tiny random model."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import hasten
from hasten.api import LLM
from hasten.drafters.racer import Racer
from hasten.types import RowSignals, SamplingParams
from tests.tiny_llm import PLAIN, make_model, make_tokenizer, meter, metered


@pytest.fixture(scope="module")
def shared() -> LLM:
    return hasten.load((make_model(), make_tokenizer()))


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    with metered(shared) as counted:
        yield counted


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["Hi", "Größe 你好", "a b c a b c"])
def test_pieces_of_a_stream_are_the_text(llm: LLM, prompt: str) -> None:
    for options in ({}, {"stop": ["zz"]}, {"temperature": 1.0, "seed": 4}):
        stream = llm.stream(prompt, max_new_tokens=40, **options)
        pieces = list(stream)
        assert "".join(pieces) == stream.result.text
        assert stream.result.text == llm.generate(prompt, max_new_tokens=40, **options).text
        assert all(pieces)


def test_nothing_runs_before_the_first_piece_is_asked_for(llm: LLM) -> None:
    stream = llm.stream("Hi", **PLAIN)
    assert meter(llm).live == 0
    next(stream)
    assert meter(llm).live == 1
    stream.close()
    assert meter(llm).live == 0


@pytest.mark.parametrize("ask", ["stream", "chat_stream"])
def test_an_abandoned_stream_frees_its_cache_at_once(llm: LLM, ask: str) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    gc.disable()
    try:
        stream = getattr(llm, ask)(messages, **PLAIN)
        next(stream)
        assert meter(llm).live == 1
        del stream
        assert meter(llm).live == 0
    finally:
        gc.enable()
    with getattr(llm, ask)(messages, **PLAIN) as stream:
        next(stream)
    assert meter(llm).live == 0
    assert list(stream) == []


def test_interleaved_streams_are_as_alone(llm: LLM) -> None:
    prompts = ["Hi", "Hello there", "abcabc"]
    alone = [llm.generate(p, temperature=0.7, seed=i, **PLAIN) for i, p in enumerate(prompts)]
    streams = [llm.stream(p, temperature=0.7, seed=i, **PLAIN) for i, p in enumerate(prompts)]
    open_streams = list(streams)
    while open_streams:
        open_streams = [s for s in open_streams if next(s, None) is not None]
    for stream, want in zip(streams, alone, strict=True):
        assert stream.result.tokens == want.tokens
        assert stream.result.text == want.text


def test_rounds_may_be_followed_instead_of_text(llm: LLM) -> None:
    stream = llm.stream("Hi", **PLAIN)
    tokens = [t for made in stream.rounds() for t in made.emitted]
    assert tuple(tokens) == stream.result.tokens
    assert len(tokens) == 24


def test_threads_take_turns(llm: LLM) -> None:
    want = [llm.generate([5, 6, i], **PLAIN).tokens for i in range(4)]
    got: list[Any] = [None] * 4

    def ask(index: int) -> None:
        got[index] = llm.generate([5, 6, index], **PLAIN).tokens

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == want


# -- conversations ---------------------------------------------------------------------------------


def _turns(llm: LLM, fresh: bool) -> tuple[list[tuple[int, ...]], list[int]]:
    """Answers of a conversation of three turns, and the prompt rows each ran."""
    messages: list[dict[str, str]] = []
    answers, rows = [], []
    for text in ("Hi", "And then?", "Why?"):
        messages.append({"role": "user", "content": text})
        before = meter(llm).rows
        if fresh:
            llm.forget()
        got = llm.chat(messages, max_new_tokens=8, bad_words_ids=[[257]])
        answers.append(got.tokens)
        rows.append(meter(llm).rows - before)
        messages.append({"role": "assistant", "content": got.text})
    return answers, rows


def test_a_conversations_next_turn_runs_only_what_is_new(llm: LLM) -> None:
    want, whole = _turns(llm, fresh=True)
    llm.forget()
    got, rows = _turns(llm, fresh=False)
    assert got == want
    assert rows[0] == whole[0]
    assert all(few <= many - whole[0] for few, many in zip(rows[1:], whole[1:], strict=True))


def test_another_conversation_is_answered_right_after_one(llm: LLM) -> None:
    one = [{"role": "user", "content": "Hi"}]
    two = [{"role": "user", "content": "Hello"}]
    want = [llm.generate(m, **PLAIN).tokens for m in (one, two)]
    assert [llm.chat(m, **PLAIN).tokens for m in (one, two, one, two)] == want * 2
    # the same prompt again: its last token has to be run anew
    assert llm.chat(two, **PLAIN).tokens == want[1]


def test_two_conversations_at_once_are_both_right(llm: LLM) -> None:
    prompts: list[Any] = [[{"role": "user", "content": t}] for t in ("Hi", "Hello")]
    want = [llm.generate(m, **PLAIN).tokens for m in prompts]
    streams = [llm.chat_stream(m, **PLAIN) for m in prompts]
    for _ in range(3):
        for stream in streams:
            next(stream, None)
    assert [s.finish().tokens for s in streams] == want


@pytest.mark.parametrize("method", ["ar", "racer,nodes=6", "adapld,nodes=6", "auto"])
def test_a_prompt_given_several_times_runs_once_and_each_answer_is_its_own(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    params = [SamplingParams(max_new_tokens=12, temperature=1.0, seed=seed) for seed in range(3)]
    alone = [llm.generate("a b c", params=each, method="ar").tokens for each in params]
    held = meter(llm)
    rows: list[int] = []
    prefill = llm.target.prefill

    def counted(sequence: Any, tokens: Any, **how: Any) -> Any:
        rows.append(len(tokens))
        return prefill(sequence, tokens, **how)

    monkeypatch.setattr(llm.target, "prefill", counted)
    read: list[int] = []
    begin = Racer.begin

    def spy(self: Racer, prompt: Sequence[int], signals: RowSignals) -> None:
        read.append(0 if signals.topk_ids is None else len(signals.topk_ids))
        begin(self, prompt, signals)

    monkeypatch.setattr(Racer, "begin", spy)
    together = llm.generate_many(["a b c"] * 3, params=params, method=method)
    assert [each.tokens for each in together] == alone
    assert len(set(alone)) > 1
    size = len(llm.tokenize("a b c"))
    assert sorted(rows) == [1, 1, 1, size - 1]
    if method == "racer,nodes=6":
        assert read == [size] * 3, "each drafter is told of every row of the prompt"
    assert held.live == 0

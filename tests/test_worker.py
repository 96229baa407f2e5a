"""Requests that come and go share passes, and each gets the answer it would get alone."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import hasten
from hasten.api import LLM
from hasten.errors import HastenError, OptionError, OverloadError
from hasten.worker import Worker
from tests.tiny_llm import CONTEXT, PLAIN, make_model, make_tokenizer, meter, metered
from tests.worker_cases import until

METHOD = "racer,nodes=6"


@pytest.fixture(scope="module", params=["fused", "transformers"])
def shared(request: Any) -> LLM:
    return hasten.load((make_model(), make_tokenizer()), method=METHOD, engine=request.param)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    with metered(shared) as counted:
        yield counted


@pytest.fixture
def worker(llm: LLM) -> Iterator[Worker]:
    made = Worker(llm, most=4, waiting=16)
    yield made
    made.close(drain=False)


PROMPTS = ["a b c a b c a", "hello hello", "xyz", "0123456789" * 4, "the end", "one two one two"]
KINDS: list[dict[str, Any]] = [
    {"max_new_tokens": 20},
    {"max_new_tokens": 5},
    {"max_new_tokens": 24, "temperature": 1.0, "seed": 7},
    {"max_new_tokens": 12, "temperature": 0.7, "top_p": 0.9, "seed": 3, "repetition_penalty": 1.2},
    {"max_new_tokens": 30, "logprobs": 2},
    {"max_new_tokens": 18, "method": "prompt-lookup,nodes=5"},
]


def test_each_request_gets_the_answer_it_gets_alone_with_its_own_options(
    llm: LLM, worker: Worker
) -> None:
    alone = [llm.generate(p, **k) for p, k in zip(PROMPTS, KINDS, strict=True)]
    tickets = [worker.submit(p, **k) for p, k in zip(PROMPTS, KINDS, strict=True)]
    for ticket, want in zip(tickets, alone, strict=True):
        pieces = "".join(update.text for update in ticket)
        got = ticket.result
        assert got.tokens == want.tokens
        assert got.text == want.text == pieces
        assert got.finish_reason == want.finish_reason
        if want.logprobs is not None:
            assert got.logprobs is not None
            for a, b in zip(got.logprobs, want.logprobs, strict=True):
                assert a.token == b.token
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_a_request_joins_while_others_run(llm: LLM, worker: Worker) -> None:
    want = llm.generate("late", **PLAIN).tokens
    first = worker.submit("early", max_new_tokens=120, ignore_eos=True)
    updates = iter(first)
    for _ in range(3):
        next(updates)
    late = worker.submit("late", **PLAIN)
    assert late.wait().tokens == want
    assert len(first.wait().tokens) == 120


def test_updates_are_the_rounds_and_conserve_tokens(worker: Worker) -> None:
    ticket = worker.submit("abcabcabc", **PLAIN)
    rounds = [update.round for update in ticket]
    assert [t for made in rounds for t in made.emitted] == list(ticket.result.tokens)
    assert rounds[0].tree is None
    assert [made.finish for made in rounds[:-1]] == [None] * (len(rounds) - 1)
    assert rounds[-1].finish is not None
    assert ticket.result.metrics.new_tokens == 24


def test_without_pieces_all_text_comes_at_the_end(worker: Worker) -> None:
    ticket = worker.submit("abcabcabc", pieces=False, **PLAIN)
    texts = [update.text for update in ticket]
    assert texts[:-1] == [""] * (len(texts) - 1)
    assert texts[-1] == ticket.result.text


def test_several_answers_to_one_prompt_run_it_once(llm: LLM, worker: Worker) -> None:
    prompt = "0123456789 abcdefghij"
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    want = [llm.generate(prompt, seed=5 + i, **options).tokens for i in range(3)]
    before = meter(llm).rows
    tickets = worker.submit_n(prompt, 3, seed=5, **options)
    assert [t.wait().tokens for t in tickets] == want
    size = len(llm.tokenize(prompt))
    assert meter(llm).rows - before == size + 2
    assert [t.cached_tokens for t in tickets] == [0, size - 1, size - 1]
    assert len({t.wait().tokens for t in worker.submit_n(prompt, 3, **options)}) > 1


# -- limits, cancelling, errors --------------------------------------------------------------------


def test_more_than_may_wait_are_refused_and_nothing_is_lost(llm: LLM) -> None:
    worker = Worker(llm, most=1, waiting=2)
    try:
        taken = [worker.submit("a", max_new_tokens=150, ignore_eos=True) for _ in range(3)]
        with pytest.raises(OverloadError, match="try again"):
            worker.submit("b")
        with pytest.raises(OverloadError):
            worker.submit_n("b", 2)
        assert [len(t.wait().tokens) for t in taken] == [150] * 3
        assert len(worker.submit("b", **PLAIN).wait().tokens) == 24
    finally:
        worker.close()


def test_bad_options_are_refused_before_anything_runs(llm: LLM, worker: Worker) -> None:
    before = meter(llm).rows
    with pytest.raises(OptionError, match="temperature"):
        worker.submit("a", temperature=-1)
    with pytest.raises(OptionError, match="nope"):
        worker.submit("a", nope=1)
    with pytest.raises(OptionError, match="n: must"):
        worker.submit_n("a", 0)
    with pytest.raises(HastenError):
        worker.submit("a" * (2 * CONTEXT))
    with pytest.raises(OptionError, match="most"):
        Worker(llm, most=0)
    assert meter(llm).rows == before
    assert worker.active == worker.waiting == 0


def test_a_cancelled_request_stops_and_its_memory_is_freed(llm: LLM) -> None:
    worker = Worker(llm, most=2, cache_tokens=0)
    live = meter(llm).live
    running = worker.submit("a", max_new_tokens=150, ignore_eos=True)
    other = worker.submit("b", max_new_tokens=150, ignore_eos=True)
    queued = worker.submit("c", max_new_tokens=150, ignore_eos=True)
    updates = iter(running)
    next(updates)
    running.cancel()
    queued.cancel()
    assert len(list(updates)) < 150
    assert list(queued) == []
    for each in (running, queued):
        assert each.result.finish_reason is None
    assert len(other.wait().tokens) == 150
    until(lambda: worker.active == 0)
    worker.close()
    assert meter(llm).live == live


def test_a_request_that_fails_does_not_harm_the_others(llm: LLM, worker: Worker) -> None:
    calls = []

    class Fails:
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            calls.append(1)
            if len(calls) > 3:
                raise RuntimeError("on purpose")
            return scores

    want = llm.generate("abc", **PLAIN).tokens
    good = worker.submit("abc", **PLAIN)
    bad = worker.submit("xyz", processors=(Fails(),), **PLAIN)
    with pytest.raises(Exception, match="on purpose"):
        bad.wait()
    assert good.wait().tokens == want
    assert worker.submit("abc", **PLAIN).wait().tokens == want


def test_a_failing_pass_ends_its_requests_and_the_worker_goes_on(
    llm: LLM, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = llm.target.forward
    left = [3]

    def broken(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError("on purpose")
        return forward(*args, **kwargs)

    monkeypatch.setattr(llm.target, "forward", broken)
    with pytest.raises(MemoryError, match="on purpose"):
        worker.submit("abc", **PLAIN).wait()
    assert len(worker.submit("abc", **PLAIN).wait().tokens) == 24


def test_nothing_asked_for_is_answered_at_once(worker: Worker) -> None:
    result = worker.submit("abc", max_new_tokens=0).wait()
    assert result.tokens == ()
    assert result.finish_reason == "length"


def test_closing_finishes_what_runs_and_refuses_the_rest(llm: LLM) -> None:
    live = meter(llm).live
    worker = Worker(llm, most=2)
    tickets = [worker.submit("a", **PLAIN) for _ in range(5)]
    worker.close()
    worker.close()
    assert [len(t.wait().tokens) for t in tickets] == [24] * 5
    with pytest.raises(HastenError, match="closed"):
        worker.submit("a")
    assert meter(llm).live == live


def test_closing_at_once_cancels(llm: LLM) -> None:
    worker = Worker(llm, most=2)
    tickets = [worker.submit("a", max_new_tokens=150, ignore_eos=True) for _ in range(5)]
    worker.close(drain=False)
    assert any(t.wait().finish_reason is None for t in tickets)
    assert worker.active == worker.waiting == 0


# -- prefixes --------------------------------------------------------------------------------------


def test_the_next_turn_of_a_conversation_runs_only_what_is_new(llm: LLM, worker: Worker) -> None:
    first = llm.tokenize("tell me a long story about a cat")
    answer = worker.submit(first, **PLAIN).wait()
    turn = [*first, *answer.tokens, *llm.tokenize("more")]
    want = llm.generate(turn, **PLAIN).tokens
    ticket = worker.submit(turn, **PLAIN)
    assert ticket.wait().tokens == want
    assert ticket.cached_tokens == len(first) + 23


def test_a_prefix_is_not_shown_to_somebody_who_only_knows_the_prompt(
    llm: LLM, worker: Worker
) -> None:
    prompt = llm.tokenize("tell me a long story about a dog")
    want = worker.submit(prompt, **PLAIN).wait().tokens
    again = worker.submit(prompt, **PLAIN)
    assert again.wait().tokens == want
    assert again.cached_tokens == 0
    longer = worker.submit([*prompt, 5, 6, 7], **PLAIN)
    longer.wait()
    assert longer.cached_tokens == 0


def test_a_scope_shares_prefixes_and_another_does_not(llm: LLM, worker: Worker) -> None:
    prompt = llm.tokenize("a system prompt that everybody has")
    worker.submit(prompt, scope="us", **PLAIN).wait()
    ours = worker.submit([*prompt, 5, 6], scope="us", **PLAIN)
    theirs = worker.submit([*prompt, 5, 6], scope="them", **PLAIN)
    nobodys = worker.submit([*prompt, 5, 6], **PLAIN)
    assert ours.wait().tokens == theirs.wait().tokens == nobodys.wait().tokens
    assert [t.cached_tokens for t in (ours, theirs, nobodys)] == [len(prompt), 0, 0]


def test_kept_prefixes_are_bounded(llm: LLM) -> None:
    worker = Worker(llm, most=2, cache_tokens=150)
    for index in range(6):
        worker.submit(f"prompt number {index}", **PLAIN).wait()
        until(lambda: worker.active == 0)
        assert worker.cached_tokens <= 150
    assert worker.cached_tokens > 0
    worker.close()
    assert worker.cached_tokens == 0


# -- threads and event loops -----------------------------------------------------------------------


def test_a_thread_that_generates_gets_its_turn_beside_a_busy_worker(
    llm: LLM, worker: Worker
) -> None:
    want = llm.generate("abc", **PLAIN).tokens
    busy = [worker.submit("a", max_new_tokens=150, ignore_eos=True) for _ in range(4)]
    assert llm.generate("abc", **PLAIN).tokens == want
    assert any(not t.ended for t in busy), "it didn't have to wait for them"


def test_async_streams_share_passes_and_are_each_right(llm: LLM) -> None:
    want = [llm.generate(p, **PLAIN) for p in PROMPTS[:3]]

    async def one(prompt: str) -> tuple[str, Any]:
        stream = llm.astream(prompt, **PLAIN)
        text = "".join([piece async for piece in stream])
        return text, stream.result

    async def all_of_them() -> list[tuple[str, Any]]:
        return await asyncio.gather(*[one(p) for p in PROMPTS[:3]])

    for (text, result), expected in zip(asyncio.run(all_of_them()), want, strict=True):
        assert text == expected.text
        assert result.tokens == expected.tokens


def test_agenerate_gives_the_result_and_options_are_checked_at_once(llm: LLM) -> None:
    want = llm.generate("abc", **PLAIN).tokens
    assert asyncio.run(llm.agenerate("abc", **PLAIN)).tokens == want
    with pytest.raises(OptionError, match="temperature"):
        llm.astream("abc", temperature=-1)


def test_a_cancelled_task_ends_its_request(llm: LLM) -> None:
    live = meter(llm).live

    async def cancel_one() -> None:
        task = asyncio.ensure_future(llm.agenerate("a", max_new_tokens=150, ignore_eos=True))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_one())
    until(lambda: llm._shared_worker().active == 0)
    until(lambda: meter(llm).live == live)


def test_a_dropped_async_stream_ends_its_request(llm: LLM) -> None:
    async def drop() -> None:
        stream = llm.astream("a", max_new_tokens=150, ignore_eos=True)
        await anext(stream)
        assert llm._shared_worker().active == 1
        del stream
        gc.collect()

    asyncio.run(drop())
    until(lambda: llm._shared_worker().active == 0)


def test_an_llm_that_nobody_holds_is_freed_after_its_worker_was_used() -> None:
    made = hasten.load((make_model(), make_tokenizer()), method="ar")
    asyncio.run(made.agenerate("abc", **PLAIN))
    gone = weakref.ref(made)
    del made
    deadline = time.monotonic() + 30
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.05)
        gc.collect()
    assert gone() is None
    assert not any(t.name == "hasten-worker" for t in threading.enumerate() if gone() is None)

"""Requests that end before their time, and the end of the server."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import httpx
import openai
import pytest

from hasten.api import LLM
from tests.serve.live import CHAT, HELLO, Live, error_of, events, serving, wait_for
from tests.tiny_llm import meter

ENDLESS: dict[str, Any] = {
    "messages": HELLO, "max_tokens": 900, "ignore_eos": True, "temperature": 1,
}  # fmt: skip


def test_a_client_that_drops_its_stream_frees_the_request(slow: LLM) -> None:
    with serving(slow, cache_tokens=0) as live:
        with httpx.stream("POST", f"{live.url}{CHAT}", json={**ENDLESS, "stream": True}) as got:
            for _, line in zip(range(8), got.iter_lines(), strict=False):
                assert line is not None
            assert live.service.worker.active == 1
        live.idle()
        wait_for(lambda: meter(slow).live == 0)
        assert live.metric('vllm:request_success_total{finished_reason="abort"') == 1


def test_a_client_that_gives_up_waiting_frees_the_request(slow: LLM) -> None:
    with serving(slow) as live:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{live.url}{CHAT}", json={**ENDLESS, "n": 3}, timeout=0.3)
        live.idle()
        assert live.metric('vllm:request_success_total{finished_reason="abort"') == 3


def test_a_client_that_gives_up_in_the_queue_frees_its_place(slow: LLM) -> None:
    with serving(slow, max_concurrency=1, queue=1) as live:
        with httpx.stream("POST", f"{live.url}{CHAT}", json={**ENDLESS, "stream": True}) as first:
            lines = first.iter_lines()  # dropped, it would end the stream
            next(lines)
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{live.url}{CHAT}", json=ENDLESS, timeout=0.3)
            wait_for(lambda: live.service.worker.waiting == 0)
            assert live.service.worker.active == 1
        live.idle()


def test_a_client_that_goes_while_its_request_is_handed_in_frees_it(
    slow: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(slow) as live:
        entered, go_on = threading.Event(), threading.Event()
        submit = live.service.worker.submit_n

        def late(*args: Any, **kwargs: Any) -> Any:
            entered.set()
            assert go_on.wait(30)
            return submit(*args, **kwargs)

        monkeypatch.setattr(live.service.worker, "submit_n", late)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{live.url}{CHAT}", json=ENDLESS, timeout=0.3)
        assert entered.is_set()
        go_on.set()
        live.idle()


def test_the_asynchronous_client_can_cancel(slow: LLM) -> None:
    async def half() -> None:
        client = openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
        async with client:
            task = asyncio.ensure_future(
                client.chat.completions.create(model=live.model, messages=HELLO, max_tokens=900)
            )
            while not live.service.worker.active:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with serving(slow) as live:
        asyncio.run(half())
        live.idle()


def test_the_event_loop_answers_while_passes_run_and_methods_load(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass, a prompt being cut into tokens, a method being prepared: none holds up /health."""
    entered, go_on = threading.Event(), threading.Event()

    def hold(call: Any) -> Any:
        def held(*args: Any, **kwargs: Any) -> Any:
            entered.set()
            assert go_on.wait(30)
            return call(*args, **kwargs)

        return held

    with serving(llm) as live:
        for holder, name, body in (
            (llm.target, "prefill", ENDLESS),
            (llm, "tokenize", ENDLESS),
            (llm, "prepare", {**ENDLESS, "method": "racer"}),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(holder, name, hold(getattr(holder, name)))
                asking = threading.Thread(
                    target=httpx.post,
                    args=(f"{live.url}{CHAT}",),
                    kwargs={"json": {**body, "max_tokens": 3}, "timeout": 60},
                )
                asking.start()
                assert entered.wait(30)
                assert httpx.get(f"{live.url}/health", timeout=5).status_code == 200
                go_on.set()
                asking.join(30)
            entered.clear()
            go_on.clear()


# -- the end -----------------------------------------------------------------------------------


def test_at_the_end_running_requests_finish_and_new_ones_are_turned_away(slow: LLM) -> None:
    body = {**ENDLESS, "max_tokens": 60, "temperature": 0}
    expected = slow.generate(HELLO, max_new_tokens=60, ignore_eos=True).text
    with serving(slow, grace=30) as live, httpx.Client() as client:
        assert client.get(f"{live.url}/health").status_code == 200
        with httpx.stream("POST", f"{live.url}{CHAT}", json={**body, "stream": True}) as first:
            lines = first.iter_lines()
            next(lines)
            live.server.stop()
            wait_for(lambda: live.service.draining)
            refused = client.post(f"{live.url}{CHAT}", json=body)
            assert refused.status_code == 503
            assert error_of(refused)["code"] == "shutting_down"
            assert live.get("/health").status_code == 503
            rest = "\n".join(lines)
        assert rest.rstrip().endswith("data: [DONE]")
        told = [part for part in rest.split("\n") if part.startswith("data: {")]
        assert "metrics" in told[-1]
        assert len(told) > 3
        live.thread.join(30)
        assert not live.thread.is_alive()
    assert expected


def test_after_the_grace_time_requests_are_cancelled_and_told(slow: LLM) -> None:
    with serving(slow, grace=0.05) as live:
        answers: list[httpx.Response] = []
        whole = threading.Thread(
            target=lambda: answers.append(live.post(CHAT, ENDLESS)), daemon=True
        )
        whole.start()
        with httpx.stream("POST", f"{live.url}{CHAT}", json={**ENDLESS, "stream": True}) as got:
            lines = got.iter_lines()
            next(lines)
            wait_for(lambda: live.service.worker.active == 2)
            live.server.stop()
            rest = [line for line in lines if line]
        whole.join(30)
        assert '"code":"shutting_down"' in rest[-1]
        assert answers[0].status_code == 503
        assert error_of(answers[0])["code"] == "shutting_down"


def test_a_second_signal_cancels_at_once_and_the_end_stays_orderly(slow: LLM) -> None:
    with serving(slow, grace=600) as live:
        with httpx.stream("POST", f"{live.url}{CHAT}", json={**ENDLESS, "stream": True}) as got:
            lines = got.iter_lines()
            next(lines)
            live.server.handle_exit(signal.SIGINT, None)
            wait_for(lambda: live.service.draining)
            live.server.handle_exit(signal.SIGINT, None)
            rest = [line for line in lines if line]
        assert '"code":"shutting_down"' in rest[-1]
        live.thread.join(30)
        assert not live.thread.is_alive()
    assert live.service.worker.active == 0


def test_the_model_is_free_for_another_server_afterwards(llm: LLM) -> None:
    answers = []
    for _ in range(2):
        with serving(llm) as live:
            body = {**ENDLESS, "temperature": 0, "max_tokens": 20}
            answers.append(events(live.post(CHAT, {**body, "stream": True}))[1:-1])
    texts = [[c["choices"][0]["delta"] for c in chunks] for chunks in answers]
    assert texts[0] == texts[1]
    assert llm.generate(HELLO, max_new_tokens=5).tokens


# -- what is kept between requests -------------------------------------------------------------


def turn(live: Live, messages: Any, **more: Any) -> tuple[str, int]:
    body = {"messages": messages, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **more}
    got = live.post(CHAT, body).json()
    return (
        got["choices"][0]["message"]["content"],
        got["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


def spoken(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_the_next_turn_runs_only_what_is_new_and_says_so(live: Live) -> None:
    biased = {"logit_bias": {str(i): -100 for i in range(94, 258)}}  # ASCII only: it comes back
    first, cached = turn(live, HELLO, **biased)
    assert cached == 0
    longer = [*HELLO, {"role": "assistant", "content": first}, *spoken("And then?")]
    before = meter(live.llm).rows
    second, cached = turn(live, longer, **biased)
    prompt = len(live.llm.tokenize(longer))
    assert cached >= len(live.llm.tokenize(HELLO)) + 30
    assert meter(live.llm).rows - before == prompt - cached
    bias = {int(k): float(v) for k, v in biased["logit_bias"].items()}
    alone = live.llm.generate(longer, max_new_tokens=40, ignore_eos=True, logit_bias=bias)
    assert second == alone.text


def test_two_conversations_do_not_see_each_others_cache(live: Live) -> None:
    start = "A long beginning that two people share, word for word. "
    turn(live, spoken(f"{start}I am Ada."))
    before = meter(live.llm).rows
    _, cached = turn(live, spoken(f"{start}I am Bob."))
    assert cached == 0
    assert meter(live.llm).rows - before == len(live.llm.tokenize(spoken(f"{start}I am Bob.")))
    _, again = turn(live, spoken(f"{start}I am Ada."))
    assert again == 0, "asking the same shows whether somebody did before"


def test_prefixes_are_shared_where_the_operator_or_a_key_says_so(llm: LLM) -> None:
    start = "A long beginning that two people share, word for word. "
    with serving(llm, share_prefixes=True) as live:
        turn(live, spoken(f"{start}I am Ada."))
        assert turn(live, spoken(f"{start}I am Bob."))[1] > len(start)
    with serving(llm) as live:
        turn(live, spoken(f"{start}I am Ada."), prompt_cache_key="us")
        assert turn(live, spoken(f"{start}I am Eve."), prompt_cache_key="them")[1] == 0
        assert turn(live, spoken(f"{start}I am Bob."), prompt_cache_key="us")[1] > len(start)


def test_answers_are_the_same_with_and_without_what_is_kept(llm: LLM) -> None:
    with serving(llm, share_prefixes=True) as shares, serving(llm, cache_tokens=0) as fresh:
        for i in range(4):
            messages = spoken(f"The same beginning of some length, and then {i}")
            asked = {"temperature": 1, "seed": i}
            assert turn(shares, messages, **asked)[0] == turn(fresh, messages, **asked)[0]

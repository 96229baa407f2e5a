"""Requests that can't be answered: told in OpenAI's shape, naming the field, with nothing run."""

from __future__ import annotations

import logging
import socket
from typing import Any

import httpx
import openai
import pytest

from hasten.api import LLM
from tests.serve.live import (
    CHAT,
    COMPLETIONS,
    HELLO,
    Live,
    error_of,
    events,
    serving,
    wait_for,
)


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": HELLO, **more}


def text(**more: Any) -> dict[str, Any]:
    return {"prompt": "abc", **more}


BAD: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": ["hello"]}, "messages[0]"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "pirate", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{**HELLO[0], "name": "Ada"}]}, "messages[0].name"),
    (CHAT, {"messages": [{**HELLO[0], "mood": "x"}]}, "messages[0].mood"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "prompt"),
    (CHAT, {"messages": [{**HELLO[0], "\udfff": 1}]}, "messages[0].\udfff"),
    (CHAT, chat(**{"\ud800": 1}), "\ud800"),
    (CHAT, chat(repetition_penalty=1e-300), "repetition_penalty"),
    (CHAT, chat(logit_bias={"5": 1, "05": 2}), "logit_bias"),
    (CHAT, chat(model="gpt-4"), "model"),
    (CHAT, chat(max_tokens=0), "max_tokens"),
    (CHAT, chat(max_tokens="5"), "max_tokens"),
    (CHAT, chat(max_tokens=5.5), "max_tokens"),
    (CHAT, chat(max_tokens=True), "max_tokens"),
    (CHAT, chat(max_tokens=5, max_completion_tokens=6), "max_tokens"),
    (CHAT, chat(temperature=-1), "temperature"),
    (CHAT, chat(temperature="hot"), "temperature"),
    (CHAT, chat(top_p=0), "top_p"),
    (CHAT, chat(top_p=1.5), "top_p"),
    (CHAT, chat(top_k=-2), "top_k"),
    (CHAT, chat(min_p=2), "min_p"),
    (CHAT, chat(repetition_penalty=0), "repetition_penalty"),
    (CHAT, chat(presence_penalty=3), "presence_penalty"),
    (CHAT, chat(frequency_penalty=-2.5), "frequency_penalty"),
    (CHAT, chat(logit_bias={"a": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"5": 101}), "logit_bias.5"),
    (CHAT, chat(logit_bias={"99999": 1}), "logit_bias"),
    (CHAT, chat(logit_bias=[1]), "logit_bias"),
    (CHAT, chat(stop=["a", "b", "c", "d", "e"]), "stop"),
    (CHAT, chat(stop=""), "stop"),
    (CHAT, chat(stop=[5]), "stop"),
    (CHAT, chat(seed=1.5), "seed"),
    (CHAT, chat(seed=2**70), "seed"),
    (CHAT, chat(n=0), "n"),
    (CHAT, chat(n=17), "n"),
    (CHAT, chat(logprobs=5), "logprobs"),
    (CHAT, chat(top_logprobs=5), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat(min_tokens=9, max_tokens=5), "min_tokens"),
    (CHAT, chat(min_tokens=2**40), "min_tokens"),
    (CHAT, chat(stream="yes"), "stream"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options"),
    (CHAT, chat(stream=True, stream_options={"more": True}), "stream_options.more"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools"),
    (CHAT, chat(tool_choice="required"), "tool_choice"),
    (CHAT, chat(modalities=["text", "audio"]), "modalities"),
    (CHAT, chat(audio={"voice": "x"}), "audio"),
    (CHAT, chat(reasoning_effort="high"), "reasoning_effort"),
    (CHAT, chat(store=True), "store"),
    (CHAT, chat(temprature=1), "temprature"),
    (CHAT, chat(prompt="x"), "prompt"),
    (CHAT, chat(method="no-such"), "method"),
    (CHAT, chat(method="draft-model,model=/etc"), "method"),
    (CHAT, chat(method="racer,nodes=9999"), "method"),
    (CHAT, chat(verify="maybe"), "verify"),
    (CHAT, chat(verify="greedy"), "verify"),
    (CHAT, chat(hasten={"marks": True}), "hasten.marks"),
    (CHAT, chat(hasten={"other": True}), "hasten.other"),
    (CHAT, chat(response_format={"type": "xml"}), "response_format"),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format.json_schema.schema"),
    (CHAT, chat(response_format="json"), "response_format"),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [10**6]}, "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    (COMPLETIONS, text(echo=True), "echo"),
    (COMPLETIONS, text(suffix="x"), "suffix"),
    (COMPLETIONS, text(best_of=3), "best_of"),
    (COMPLETIONS, text(logprobs=True), "logprobs"),
    (COMPLETIONS, text(logprobs=99), "logprobs"),
    (COMPLETIONS, text(messages=HELLO), "messages"),
]


def test_what_is_wrong_is_named(live: Live) -> None:
    for path, body, param in BAD:
        got = live.post(path, body)
        error = error_of(got)
        assert 400 <= got.status_code < 500, (body, got.text)
        assert error["type"] == "invalid_request_error", (body, got.text)
        assert error["param"] == param, (body, got.text)
        if "messages" in body or param != "prompt":
            assert param.partition("[")[0].partition(".")[0] in error["message"], got.text
    assert live.metric("vllm:prompt_tokens_total") == 0
    assert live.service.worker.active == 0


def test_the_same_faults_are_told_before_a_stream_begins(live: Live) -> None:
    for path, body, param in BAD:
        if param.startswith(("stream", "hasten")):
            continue
        got = live.post(path, {**body, "stream": True})
        assert error_of(got)["param"] == param, (body, got.text)


NOT_JSON = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b'{"messages": NaN}',
    b"\xff\xfe{}",
    b"{" * 20_000,
    b"[" * 200_000,
    b'{"seed": ' + b"9" * 5_000 + b"}",
]


def test_bodies_that_are_no_json_objects_are_told(live: Live) -> None:
    for body in NOT_JSON:
        got = httpx.post(
            f"{live.url}{CHAT}", content=body, headers={"Content-Type": "application/json"}
        )
        assert got.status_code == 400, (body[:30], got.text)
        assert error_of(got)["code"] == "invalid_json"


def test_other_kinds_of_content_are_refused_so_that_web_pages_cannot_post(live: Live) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        headers = {} if kind is None else {"Content-Type": kind}
        got = httpx.post(f"{live.url}{CHAT}", content=b'{"messages": []}', headers=headers)
        assert got.status_code == 415
        assert "application/json" in error_of(got)["message"]
    told = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert httpx.post(f"{live.url}{CHAT}", content=b"{}", headers=told).status_code == 400


def test_unknown_paths_and_methods_have_the_same_shape(live: Live) -> None:
    for call, status in (
        (httpx.get(f"{live.url}/v2"), 404),
        (httpx.get(f"{live.url}/docs"), 404),
        (httpx.get(f"{live.url}/openapi.json"), 404),
        (httpx.get(f"{live.url}/v1/models/gpt-4"), 404),
        (httpx.get(f"{live.url}{CHAT}"), 405),
        (httpx.delete(f"{live.url}/v1/models"), 405),
    ):
        assert call.status_code == status
        error_of(call)
    assert "/v1/chat/completions" in error_of(httpx.get(f"{live.url}/v2"))["message"]


def test_a_prompt_that_fills_the_context_says_so_in_openais_words(live: Live) -> None:
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "x" * 2000}]}),
        (COMPLETIONS, {"prompt": "x" * 1024}),
        (COMPLETIONS, {"prompt": [5] * 1024}),
        (COMPLETIONS, {"prompt": ["short", "x" * 2000]}),
    ):
        got = live.post(path, body)
        assert got.status_code == 400
        error = error_of(got)
        assert error["code"] == "context_length_exceeded"
        assert "1024" in error["message"]
    with pytest.raises(openai.BadRequestError) as caught:
        live.openai().completions.create(model=live.model, prompt="x" * 1024)
    assert caught.value.code == "context_length_exceeded"
    room = live.post(COMPLETIONS, {"prompt": "x" * 1023, "max_tokens": 50, "ignore_eos": True})
    assert room.json()["usage"]["completion_tokens"] == 1
    assert room.json()["choices"][0]["finish_reason"] == "length"


def test_an_answer_without_an_allowed_token_is_told(live: Live) -> None:
    everything = {str(i): -100.0 for i in range(258)}
    assert live.post(CHAT, chat(logit_bias=everything, max_tokens=3)).status_code == 200
    # banned for good: from the third token on nothing is left
    schema = {"const": "ab"}
    body = chat(
        response_format={"type": "json_schema", "json_schema": {"schema": schema}},
        logit_bias={str(live.llm.tokenizer("a")["input_ids"][0]): -100},
    )
    pytest.importorskip("xgrammar", reason="needs xgrammar (the extra grammar)")
    assert live.post(CHAT, body).json()["choices"][0]["message"]["content"] == '"ab"'


# -- limits ------------------------------------------------------------------------------------


def test_a_full_queue_turns_requests_away_and_recovers(slow: LLM) -> None:
    body = chat(max_tokens=900, ignore_eos=True, temperature=0)
    with serving(slow, max_concurrency=1, queue=1) as live:
        with httpx.stream("POST", f"{live.url}{CHAT}", json={**body, "stream": True}) as first:
            lines = first.iter_lines()  # dropped, it would end the stream
            next(lines)
            got = live.post(CHAT, {**body, "n": 2})
            assert got.status_code == 429
            assert got.headers["retry-after"] == "1"
            assert error_of(got)["type"] == "rate_limit_error"
            with pytest.raises(openai.RateLimitError):
                live.openai().chat.completions.create(
                    model=live.model, messages=HELLO, n=2, max_tokens=900
                )
        live.idle()
        assert live.post(CHAT, chat(max_tokens=2)).status_code == 200


def test_of_several_prompts_all_or_none_are_taken(llm: LLM) -> None:
    with serving(llm, max_concurrency=1, queue=1) as live:
        # more than ever fit: waiting wouldn't help
        got = live.post(COMPLETIONS, {"prompt": ["a", "b", "c"], "max_tokens": 900})
        assert got.status_code == 400
        assert error_of(got)["param"] == "n"
        live.idle()


def test_the_operators_limits_hold(llm: LLM) -> None:
    with serving(llm, max_tokens=20, choices=2, max_body=2000) as live:
        assert "20" in error_of(live.post(CHAT, chat(max_tokens=21)))["message"]
        got = live.post(CHAT, chat(ignore_eos=True)).json()
        assert got["usage"]["completion_tokens"] == 20
        assert error_of(live.post(CHAT, chat(n=3)))["param"] == "n"
        assert error_of(live.post(COMPLETIONS, {"prompt": ["a", "b", "c"]}))["param"] == "n"
        assert live.post(CHAT, chat(n=2, max_tokens=3)).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_long_bodies_are_refused_whether_they_say_so_or_not(llm: LLM, chunked: bool) -> None:
    long = b'{"prompt": "' + b"x" * 100_000 + b'"}'
    with serving(llm, max_body=2000) as live:
        content: Any = (long[i : i + 5000] for i in range(0, len(long), 5000)) if chunked else long
        got = httpx.post(
            f"{live.url}{COMPLETIONS}",
            content=content,
            headers={"Content-Type": "application/json"},
        )
        assert got.status_code == 413
        assert error_of(got)["code"] == "body_too_large"


def test_a_body_that_never_comes_is_given_up(llm: LLM) -> None:
    with serving(llm, body_seconds=0.05) as live:
        host, port = live.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: 50\r\n\r\n{{".encode())
            assert client.recv(100).startswith(b"HTTP/1.1 408")


# -- who may ask -------------------------------------------------------------------------------


def test_with_a_key_only_its_holder_is_answered(llm: LLM) -> None:
    with serving(llm, api_key="s3cret") as live:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "s3cret"},
            {"Authorization": "Basic s3cret"},
            {"Authorization": "Bearer s3cret s3cret"},
            {"Authorization": "Bearer s3crét".encode()},
        ):
            for call in (
                live.post(CHAT, chat(max_tokens=2), headers=headers),
                live.get("/v1/models", headers=headers),
                live.get("/metrics", headers=headers),
            ):
                assert call.status_code == 401
                assert error_of(call)["code"] == "invalid_api_key"
        assert live.get("/health").status_code == live.get("/").status_code == 200
        good = live.openai("s3cret")
        assert good.chat.completions.create(model=live.model, messages=HELLO, max_tokens=2).id
        with pytest.raises(openai.AuthenticationError):
            live.openai("other").models.list()


def test_names_made_to_point_here_are_not_answered(llm: LLM) -> None:
    with serving(llm) as live:
        port = live.url.rpartition(":")[2]
        for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", ""):
            got = live.get("/v1/models", headers={"Host": host})
            assert got.status_code == 421, host
            error_of(got)
        for host in ("localhost", f"LOCALHOST:{port}", f"127.0.0.1:{port}", "[::1]", "[::1]:80"):
            assert live.get("/health", headers={"Host": host}).status_code == 200
    with serving(llm, allow_host=()) as live:
        assert live.get("/health", headers={"Host": "any.example"}).status_code == 200


def test_no_other_origin_may_read_answers_unless_allowed(llm: LLM) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with serving(llm) as live:
        got = httpx.options(f"{live.url}{CHAT}", headers=asked)
        assert got.status_code == 405
        assert "access-control-allow-origin" not in live.get("/health", headers=asked).headers
    with serving(llm, allow_origin=("https://a.example",), api_key="k") as live:
        got = httpx.options(f"{live.url}{CHAT}", headers=asked)
        assert got.headers["access-control-allow-origin"] == "https://a.example"
        other = httpx.options(f"{live.url}{CHAT}", headers={**asked, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        denied = live.post(CHAT, chat(), headers={"Origin": "https://a.example"})
        assert denied.status_code == 401
        assert denied.headers["access-control-allow-origin"] == "https://a.example"


# -- faults of the server's own ----------------------------------------------------------------


def test_a_fault_inside_is_a_500_without_its_details(
    live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words = "the user's " + "own words"

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError(words)

    monkeypatch.setattr(live.llm, "tokenize", fail)
    for stream in (False, True):
        got = live.post(CHAT, chat(stream=stream))
        assert got.status_code == 500
        assert error_of(got)["type"] == "server_error"
        assert "own words" not in got.text
    logged = [r for r in caplog.records if r.levelno >= logging.INFO]
    assert any("RuntimeError" in r.getMessage() for r in logged)
    assert not any("own words" in r.getMessage() for r in logged)
    assert live.get("/health").status_code == 200


def test_a_fault_in_the_middle_of_a_stream_is_its_last_event(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    target: Any = live.llm.target
    forward, passes = target.forward, 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == 4:
            raise RuntimeError("broken")
        return forward(*args, **kwargs)

    monkeypatch.setattr(target, "forward", fail)
    body = chat(max_tokens=100, temperature=0, ignore_eos=True, stream=True)
    got = live.post(CHAT, body)
    assert got.status_code == 200
    lines = [line for line in got.text.split("\n\n") if line]
    assert lines[-1].startswith('data: {"error":')
    assert "[DONE]" not in got.text
    live.idle()
    assert events(live.post(CHAT, body))
    live.idle()
    passes = 0
    with pytest.raises(openai.APIError):  # an answer that may end early would end before the fault
        list(
            live.openai().chat.completions.create(
                model=live.model, messages=HELLO, stream=True, max_tokens=100, temperature=0,
                extra_body={"ignore_eos": True},
            )
        )  # fmt: skip


def test_requests_are_logged_without_their_texts(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="hasten.serve"):
        live.post(CHAT, {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 3})
        live.post(CHAT, {"messages": [{"role": "user", "content": "a secret"}], "secret": 3})
        live.get("/v1/models/x%0a12:00:00%20POST%20/forged")
        wait_for(lambda: len(caplog.records) >= 2)
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith(f"POST {CHAT} 200") for line in lines)
    assert any(line.startswith(f"POST {CHAT} 400") for line in lines)
    assert not any("secret" in line or "\n" in line for line in lines)

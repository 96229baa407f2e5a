"""Chat and completions through OpenAI's own client: the library's answers in OpenAI's shapes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.serve.live import CHAT, COMPLETIONS, HELLO, Live, events, pieces

LONG: dict[str, Any] = {"max_tokens": 40, "extra_body": {"ignore_eos": True}}
GREEDY = {"temperature": 0, **LONG}


def library(live: Live, prompt: Any = HELLO, **options: Any) -> Any:
    return live.llm.generate(prompt, max_new_tokens=40, ignore_eos=True, **options)


SAMPLING = [
    ({"temperature": 0}, {}),
    ({"temperature": 0.8, "seed": 5}, {"temperature": 0.8, "seed": 5}),
    ({"seed": 6}, {"temperature": 1.0, "seed": 6}),
    (
        {"temperature": 1.2, "seed": 7, "top_p": 0.9, "presence_penalty": 0.5},
        {"temperature": 1.2, "seed": 7, "top_p": 0.9, "presence_penalty": 0.5},
    ),
    (
        {"temperature": 0, "frequency_penalty": 1.5, "logit_bias": {"65": -100, "66": 5}},
        {"frequency_penalty": 1.5, "logit_bias": {65: -100.0, 66: 5.0}},
    ),
]


@pytest.mark.parametrize(("asked", "options"), SAMPLING)
def test_chat_answers_are_the_librarys(live: Live, asked: Any, options: Any) -> None:
    got = live.openai().chat.completions.create(
        model=live.model, messages=HELLO, **{**LONG, **asked}
    )
    expected = library(live, **options)
    assert got.choices[0].message.content == expected.text
    assert got.choices[0].message.role == "assistant"
    assert got.choices[0].finish_reason == "length"
    assert got.model == live.model
    assert got.usage.completion_tokens == len(expected.tokens) == 40


@pytest.mark.parametrize(("asked", "options"), SAMPLING)
def test_completions_are_the_librarys_without_the_template(
    live: Live, asked: Any, options: Any
) -> None:
    got = live.openai().completions.create(
        model=live.model, prompt="abcabcabc", **{**LONG, **asked}
    )
    expected = library(live, "abcabcabc", template=False, **options)
    assert got.choices[0].text == expected.text
    assert got.usage.prompt_tokens == 9


@pytest.mark.parametrize(("asked", "options"), SAMPLING)
def test_streamed_pieces_join_to_the_whole(live: Live, asked: Any, options: Any) -> None:
    stream = live.openai().chat.completions.create(
        model=live.model, messages=HELLO, stream=True, **{**LONG, **asked}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:])
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == library(live, **options).text
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({c.id for c in chunks}) == 1
    assert all(c.usage is None for c in chunks)


def test_extensions_reach_the_library(live: Live) -> None:
    more = {"top_k": 9, "min_p": 0.01, "repetition_penalty": 1.3, "min_tokens": 5}
    got = live.openai().chat.completions.create(
        model=live.model, messages=HELLO, seed=3, max_tokens=40, extra_body=more
    )
    expected = live.llm.generate(
        HELLO, max_new_tokens=40, temperature=1.0, seed=3, top_k=9, min_p=0.01,
        repetition_penalty=1.3, min_new_tokens=5,
    )  # fmt: skip
    assert got.choices[0].message.content == expected.text
    assert got.choices[0].finish_reason == expected.finish_reason.value
    off = live.post(CHAT, {"messages": HELLO, "seed": 3, "max_tokens": 9, "top_k": -1})
    same = live.post(CHAT, {"messages": HELLO, "seed": 3, "max_tokens": 9})
    assert off.json()["choices"] == same.json()["choices"]


def test_max_completion_tokens_is_the_newer_name(live: Live) -> None:
    for body in ({"max_completion_tokens": 7}, {"max_tokens": 7, "max_completion_tokens": 7}):
        got = live.post(CHAT, {"messages": HELLO, "ignore_eos": True, **body}).json()
        assert got["usage"]["completion_tokens"] == 7


def test_without_a_length_a_chat_fills_the_context_and_a_completion_gives_16(live: Live) -> None:
    body = {"temperature": 0, "ignore_eos": True}
    chat = live.post(CHAT, {"messages": HELLO, **body}).json()
    assert chat["usage"]["total_tokens"] == live.llm.target.info.context_limit
    assert chat["choices"][0]["finish_reason"] == "length"
    completion = live.post(COMPLETIONS, {"prompt": "abc", **body}).json()
    assert completion["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_as_in_the_library(live: Live, stream: bool) -> None:
    whole = library(live).text
    for stop in (whole[9:12], ["never there", whole[20:22]]):
        expected = library(live, stop=stop)
        body = {"messages": HELLO, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
        got = live.post(CHAT, {**body, "stop": stop, "stream": stream})
        if stream:
            chunks = events(got)
            text, finish = "".join(pieces(chunks)), chunks[-1]["choices"][0]["finish_reason"]
        else:
            choice = got.json()["choices"][0]
            text, finish = choice["message"]["content"], choice["finish_reason"]
        assert text == expected.text
        assert finish == "stop"


def test_n_answers_are_those_of_n_seeds(live: Live) -> None:
    got = live.openai().chat.completions.create(
        model=live.model, messages=HELLO, n=3, seed=11, **LONG
    )
    assert [c.index for c in got.choices] == [0, 1, 2]
    expected = [library(live, temperature=1.0, seed=11 + i) for i in range(3)]
    assert [c.message.content for c in got.choices] == [e.text for e in expected]
    assert got.usage.completion_tokens == sum(len(e.tokens) for e in expected)
    assert got.usage.prompt_tokens == len(expected[0].prompt_tokens)
    assert got.metrics["hasten"]["seeds"] == [11, 12, 13]


def test_a_stream_of_n_answers_keeps_them_apart(live: Live) -> None:
    body = {"messages": HELLO, "n": 3, "seed": 11, "max_tokens": 40, "ignore_eos": True}
    chunks = events(live.post(CHAT, {**body, "stream": True}))
    for index in range(3):
        expected = library(live, temperature=1.0, seed=11 + index)
        assert "".join(pieces(chunks, index)) == expected.text
    finishes = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    assert sum(f is not None for f in finishes) == 3
    assert "metrics" in chunks[-1]
    assert not any("metrics" in chunk for chunk in chunks[:-1])


def test_completions_take_texts_ids_and_lists_of_both(live: Live) -> None:
    ids = live.llm.tokenizer("abcabc")["input_ids"]
    texts = []
    for prompt in ("abcabc", ["abcabc"], ids, [ids]):
        got = live.openai().completions.create(model=live.model, prompt=prompt, **GREEDY)
        texts.append(got.choices[0].text)
    assert len(set(texts)) == 1
    many = live.openai().completions.create(
        model=live.model, prompt=["abcabc", "xyz", ids], n=2, **GREEDY
    )
    alone = live.openai().completions.create(model=live.model, prompt="xyz", **GREEDY)
    expected = [texts[0]] * 2 + [alone.choices[0].text] * 2 + [texts[0]] * 2
    assert [c.text for c in many.choices] == expected
    assert [c.index for c in many.choices] == list(range(6))
    assert many.usage.prompt_tokens == 6 + 3 + 6
    assert many.usage.completion_tokens == 6 * 40


def test_text_in_every_script_comes_through(live: Live) -> None:
    said = 'Grüße, 世界! 👩‍🚀 \u2028 \x85 \\ " </script> \u0000'
    messages = [{"role": "user", "content": said}]
    expected = library(live, messages, temperature=2.0, seed=1)
    body = {"messages": messages, "temperature": 2.0, "seed": 1, "max_tokens": 40}
    body["ignore_eos"] = True
    got = live.post(CHAT, body).json()
    assert got["usage"]["prompt_tokens"] == len(expected.prompt_tokens)
    assert got["choices"][0]["message"]["content"] == expected.text
    chunks = events(live.post(CHAT, {**body, "stream": True}))
    assert "".join(pieces(chunks)) == expected.text
    client = live.openai().chat.completions.create(
        model=live.model, messages=messages, temperature=2.0, seed=1, stream=True, **LONG
    )
    assert "".join(c.choices[0].delta.content or "" for c in client) == expected.text


def test_content_may_be_text_parts_and_old_answers_may_come_back(live: Live) -> None:
    first = live.openai().chat.completions.create(model=live.model, messages=HELLO, **GREEDY)
    said = first.choices[0].message
    parts = [{"type": "text", "text": "And "}, {"type": "text", "text": "then?"}]
    messages = [*HELLO, said.model_dump(), {"role": "user", "content": parts}]
    got = live.openai().chat.completions.create(model=live.model, messages=messages, **GREEDY)
    plain = [
        *HELLO,
        {"role": "assistant", "content": said.content},
        {"role": "user", "content": "And then?"},
    ]
    assert got.choices[0].message.content == library(live, plain).text


def test_developer_is_a_system_message(live: Live) -> None:
    body = {"temperature": 0, "max_tokens": 9}
    both = [
        live.post(CHAT, {"messages": [{"role": r, "content": "Be brief"}, *HELLO], **body}).json()
        for r in ("developer", "system")
    ]
    assert both[0]["choices"] == both[1]["choices"]


def test_fields_that_change_nothing_are_taken(live: Live) -> None:
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 9}
    plain = live.post(CHAT, body).json()["choices"]
    nothing: dict[str, Any] = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "tools": [],
        "tool_choice": "none", "n": 1, "stop": None, "logprobs": False, "modalities": ["text"],
        "response_format": {"type": "text"}, "audio": None, "stream": False, "seed": None,
        "parallel_tool_calls": True, "logit_bias": {}, "top_p": 1, "prompt_cache_key": "k",
    }  # fmt: skip
    assert live.post(CHAT, {**body, **nothing}).json()["choices"] == plain
    completion = {"prompt": "abc", "temperature": 0}
    same = {"echo": False, "suffix": None, "best_of": 1, "logprobs": None}
    assert (
        live.post(COMPLETIONS, {**completion, **same}).json()["choices"]
        == live.post(COMPLETIONS, completion).json()["choices"]
    )


def test_requests_at_the_same_time_get_their_own_answers(live: Live) -> None:
    async def all_of_them() -> list[Any]:
        async with live.async_openai() as client:
            asked = [
                client.chat.completions.create(
                    model=live.model,
                    messages=[{"role": "user", "content": f"Tell me about {i}"}],
                    seed=i,
                    **LONG,
                )
                for i in range(12)
            ]
            return await asyncio.gather(*asked)

    for i, got in enumerate(asyncio.run(all_of_them())):
        messages = [{"role": "user", "content": f"Tell me about {i}"}]
        expected = library(live, messages, temperature=1.0, seed=i)
        assert got.choices[0].message.content == expected.text


def test_the_asynchronous_client_streams(live: Live) -> None:
    async def stream() -> str:
        async with live.async_openai() as client:
            got = await client.chat.completions.create(
                model=live.model, messages=HELLO, stream=True, **GREEDY
            )
            return "".join([c.choices[0].delta.content or "" async for c in got])

    assert asyncio.run(stream()) == library(live).text


def test_streams_of_completions_join_too(live: Live) -> None:
    stream = live.openai().completions.create(
        model=live.model, prompt="abcabcabc", stream=True, **GREEDY
    )
    chunks = list(stream)
    expected = library(live, "abcabcabc", template=False)
    assert "".join(c.choices[0].text for c in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert {c.object for c in chunks} == {"text_completion"}


def test_models_are_listed_and_found(live: Live) -> None:
    client = live.openai()
    (card,) = client.models.list().data
    assert card.id == live.model
    assert card.max_model_len == 1024
    assert card.hasten["method"] == "prompt-lookup"
    assert "ar" in card.hasten["methods"]
    assert client.models.retrieve(live.model).id == live.model


def test_a_seed_that_was_not_given_is_told(live: Live) -> None:
    body = {"messages": HELLO, "max_tokens": 40, "ignore_eos": True}
    got = live.post(CHAT, body).json()
    (seed,) = got["metrics"]["hasten"]["seeds"]
    again = live.post(CHAT, {**body, "seed": seed}).json()
    assert again["choices"] == got["choices"]

"""What answers tell besides their text: log-probabilities, usage, drafts, marks, metrics."""

from __future__ import annotations

from typing import Any

import pytest

from hasten.api import LLM
from hasten.metrics import Summary
from hasten.types import TokenLogprob
from tests.serve.live import CHAT, COMPLETIONS, HELLO, Live, events, pieces, serving
from tests.tiny_llm import make_tokenizer

BODY: dict[str, Any] = {"messages": HELLO, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
REPEAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "one two one two one two one two"}],
    "temperature": 0,
    "max_tokens": 60,
    "logit_bias": {str(i): 12 for i in make_tokenizer()("one tw")["input_ids"]},
}


def expected_logprobs(live: Live, top: int) -> tuple[TokenLogprob, ...]:
    result = live.llm.generate(HELLO, max_new_tokens=40, ignore_eos=True, logprobs=top)
    assert result.logprobs is not None
    return result.logprobs


def flat(entries: list[dict[str, Any]]) -> list[tuple[float, tuple[float, ...]]]:
    return [(e["logprob"], tuple(t["logprob"] for t in e["top_logprobs"])) for e in entries]


# -- log-probabilities -------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 5])
def test_log_probabilities_are_the_librarys(live: Live, stream: bool, top: int) -> None:
    body = {**BODY, "logprobs": True, "top_logprobs": top, "stream": stream}
    got = live.post(CHAT, body)
    if stream:
        entries = [
            entry
            for chunk in events(got)
            for choice in chunk["choices"]
            for entry in (choice["logprobs"] or {"content": []})["content"]
        ]
    else:
        entries = got.json()["choices"][0]["logprobs"]["content"]
    expected = expected_logprobs(live, top)
    assert flat(entries) == [(e.logprob, tuple(p for _, p in e.top)) for e in expected]
    text = live.llm.generate(HELLO, max_new_tokens=40, ignore_eos=True).text
    joined = bytes(b for entry in entries for b in entry["bytes"])
    assert joined.decode("utf-8", "replace") == text
    assert all(len(entry["top_logprobs"]) == top for entry in entries)


def test_bytes_of_split_characters_are_theirs(live: Live) -> None:
    bias = {str(i): 60 for i in live.llm.tokenizer("é")["input_ids"]}
    got = live.openai().chat.completions.create(
        model=live.model,
        messages=HELLO,
        logit_bias=bias,
        frequency_penalty=2,
        temperature=0,
        max_tokens=2,
        logprobs=True,
    )
    content = got.choices[0].logprobs.content
    assert {bytes(entry.bytes) for entry in content} == {b"\xc3", b"\xa9"}


def test_completions_have_log_probabilities_in_their_own_shape(live: Live) -> None:
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 30, "logprobs": 3}
    body["ignore_eos"] = True
    got = live.post(COMPLETIONS, body).json()["choices"][0]
    expected = live.llm.generate(
        "abc", template=False, max_new_tokens=30, ignore_eos=True, logprobs=3
    ).logprobs
    assert expected is not None
    shape = got["logprobs"]
    assert shape["token_logprobs"] == [e.logprob for e in expected]
    assert len(shape["tokens"]) == len(shape["text_offset"]) == len(shape["top_logprobs"]) == 30
    for at, word in zip(shape["text_offset"], shape["tokens"], strict=True):
        if "\ufffd" in "".join(shape["tokens"]):
            break  # characters in several tokens: offsets count what each reads as
        assert got["text"][at : at + len(word)] == word
    for entry, told in zip(expected, shape["top_logprobs"], strict=True):
        assert max(told.values()) == entry.top[0][1]
    chunks = events(live.post(COMPLETIONS, {**body, "stream": True}))
    offsets = [o for c in chunks for o in c["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == shape["text_offset"]


# -- usage -------------------------------------------------------------------------------------


def test_usage_counts_every_token_once_and_no_more(live: Live) -> None:
    for more in ({}, {"max_tokens": 1}, {"stop": "e"}, {"max_tokens": 7}, {"ignore_eos": False}):
        got = live.post(CHAT, {**BODY, **more}).json()
        options = {"max_new_tokens": 40, "ignore_eos": True}
        names = {"max_tokens": "max_new_tokens"}
        options |= {names.get(k, k): v for k, v in more.items()}
        expected = live.llm.generate(HELLO, **options)
        assert got["usage"] == {
            "prompt_tokens": len(expected.prompt_tokens),
            "completion_tokens": len(expected.tokens),
            "total_tokens": len(expected.prompt_tokens) + len(expected.tokens),
            "prompt_tokens_details": {"cached_tokens": 0},
        } | {"prompt_tokens_details": got["usage"]["prompt_tokens_details"]}


def test_a_stream_tells_its_usage_when_asked(live: Live) -> None:
    stream = live.openai().chat.completions.create(
        model=live.model,
        messages=HELLO,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    expected = live.llm.generate(HELLO, max_new_tokens=40)
    assert chunks[-1].usage.completion_tokens == len(expected.tokens)
    assert chunks[-1].metrics["speculative_decoding"] is not None


# -- drafts ------------------------------------------------------------------------------------


def test_figures_of_drafts_are_the_librarys_and_conserve_tokens(live: Live) -> None:
    got = live.post(CHAT, REPEAT).json()
    told = got["metrics"]["speculative_decoding"]
    result = live.llm.generate(
        REPEAT["messages"],
        max_new_tokens=60,
        logit_bias={int(k): float(v) for k, v in REPEAT["logit_bias"].items()},
        trace=True,
    )
    expected = Summary.of(result.rounds)
    assert expected.accepted > 0
    assert told["num_accepted_draft_tokens"] == expected.accepted
    assert told["num_draft_tokens"] == expected.drafted
    assert told["num_spec_steps"] == expected.draft_rounds
    histogram = {int(k): v for k, v in told["acceptance_histogram"].items()}
    assert sum(histogram.values()) == told["num_spec_steps"]
    assert sum(k * v for k, v in histogram.items()) == told["num_accepted_draft_tokens"]
    assert told["mean_acceptance_length"] == 1 + expected.accepted / expected.draft_rounds
    assert 0 <= told["draft_acceptance_rate"] <= 1
    own = got["metrics"]["hasten"]
    assert own["tokens_per_pass"] == expected.mean_accepted_length
    assert own["method"] == "prompt-lookup"


def test_plain_decoding_reports_no_drafts(live: Live) -> None:
    got = live.post(CHAT, {**REPEAT, "method": "ar"}).json()
    told = got["metrics"]["speculative_decoding"]
    assert told["mean_acceptance_length"] == 1
    assert told["num_spec_steps"] == told["num_draft_tokens"] == 0
    assert told["acceptance_histogram"] == {}
    assert got["choices"] == live.post(CHAT, REPEAT).json()["choices"]
    assert got["metrics"]["hasten"]["method"] == "ar"


@pytest.mark.parametrize("more", [{}, {"stop": "two"}, {"temperature": 1.5, "seed": 2}])
def test_marks_say_which_text_was_drafted(live: Live, more: Any) -> None:
    body = {**REPEAT, **more, "stream": True}
    chunks = events(live.post(CHAT, {**body, "hasten": {"marks": True}}))
    plain = events(live.post(CHAT, body))
    assert "".join(pieces(chunks)) == "".join(pieces(plain))
    marked = [pair for c in chunks[1:] for pair in c["choices"][0]["hasten"]["pieces"]]
    assert "".join(text for text, _ in marked) == "".join(pieces(chunks))
    if not more:
        result = live.llm.generate(
            REPEAT["messages"],
            max_new_tokens=60,
            logit_bias={int(k): float(v) for k, v in REPEAT["logit_bias"].items()},
            trace=True,
        )
        expected = ""  # a byte a token here: which of them were drafted
        for made in result.rounds:
            kept = max(len(made.accepted) - 1, 0)
            expected += "d" * kept + "o" * (len(made.emitted) - kept)
        told = "".join(("d" if kept else "o") * len(text) for text, kept in marked)
        assert told == expected
        assert "d" in told
    assert not any("hasten" in choice for chunk in plain for choice in chunk["choices"])


# -- metrics -----------------------------------------------------------------------------------


def test_metrics_count_what_happened_under_vllms_names(llm: LLM) -> None:
    with serving(llm, served_model_name="tiny") as live:
        expected = [live.post(CHAT, {**REPEAT, "model": "tiny"}).json() for _ in range(2)]
        live.idle()
        used = [e["usage"] for e in expected]
        told = [e["metrics"]["speculative_decoding"] for e in expected]
        label = '{model_name="tiny"'

        def value(name: str) -> float:
            return live.metric(name + label)

        assert value("vllm:prompt_tokens_total") == sum(u["prompt_tokens"] for u in used)
        assert value("vllm:generation_tokens_total") == sum(u["completion_tokens"] for u in used)
        assert value("vllm:spec_decode_num_drafts_total") == sum(t["num_spec_steps"] for t in told)
        accepted = sum(t["num_accepted_draft_tokens"] for t in told)
        assert value("vllm:spec_decode_num_accepted_tokens_total") == accepted > 0
        assert value("vllm:spec_decode_num_draft_tokens_total") >= accepted
        per_position = [
            live.metric(
                "vllm:spec_decode_num_accepted_tokens_per_pos_total"
                f'{{model_name="tiny",position="{position}"}}'
            )
            for position in range(3)
        ]
        assert per_position == sorted(per_position, reverse=True)
        assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total") == accepted
        assert (
            live.metric('vllm:request_success_total{finished_reason="length",model_name="tiny"')
            + live.metric("vllm:request_success_total{")
            >= 2
        )
        assert value("vllm:time_to_first_token_seconds_count") == 2
        assert value("vllm:e2e_request_latency_seconds_count") == 2
        assert value("vllm:num_requests_running") == value("vllm:num_requests_waiting") == 0
        assert value("hasten:kept_prefix_tokens") > 0
        assert value("hasten:kv_cache_bytes") > 0


def test_two_servers_count_apart(llm: LLM) -> None:
    with serving(llm) as one, serving(llm) as other:
        one.post(CHAT, BODY)
        one.idle()
        assert one.metric("vllm:generation_tokens_total") == 40
        assert other.metric("vllm:generation_tokens_total") == 0

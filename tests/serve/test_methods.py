"""Methods and grammars that a request asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

import hasten
from hasten import methods
from hasten.api import LLM
from hasten.errors import OptionError
from hasten.serve.app import create_app
from hasten.serve.settings import ServerOptions
from tests.serve.live import CHAT, COMPLETIONS, HELLO, Live, error_of, events, pieces, serving

BODY: dict[str, Any] = {"messages": HELLO, "max_tokens": 40, "ignore_eos": True}


def test_every_offered_method_gives_the_same_answer(llm: LLM) -> None:
    with serving(llm, methods=("ar", "racer,nodes=8", "suffix", "recycling")) as live:
        names = live.get("/v1/models").json()["data"][0]["hasten"]["methods"]
        assert names == ["prompt-lookup", "ar", "racer,nodes=8", "suffix", "recycling"]
        for asked in ({"temperature": 0}, {"temperature": 1.2, "seed": 4}):
            texts = set()
            for name in names:
                got = live.post(CHAT, {**BODY, **asked, "method": name}).json()
                assert got["metrics"]["hasten"]["method"] == name
                texts.add(got["choices"][0]["message"]["content"])
            assert len(texts) == 1


def test_only_what_is_offered_can_be_asked_for_and_nothing_else_is_loaded(llm: LLM) -> None:
    with serving(llm, methods=("ar",)) as live:
        prepared = set(llm._prepared)
        for name in ("racer", "prompt-lookup,nodes=5", "draft-model,model=/etc/passwd"):
            got = live.post(CHAT, {**BODY, "method": name})
            assert got.status_code == 400
            assert "'prompt-lookup', 'ar'" in error_of(got)["message"].replace(
                "prompt-lookup, ar", "'prompt-lookup', 'ar'"
            )
        assert set(llm._prepared) == prepared


def test_lossy_methods_are_offered_only_by_name(llm: LLM) -> None:
    lossless = {name for name, made in methods.all_methods().items() if made.lossless == "yes"}
    with serving(llm) as live:
        offered = live.get("/v1/models").json()["data"][0]["hasten"]["methods"]
    assert {methods.parse(name).name for name in offered} <= lossless


def test_methods_that_cannot_be_are_told_at_the_start(llm: LLM) -> None:
    for options, message in (
        ({"methods": ("no-such",)}, "unknown method"),
        ({"methods": tuple(f"racer,nodes={i}" for i in range(2, 30))}, "fewer than 16"),
        ({"methods": ("draft-model",)}, "draft-model"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"max_tokens": True}, "max_tokens"),
        ({"grace": -1}, "grace"),
        ({"api_key": " "}, "api_key"),
        ({"allow_origin": ("example.com",)}, "isn't an origin"),
    ):
        with pytest.raises(OptionError, match=message):
            create_app(llm, ServerOptions(**options))


def test_verifiers_can_be_asked_for(live: Live) -> None:
    asked = {**BODY, "temperature": 1.0, "seed": 9}
    for verify in ("match", "rejection"):
        got = live.post(CHAT, {**asked, "verify": verify}).json()
        expected = live.llm.generate(
            HELLO, max_new_tokens=40, ignore_eos=True, temperature=1.0, seed=9, verify=verify
        )
        assert got["choices"][0]["message"]["content"] == expected.text


# -- grammars ----------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "ok": {"type": "boolean"},
        "few": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3},
    },
    "required": ["name", "ok", "few"],
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture(autouse=True)
def _grammars() -> None:
    pytest.importorskip("xgrammar", reason="needs xgrammar (the extra grammar)")


def fits(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"name", "ok", "few"}
        and isinstance(value["ok"], bool)
        and all(each in (1, 2) for each in value["few"])
    )


def test_a_schema_is_held_whole_streamed_and_n_times_with_any_method(live: Live) -> None:
    texts = {}
    for method in ("ar", "prompt-lookup", "racer"):
        got = live.openai().chat.completions.create(
            model=live.model,
            messages=HELLO,
            response_format=JSON_SCHEMA,
            n=3,
            seed=1,
            extra_body={"method": method},
        )
        texts[method] = [c.message.content for c in got.choices]
        assert all(fits(text) for text in texts[method]), texts
        assert {c.finish_reason for c in got.choices} == {"stop"}
    assert texts["ar"] == texts["prompt-lookup"] == texts["racer"]
    body = {"messages": HELLO, "response_format": JSON_SCHEMA, "seed": 1, "stream": True}
    assert "".join(pieces(events(live.post(CHAT, body)))) == texts["ar"][0]


def test_other_grammars_are_held_too(live: Live) -> None:
    def answer(**format: Any) -> str:
        body = {"prompt": "x", "max_tokens": 60, "response_format": format, "seed": 2}
        got = live.post(COMPLETIONS, body).json()
        text: str = got["choices"][0]["text"]
        return text

    assert answer(type="regex", regex="[ab]{3}")[:3].strip("ab") == ""
    assert answer(type="grammar", grammar='root ::= "left" | "right"') in ("left", "right")
    assert answer(type="json_object").startswith("{")


def test_schemas_that_cannot_be_held_are_told_before_anything_runs(live: Live) -> None:
    def refused(more: Any = None, **format: Any) -> str:
        got = live.post(CHAT, {**(more or {}), "messages": HELLO, "response_format": format})
        assert got.status_code == 400, got.text
        message: str = error_of(got)["message"]
        return message

    unique = {"type": "array", "items": {}, "uniqueItems": True}
    told = refused(type="json_schema", json_schema={"name": "x", "schema": unique})
    assert told.startswith("response_format: at #: 'uniqueItems' can't be enforced")
    assert "[" in refused(type="regex", regex="a[")
    assert refused(type="grammar", grammar="no grammar")
    for field, value in (("min_tokens", 5), ("ignore_eos", True)):
        assert field in refused({field: value}, type="json_object")
    assert live.metric("vllm:prompt_tokens_total") == 0


def test_without_xgrammar_the_extra_is_named(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from hasten import grammar

    monkeypatch.setitem(sys.modules, "xgrammar", None)
    monkeypatch.setattr(grammar, "_vocabularies", type(grammar._vocabularies)())
    got = live.post(CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}})
    assert got.status_code == 400
    assert "hasten[grammar]" in error_of(got)["message"]


def test_a_model_without_a_chat_template_says_so_and_completes() -> None:
    from tests.tiny_llm import make_model, make_tokenizer

    bare = hasten.load((make_model(), make_tokenizer(template=None)), method="ar")
    with serving(bare) as live:
        got = live.post(CHAT, BODY)
        assert got.status_code == 400
        assert "chat template" in error_of(got)["message"]
        assert live.post(COMPLETIONS, {"prompt": "abc"}).status_code == 200


def test_any_transformers_model_is_served_in_the_same_way() -> None:
    from tests.tiny_llm import make_model, make_tokenizer

    slow = hasten.load((make_model(), make_tokenizer()), engine="transformers", method="ar")
    with serving(slow) as live:
        for method in ("ar", "prompt-lookup"):
            body = {**BODY, "method": method, "seed": 4, "n": 2}
            got = live.post(CHAT, body).json()
            for index, choice in enumerate(got["choices"]):
                expected = slow.generate(
                    HELLO, max_new_tokens=40, ignore_eos=True, temperature=1.0, seed=4 + index
                )
                assert choice["message"]["content"] == expected.text
        assert "hasten:kv_cache_bytes" not in live.get("/metrics").text

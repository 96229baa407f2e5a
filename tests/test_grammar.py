"""Answers held to a grammar: always valid, the same with and without drafts, prefix-pure."""

from __future__ import annotations

import json
import random
import sys

import pytest
import torch

import hasten
from hasten import grammar
from hasten.errors import OptionError
from tests.tiny_llm import make_model, make_tokenizer

pytest.importorskip("xgrammar", reason="needs xgrammar (the extra grammar)")

VOCAB, EOS = 264, 257
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "é"]}, "maxItems": 3},
        "nested": {"type": "object", "properties": {"ok": {"type": "boolean"}}},
    },
    "required": ["name", "age", "tags"],
}
CHOICE = {"enum": ["yes", "no", {"maybe": [1, None]}]}
EITHER = {
    "$defs": {"code": {"type": "string", "pattern": "^[A-Z]{2}-\\d{1,2}$"}},
    "anyOf": [{"$ref": "#/$defs/code"}, {"type": "null"}, {"type": "boolean"}],
}
TUPLE = {
    "type": "array",
    "prefixItems": [{"type": "boolean"}, {"type": "string", "format": "date"}],
    "items": False,
    "minItems": 2,
}


@pytest.fixture(scope="module")
def llm():
    made = make_model(vocab_size=VOCAB)  # six ids more than the tokenizer has
    return hasten.load((made, make_tokenizer()), method="ar")


def make(llm, schema):
    info = llm.target.info
    return grammar.json_schema(
        llm.tokenizer, schema, vocab_size=info.vocab_size, eos_ids=info.eos_ids
    )


def answer(llm, made, prompt="{", **options):
    ids = llm.tokenize(prompt)
    return llm.generate(ids, processors=[made], max_new_tokens=150, **options)


def fits(value, schema, root=None):
    """A small check of the schemas above, apart from the code under test."""
    root = root or schema
    if "$ref" in schema:
        return fits(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(fits(value, s, root) for s in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "object":
        known = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema.get("required", ())) <= set(value) <= set(known)
            and all(fits(v, known[k], root) for k, v in value.items())
        )
    if kind == "array":
        items = schema.get("prefixItems") or [schema["items"]] * len(value)
        return (
            isinstance(value, list)
            and schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(items))
            and all(fits(v, s, root) for v, s in zip(value, items, strict=True))
        )
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema.get("maxLength", 99)
    if kind == "integer":
        return type(value) is int and schema.get("minimum", 0) <= value <= schema.get("maximum", 0)
    return value is None if kind == "null" else isinstance(value, bool)


# -- answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", [PERSON, CHOICE, EITHER, TUPLE])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "seed": 7, "top_k": 40}])
@pytest.mark.parametrize("drafts", ["prompt-lookup", "racer", "ptd"])
def test_a_random_model_gives_valid_json_the_same_with_and_without_drafts(
    llm, schema, sampling, drafts
):
    made = make(llm, schema)
    plain = answer(llm, made, **sampling)
    assert plain.finish_reason == "stop"
    assert fits(json.loads(plain.text), schema), plain.text
    drafted = answer(llm, made, method=drafts, **sampling)
    assert (drafted.tokens, drafted.text) == (plain.tokens, plain.text)


def test_many_seeds_give_valid_json_under_match_and_rejection(llm):
    made = make(llm, PERSON)
    texts = set()
    for seed in range(12):
        for verify in ("match", "rejection"):
            result = answer(
                llm, made, temperature=1.0, seed=seed, verify=verify, method="prompt-lookup"
            )
            assert fits(json.loads(result.text), PERSON), result.text
            texts.add(result.text)
    assert len(texts) > 6


def test_drafts_are_kept_under_a_grammar(llm):
    schema = {
        "type": "array",
        "items": {"const": "a long and certain text"},
        "minItems": 4,
        "maxItems": 4,
    }
    result = answer(llm, make(llm, schema), method="prompt-lookup", prompt="x")
    assert json.loads(result.text) == ["a long and certain text"] * 4
    assert result.metrics.mean_accepted_length > 1.5


def test_the_mask_acts_before_temperature_and_filters(llm):
    """top_k=1 keeps the likeliest *allowed* token, so sampling gives the greedy answer."""
    made = make(llm, PERSON)
    drawn = answer(llm, made, temperature=2.0, seed=1, top_k=1)
    assert drawn.tokens == answer(llm, made).tokens


def test_a_cut_answer_is_the_beginning_of_the_whole(llm):
    made = make(llm, PERSON)
    ids = llm.tokenize("x")
    whole = llm.generate(ids, processors=[made], max_new_tokens=150)
    short = llm.generate(ids, processors=[made], max_new_tokens=9)
    assert short.finish_reason == "length"
    assert short.tokens == whole.tokens[:9]


def test_one_bound_grammar_serves_several_requests_at_a_time(llm):
    made = make(llm, PERSON)
    ids = llm.tokenize("abc")
    bound = made.for_prompt(len(ids))
    params = [
        hasten.SamplingParams(max_new_tokens=150, temperature=1.0, seed=s, processors=[bound])
        for s in range(4)
    ]
    together = llm.generate_many([ids] * 4, params=params, method="prompt-lookup")
    for seed, result in enumerate(together):
        assert result.tokens == answer(llm, made, "abc", temperature=1.0, seed=seed).tokens


def test_json_object_regex_and_ebnf_hold(llm):
    info = llm.target.info
    names = {"vocab_size": info.vocab_size, "eos_ids": info.eos_ids}
    digits = grammar.regex(llm.tokenizer, "[0-9]{3}-(ab|cd)", **names)
    assert answer(llm, digits).text[3:] in ("-ab", "-cd")
    word = grammar.ebnf(llm.tokenizer, 'root ::= "yes" | "no, " ("never" | "later")', **names)
    assert answer(llm, word).text in ("yes", "no, never", "no, later")
    anything = grammar.json_object(llm.tokenizer, **names)
    text = answer(llm, anything, temperature=1.0, seed=3).text
    assert text.startswith("{")
    matcher = anything.for_prompt(0)
    ends = matcher(torch.tensor([llm.tokenizer('{"k": [1, {}]}')["input_ids"]]), zeros())
    assert allowed(ends) == {EOS}


# -- the processor by itself -------------------------------------------------------------------


def zeros():
    return torch.zeros(1, VOCAB)


def allowed(scores):
    return {i for i, score in enumerate(scores[0].tolist()) if score == 0}


@pytest.mark.parametrize("schema", [PERSON, EITHER])
def test_answers_do_not_depend_on_the_order_of_calls(llm, schema):
    """Prefixes longer, shorter and aside, valid and broken: as a fresh matcher says."""
    made = make(llm, schema)
    rng = random.Random(5)
    prompt = [1, 2, 3]
    paths = [list(answer(llm, made, temperature=1.0, seed=s).tokens) for s in range(4)]
    prefixes = [path[:cut] for path in paths for cut in range(len(path) + 1)]
    for path in paths:  # broken in the middle, ended early, gone on past the end
        cut = rng.randrange(len(path))
        prefixes += [[*path[:cut], 0], [*path[:cut], 256, *path[cut:]], [*path, EOS, 5], [EOS]]
        prefixes += [[*path[:cut], VOCAB - 1], [*path[:cut], EOS, *path[cut:]]]
    used = made.for_prompt(len(prompt))
    for prefix in rng.choices(prefixes, k=500):
        fresh = made.for_prompt(len(prompt))
        ids = torch.tensor([prompt + prefix])
        assert torch.equal(used(ids, zeros()), fresh(ids, zeros())), prefix


def test_the_prompt_plays_no_part(llm):
    made = make(llm, PERSON)
    held = llm.tokenizer('{"name')["input_ids"]
    alone = made.for_prompt(0)(torch.tensor([held]), zeros())
    behind = made.for_prompt(5)(torch.tensor([[9, EOS, 9, 256, 9, *held]]), zeros())
    assert torch.equal(alone, behind)


def test_only_the_end_follows_a_complete_text_and_a_broken_one(llm):
    bound = make(llm, {"type": "boolean"}).for_prompt(0)
    for text, ends in (("true", True), ("tru", False), ("trux", True)):
        got = allowed(bound(torch.tensor([llm.tokenizer(text)["input_ids"]]), zeros()))
        assert (got == {EOS}) is ends


def test_special_tokens_and_padding_are_never_part_of_a_text(llm):
    bound = make(llm, {"type": "string"}).for_prompt(0)
    inside = bound(torch.tensor([llm.tokenizer('"<|im')["input_ids"]]), zeros())
    assert not allowed(inside) & {256, EOS, *range(258, VOCAB)}
    assert len(allowed(inside)) > 100


def test_scores_are_left_as_they_were(llm):
    scores = torch.randn(1, VOCAB)
    before = scores.clone()
    out = make(llm, CHOICE).for_prompt(0)(torch.empty(1, 0, dtype=torch.int64), scores)
    assert torch.equal(scores, before)
    kept = torch.isfinite(out)
    assert 0 < int(kept.sum()) < VOCAB
    assert torch.equal(out[kept], scores[kept])


def test_matching_is_silent(llm, capfd):
    bound = make(llm, {"type": "boolean"}).for_prompt(0)
    for ids in ([256], [EOS], [10**6], [VOCAB - 1], [5], [EOS, EOS]):
        bound(torch.tensor([ids]), zeros())
    assert capfd.readouterr() == ("", "")


# -- refusals ----------------------------------------------------------------------------------


def test_requests_share_a_grammar_and_each_has_a_matcher_of_its_own(llm):
    made = make(llm, CHOICE)
    options = {"processors": [made], "max_new_tokens": 150}
    prompts = ["x", "a longer prompt", "yz"]
    alone = [llm.generate(prompt, **options).tokens for prompt in prompts]
    assert [each.tokens for each in llm.generate_many(prompts, **options)] == alone


REFUSED = {
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "not": {"not": {"type": "integer"}},
    "if": {"type": "object", "properties": {}, "if": {}, "then": {}},
    "contains": {"type": "array", "contains": {"const": 1}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "strange": {"type": "integer", "strange": 1},
    "'pattern' isn't enforced together": {"type": "string", "pattern": "a", "maxLength": 1},
    "'allOf' of several": {"allOf": [{"type": "integer"}, {"minimum": 1}]},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    r"'\$ref' isn't enforced": {"$defs": {"x": {}}, "$ref": "#/$defs/x", "minimum": 5},
    "leads nowhere": {"$ref": "#/$defs/x"},
    "can't be followed": {"$ref": "http://example.com/schema"},
    "without end": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    "'enum' isn't enforced together": {"type": "string", "enum": ["a", 1]},
    "give a 'type'": {"minimum": 5},
    "got 'strange'": {"type": "strange"},
    "'maxLength' isn't enforced on integer": {"type": "integer", "maxLength": 1},
    "multipleOf": {"type": "number", "multipleOf": 0.5},
    "format 'weird'": {"type": "string", "format": "weird"},
    r"'\(\?=a' of a pattern": {"type": "string", "pattern": "(?=a)b"},
    r"stand inside": {"type": "string", "pattern": "^a$|b"},
    "quotes, backslashes": {"type": "string", "pattern": '["x]{2}'},
    r"x22.*can't be enforced": {"type": "string", "pattern": r"\x22"},
    "control characters": {"type": "object", "patternProperties": {r"a\n": {}}},
    "Word boundary": {"type": "string", "pattern": r"a\bb"},
    "'b' is required": {"type": "object", "properties": {"a": {}}, "required": ["b"]},
    "minProperties": {"type": "object", "additionalProperties": {}, "minProperties": 2},
    "minimum greater than maximum": {"type": "integer", "minimum": 5, "maximum": 3},
    "must be an object": {"type": "object", "properties": {"a": 5}},
    "isn't a JSON Schema": {"const": {1, 2}},
    "items must be a boolean or an object|must be an object": {"type": "array", "items": [{}]},
    "must be a list of schemas": {"anyOf": []},
    "false": False,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(llm, message):
    with pytest.raises(OptionError, match=message) as caught:
        make(llm, REFUSED[message])
    assert caught.value.option == "schema"


def test_a_fault_deep_inside_says_where(llm):
    schema = {"type": "array", "items": {"type": "object", "properties": {"a": {"not": {}}}}}
    with pytest.raises(OptionError, match="at #/items/properties/a: 'not' can't be enforced"):
        make(llm, schema)


def test_schemas_that_never_end_or_are_too_deep_are_refused(llm):
    deep: dict = {"type": "integer"}
    for _ in range(5000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(OptionError, match=r"deep|isn't a JSON Schema"):
        make(llm, deep)
    with pytest.raises(OptionError, match="longer than"):
        make(llm, {"enum": ["x" * 70_000]})


def test_what_says_nothing_about_validity_is_let_through(llm):
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "T",
        "type": "object",
        "properties": {"a": {"description": "d", "default": 1, "type": "boolean", "x-order": 3}},
        "required": ["a"],
    }
    assert set(json.loads(answer(llm, make(llm, schema)).text)) == {"a"}


def test_one_of_schemas_that_exclude_each_other_is_enforced(llm):
    tagged = [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, "v": value},
            "required": ["kind", "v"],
        }
        for kind, value in (("n", {"type": "boolean"}), ("s", {"type": "null"}))
    ]
    value = json.loads(answer(llm, make(llm, {"oneOf": tagged})).text)
    assert value in [{"kind": "n", "v": True}, {"kind": "n", "v": False}, {"kind": "s", "v": None}]
    make(llm, {"oneOf": [{"type": "string"}, {"type": "integer"}]})
    make(llm, {"oneOf": [{"const": 1}, {"enum": [2, 3]}]})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 2, "maxLength": 6},
        {"type": "string", "pattern": r"^[^\n\"]{9}$"},
        {"type": "string", "pattern": r"^.{9}$"},
        {"type": "object", "additionalProperties": {}, "maxProperties": 3},
        {"type": "number", "minimum": -3.5, "maximum": 1000},
        {"type": "string", "format": "uri"},
    ],
)
def test_texts_drawn_evenly_from_what_is_allowed_are_json(llm, schema):
    """No model's taste hides a hole: xgrammar itself lets control characters into strings."""
    bound = make(llm, schema).for_prompt(0)
    rng = random.Random(1)
    ended = 0
    for _ in range(25):
        ids: list[int] = []
        while len(ids) < 200 and EOS not in ids:
            choice = allowed(bound(torch.tensor([ids], dtype=torch.int64), zeros()))
            ids.append(EOS if EOS in choice else rng.choice(sorted(choice)))
        if EOS in ids:
            json.loads(llm.tokenizer.decode(ids, skip_special_tokens=True))
            ended += 1
    assert ended > 5


def test_recursive_schemas_work(llm):
    schema = {
        "type": "object",
        "properties": {"v": {"type": "boolean"}, "next": {"$ref": "#"}},
        "required": ["v"],
    }
    bound = make(llm, schema).for_prompt(0)
    text = '{"v": true, "next": {"v": false, "next": {"v": true}}}'
    assert allowed(bound(torch.tensor([llm.tokenizer(text)["input_ids"]]), zeros())) == {EOS}


def test_without_xgrammar_the_extra_is_named(llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(OptionError, match=r"hasten\[grammar\]"):
        grammar.json_object(make_tokenizer(), vocab_size=VOCAB, eos_ids={EOS})


def test_a_model_without_an_end_is_refused(llm):
    with pytest.raises(OptionError, match="no end-of-sequence id"):
        grammar.json_object(llm.tokenizer, vocab_size=VOCAB, eos_ids=())


def test_the_vocabularies_kept_are_bounded(llm):
    for _ in range(8):
        grammar.json_object(make_tokenizer(), vocab_size=VOCAB, eos_ids={EOS})
    assert len(grammar._vocabularies) <= grammar._MOST_VOCABULARIES

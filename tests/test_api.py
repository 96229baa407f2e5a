"""The public surface over a tiny random model: prompts, options, answers, errors; no network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import hasten
from hasten.api import LLM
from hasten.drafters.auto import Auto
from hasten.errors import (
    CapabilityError,
    ContextError,
    DrafterError,
    HastenError,
    ModelError,
    OptionError,
)
from hasten.types import FinishReason, SamplingParams
from tests.targets import tiny_models as tiny
from tests.tiny_llm import CONTEXT, PLAIN, make_model, make_tokenizer, meter, metered, reference


@pytest.fixture(scope="module")
def shared() -> LLM:
    return hasten.load((make_model(), make_tokenizer()))


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    with metered(shared) as counted:
        yield counted


# -- prompts ---------------------------------------------------------------------------------------


def test_text_ids_and_messages_are_the_same_prompt(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hé?"}]
    rendered = "<|im_start|>user\nHé?<|im_end|>\n<|im_start|>assistant\n"
    ids = llm.tokenizer(rendered, add_special_tokens=False)["input_ids"]
    prompts: list[Any] = [
        "Hé?",
        messages,
        ids,
        tuple(ids),
        np.array(ids),
        torch.tensor(ids),
    ]
    answers = [llm.generate(p, **PLAIN) for p in prompts]
    assert {a.prompt_tokens for a in answers} == {tuple(ids)}
    assert {a.tokens for a in answers} == {tuple(reference(llm, ids, 24))}
    raw = llm.generate("Hé?", template=False, **PLAIN)
    assert raw.prompt_tokens == tuple(llm.tokenizer("Hé?")["input_ids"])
    assert raw.tokens == tuple(reference(llm, raw.prompt_tokens, 24))


def test_a_system_message_comes_first(llm: LLM) -> None:
    got = llm.tokenize("Hi", system="Be brief.")
    want = llm.tokenize(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )
    assert got == want
    text = llm.tokenizer.decode(got, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")


@pytest.mark.parametrize(
    ("prompt", "options", "error", "words"),
    [
        ("", {}, ContextError, "empty"),
        ([], {}, ContextError, "empty"),
        ([5] * CONTEXT, {}, ContextError, "no room"),
        ([5] * (CONTEXT + 9), {}, ContextError, f"{CONTEXT + 9} tokens"),
        ([258], {}, ContextError, "0..257"),
        (None, {}, OptionError, "prompt"),
        (3, {}, OptionError, "prompt"),
        ([[5, 6]], {}, OptionError, "one row of ids"),
        (b"hello", {}, OptionError, "prompt: must be text"),
        ([True, False], {}, OptionError, "one row of ids"),
        ([{"role": "user", "content": None}], {}, OptionError, "content is None"),
        ("x", {"logprobs": True}, OptionError, "logprobs"),
        ("x", {"verify": ["match"]}, OptionError, "verify"),
        ([{"role": "user"}], {}, OptionError, "content"),
        ([5, 6], {"system": "x"}, OptionError, "system"),
        ([{"role": "user", "content": "x"}], {"template": False}, OptionError, "template"),
        ("x", {"template": False, "system": "y"}, OptionError, "system"),
        ("x", {"temprature": 1}, OptionError, "temprature: no such option.*temperature"),
        ("x", {"temperature": -1}, OptionError, "temperature"),
        ("x", {"top_p": 0}, OptionError, "top_p"),
        ("x", {"stop": ""}, OptionError, "stop"),
        ("x", {"max_new_tokens": -1}, OptionError, "max_new_tokens"),
        ("x", {"verify": "greedy", "temperature": 1}, OptionError, "verify"),
        ("x", {"verify": "typical"}, OptionError, "verify"),
        ("x", {"method": "nope"}, OptionError, "unknown method 'nope'"),
        ("x", {"method": "prompt-lookup,knots=2"}, OptionError, "prompt-lookup.knots"),
        ("x", {"params": {"temperature": 1}}, OptionError, "params"),
        ("x", {"logit_bias": {999: 1.0}}, OptionError, "logit_bias"),
        ("x", {"stop_token_ids": [999]}, OptionError, "stop_token_ids"),
    ],
)
def test_bad_input_is_refused_by_name_before_any_pass(
    llm: LLM, prompt: Any, options: dict[str, Any], error: type[HastenError], words: str
) -> None:
    for ask in (llm.generate, llm.stream):
        with pytest.raises(error, match=words):
            ask(prompt, **options)
    assert meter(llm).rows == 0


def test_text_without_a_tokenizer_and_messages_without_a_template_are_refused() -> None:
    bare = hasten.load((make_model(), make_tokenizer(template=None)))
    with pytest.raises(OptionError, match="chat template"):
        bare.generate([{"role": "user", "content": "x"}])
    with pytest.raises(OptionError, match="system"):
        bare.generate("x", system="y")
    assert bare.tokenize("x") == bare.tokenizer("x")["input_ids"]


def test_a_model_that_is_none_is_refused() -> None:
    with pytest.raises(ModelError):
        hasten.load("./no/such/folder")
    with pytest.raises(OptionError, match="unknown method"):
        hasten.load("./no/such/folder", method="nope")


# -- answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ar", "prompt-lookup", "prompt-lookup:hf,nodes=4"])
def test_every_method_gives_plain_decodings_answer(llm: LLM, method: str) -> None:
    ids = [10, 20, 30, 10, 20]
    got = llm.generate(ids, method=method, trace=True, **PLAIN)
    assert got.tokens == tuple(reference(llm, ids, 24))
    assert got.method == method
    assert got.finish_reason is FinishReason.LENGTH
    assert got.metrics.new_tokens == 24
    assert sum(len(r.emitted) for r in got.rounds) == 24
    assert got.text == llm.tokenizer.decode(got.tokens, skip_special_tokens=True)
    assert llm.generate(ids, **PLAIN).rounds == ()


def test_no_new_tokens_is_an_empty_answer(llm: LLM) -> None:
    got = llm.generate("Hi", max_new_tokens=0, logprobs=1)
    assert (got.tokens, got.text, got.finish_reason) == ((), "", FinishReason.LENGTH)
    assert got.logprobs == ()
    assert list(llm.stream("Hi", max_new_tokens=0)) == []
    assert llm.chat([{"role": "user", "content": "Hi"}], max_new_tokens=0).tokens == ()


def test_the_context_limit_ends_an_answer(llm: LLM) -> None:
    ids = [7] * (CONTEXT - 3)
    got = llm.generate(ids, max_new_tokens=50, ignore_eos=True)
    assert len(got.tokens) == 3
    assert got.finish_reason is FinishReason.LENGTH


def test_an_answer_has_the_seed_that_repeats_it(llm: LLM) -> None:
    one = llm.generate("Hi", temperature=1.0, **PLAIN)
    two = llm.generate("Hi", temperature=1.0, **PLAIN)
    assert one.tokens != two.tokens
    assert llm.generate("Hi", temperature=1.0, seed=one.seed, **PLAIN).tokens == one.tokens
    for verify in ("match", "rejection"):
        again = llm.generate("Hi", temperature=1.0, seed=one.seed, verify=verify, **PLAIN)
        assert again.tokens == one.tokens, "prompt lookup draws nothing"


def test_params_and_keywords_are_merged(llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    assert len(llm.generate("Hi", params=params).tokens) == 3
    assert len(llm.generate("Hi", params=params, max_new_tokens=5).tokens) == 5
    assert params.max_new_tokens == 3


def test_logprobs_come_one_a_token(llm: LLM) -> None:
    got = llm.generate("Hi", logprobs=2, **PLAIN)
    assert got.logprobs is not None
    assert [p.token for p in got.logprobs] == list(got.tokens)
    assert all(p.top[0][0] == p.token and len(p.top) == 2 for p in got.logprobs)
    assert llm.generate("Hi", **PLAIN).logprobs is None


@pytest.mark.parametrize("kind", ["none", "one", "list"])
def test_end_ids_may_be_none_one_or_a_list(kind: str) -> None:
    free = hasten.load((make_model(eos_token_id=None), make_tokenizer()))
    plain = free.generate([9, 8, 7], max_new_tokens=12)
    assert len(plain.tokens) == 12
    assert free.target.info.eos_ids == frozenset()
    first = next(i for i in range(3, 12) if plain.tokens[i] not in plain.tokens[:i])
    end = plain.tokens[first]
    eos = {"none": None, "one": end, "list": [end, 257]}[kind]
    got = hasten.load((make_model(eos_token_id=eos), make_tokenizer())).generate(
        [9, 8, 7], max_new_tokens=12
    )
    if kind == "none":
        assert got.tokens == plain.tokens
        return
    assert got.tokens == plain.tokens[: first + 1]
    assert (got.finish_reason, got.stop_reason) == (FinishReason.STOP, end)


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.generate("Hi there", **PLAIN)
    stop = whole.text[5:8]
    got = llm.generate("Hi there", stop=[stop], **PLAIN)
    assert got.text == whole.text[: whole.text.index(stop)]
    assert (got.finish_reason, got.stop_reason) == (FinishReason.STOP, stop)
    assert got.tokens == whole.tokens[: len(got.tokens)]


# -- many prompts ----------------------------------------------------------------------------------


def test_many_prompts_are_answered_as_each_alone(llm: LLM) -> None:
    prompts: list[Any] = ["Hi", [5, 6, 7], "abcabcabc", [{"role": "user", "content": "Hi"}]]
    each = [
        SamplingParams(max_new_tokens=20, ignore_eos=True),
        SamplingParams(max_new_tokens=3, ignore_eos=True),
        SamplingParams(max_new_tokens=15, temperature=1.0, seed=5),
        SamplingParams(max_new_tokens=0),
    ]
    together = llm.generate_many(prompts, params=each)
    for prompt, params, got in zip(prompts, each, together, strict=True):
        alone = llm.generate(prompt, params=params)
        assert got.tokens == alone.tokens
        assert (got.text, got.finish_reason) == (alone.text, alone.finish_reason)
    same = llm.generate_many(["Hi", "Hi"], max_new_tokens=4, ignore_eos=True)
    assert same[0].tokens == same[1].tokens
    assert llm.generate_many([]) == []


def test_prompts_without_a_seed_draw_their_own(llm: LLM) -> None:
    one, two = llm.generate_many(["Hi", "Hi"], temperature=1.0, **PLAIN)
    assert one.seed != two.seed
    assert one.tokens != two.tokens


def test_params_must_fit_the_prompts(llm: LLM) -> None:
    with pytest.raises(OptionError, match="params: 1 given for 2"):
        llm.generate_many(["a", "b"], params=[SamplingParams()])
    with pytest.raises(OptionError, match="prompts: must be a list"):
        llm.generate_many("ab")


# -- errors ----------------------------------------------------------------------------------------


def test_after_a_failing_request_the_next_one_is_right(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = llm.generate("Hi", **PLAIN).tokens
    llm.reset_state()  # what earlier batches taught may keep a new one from drafting

    def fail(*args: Any) -> Any:
        raise RuntimeError("broken")

    messages = [{"role": "user", "content": "Hi"}]
    with monkeypatch.context() as patch:
        patch.setattr(Auto, "propose", fail)
        asks: list[Any] = [
            lambda: llm.generate("Hi", **PLAIN),
            lambda: llm.chat(messages, **PLAIN),
            lambda: llm.generate_many(["Hi", "Ho"], **PLAIN),
        ]
        for ask in asks:
            with pytest.raises(DrafterError, match="auto"):
                ask()
            assert meter(llm).live == 0
    assert llm.generate("Hi", **PLAIN).tokens == want


def test_the_users_model_and_tokenizer_are_left_as_they_were() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    config, generation = model.config.to_dict(), model.generation_config.to_dict()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    llm = hasten.load((model, tokenizer))
    llm.generate("Hi", temperature=1.0, stop=["x"], **PLAIN)
    with pytest.raises(OptionError):
        llm.generate("Hi", temperature=-1)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.to_dict() == config
    assert model.generation_config.to_dict() == generation
    assert all(torch.equal(v, weights[n]) for n, v in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    assert not model.training


def test_prompts_may_be_arrays_with_a_batch_of_one(llm: LLM) -> None:
    ids = llm.tokenize("Hi")
    assert llm.tokenize(torch.tensor([ids])) == ids  # type: ignore[arg-type]
    assert llm.tokenize(list(np.array(ids))) == ids


def test_a_template_that_refuses_is_told_as_an_option(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ raise_exception('no system role here') }}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    with pytest.raises(OptionError, match=r"messages: .*no system role here"):
        llm.tokenize([{"role": "system", "content": "x"}])


def test_any_seed_however_long_draws(llm: LLM) -> None:
    assert len(llm.generate("x", max_new_tokens=3, temperature=1.0, seed=-(10**5000)).tokens) == 3


def test_a_broken_model_is_told_and_no_answer_made_up() -> None:
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    broken = hasten.load((model, make_tokenizer()))
    for options in ({}, {"temperature": 1.0}, {"repetition_penalty": 1.2}):
        with pytest.raises(ModelError, match="NaN"):
            broken.generate([5, 6, 7], max_new_tokens=4, **options)


def test_load_names_an_option_it_does_not_have() -> None:
    with pytest.raises(OptionError, match=r"dtpye: no such option of load.*dtype"):
        hasten.load((make_model(), make_tokenizer()), dtpye="float32")


def test_a_model_that_cannot_be_accelerated_is_decoded_plainly_unless_a_method_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny.build(tiny.mamba2)
    llm = hasten.load((model, make_tokenizer()))
    assert str(llm.method) == "auto"
    assert llm.generate([5, 6, 7], max_new_tokens=4).metrics.drafted == 0
    assert "plain decoding" in caplog.text
    assert len(llm.generate([5, 6, 7], max_new_tokens=4).tokens) == 4
    with pytest.raises(CapabilityError, match="rollback"):
        hasten.load((model, make_tokenizer()), method="prompt-lookup")

"""The public surface over a tiny random Llama and a byte-level tokenizer: no network."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import hasten
from hasten.api import LLM
from hasten.drafters.prompt_lookup import PromptLookup
from hasten.errors import ContextError, DrafterError, HastenError, ModelError, OptionError
from hasten.types import FinishReason, SamplingParams

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 192
PLAIN: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=core, additional_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    tokenizer.chat_template = template
    return tokenizer


def make_model(**changes: Any) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.4,
        "bos_token_id": None,
        "eos_token_id": 257,
        "pad_token_id": None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return hf.LlamaForCausalLM(hf.LlamaConfig(**{**shape, **changes})).eval()


class Meter:
    """Counts a target's open sequences and the prompt rows it runs."""

    def __init__(self, llm: LLM) -> None:
        self.live = self.rows = 0
        target: Any = llm.target
        self._open, self._close, self._prefill = target.open, target.close, target.prefill
        self._known: set[int] = set()
        target.open, target.close, target.prefill = self.open, self.close, self.prefill

    def open(self, *args: Any, **kwargs: Any) -> Any:
        sequence = self._open(*args, **kwargs)
        self._known.add(id(sequence))
        self.live += 1
        return sequence

    def close(self, sequence: Any) -> None:
        if id(sequence) in self._known:
            self._known.remove(id(sequence))
            self.live -= 1
        self._close(sequence)

    def prefill(self, sequence: Any, tokens: Sequence[int], **kwargs: Any) -> Any:
        self.rows += len(tokens)
        return self._prefill(sequence, tokens, **kwargs)


@pytest.fixture(scope="module")
def shared() -> LLM:
    return hasten.load((make_model(), make_tokenizer()))


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The LLM, without anything kept; a test that leaves a sequence open fails."""
    target: Any = shared.target
    before = {name: getattr(target, name) for name in ("open", "close", "prefill")}
    meter = Meter(shared)
    yield shared
    shared.forget()
    for name, method in before.items():
        setattr(target, name, method)
    assert meter.live == 0, "a sequence was left open"


def reference(llm: LLM, ids: Sequence[int], count: int) -> list[int]:
    """Greedy ids by whole passes, without a cache."""
    out = list(ids)
    target = llm.target
    for _ in range(count):
        sequence = target.open()
        logits = target.prefill(sequence, out).logits
        target.close(sequence)
        assert logits is not None
        out.append(int(logits[-1].argmax()))
    return out[len(ids) :]


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
        ([[5, 6]], {}, OptionError, "role"),
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
    target: Any = llm.target
    for ask in (llm.generate, llm.stream):
        with pytest.raises(error, match=words):
            ask(prompt, **options)
    assert target.prefill.__self__.rows == 0


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
    target: Any = llm.target
    stream = llm.stream("Hi", **PLAIN)
    assert target.prefill.__self__.live == 0
    next(stream)
    assert target.prefill.__self__.live == 1
    stream.close()
    assert target.prefill.__self__.live == 0


@pytest.mark.parametrize("ask", ["stream", "chat_stream"])
def test_an_abandoned_stream_frees_its_cache_at_once(llm: LLM, ask: str) -> None:
    target: Any = llm.target
    meter = target.prefill.__self__
    messages: Any = [{"role": "user", "content": "Hi"}]
    gc.disable()
    try:
        stream = getattr(llm, ask)(messages, **PLAIN)
        next(stream)
        assert meter.live == 1
        del stream
        assert meter.live == 0
    finally:
        gc.enable()
    with getattr(llm, ask)(messages, **PLAIN) as stream:
        next(stream)
    assert meter.live == 0
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
    target: Any = llm.target
    meter = target.prefill.__self__
    messages: list[dict[str, str]] = []
    answers, rows = [], []
    for text in ("Hi", "And then?", "Why?"):
        messages.append({"role": "user", "content": text})
        before = meter.rows
        if fresh:
            llm.forget()
        got = llm.chat(messages, max_new_tokens=8, bad_words_ids=[[257]])
        answers.append(got.tokens)
        rows.append(meter.rows - before)
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
    with pytest.raises(OptionError, match="prompts: is one text"):
        llm.generate_many("ab")


# -- errors ----------------------------------------------------------------------------------------


def test_after_a_failing_request_the_next_one_is_right(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = llm.generate("Hi", **PLAIN).tokens
    target: Any = llm.target

    def fail(*args: Any) -> Any:
        raise RuntimeError("broken")

    messages = [{"role": "user", "content": "Hi"}]
    with monkeypatch.context() as patch:
        patch.setattr(PromptLookup, "propose", fail)
        asks: list[Any] = [
            lambda: llm.generate("Hi", **PLAIN),
            lambda: llm.chat(messages, **PLAIN),
            lambda: llm.generate_many(["Hi", "Ho"], **PLAIN),
        ]
        for ask in asks:
            with pytest.raises(DrafterError, match="prompt-lookup"):
                ask()
            assert target.prefill.__self__.live == 0
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

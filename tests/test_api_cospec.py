"""``cospec`` where every other method is: generate, streams, batches, the worker, other doors."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hasten
from hasten import methods
from hasten.api import LLM
from hasten.arbitration.rules import Always, Random, Rule, Target
from hasten.errors import OptionError
from hasten.worker import Worker
from tests.arbitration.cases import Alternating
from tests.tiny_llm import make_model, make_tokenizer, meter, metered

OPEN = ",gate=0,consecutive=0"
GREEDY: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
SAMPLED: dict[str, Any] = {**GREEDY, "temperature": 0.9, "seed": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft model: other weights, the same vocabulary."""
    folder = tmp_path_factory.mktemp("draft")
    make_model(num_hidden_layers=1).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=["fused", "transformers"])
def shared(request: Any) -> LLM:
    return hasten.load((make_model(), make_tokenizer()), method="ar", engine=request.param)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    with metered(shared) as counted:
        yield counted


@pytest.fixture
def draft(llm: LLM, folder: str) -> str:
    """What drafts: lower layers where they can, else the draft model."""
    own = "head=own,exits=1"
    return own if llm.target.capabilities.layer_ranges else f"draft=draft-model,model={folder}"


# -- C1 and C2 on models ---------------------------------------------------------------------------


def prompts(count: int) -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(256) for _ in range(2 + n % 9)] for n in range(count)]


@pytest.mark.slow
def test_the_target_always_is_plain_decoding_on_fifty_prompts(
    llm: LLM, draft: str, folder: str
) -> None:
    asked = prompts(50)
    want = [r.tokens for r in llm.generate_many(asked, method="ar", **GREEDY)]
    for how in (draft, f"draft=draft-model,model={folder},length=3,bonus=off"):
        got = llm.generate_many(asked, method=f"cospec:target,{how}", **GREEDY)
        assert [r.tokens for r in got] == want
        assert sum(r.metrics.mismatches for r in got) > 50
        assert not any(r.overrides for r in got)


def test_the_draft_always_without_bonus_is_the_draft_models_own_text(llm: LLM, folder: str) -> None:
    small = hasten.load(folder, method="ar", dtype="float32", device="cpu")
    asked = prompts(50)
    method = f"cospec:draft,draft=draft-model,model={folder}"
    for params in (GREEDY, {"max_new_tokens": 9}):  # with ends of sequences too
        want = [r.tokens for r in small.generate_many(asked, **params)]
        got = llm.generate_many(asked, method=method, **params)
        assert [r.tokens for r in got] == want


@pytest.mark.slow
def test_the_embedded_model_is_plain_on_fifty_prompts(smollm2: Any) -> None:
    llm = LLM(smollm2, method="ar")
    generator = random.Random(1)
    asked = [[generator.randrange(5000) for _ in range(6)] for _ in range(50)]
    params = {"max_new_tokens": 8, "ignore_eos": True}
    want = [r.tokens for r in llm.generate_many(asked, **params)]
    got = llm.generate_many(asked, method="cospec:target,exits=2", **params)
    assert [r.tokens for r in got] == want
    assert sum(r.metrics.mismatches for r in got) > 50


# -- C3 --------------------------------------------------------------------------------------------


def test_laws_after_an_override_are_those_of_a_fresh_pass(llm: LLM, draft: str) -> None:
    seen: list[tuple[int, torch.Tensor]] = []

    class Watching(Alternating):
        def keep(self, m: Any) -> bool:
            seen.append((m.position, m.log_p.clone()))
            return super().keep(m)

    got = llm.generate("hello", method=f"cospec:target,{draft}{OPEN}", rule=Watching(), **GREEDY)
    assert got.overrides
    for position, log_p in seen:
        if position >= len(got.tokens):
            continue
        sequence = llm.target.open()
        passed = llm.target.prefill(sequence, [*got.prompt_tokens, *got.tokens[:position]])
        llm.target.close(sequence)
        assert passed.logits is not None
        want = torch.log_softmax(passed.logits[-1].float(), 0)
        assert float((log_p - want).abs().max()) < 1e-3


# -- what comes out --------------------------------------------------------------------------------


def test_results_say_where_the_draft_overrode(llm: LLM, draft: str) -> None:
    method = f"cospec:random,{draft}{OPEN}"
    got = llm.generate("hello", method=method, seed=1, trace=True, **GREEDY)
    told = [d for made in got.rounds for d in made.decisions]
    assert got.overrides == tuple(d for d in told if d.kept)
    assert 0 < len(got.overrides) < len(told)
    assert (got.metrics.overrides, got.metrics.mismatches) == (len(got.overrides), len(told))
    assert got.metrics.override_rate == pytest.approx(len(got.overrides) / len(told))
    for each in got.overrides:
        assert got.tokens[each.position] == each.drafted != each.target
    assert [d.position for d in told] == sorted({d.position for d in told})
    plain = llm.generate("hello", method="ar", **GREEDY)
    assert (plain.overrides, plain.metrics.mismatches) == ((), 0)


def test_log_probabilities_are_the_targets_own(llm: LLM, draft: str) -> None:
    method = f"cospec:target,{draft}{OPEN}"
    got = llm.generate("hello", method=method, rule=Alternating(), logprobs=2, **GREEDY)
    assert got.logprobs is not None
    assert [each.token for each in got.logprobs] == list(got.tokens)
    for each in got.overrides:
        ids = [*got.prompt_tokens, *got.tokens[: each.position]]
        sequence = llm.target.open()
        passed = llm.target.prefill(sequence, ids)
        llm.target.close(sequence)
        assert passed.logits is not None
        want = float(torch.log_softmax(passed.logits[-1].float(), 0)[each.drafted])
        assert got.logprobs[each.position].logprob == pytest.approx(want, abs=1e-3)
        assert got.logprobs[each.position].top[0][0] == each.target


def test_figures_count_the_first_pass_before_the_first_token(llm: LLM, draft: str) -> None:
    got = llm.generate("hello", method=f"cospec:target,{draft}", trace=True, **GREEDY).metrics
    assert got.pass_tokens == got.new_tokens == 20
    assert got.accepted + got.target_passes == got.pass_tokens
    assert got.time_to_first_token_s > got.prefill_s
    plain = llm.generate("hello", method="ar", **GREEDY).metrics
    assert plain.time_to_first_token_s == plain.prefill_s


# -- together with others --------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_the_same_answer_however_it_is_asked_for(
    llm: LLM, draft: str, params: dict[str, Any]
) -> None:
    method = f"cospec:random,{draft},rate=0.4{OPEN}"
    params = {"method": method, **params, "seed": 5}
    want = llm.generate("abc", **params)
    assert want.overrides
    stream = llm.stream("abc", **params)
    assert "".join(stream) == want.text
    assert (stream.result.tokens, stream.result.overrides) == (want.tokens, want.overrides)
    together = llm.generate_many(["abc", "xyz", "abc"], **params)
    assert [each.tokens == want.tokens for each in together] == [True, False, True]
    assert together[2].overrides == want.overrides
    assert llm.chat([{"role": "user", "content": "abc"}], **params).tokens == want.tokens
    assert asyncio.run(llm.agenerate("abc", **params)).tokens == want.tokens
    worker = Worker(llm, most=3)
    tickets = [worker.submit("abc", **params) for _ in range(2)]
    tickets += worker.submit_n("abc", 2, **params)
    plain = worker.submit("abc", **{**params, "method": "ar"})
    assert [t.wait().tokens for t in tickets[:3]] == [want.tokens] * 3
    assert plain.wait().tokens == llm.generate("abc", **{**params, "method": "ar"}).tokens
    worker.close()


def test_a_conversation_goes_on_over_its_kept_cache(llm: LLM, draft: str) -> None:
    method = f"cospec:target,{draft}{OPEN}"
    messages: list[dict[str, str]] = []
    rows = []
    for text in ("One?", "And two?", "Three."):
        messages.append({"role": "user", "content": text})
        before = meter(llm).rows
        got = llm.chat(messages, method=method, rule=Alternating(), **GREEDY)
        rows.append(meter(llm).rows - before)
        llm_alone = llm.generate(messages, method=method, rule=Alternating(), **GREEDY)
        assert got.tokens == llm_alone.tokens
        messages.append({"role": "assistant", "content": got.text})
    assert rows[2] < len(llm.tokenize(messages[:5])), "earlier turns don't run again"


def test_a_stream_that_is_dropped_leaves_nothing(llm: LLM, draft: str) -> None:
    stream = llm.stream("abc", method=f"cospec:draft,{draft}", **GREEDY)
    next(stream)
    stream.close()
    failing = llm.stream("abc", method=f"cospec:target,{draft}{OPEN}", rule=Broken(), **GREEDY)
    with pytest.raises(ZeroDivisionError):
        failing.finish()


class Broken(Rule):
    def keep(self, m: Any) -> bool:
        return bool(1 / 0)


def test_one_rule_for_many_prompts_keeps_no_state(llm: LLM, draft: str) -> None:
    method, rule = f"cospec:target,{draft}{OPEN}", Alternating()
    asked = ["abc", "hello", "xyz"]
    many = llm.generate_many(asked, method=method, rule=rule, **GREEDY)
    alone = [llm.generate(p, method=method, rule=rule, **GREEDY).tokens for p in asked]
    assert [r.tokens for r in many] == alone


def test_sampling_with_the_rule_target_accepts_and_draws_as_ever(llm: LLM, draft: str) -> None:
    """Equal in law to plain sampling, not by token; so over many seeds the first token's is."""
    plain, ours = (
        [
            r.tokens[0]
            for r in llm.generate_many(
                ["abc"] * 150,
                params=[
                    hasten.SamplingParams(max_new_tokens=2, temperature=0.6, top_k=3, seed=s)
                    for s in range(start, start + 150)
                ],
                method=method,
            )
        ]
        for method, start in (("ar", 0), (f"cospec:target,{draft}", 1000))
    )
    tokens = set(plain) | set(ours)
    apart = sum(abs(plain.count(t) - ours.count(t)) for t in tokens) / 300
    assert apart < 0.2


# -- other doors -----------------------------------------------------------------------------------


def test_what_plays_no_part_is_refused_before_any_pass(llm: LLM, draft: str) -> None:
    for verify in ("greedy", "match", "rejection"):
        with pytest.raises(OptionError, match="verify: plays no part in cospec"):
            llm.generate("abc", method=f"cospec:target,{draft}", verify=verify)
    with pytest.raises(OptionError, match="rule: plays no part in ar"):
        llm.generate("abc", method="ar", rule=Target())
    with pytest.raises(OptionError, match="no such option"):
        llm.generate("abc", method="ar", arbiter="x")
    with pytest.raises(OptionError, match=r"rule: must be a hasten\.arbitration\.rules\.Rule"):
        llm.generate("abc", method=f"cospec:target,{draft}", rule="typical")
    assert meter(llm).rows == 0


def test_the_server_offers_it_only_by_name(shared: LLM) -> None:
    from hasten.serve.service import OFFERED, offered_methods
    from hasten.serve.settings import ServerOptions

    offered = {spec.name for spec in offered_methods(shared, ServerOptions())}
    assert "racer" in offered
    for name in ("cospec", "smc"):
        assert not any(each.startswith(name) for each in OFFERED)
        assert methods.is_lossy(methods.parse(name))
        assert name not in offered


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_told_of_it_answers_as_the_library(llm: LLM, draft: str, stream: bool) -> None:
    pytest.importorskip("fastapi", reason="needs the extra serve")
    from tests.serve.live import CHAT, HELLO, serving

    method = f"cospec:random,{draft},rate=0.4{OPEN}"
    want = llm.generate(HELLO, method=method, max_new_tokens=20, seed=5)
    body = {"messages": HELLO, "max_tokens": 20, "seed": 5, "temperature": 0}
    with serving(llm, methods=(method,)) as live:
        assert live.post(CHAT, {**body, "model": live.model, "method": "cospec"}).status_code == 400
        asked = {**body, "model": live.model, "method": method, "stream": stream}
        got = live.post(CHAT, asked)
        assert got.status_code == 200, got.text
        if stream:
            lines = [
                x.removeprefix("data: ") for x in got.text.splitlines() if x.startswith("data: {")
            ]
            pieces = [json.loads(x)["choices"] for x in lines]
            text = "".join(c[0]["delta"].get("content") or "" for c in pieces if c)
        else:
            text = got.json()["choices"][0]["message"]["content"]
    assert text == want.text


def test_engines_that_verify_themselves_refuse_it(shared: LLM) -> None:
    from hasten.plugins.transformers import speculate

    model, tokenizer = make_model(), make_tokenizer()
    fast = speculate("cospec:target,head=own,exits=1", tokenizer=tokenizer, engine="fused")
    with pytest.raises(OptionError, match="method"):
        model.generate(
            torch.tensor([[1, 2, 3]]), max_new_tokens=3, custom_generate=fast, pad_token_id=0
        )


def test_auto_never_picks_it(llm: LLM) -> None:
    assert methods.get("cospec").arbitrates
    others = {name for name, made in methods.all_methods().items() if made.arbitrates}
    assert others == {"cospec"}
    assert llm.generate("abc", method="ar", **GREEDY).overrides == ()


def test_python_rules_need_nothing_but_a_word(llm: LLM, draft: str) -> None:
    method = f"cospec:target,{draft}{OPEN}"
    free = llm.generate("abc", method=method, rule=Always(), **GREEDY)
    assert free.metrics.overrides == free.metrics.mismatches > 0
    half = llm.generate("abc", method=method, rule=Random(0.5), seed=3, **GREEDY)
    again = llm.generate("abc", method=method, rule=Random(0.5), seed=3, **GREEDY)
    assert half.tokens == again.tokens

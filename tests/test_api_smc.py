"""`smc` where every other method is: generate, streams, batches, the worker, the command line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import hasten
from hasten.api import LLM
from hasten.errors import OptionError
from hasten.worker import Worker
from tests.tiny_llm import make_model, make_tokenizer, metered

METHOD = "smc,draft=self,particles=3,length=2"
DRAWN: dict[str, Any] = {"max_new_tokens": 14, "temperature": 1.0, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module", params=["fused", "transformers"])
def shared(request: Any) -> LLM:
    return hasten.load((make_model(), make_tokenizer()), method=METHOD, engine=request.param)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    with metered(shared) as counted:
        yield counted


def test_an_answer_comes_with_its_population(llm: LLM) -> None:
    result = llm.generate("abc", **DRAWN)
    assert len(result.tokens) == 14 == result.metrics.new_tokens
    assert result.finish_reason == "length"
    assert len(result.population.answers) == 3
    assert result.population.answers[result.population.picked].tokens == result.tokens
    assert sum(each.weight for each in result.population.answers) == pytest.approx(1)
    assert llm.generate("abc", method="ar", **DRAWN).population is None


def test_the_same_seed_gives_the_same_answer_however_it_is_asked_for(llm: LLM) -> None:
    want = llm.generate("abc", **DRAWN)
    stream = llm.stream("abc", **DRAWN)
    assert "".join(stream) == want.text
    assert stream.result.tokens == want.tokens
    together = llm.generate_many(["abc", "xyz", "abc"], **DRAWN)
    assert [each.tokens == want.tokens for each in together] == [True, False, True]
    assert llm.chat([{"role": "user", "content": "abc"}], **DRAWN).tokens == want.tokens


def test_beside_other_methods_each_gets_its_own_answer(llm: LLM) -> None:
    want = [llm.generate("abc", method=m, **DRAWN).tokens for m in (METHOD, "ar", "racer,nodes=4")]
    worker = Worker(llm, most=3)
    tickets = [
        worker.submit("abc", method=m, **DRAWN) for m in (METHOD, "ar", "racer,nodes=4", METHOD)
    ]
    assert [t.wait().tokens for t in tickets] == [*want, want[0]]
    cancelled = worker.submit("abc", **{**DRAWN, "max_new_tokens": 100})
    next(iter(cancelled))
    cancelled.cancel()
    worker.close()


def test_a_draft_that_looks_at_the_prompt_gets_all_of_it(llm: LLM) -> None:
    method = "smc,draft=early-exit,head=own,exits=1,particles=3,length=2"
    if not llm.target.capabilities.layer_ranges:
        pytest.skip("drafting from lower layers needs layer ranges")
    want = [llm.generate("abcabc" * 4, method=method, **{**DRAWN, "seed": 5 + i}).tokens
            for i in range(3)]  # fmt: skip
    worker = Worker(llm, most=3)
    tickets = worker.submit_n("abcabc" * 4, 3, method=method, **DRAWN)
    assert [t.wait().tokens for t in tickets] == want
    for _ in range(2):
        again = worker.submit("abcabc" * 4, method=method, scope="k", **DRAWN)
        assert again.wait().tokens == want[0]
    worker.close()


def test_what_makes_no_sense_is_refused_by_name_before_any_pass(llm: LLM) -> None:
    with pytest.raises(OptionError, match="temperature"):
        llm.generate("abc", max_new_tokens=4)
    with pytest.raises(OptionError, match="verify"):
        llm.generate("abc", verify="match", **DRAWN)
    with pytest.raises(OptionError, match=r"smc\.particles"):
        llm.generate("abc", method="smc,draft=self,particles=0", **DRAWN)


def test_it_says_that_it_is_not_lossless() -> None:
    from hasten.methods import get

    assert get("smc").lossless == "no (bounded)"

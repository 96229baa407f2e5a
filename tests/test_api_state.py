"""What methods learn across requests, and that an LLM can forget it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import hasten
from hasten.api import LLM
from hasten.errors import OptionError
from tests.tiny_llm import PLAIN, make_model, make_tokenizer, metered

SESSION = "racer,nodes=8,scope=session"
MESSAGES: Any = [{"role": "user", "content": "abcabcabc"}]


@pytest.fixture(scope="module")
def shared() -> LLM:
    return hasten.load((make_model(), make_tokenizer()), method="ar")


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    with metered(shared) as counted:
        counted.reset_state()
        yield counted


def _passes(llm: LLM, method: str = SESSION) -> int:
    passes: int = llm.generate("abcabcabc", method=method, **PLAIN).metrics.target_passes
    return passes


def test_a_session_learns_and_reset_state_makes_it_cold_again(llm: LLM) -> None:
    cold = _passes(llm)
    assert _passes(llm) < cold
    llm.reset_state()
    assert _passes(llm) == cold


def test_one_method_can_be_reset_alone(llm: LLM) -> None:
    other = "recycling,nodes=8,scope=session"
    cold, cold_other = _passes(llm), _passes(llm, other)
    llm.reset_state(SESSION)
    assert _passes(llm) == cold
    assert _passes(llm, other) < cold_other
    llm.reset_state("ar")  # has nothing to forget
    with pytest.raises(OptionError, match="nope"):
        llm.reset_state("nope")


def test_forget_ends_the_session_and_not_more(llm: LLM) -> None:
    everywhere = "racer,nodes=8,scope=global"
    cold = _passes(llm)
    llm.reset_state(everywhere)
    cold_everywhere = _passes(llm, everywhere)
    llm.forget()
    assert _passes(llm) == cold
    assert _passes(llm, everywhere) < cold_everywhere
    llm.reset_state(everywhere)
    assert _passes(llm, everywhere) == cold_everywhere


def test_a_conversations_turns_do_not_end_the_session(llm: LLM) -> None:
    """Each turn puts the cache of the one before away; what was learned stays."""
    first = llm.chat(MESSAGES, method=SESSION, **PLAIN)
    again = llm.chat(MESSAGES, method=SESSION, **PLAIN)
    assert again.tokens == first.tokens
    assert again.metrics.target_passes < first.metrics.target_passes

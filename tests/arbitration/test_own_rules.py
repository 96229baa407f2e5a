"""Rules of a user's own: what they say is checked, and what a request forbids stays forbidden."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hasten.arbitration.mismatch import Mismatch
from hasten.arbitration.rules import Rule
from hasten.errors import OptionError
from hasten.types import SamplingParams
from tests.arbitration.cases import GREEDY, SAMPLED, run, verifier
from tests.conformance.harness import prompt_of
from tests.conformance.toy_target import ToyTarget

PROMPTS = [prompt_of(seed) for seed in range(10)]


def tokens(rule: Rule, params: SamplingParams, prompts: Sequence[list[int]] = PROMPTS) -> set[int]:
    """All that is answered under a rule."""
    return {
        t for prompt in prompts for t in run(ToyTarget(), prompt, params, verifier(rule)).tokens
    }


class Saying(Rule):
    """Says this at every mismatch."""

    def __init__(self, word: Any) -> None:
        self.word = word

    def keep(self, m: Mismatch) -> bool:
        word: bool = self.word
        return word


class Giving(Rule):
    """Emits from what a function makes of the mismatch."""

    emits = True

    def __init__(self, make: Callable[[Mismatch], Any]) -> None:
        self.make = make

    def law(self, m: Mismatch) -> torch.Tensor:
        law: torch.Tensor = self.make(m)
        return law


@pytest.mark.parametrize("word", [np.bool_(True), torch.tensor(True), 1])
def test_a_word_may_be_any_kind_of_truth(word: Any) -> None:
    got = run(ToyTarget(), PROMPTS[0], GREEDY, verifier(Saying(word)))
    assert got.decisions
    assert all(each.kept for each in got.decisions)


@pytest.mark.parametrize(
    "word", [None, "no", torch.tensor([True, False]), np.array([True, False])], ids=repr
)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_word_that_is_neither_true_nor_false_is_refused(word: Any, params: Any) -> None:
    with pytest.raises(OptionError, match=r"rule: Saying\.keep gave .*not True or False"):
        tokens(Saying(word), params)


BROKEN: dict[str, Callable[[Mismatch], Any]] = {
    "nothing": lambda m: None,
    "a list": lambda m: m.p.tolist(),
    "too short": lambda m: m.p[:5],
    "nan": lambda m: m.p * float("nan"),
    "negative": lambda m: 2 * m.p.new_tensor([1.0, *[0.0] * (len(m.p) - 1)]) - m.p,
    "all zero": lambda m: m.p * 0,
    "logarithms": lambda m: m.log_p,
    "three times a law": lambda m: m.p * 3,
}


@pytest.mark.parametrize("made", BROKEN.values(), ids=BROKEN.keys())
def test_a_law_that_is_none_is_refused(made: Callable[[Mismatch], Any]) -> None:
    with pytest.raises(OptionError, match=r"rule: Giving\.law gave .*probabilities"):
        tokens(Giving(made), SAMPLED)


def test_a_law_in_any_precision_is_one() -> None:
    for kind in (torch.float64, torch.float16):
        rule = Giving(lambda m, kind=kind: m.q.to(kind))
        assert run(ToyTarget(), PROMPTS[0], SAMPLED, verifier(rule)).tokens


def test_forbidden_tokens_are_never_drawn_from_a_rules_law() -> None:
    banned, few = set(range(2, 12)), PROMPTS[:4]
    params = dataclasses.replace(SAMPLED, bad_words_ids=tuple((t,) for t in banned))

    def only_forbidden(m: Mismatch) -> torch.Tensor:
        return torch.nn.functional.normalize((m.p == 0).float(), p=1, dim=0)

    assert tokens(Giving(lambda m: m.p), SAMPLED, few) & banned
    for make in (lambda m: torch.ones_like(m.p) / len(m.p), lambda m: m.q, only_forbidden):
        got = tokens(Giving(make), params, few)
        assert got
        assert not got & banned

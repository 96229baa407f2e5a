"""Targets as functions of a prefix, and drafters that fail: what the fakes of engines share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hasten import methods
from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.methods import Method, MethodContext
from hasten.policies.base import FixedPolicy
from hasten.types import Budget, Draft, DraftTree, Round

NextToken = Callable[[Sequence[int]], int]
"""The target's choice after a prefix."""

VOCAB = 64
PHRASE = (5, 9, 12, 7, 31, 22, 40, 18)


def repeating(ids: Sequence[int]) -> int:
    """A text that repeats itself, with a word of its prompt now and then: drafts of it are kept."""
    at = len(ids)
    return (ids[0] + at // 16) % VOCAB if at % 16 == 0 else PHRASE[at % 8]


def unforeseeable(ids: Sequence[int]) -> int:
    """A text that no earlier part of it foretells."""
    mixed = 0
    for token in ids[-3:]:
        mixed = (mixed * 31 + token + 7) % 9973
    return (mixed * 17 + len(ids) * 13) % VOCAB


def plain(prompt: Sequence[int], count: int, after: NextToken) -> list[int]:
    """The answer of plain decoding."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(after(ids))
    return ids[len(prompt) :]


class Raising(BaseDrafter):
    """Drafts well for `rounds` rounds and raises ever after."""

    name = "raising"
    rounds = 0

    def __init__(self) -> None:
        self.left = self.rounds

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        if self.left <= 0:
            raise ValueError("no more of this")
        self.left -= 1
        return Draft(DraftTree.chain(ctx.ids[-1], [repeating(ctx.ids)]))


class OutOfVocabulary(BaseDrafter):
    """Drafts an id that there isn't."""

    name = "out-of-vocabulary"

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        return Draft(DraftTree.chain(ctx.ids[-1], [VOCAB]))


class RaisingAtTheEnd(BaseDrafter):
    """Can neither draft nor be ended."""

    name = "raising-at-the-end"

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        raise RuntimeError("no draft")

    def observe(self, round: Round) -> None:
        return

    def end(self) -> None:
        raise RuntimeError("no end")


def register(monkeypatch: pytest.MonkeyPatch, drafter: type, **changes: Any) -> str:
    """A method of that drafter, with a fixed budget, for this test; its name."""

    def made(options: Any, context: MethodContext) -> Any:
        return lambda: (drafter(), FixedPolicy(nodes=9))

    known = {**methods.all_methods(), "toy": Method("toy", "a toy", made, **changes)}
    monkeypatch.setattr(methods, "_REGISTRY", known)
    return "toy"

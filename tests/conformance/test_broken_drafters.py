"""Drafters that break their contract: a DrafterError naming them, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hasten.decode import decode
from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.errors import DrafterError
from hasten.types import Budget, Draft, DraftTree, ExtraRows, Round, RowSignals, SamplingParams
from tests.conformance.drafters import Oracle, TestDrafter
from tests.conformance.harness import prompt_of, request, run
from tests.conformance.toy_target import ToyTarget

GREEDY = SamplingParams(max_new_tokens=20)


class Broken(BaseDrafter):
    """Proposes whatever `make(ctx)` gives, from its second round on."""

    name = "broken-one"

    def __init__(self, make: Callable[[DraftContext], Any]) -> None:
        self.make = make
        self.rounds = 0
        self.ended = 0

    def propose(self, ctx: DraftContext, budget: Budget) -> Any:
        self.rounds += 1
        if self.rounds == 1:
            return Draft(DraftTree.chain(ctx.ids[-1], [0]))
        return self.make(ctx)

    def end(self) -> None:
        self.ended += 1


def fails(drafter: Any, target: ToyTarget | None = None, **how: Any) -> str:
    """Run it: there must be a DrafterError, the drafter ended once, and no sequence left open."""
    target = target or ToyTarget(eos_ids=())
    asked = request(target, prompt_of(1), GREEDY, drafter, nodes=4, **how)
    with pytest.raises(DrafterError) as caught:
        list(decode([asked]))
    assert drafter.name in str(caught.value)
    assert target.live == []
    assert drafter.ended == 1
    return str(caught.value)


def _tree(ctx: DraftContext, tokens: list[Any], parents: list[int]) -> Draft:
    return Draft(DraftTree((ctx.ids[-1], *tokens), (-1, *parents)))


def _drawn(ctx: DraftContext, q: Any) -> Draft:
    return Draft(DraftTree.chain(ctx.ids[-1], [3]), q={0: q})


BROKEN: dict[str, tuple[Callable[[DraftContext], Any], str]] = {
    "an id past the vocabulary": (lambda c: _tree(c, [24], [0]), "0..23"),
    "a negative id": (lambda c: _tree(c, [-1], [0]), "0..23"),
    "an id that is text": (lambda c: _tree(c, ["a"], [0]), "0..23"),
    "an id that is a float": (lambda c: _tree(c, [3.0], [0]), "0..23"),
    "an id that is a tensor": (lambda c: _tree(c, [torch.tensor(3)], [0]), "0..23"),
    "duplicate siblings": (lambda c: _tree(c, [5, 5], [0, 0]), "sibling"),
    "too many nodes": (lambda c: _tree(c, [5, 6, 7, 8], [0, 0, 0, 0]), "5 nodes"),
    "another root": (lambda c: Draft(DraftTree.chain((c.ids[-1] + 1) % 24)), "root"),
    "a parent after its child": (lambda c: _tree(c, [5, 6], [2, 0]), "parent"),
    "a second root": (lambda c: _tree(c, [5], [-1]), "parent"),
    "fewer parents than tokens": (lambda c: DraftTree((c.ids[-1], 5), (-1,)), "parents"),
    "a q of another length": (lambda c: _drawn(c, torch.ones(5) / 5), "q"),
    "a q with a dimension more": (lambda c: _drawn(c, torch.ones(1, 24) / 24), "q"),
    "a q that is a list": (lambda c: _drawn(c, [1 / 24] * 24), "q"),
    "a q of whole numbers": (lambda c: _drawn(c, torch.ones(24, dtype=torch.int64)), "q"),
    "a q without the drawn token": (
        lambda c: _drawn(c, torch.nn.functional.one_hot(torch.tensor(4), 24).float()),
        "q",
    ),
    "a q of no node": (
        lambda c: Draft(DraftTree.chain(c.ids[-1], [3]), q={7: torch.ones(24) / 24}),
        "q",
    ),
    "no draft at all": (lambda c: None, "Draft"),
    "a tree without its draft": (lambda c: DraftTree.chain(c.ids[-1]), "Draft"),
    "an extra row of no parent": (
        lambda c: Draft(DraftTree.chain(c.ids[-1]), extra=ExtraRows((3,), (-1,))),
        "parent",
    ),
    "an extra row past the vocabulary": (
        lambda c: Draft(DraftTree.chain(c.ids[-1]), extra=ExtraRows((24,), (0,))),
        "0..23",
    ),
    "an extra row before its parent": (
        lambda c: Draft(DraftTree.chain(c.ids[-1]), extra=ExtraRows((3,), (1,))),
        "parent",
    ),
    "fewer sources than nodes": (
        lambda c: Draft(DraftTree.chain(c.ids[-1], [3]), sources=("root",)),
        "source",
    ),
    "rows said to have run that didn't": (
        lambda c: Draft(DraftTree.chain(c.ids[-1], [3]), frontiers=(2, 2)),
        "frontiers",
    ),
    "an exception": (lambda c: 1 / 0, "ZeroDivisionError"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_draft_is_refused_by_name(fault: str) -> None:
    make, words = BROKEN[fault]
    assert words in fails(Broken(make))


def test_a_draft_deeper_than_asked_for_is_refused() -> None:
    def last(ctx: DraftContext) -> Draft:  # as many tokens as the answer has left: one too many
        left = 20 - (len(ctx.ids) - 12)
        return Draft(DraftTree.chain(ctx.ids[-1], [2] * min(3, left)))

    assert "depth" in fails(Broken(last))


@pytest.mark.parametrize("faulty", ["begin", "observe", "end"])
def test_an_exception_in_any_call_names_the_drafter(faulty: str) -> None:
    class Raising(Broken):
        def __init__(self) -> None:
            super().__init__(lambda c: Draft(DraftTree.chain(c.ids[-1])))

        def begin(self, prompt: Any, signals: RowSignals) -> None:
            self._may_raise("begin")

        def observe(self, round: Round) -> None:
            self._may_raise("observe")

        def end(self) -> None:
            super().end()
            self._may_raise("end")

        def _may_raise(self, call: str) -> None:
            if call == faulty:
                raise ValueError("out of luck")

    message = fails(Raising())
    assert "out of luck" in message
    assert faulty in message


def test_numpy_ids_are_refused_and_the_message_says_how_to_give_them() -> None:
    assert "not ints" in fails(Broken(lambda c: _tree(c, [np.int64(3)], [0])))


def test_running_rows_and_drafting_others_is_refused() -> None:
    def other_token(ctx: DraftContext) -> Draft:
        assert ctx.run_rows is not None
        ctx.run_rows([ctx.ids[-1], 3], [-1, 0], (0, 2))
        return Draft(DraftTree.chain(ctx.ids[-1], [4]), frontiers=(2, 2))

    def other_parent(ctx: DraftContext) -> Draft:
        assert ctx.run_rows is not None
        ctx.run_rows([ctx.ids[-1], 3, 4], [-1, 0, 1], (0, 2))
        return Draft(DraftTree((ctx.ids[-1], 3, 4), (-1, 0, 0)), frontiers=(2, 2, 2))

    def other_layer(ctx: DraftContext) -> Draft:
        assert ctx.run_rows is not None
        ctx.run_rows([ctx.ids[-1]], [-1], (0, 2))
        return Draft(DraftTree.chain(ctx.ids[-1], [4]), frontiers=(1,))

    for fault in (other_token, other_parent, other_layer):
        assert "frontiers" in fails(Broken(fault))


def test_rows_may_not_be_run_to_the_last_layer() -> None:
    def all_layers(ctx: DraftContext) -> Draft:
        assert ctx.run_rows is not None
        ctx.run_rows([ctx.ids[-1]], [-1], (0, 4))
        return Draft(DraftTree.chain(ctx.ids[-1], [4]), frontiers=(4,))

    assert "layer" in fails(Broken(all_layers))


def test_rows_run_and_then_given_up_are_dropped() -> None:
    class Timid(TestDrafter):
        name = "timid"

        def draft(self, ctx: DraftContext, budget: Budget) -> Draft:
            assert ctx.run_rows is not None
            ctx.run_rows([ctx.ids[-1], 5], [-1, 0], (0, 2))
            return Draft(DraftTree.chain(ctx.ids[-1]))

    target = ToyTarget()
    plain = target.plain(prompt_of(1), GREEDY)
    assert run(target, prompt_of(1), GREEDY, Timid()).tokens == plain


@pytest.mark.parametrize("tree", [True, False])
def test_extra_rows_may_ride_with_resumed_rows(tree: bool) -> None:
    class Both(Oracle):
        name = "both"

        def draft(self, ctx: DraftContext, budget: Budget) -> Draft:
            chain = super().draft(ctx, budget).tree
            assert ctx.run_rows is not None
            count = min(2, len(chain))
            ctx.run_rows(chain.tokens[:count], chain.parents[:count], (0, 2))
            extra = ExtraRows((3, 4), (0, len(chain)))
            return Draft(chain, extra=extra, frontiers=(2,) * count)

    target = ToyTarget(tree=tree)
    plain = target.plain(prompt_of(1), GREEDY)
    got = run(target, prompt_of(1), GREEDY, Both(prompt_of(1) + plain), nodes=4)
    assert got.tokens == plain


def test_extra_rows_never_stand_past_the_context() -> None:
    class Long(Oracle):
        name = "long"

        def draft(self, ctx: DraftContext, budget: Budget) -> Draft:
            tree = super().draft(ctx, budget).tree
            first = len(tree)
            parents = (0, *range(first, first + 7))
            return Draft(tree, extra=ExtraRows((2, 3, 4, 5, 6, 7, 8, 9), parents))

    target = ToyTarget(context_limit=26, eos_ids=())
    plain = target.plain(prompt_of(1), GREEDY)
    got = run(target, prompt_of(1), GREEDY, Long(prompt_of(1) + plain), nodes=3)
    assert got.tokens == plain
    assert len(plain) == 14


def test_changing_the_ids_handed_over_harms_no_answer() -> None:
    class Vandal(BaseDrafter):
        name = "vandal"

        def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
            root = ctx.ids[-1]
            ctx.ids.insert(0, 5)  # type: ignore[attr-defined]
            ctx.ids[0:3] = [9, 9]  # type: ignore[index]
            return Draft(DraftTree.chain(root, [2]))

    target = ToyTarget()
    plain = target.plain(prompt_of(1), GREEDY)
    assert run(target, prompt_of(1), GREEDY, Vandal()).tokens == plain


def test_a_broken_drafter_in_a_batch_leaves_nothing_of_the_others() -> None:
    for packed in (True, False):
        target = ToyTarget(packed=packed, eos_ids=())
        good = TestGood()
        bad = Broken(lambda c: 1 / 0)
        asked = [request(target, prompt_of(i), GREEDY, d) for i, d in enumerate((good, bad))]
        with pytest.raises(DrafterError, match="broken-one"):
            list(decode(asked))
        assert target.live == []
        assert good.calls[-1] == "end"
        assert bad.ended == 1


class TestGood(TestDrafter):
    """Never drafts."""

    name = "good"

    def draft(self, ctx: DraftContext, budget: Budget) -> Draft:
        return Draft(DraftTree.chain(ctx.ids[-1]))

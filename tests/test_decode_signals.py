"""What the loop hands to drafters: every signal of every row, and nothing not asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hasten.decode import decode
from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.opening import PREFILL_CHUNK
from hasten.policies.base import FixedPolicy, PlanContext
from hasten.types import (
    Budget,
    Draft,
    DraftTree,
    ExtraRows,
    Round,
    RowSignals,
    SamplingParams,
    Signals,
)
from tests.conformance.drafters import Oracle, TestDrafter
from tests.conformance.harness import prompt_of, request, run
from tests.conformance.toy_target import ToyTarget

GREEDY = SamplingParams(max_new_tokens=20)


class Reader(BaseDrafter):
    """Wants the prompt's candidates, and drafts nothing."""

    name = "reader"
    needs = Signals(topk=2, prompt=True)

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        self.read = 0 if signals.topk_ids is None else len(signals.topk_ids)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        return Draft(DraftTree.chain(ctx.ids[-1]))


def _prefills(target: ToyTarget) -> list[int]:
    """Rows of each call of `prefill` from now on."""
    sizes: list[int] = []
    prefill = target.prefill

    def spy(sequence: Any, tokens: Sequence[int], **options: Any) -> Any:
        sizes.append(len(tokens))
        return prefill(sequence, tokens, **options)

    target.prefill = spy  # type: ignore[method-assign]
    return sizes


@pytest.mark.parametrize("whole", [False, True])
def test_a_prompt_whose_angles_depend_on_its_length_runs_in_one_call(whole: bool) -> None:
    target = ToyTarget()
    target.info = replace(target.info, whole_prompt=whole)
    sizes = _prefills(target)
    prompt = prompt_of(1, length=PREFILL_CHUNK + 30)
    drafter = Reader()
    run(target, prompt, GREEDY, drafter)
    assert sizes == ([len(prompt)] if whole else [PREFILL_CHUNK, 30])
    assert drafter.read == len(prompt)


def test_a_request_for_one_token_reads_the_last_row_only() -> None:
    target, drafter = ToyTarget(), Reader()
    sizes = _prefills(target)
    prompt = prompt_of(1, length=PREFILL_CHUNK + 30)
    answer = run(target, prompt, SamplingParams(max_new_tokens=1), drafter)
    assert answer.tokens == target.plain(prompt, SamplingParams(max_new_tokens=1))
    assert sizes == [len(prompt)]
    assert drafter.read == 1


class Curious(TestDrafter):
    """Checks every signal of every row against the target's function of that row's own path."""

    name = "curious"
    needs = Signals(topk=3, hidden=(0, 1, 3, 4), probs=True, embeddings=True, prompt=True)

    def __init__(self, target: ToyTarget, truth: Sequence[int], kind: str) -> None:
        super().__init__(truth)
        self.target, self.kind = target, kind
        self.rows: list[list[int]] = []
        self.checked = 0

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        super().begin(prompt, signals)
        held = len(prompt) - len(signals.hidden[1])
        self._compare([list(prompt[: i + 1]) for i in range(held, len(prompt))], signals)
        assert signals.probs is None

    def draft(self, ctx: DraftContext, budget: Budget) -> Draft:
        assert ctx.embed is not None
        assert torch.equal(ctx.embed([3, 4]), self.target.embed([3, 4]))
        root, ids = ctx.ids[-1], list(ctx.ids)
        right = self.next_truth(2)
        wrong = self.wrong(right[0]) if right else 5
        tree = DraftTree((root, wrong, *right), (-1, 0, 0, 2)[: 2 + len(right)])
        if len(tree) > budget.nodes or max(tree.depths) > budget.depth:
            tree = DraftTree.chain(root)
        extra = ExtraRows((7, 8), (len(tree) - 1, len(tree)))
        tokens, parents = tree.tokens + extra.tokens, tree.parents + extra.parents
        paths: list[list[int]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else ids[:-1]), token])
        self.rows = paths
        if self.kind == "resumed":
            assert ctx.run_rows is not None
            out = ctx.run_rows(tree.tokens[:2], tree.parents[:2], (0, 2))
            for row, hidden in enumerate(out):
                assert torch.equal(hidden, self.target.hidden_after(paths[row], 2))
            ctx.run_rows(tree.tokens[2:3], tree.parents[2:3], (0, 1)) if len(tree) > 2 else None
            frontiers = (2, 2, 1)[: len(tree)]
            return Draft(tree, extra=extra, frontiers=frontiers)
        return Draft(tree, extra=extra)

    def observe(self, round: Round) -> None:
        rows, self.rows = self.rows, []
        if rows:
            self._compare(rows, round.signals)
            assert round.signals.probs is not None
            for path, probs in zip(rows, round.signals.probs, strict=True):
                assert int(probs.argmax()) == int(self.target.logits_after(path).argmax())
        super().observe(round)

    def _compare(self, paths: list[list[int]], signals: RowSignals) -> None:
        assert signals.topk_ids is not None
        assert signals.topk_logits is not None
        assert signals.topk_ids.dtype == torch.int64
        assert signals.topk_logits.dtype == torch.float32
        assert len(paths) == len(signals.topk_ids) == len(signals.topk_logits)
        assert set(signals.hidden) == set(self.needs.hidden)
        for row, path in enumerate(paths):
            values, ids = self.target.logits_after(path).topk(3)
            assert signals.topk_ids[row].tolist() == ids.tolist()
            assert torch.equal(signals.topk_logits[row], values)
            for layer, hidden in signals.hidden.items():
                assert torch.equal(hidden[row], self.target.hidden_after(path, layer))
            self.checked += 1


@pytest.mark.parametrize("kind", ["whole", "resumed"])
def test_signals_belong_to_the_rows_they_are_given_for(kind: str) -> None:
    target = ToyTarget(eos_ids=(), context_limit=2000)
    prompt = prompt_of(1, length=PREFILL_CHUNK + 30)  # the prompt's signals come in two chunks
    plain = target.plain(prompt, GREEDY)
    drafter = Curious(target, prompt + plain, kind)
    assert run(target, prompt, GREEDY, drafter, nodes=4).tokens == plain
    assert drafter.checked > len(prompt) + 30


def test_a_requests_signals_are_its_own_in_a_shared_pass() -> None:
    target = ToyTarget(eos_ids=(), packed=True)
    prompt = prompt_of(1)
    truth = prompt + target.plain(prompt, GREEDY)
    asked = [
        request(target, prompt, GREEDY, Curious(target, truth, "whole"), nodes=4),
        request(target, prompt_of(2), GREEDY, Oracle(), nodes=4),
        request(target, prompt, GREEDY, Curious(target, truth, "resumed"), nodes=4),
    ]
    tokens: list[list[int]] = [[], [], []]
    for index, made in decode(asked):
        tokens[index].extend(made.emitted)
    assert prompt + tokens[0] == prompt + tokens[2] == truth


class Picky(Oracle):
    """Wants one layer, and says so when it gets another."""

    needs = Signals(hidden=(2,))

    def observe(self, round: Round) -> None:
        assert set(round.signals.hidden) <= set(self.needs.hidden)
        super().observe(round)


def test_a_shared_pass_gives_each_request_its_own_layers_only() -> None:
    class Other(Picky):
        needs = Signals(hidden=(1, 3), topk=2)

    target = ToyTarget(packed=True, eos_ids=())
    asked = [request(target, prompt_of(i), GREEDY, k()) for i, k in enumerate((Picky, Other))]
    assert sum(len(made.emitted) for _, made in decode(asked)) == 40
    assert target.taps == {1, 2, 3}


def test_only_the_layers_asked_for_are_tapped() -> None:
    target = ToyTarget()
    run(target, prompt_of(1), GREEDY, Picky())
    assert target.taps == {2}
    plain = ToyTarget()
    run(plain, prompt_of(1), GREEDY, Oracle())
    assert plain.taps == set()


def test_a_drafter_gets_lower_layers_only_where_the_target_has_ranges() -> None:
    class Asking(Oracle):
        seen: bool | None = None

        def draft(self, ctx: DraftContext, budget: Budget) -> Draft:
            self.seen = ctx.run_rows is not None
            assert ctx.embed is None
            return super().draft(ctx, budget)

    for ranges in (True, False):
        drafter = Asking()
        run(ToyTarget(layer_ranges=ranges), prompt_of(1), GREEDY, drafter)
        assert drafter.seen is ranges


def test_the_options_reach_a_drawing_drafter() -> None:
    class Warping(BaseDrafter):
        name = "warping"

        def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
            probs = ctx.warp([*ctx.ids], torch.arange(24.0))
            assert probs.dtype == torch.float32
            assert probs.count_nonzero() == 2
            assert not ctx.greedy
            first = ctx.sample(probs, len(ctx.ids), 5)
            assert sorted(first) == [22, 23], "distinct, and only what can be drawn"
            assert ctx.sample(probs, len(ctx.ids), 1) == first[:1]
            return Draft(DraftTree.chain(ctx.ids[-1]))

    params = SamplingParams(max_new_tokens=5, temperature=1.0, top_k=2)
    run(ToyTarget(), prompt_of(1), params, Warping())


def test_the_policy_is_told_what_may_still_come_and_a_plain_step_asks_no_draft() -> None:
    class Watching(FixedPolicy):
        __slots__ = ("learnt", "seen")

        def __init__(self) -> None:
            super().__init__(4)
            self.seen: list[tuple[int, int]] = []
            self.learnt = 0

        def plan(self, context: PlanContext) -> Budget:
            self.seen.append((context.context, context.remaining))
            return Budget(1 if len(self.seen) % 2 else 4, 50)

        def learn(self, round: Round) -> None:
            self.learnt += 1

    target = ToyTarget(eos_ids=())
    policy, drafter = Watching(), Oracle()
    got = run(target, prompt_of(1), GREEDY, drafter, policy=policy)
    assert policy.learnt == len(got.rounds)
    assert policy.seen == [(12 + n, 20 - n) for n in range(1, 20)]
    assert drafter.calls.count("propose") == 9
    assert drafter.calls.count("observe") == len(got.rounds)

"""Arbitration in the one loop: whose text comes out, at what cost, and what can't go wrong."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hasten.arbitration.loop import Arbitration
from hasten.arbitration.rules import Always, Random, Rule, Target, Threshold
from hasten.decode import decode
from hasten.errors import DrafterError
from hasten.judge import PassJudge
from hasten.sampling import Sampler
from hasten.types import Draft, DraftLaw, DraftTree, SamplingParams
from hasten.verify import Judge, Verdict, rejection
from tests.arbitration.cases import (
    GREEDY,
    LENGTH,
    SAMPLED,
    Alternating,
    AtPositions,
    Noting,
    drafter,
    near,
    request,
    run,
    verifier,
)
from tests.conformance.harness import prompt_of
from tests.conformance.toy_target import ToyTarget

PROMPTS = [prompt_of(seed) for seed in range(50)]
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bans": {"bad_words_ids": ((3,), (5, 7)), "no_repeat_ngram_size": 3},
    "bias": {"logit_bias": {2: 1.5, 4: -math.inf}},
    "least": {"min_new_tokens": 9},
    "most": {"max_new_tokens": 1},
    "two": {"max_new_tokens": 2},
    "none of the model's ends": {"ignore_eos": True, "stop_token_ids": (6,)},
}


def plain(prompt: list[int], params: SamplingParams, model: ToyTarget | None = None) -> list[int]:
    return (model or ToyTarget()).plain(prompt, params)


# -- C1 and C2: the two ends -----------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_the_target_always_is_plain_decoding_token_for_token(length: int) -> None:
    overridable = 0
    for prompt in PROMPTS:
        got = run(ToyTarget(), prompt, GREEDY, verifier(Target()), length=length)
        assert got.tokens == plain(prompt, GREEDY)
        overridable += len(got.decisions)
        assert not any(each.kept for each in got.decisions)
    assert overridable > 50, "there was something to decide"


@pytest.mark.parametrize("name", OPTIONS)
def test_the_target_always_is_plain_decoding_under_every_option(name: str) -> None:
    params = dataclasses.replace(GREEDY, **OPTIONS[name])
    for prompt in PROMPTS[:12]:
        got = run(ToyTarget(), prompt, params, verifier(Target(), bonus=len(prompt) % 2 == 0))
        assert got.tokens == plain(prompt, params)


@pytest.mark.parametrize("length", [1, 4, 6])
@pytest.mark.parametrize("most", [1, 5, 33])
def test_the_draft_always_without_bonus_is_the_drafts_own_text(length: int, most: int) -> None:
    params = dataclasses.replace(GREEDY, max_new_tokens=most)
    for prompt in PROMPTS:
        judge = verifier(Always(), bonus=False, length=length)
        got = run(ToyTarget(), prompt, params, judge, length=length)
        assert got.tokens == plain(prompt, params, near()), "its first and last tokens too"


def test_with_the_bonus_token_it_is_neither_text() -> None:
    texts = [run(ToyTarget(), p, GREEDY, verifier(Always())).tokens for p in PROMPTS[:10]]
    assert any(t != plain(p, GREEDY, near()) for t, p in zip(texts, PROMPTS, strict=False))
    assert any(t != plain(p, GREEDY) for t, p in zip(texts, PROMPTS, strict=False))


def test_a_draft_that_is_the_target_leaves_nothing_to_decide() -> None:
    for rule in (Always(), Target()):
        for prompt in PROMPTS[:8]:
            got = run(ToyTarget(), prompt, GREEDY, verifier(rule), draft=drafter(ToyTarget()))
            assert got.tokens == plain(prompt, GREEDY)
            assert got.decisions == []


# -- C3, C4 and costs ------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [Always(), Alternating(), Random(0.4)])
def test_laws_after_an_override_are_those_of_the_text_as_it_is(rule: Rule) -> None:
    target, penalty = ToyTarget(), dataclasses.replace(GREEDY, repetition_penalty=1.4)
    for params in (GREEDY, penalty):
        noting = Noting(rule, lambda m: (m.position, m.log_p, m.log_q))
        got = run(ToyTarget(), PROMPTS[1], params, verifier(noting))
        sampler = Sampler(params, 24, frozenset({1}), len(PROMPTS[1]), 0)
        notes = [each for each in noting.notes if each[0] < len(got.tokens)]  # before the end
        assert notes
        for position, log_p, log_q in notes:
            ids = [*PROMPTS[1], *got.tokens[:position]]
            want = torch.log_softmax(sampler.process(ids, target.logits_after(ids)), 0)
            assert float((log_p - want).abs().max()) < 1e-3
            theirs = torch.log_softmax(near().logits_after(ids), 0)
            assert float((log_q - theirs).abs().max()) < 1e-3


def test_an_override_costs_no_pass() -> None:
    ignoring = dataclasses.replace(GREEDY, ignore_eos=True, max_new_tokens=40)
    for prompt in PROMPTS[:10]:
        got = run(ToyTarget(), prompt, ignoring, verifier(Always()))
        assert got.passes == math.ceil(40 / (LENGTH + 1)), "whole blocks, each in one pass"
        assert got.metrics.overrides == got.metrics.mismatches == len(got.decisions) > 0


def passes_of(truth: list[int], drafted: list[int], kept: set[int]) -> int:
    """Passes over a trajectory that doesn't depend on what is emitted."""
    at, passes = 0, 0
    judge = verifier(AtPositions(sorted(kept)))
    while at < len(truth) - LENGTH - 1:
        tree = DraftTree.chain(0, drafted[at : at + LENGTH])
        rows = torch.full((LENGTH + 1, 4), -9.0)
        for row in range(LENGTH + 1):
            rows[row, truth[at + row]] = 9.0
        sampler = Sampler(SamplingParams(), 4, frozenset(), 1, 0)
        at += len(
            judge(tree, {}, PassJudge(sampler, [0] * (at + 1), rows, None, Draft(tree))).tokens
        )
        passes += 1
    return passes


def test_passes_never_grow_when_the_draft_is_chosen_more_often() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        truth = torch.randint(0, 4, (60,), generator=generator).tolist()
        noise = torch.rand(60, generator=generator) < 0.5
        drafted = [(t + 1) % 4 if n else t for t, n in zip(truth, noise.tolist(), strict=True)]
        order = torch.randperm(60, generator=generator).tolist()
        counts = [passes_of(truth, drafted, set(order[:size])) for size in range(0, 61, 6)]
        assert counts == sorted(counts, reverse=True)
        assert counts[0] > counts[-1]


# -- nothing beyond the decision -------------------------------------------------------------------


class Uncropped(Arbitration):
    """A planted bug: after the target's token the draft's rows stay."""

    def __call__(self, tree: DraftTree, q: Mapping[int, torch.Tensor], judge: Judge) -> Verdict:
        made = super().__call__(tree, q, judge)
        more = len(made.nodes)
        if made.decisions and not made.decisions[-1].kept and more < len(tree):
            return Verdict((*made.nodes, more), (*made.tokens, tree.tokens[more]), made.decisions)
        return made


class Ending(Arbitration):
    """A planted bug: an override ends the block too, as if it had to be verified again."""

    def __call__(self, tree: DraftTree, q: Mapping[int, torch.Tensor], judge: Judge) -> Verdict:
        made = super().__call__(tree, q, judge)
        if not made.decisions:
            return made
        end = made.decisions[0].position - judge.answered(()) + 1  # type: ignore[attr-defined]
        return Verdict(made.nodes[:end], made.tokens[:end], made.decisions[:1])


def test_a_loop_that_forgets_to_crop_is_found_out() -> None:
    found = False
    for prompt in PROMPTS[:5]:
        got = None
        try:
            got = run(ToyTarget(), prompt, GREEDY, verifier(Target(), kind=Uncropped))
        except AssertionError:
            found = True
        found = found or got is None or got.tokens != plain(prompt, GREEDY)
    assert found


def test_a_loop_that_verifies_overrides_again_is_found_out() -> None:
    ignoring = dataclasses.replace(GREEDY, ignore_eos=True, max_new_tokens=40)
    got = run(ToyTarget(), PROMPTS[0], ignoring, verifier(Always(), kind=Ending))
    assert got.passes > math.ceil(40 / (LENGTH + 1))


@pytest.mark.parametrize("rule", [Target(), Always(), Alternating()])
def test_the_draft_models_cache_holds_the_answer_and_nothing_refused(rule: Rule) -> None:
    model = near()
    asked = request(ToyTarget(), PROMPTS[0], GREEDY, verifier(rule), draft=drafter(model))
    tokens: list[int] = []
    for _, made in decode([asked]):
        tokens += made.emitted
        for sequence in model.live:
            held = sequence.tokens
            assert held == [*PROMPTS[0], *tokens][: len(held)]
    assert model.live == []


# -- ends of answers -------------------------------------------------------------------------------


def with_end(token: int) -> tuple[ToyTarget, ToyTarget]:
    """Both models, with this id as their end of a sequence."""
    return ToyTarget(eos_ids=(token,)), ToyTarget(bigram=0.7, seed=0, eos_ids=(token,))


def test_an_end_kept_from_a_draft_ends_the_answer_and_all_that_is_told_of_it() -> None:
    tried = 0
    for prompt in PROMPTS[:20]:
        whole = run(
            ToyTarget(), prompt, dataclasses.replace(GREEDY, ignore_eos=True), verifier(Always())
        )
        for each in whole.decisions:
            ends = each.drafted
            if ends in whole.tokens[: each.position]:
                continue
            target, model = with_end(ends)
            got = run(target, prompt, GREEDY, verifier(Always(), target), draft=drafter(model))
            assert got.tokens == whole.tokens[: each.position + 1]
            last = got.rounds[-1]
            assert (last.finish, last.stop_reason) == ("stop", ends)
            assert all(d.position <= each.position for d in got.decisions)
            assert got.decisions[-1].kept
            tried += 1
            break
    assert tried > 5


@pytest.mark.parametrize("rule", [Always(), Alternating()])
def test_stop_strings_and_lengths_cut_inside_a_block(rule: Rule) -> None:
    for prompt in PROMPTS[:6]:
        whole = run(
            ToyTarget(), prompt, dataclasses.replace(GREEDY, ignore_eos=True), verifier(rule)
        )
        stop = whole.text[6:8]
        params = dataclasses.replace(GREEDY, ignore_eos=True, stop=(stop,))
        got = run(ToyTarget(), prompt, params, verifier(rule))
        assert got.text == whole.text[: whole.text.index(stop)]
        assert got.tokens == whole.tokens[: len(got.tokens)]
        assert all(d.position < len(got.tokens) for d in got.decisions)
        for most in (1, 3, 8):
            short = dataclasses.replace(GREEDY, ignore_eos=True, max_new_tokens=most)
            assert run(ToyTarget(), prompt, short, verifier(rule)).tokens == whole.tokens[:most]


def test_a_full_context_ends_the_answer_where_it_is_full() -> None:
    for limit in range(13, 20):
        target = ToyTarget(context_limit=limit)
        params = dataclasses.replace(GREEDY, ignore_eos=True)
        got = run(target, PROMPTS[0], params, verifier(Always(), bonus=False))
        assert len(got.tokens) == limit - len(PROMPTS[0])
        assert got.tokens == plain(PROMPTS[0], params, near())[: len(got.tokens)]
        assert got.rounds[-1].finish == "length"


def test_a_prompt_of_one_token_begins_with_the_targets_own() -> None:
    got = run(ToyTarget(), [5], GREEDY, verifier(Always(), bonus=False))
    assert got.tokens[0] == plain([5], GREEDY)[0]
    assert got.tokens[1:] == plain([5, got.tokens[0]], GREEDY, near())[: len(got.tokens) - 1]
    assert run(ToyTarget(), [5], GREEDY, verifier(Target())).tokens == plain([5], GREEDY)


# -- the gate --------------------------------------------------------------------------------------


def test_forbidden_tokens_are_never_kept_whatever_the_rule_says() -> None:
    for params in (GREEDY, SAMPLED):
        banned = dataclasses.replace(params, bad_words_ids=tuple((t,) for t in range(2, 12)))
        for prompt in PROMPTS[:10]:
            free = run(ToyTarget(), prompt, params, verifier(Always()))
            got = run(ToyTarget(), prompt, banned, verifier(Always()))
            assert not set(got.tokens) & set(range(2, 12))
        assert set(free.tokens) & set(range(2, 12))


def test_the_gate_keeps_out_what_the_target_finds_too_unlikely() -> None:
    noting = Noting(Always(), lambda m: float(m.p[m.drafted]))
    judge = verifier(noting, gate=0.05)
    got = [run(ToyTarget(), p, GREEDY, judge) for p in PROMPTS[:10]]
    assert min(noting.notes) >= 0.05
    assert any(not d.kept for each in got for d in each.decisions)
    assert any(d.kept for each in got for d in each.decisions)


def test_no_more_overrides_in_a_row_than_allowed() -> None:
    for most in (1, 2, 3):
        streak = longest = 0
        for prompt in PROMPTS[:10]:
            got = run(ToyTarget(), prompt, GREEDY, verifier(Always(), consecutive=most))
            streak = 0
            for each in got.decisions:
                streak = streak + 1 if each.kept else 0
                longest = max(longest, streak)
        assert longest == most


def test_a_draft_that_branches_is_refused() -> None:
    tree = DraftTree((0, 1, 2), (-1, 0, 0))
    sampler = Sampler(SamplingParams(), 4, frozenset(), 1, 0)
    judge = PassJudge(sampler, [0], torch.zeros(3, 4), None, Draft(tree))
    with pytest.raises(DrafterError, match="branches"):
        verifier(Target())(tree, {}, judge)


# -- sampled requests ------------------------------------------------------------------------------


def drawn_block(seed: int) -> tuple[DraftTree, dict[int, torch.Tensor], PassJudge]:
    """A chain drawn from random laws, and a judge of it."""
    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(temperature=0.8, top_p=0.95)
    sampler = Sampler(params, 9, frozenset(), 1, seed)
    q = {n: torch.softmax(torch.randn(9, generator=generator), 0) for n in range(LENGTH)}
    tokens = [int(torch.multinomial(q[n], 1, generator=generator)) for n in range(LENGTH)]
    tree = DraftTree.chain(0, tokens)
    logits = torch.randn(LENGTH + 1, 9, generator=generator) * 1.5
    laws = {n: DraftLaw(q[n].log()) for n in q}
    return tree, q, PassJudge(sampler, [0, 1], logits, None, Draft(tree, q=q, laws=laws))


def test_the_target_always_is_rejection_sampling_draw_for_draw() -> None:
    lengths = set()
    for seed in range(150):
        tree, q, judge = drawn_block(seed)
        want, got = rejection(tree, q, judge), verifier(Target())(tree, q, judge)
        assert (got.nodes, got.tokens) == (want.nodes, want.tokens)
        assert got.decisions == () or not got.decisions[-1].kept
        point = rejection(tree, {}, judge)  # nothing was drawn
        got = verifier(Target())(tree, {}, judge)
        assert (got.nodes, got.tokens) == (point.nodes, point.tokens)
        lengths.add(len(want.tokens))
    assert lengths == {1, 2, 3, 4, 5}


def test_the_draft_always_keeps_what_was_drawn() -> None:
    for seed in range(100):
        tree, q, judge = drawn_block(seed)
        got = verifier(Always(), bonus=False)(tree, q, judge)
        forbidden = [d for d in got.decisions if not d.kept]
        if forbidden:  # outside the target's nucleus
            assert (
                float(judge.probs(len(got.nodes) - 1, got.tokens[:-1])[forbidden[0].drafted]) == 0
            )
        else:
            assert got.tokens == tree.tokens[1:]


class From(Rule):
    """Emits from a given law."""

    emits = True

    def __init__(self, given: torch.Tensor) -> None:
        self.given = given

    def law(self, m: Any) -> torch.Tensor:
        return self.given


def test_a_rule_with_a_law_emits_from_that_law() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    q = torch.tensor([0.1, 0.2, 0.3, 0.4])
    wanted = torch.tensor([0.3, 0.3, 0.1, 0.3])
    seen = torch.zeros(4)
    runs = 2000
    for seed in range(runs):
        sampler = Sampler(SamplingParams(temperature=1.0), 4, frozenset(), 1, seed)
        token = sampler.draw(q, 1, 1, "draft-0")[0]
        tree = DraftTree.chain(0, [token])
        judge = PassJudge(sampler, [0], p.log().repeat(2, 1), None, Draft(tree, q={0: q}))
        seen[verifier(From(wanted))(tree, {0: q}, judge).tokens[0]] += 1
    assert float((seen / runs - wanted).abs().max()) < 4 * math.sqrt(0.25 / runs)
    assert float((seen / runs - p).abs().max()) > 0.1


def test_sampled_answers_depend_on_their_seed_alone() -> None:
    for rule in (Random(0.5), Threshold(0.05)):
        one, two = (run(ToyTarget(), PROMPTS[0], SAMPLED, verifier(rule), seed=7) for _ in range(2))
        assert one.tokens == two.tokens
        assert one.decisions == two.decisions
        other = run(ToyTarget(), PROMPTS[0], SAMPLED, verifier(rule), seed=8)
        assert other.tokens != one.tokens


def test_nothing_of_a_request_stays_for_the_next() -> None:
    judges = [verifier(Alternating(), consecutive=2) for _ in range(2)]
    first = run(ToyTarget(), PROMPTS[0], GREEDY, judges[0])
    again = run(ToyTarget(), PROMPTS[0], GREEDY, judges[1])
    assert (first.tokens, first.decisions) == (again.tokens, again.decisions)
    target = ToyTarget(packed=True)
    model = near()
    asked = [
        request(target, p, GREEDY, verifier(Alternating(), consecutive=2), draft=drafter(model))
        for p in PROMPTS[:5]
    ]
    tokens: list[list[int]] = [[] for _ in asked]
    for index, made in decode(asked):
        tokens[index] += made.emitted
    alone = [
        run(ToyTarget(), p, GREEDY, verifier(Alternating(), consecutive=2)).tokens
        for p in PROMPTS[:5]
    ]
    assert tokens == alone

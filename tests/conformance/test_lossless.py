"""Every drafter x verifier x chain/tree target x budget: the answer is plain decoding's."""

from __future__ import annotations

import random

import pytest

from hasten import methods
from hasten.drafts import prune
from hasten.policies.base import FixedPolicy
from hasten.types import Draft, DraftTree, FinishReason, SamplingParams
from tests.conformance.drafters import Adversarial, Flaky, Oracle, Resuming, Riding, Wide
from tests.conformance.harness import (
    DRAFTERS,
    DRAWING,
    REGISTERED,
    TREE_DRAFTERS,
    load_other,
    prompt_of,
    run,
)
from tests.conformance.toy_target import ToyTarget, ToyTokenizer

BUDGETS = (1, 2, 3, 8, 24)
GREEDY = SamplingParams(max_new_tokens=33)
SAMPLED = SamplingParams(max_new_tokens=33, temperature=0.9, top_p=0.97, top_k=12)
KINDS_OF_RUNS = [
    *(pytest.param(name, True, id=f"{name}-tree") for name in TREE_DRAFTERS),
    *(pytest.param(name, False, id=f"{name}-chain") for name in DRAFTERS),
]


def test_every_registered_method_is_prepared_here() -> None:
    made = {name for name, method in methods.all_methods().items() if method.lossless == "yes"}
    missing = made - REGISTERED.keys()
    assert not missing, (
        f"{sorted(missing)} registered, and tests/conformance/harness.py doesn't run them: add an "
        "entry to REGISTERED (and a drafter's model to load_other)"
    )
    for name, texts in REGISTERED.items():
        assert {methods.parse(t).name for t in texts} == {name}


@pytest.mark.parametrize(("name", "tree"), KINDS_OF_RUNS)
def test_greedy_and_match_answers_are_plain_decodings(name: str, tree: bool) -> None:
    target = ToyTarget(tree=tree)
    for params in (GREEDY, SAMPLED):
        for case, nodes in enumerate(BUDGETS):
            prompt = prompt_of(case)
            plain = target.plain(prompt, params, seed=case)
            drafter = TREE_DRAFTERS[name](target, prompt + plain, case)
            got = run(target, prompt, params, drafter, nodes=nodes, seed=case)
            assert got.tokens == plain, (params.temperature, nodes)


@pytest.mark.parametrize(("name", "tree"), KINDS_OF_RUNS)
def test_rejection_is_plain_decoding_for_greedy_requests_and_point_mass_drafts(
    name: str, tree: bool
) -> None:
    target = ToyTarget(tree=tree)
    for params in (GREEDY, SAMPLED):
        for case, nodes in enumerate(BUDGETS):
            prompt = prompt_of(case)
            plain = target.plain(prompt, params, seed=case)
            drafter = TREE_DRAFTERS[name](target, prompt + plain, case)
            how = {"nodes": nodes, "seed": case, "verifier": "rejection"}
            got = run(target, prompt, params, drafter, **how)
            if params.is_greedy or name not in DRAWING:
                assert got.tokens == plain, (params.temperature, nodes)
            elif got.finish is FinishReason.LENGTH:
                assert len(got.tokens) == params.max_new_tokens


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_cache_that_cannot_be_rolled_back_gets_one_row_at_a_time(name: str) -> None:
    plainest = ToyTarget(rollback=False, tree=False)
    prompt = prompt_of(3)
    plain = plainest.plain(prompt, GREEDY)
    if name != "ar" and any(name in texts for texts in REGISTERED.values()):
        drafter = DRAFTERS[name](ToyTarget(), prompt + plain, 0)
    else:
        drafter = DRAFTERS[name](plainest, prompt + plain, 0)
    got = run(plainest, prompt, GREEDY, drafter, nodes=8)
    assert got.tokens == plain
    assert all(r.drafted == 0 for r in got.rounds)


@pytest.mark.parametrize("name", TREE_DRAFTERS)
def test_answers_are_plain_up_to_the_context_limit(name: str) -> None:
    for limit in (13, 14, 17, 24):
        target = ToyTarget(context_limit=limit, eos_ids=())
        prompt = prompt_of(5)
        params = SamplingParams(max_new_tokens=100)
        plain = target.plain(prompt, params)
        assert len(plain) == limit - len(prompt)
        drafter = TREE_DRAFTERS[name](target, prompt + plain + plain, 1)
        got = run(target, prompt, params, drafter, nodes=24)
        assert got.tokens == plain
        assert got.finish is FinishReason.LENGTH


@pytest.mark.parametrize("name", TREE_DRAFTERS)
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_exactly_as_many_tokens_as_asked_for(name: str, count: int) -> None:
    target = ToyTarget(eos_ids=())
    prompt = prompt_of(6)
    plain = target.plain(prompt, SamplingParams(max_new_tokens=30))
    params = SamplingParams(max_new_tokens=count)
    for nodes in (3, 24):
        drafter = TREE_DRAFTERS[name](target, prompt + plain, 1)
        got = run(target, prompt, params, drafter, nodes=nodes)
        assert got.tokens == plain[:count]


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("name", TREE_DRAFTERS)
def test_a_prompt_of_one_or_two_tokens_works(name: str, length: int) -> None:
    target = ToyTarget()
    plain = target.plain([7, 7][:length], GREEDY)
    drafter = TREE_DRAFTERS[name](target, [7, 7][:length] + plain, 0)
    assert run(target, [7, 7][:length], GREEDY, drafter).tokens == plain


# -- what the test drafters must show, or they would test nothing ----------------------------------


def _passes(kind: type, nodes: int, **target_options: object) -> tuple[int, int]:
    """Passes and tokens of a run of a test drafter."""
    target = ToyTarget(eos_ids=(), **target_options)  # type: ignore[arg-type]
    prompt, params = prompt_of(8), SamplingParams(max_new_tokens=41)
    plain = target.plain(prompt, params)
    got = run(target, prompt, params, kind(prompt + plain, 24, 0), nodes=nodes)
    return len(got.rounds) - 1, len(got.tokens)


def test_the_oracle_has_everything_accepted() -> None:
    assert _passes(Oracle, 9) == (5, 41)  # 40 tokens after the first, 9 a pass


def test_the_adversary_has_everything_refused() -> None:
    assert _passes(Adversarial, 9) == (40, 41)


def test_wide_drafts_are_kept_along_second_children() -> None:
    assert _passes(Wide, 9) == (8, 41)  # 4 deep: 5 a pass
    assert _passes(Wide, 9, tree=False) == (40, 41)  # collapsed to the wrong first children


def test_flaky_drafts_are_partly_kept() -> None:
    passes, _ = _passes(Flaky, 9)
    assert 5 < passes < 40


def test_extra_rows_read_back_true_predictions() -> None:
    target = ToyTarget(eos_ids=())
    prompt, params = prompt_of(8), SamplingParams(max_new_tokens=60)
    plain = target.plain(prompt, params)
    drafter = Riding(prompt + plain, 24, 0)
    run(target, prompt, params, drafter, nodes=4)
    assert drafter.hits > 5
    assert drafter.misses == 0


def test_resumed_rows_pass_each_layer_once_and_stand_at_several_frontiers() -> None:
    target = ToyTarget(eos_ids=())
    ranges: set[tuple[int, int]] = set()
    forward = target.forward

    def spy(batch, *, layers=None, taps=()):  # type: ignore[no-untyped-def]
        ranges.add(layers or (0, 4))
        return forward(batch, layers=layers, taps=taps)

    target.forward = spy  # type: ignore[method-assign]
    prompt, params = prompt_of(8), SamplingParams(max_new_tokens=60)
    plain = target.plain(prompt, params)
    for seed in range(4):
        got = run(target, prompt, params, Resuming(prompt + plain, 24, seed), nodes=6)
        assert got.tokens == plain
    assert {(0, 1), (1, 2), (1, 3), (2, 3), (3, 4), (0, 4)} <= ranges


def test_a_draft_model_drafts_what_is_often_right() -> None:
    target = ToyTarget(eos_ids=())
    prompt, params = prompt_of(8), SamplingParams(max_new_tokens=60)
    name = "draft-model,model=near"
    got = run(target, prompt, params, DRAFTERS[name](target, [], 0), nodes=6)
    assert sum(len(r.accepted) - 1 for r in got.rounds[1:]) > 10
    assert load_other("near")[0].info.vocab_size == len(ToyTokenizer.letters[:24])


class RandomSelection(FixedPolicy):
    """Keeps a random part of each draft, closed under parents, drawn siblings from the first on."""

    __slots__ = ("random",)

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self.random = random.Random(1)

    def select(self, draft: Draft) -> Draft:
        kept = {0}
        refused: set[int] = set()
        for node, parent in enumerate(draft.tree.parents):
            if parent in kept and parent not in refused:
                if self.random.random() < 0.6:
                    kept.add(node)
                elif parent in draft.q:
                    refused.add(parent)
        if self.random.random() < 0.2:
            return Draft(DraftTree.chain(draft.tree.tokens[0]))
        return prune(draft, sorted(kept - {0}))


@pytest.mark.parametrize("name", TREE_DRAFTERS)
def test_a_policy_that_verifies_part_of_a_draft_changes_no_answer(name: str) -> None:
    for params in (GREEDY, SAMPLED):
        target = ToyTarget()
        prompt = prompt_of(4)
        plain = target.plain(prompt, params)
        drafter = TREE_DRAFTERS[name](target, prompt + plain, 0)
        assert run(target, prompt, params, drafter, policy=RandomSelection(9)).tokens == plain

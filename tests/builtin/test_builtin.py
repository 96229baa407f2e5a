"""RACER, recycling and auto as registered: options, scopes, and what requests share."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.conformance.harness import COSTS, load_other, prompt_of, run
from tests.conformance.toy_target import ToyTarget, ToyTokenizer

from hasten import methods
from hasten.builtin import common
from hasten.drafters.base import DraftContext
from hasten.drafters.racer import Racer
from hasten.drafters.recycling import TokenRecycling
from hasten.errors import CapabilityError, OptionError
from hasten.methods import MethodContext, RequestMaker
from hasten.policies import cost
from hasten.policies.base import FixedPolicy
from hasten.policies.budget import BudgetPolicy
from hasten.types import Budget, Draft, SamplingParams

PARAMS = SamplingParams(max_new_tokens=40)


@pytest.fixture(autouse=True)
def _no_global_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_GLOBAL", type(common._GLOBAL)())


def prepare(text: str, target: ToyTarget | None = None) -> RequestMaker:
    context = MethodContext(target or ToyTarget(), ToyTokenizer(), load_other, COSTS)
    return methods.prepare(methods.parse(text), context)


def ask(maker: RequestMaker, target: ToyTarget, seed: int) -> list[Any]:
    """Run one request; its drafts."""
    drafter, policy = maker()
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    got = run(target, prompt_of(seed), params, drafter, policy=policy)
    assert got.tokens == target.plain(prompt_of(seed), params)
    return [r.tree for r in got.rounds]


SHARING = ["racer,nodes=12", "recycling,nodes=12"]


@pytest.mark.parametrize("method", SHARING)
def test_requests_are_strangers_by_default(method: str) -> None:
    target, maker = ToyTarget(), prepare(method)
    first = ask(maker, target, 1)
    ask(maker, target, 2)
    assert ask(maker, target, 1) == first
    assert maker.shares == ("counts",)


@pytest.mark.parametrize("scope", ["session", "global"])
@pytest.mark.parametrize("method", SHARING)
def test_a_wider_scope_learns_from_earlier_requests(method: str, scope: str) -> None:
    target, maker = ToyTarget(), prepare(f"{method},scope={scope}")
    first = ask(maker, target, 1)
    again = ask(maker, target, 1)
    assert len(again) < len(first)
    elsewhere = ask(prepare(f"{method},scope={scope}"), target, 1)
    assert elsewhere == first if scope == "session" else len(elsewhere) < len(first)


@pytest.mark.parametrize("scope", ["session", "global"])
@pytest.mark.parametrize("method", SHARING)
def test_a_reset_leaves_no_trace(method: str, scope: str) -> None:
    target, maker = ToyTarget(), prepare(f"{method},scope={scope}")
    first = ask(maker, target, 1)
    ask(maker, target, 2)
    maker.reset("counts")
    assert ask(maker, target, 1) != first
    maker.reset(scope)
    assert ask(maker, target, 1) == first
    maker.reset()
    assert ask(maker, target, 1) == first


@pytest.mark.parametrize("method", SHARING)
def test_a_fork_goes_its_own_way(method: str) -> None:
    target, maker = ToyTarget(), prepare(f"{method},scope=session")
    ask(maker, target, 1)
    one, two = maker.fork(), maker.fork()
    ask(one, target, 2)
    ask(one, target, 3)
    assert ask(two, target, 2) == ask(maker, target, 2)
    two.reset()
    assert ask(maker.fork(), target, 3) == ask(maker, target, 3)


def test_counts_are_shared_and_emptied() -> None:
    target, maker = ToyTarget(), prepare("racer")
    (_, one), (_, two) = maker(), maker()
    assert isinstance(one, BudgetPolicy)
    assert isinstance(two, BudgetPolicy)
    assert one is not two
    assert one.book is two.book
    assert one.costs is two.costs
    ask(maker, target, 1)
    assert one.book.counts
    maker.reset("session")
    assert one.book.counts
    maker.reset()
    assert not one.book.counts


def test_process_wide_states_are_kept_apart_by_model_and_shape_and_are_few() -> None:
    def state(text: str, seed: int = 0) -> Any:
        return prepare(f"{text},scope=global", ToyTarget(seed=seed))()[0]._shared  # type: ignore[attr-defined]

    first = state("racer,nodes=4")
    assert state("racer,nodes=9") is first
    assert state("racer,ngram=5") is not first
    assert state("racer,nodes=4", seed=1) is not first
    assert state("recycling,nodes=4") is state("recycling,nodes=4")
    for seed in range(30):
        state("racer,nodes=4", seed=seed)
    assert len(common._GLOBAL) == common._GLOBAL_STATES
    assert state("racer,nodes=4", seed=0) is not first


@pytest.mark.parametrize("scope", ["session", "global"])
def test_shared_memory_is_flat_over_two_hundred_requests(
    scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "SHARED_ROWS", 10)
    maker = prepare(f"racer,nodes=8,capacity=200,scope={scope}")
    rng = random.Random(0)
    target = ToyTarget(eos_ids=())
    state = maker()[0]._shared  # type: ignore[attr-defined]
    params = SamplingParams(max_new_tokens=5)
    sizes = []
    for _ in range(200):
        drafter, policy = maker()
        run(target, [rng.randrange(24) for _ in range(15)], params, drafter, policy=policy)
        sizes.append((len(state.ngrams), len(state.successors)))
    assert max(nodes for nodes, _ in sizes) <= 200
    assert {rows for _, rows in sizes} == {10}
    assert min(nodes for nodes, _ in sizes[10:]) > 50


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("racer,nodes=-1", "racer.nodes"),
        ("racer,most=-1", "racer.most"),
        ("racer,breadth=-1", "racer.breadth"),
        ("racer,ngram=-1", "racer.ngram"),
        ("racer,breadth=0,ngram=0", "racer.ngram"),
        ("racer,min_match=0", "racer.min_match"),
        ("racer,ngram=4,min_match=4", "racer.min_match"),
        ("racer,breadth=0,min_match=10", "racer.min_match"),
        ("racer,ngram=1", "racer.ngram"),
        ("racer,retrieved=0", "racer.retrieved"),
        ("racer,retrieved=1.5", "racer.retrieved"),
        ("racer,capacity=40", "racer.capacity"),
        ("racer,schedule=tall", "racer.schedule"),
        ("racer,scope=world", "racer.scope"),
        ("recycling,scope=world", "recycling.scope"),
        ("recycling,nodes=-2", "recycling.nodes"),
        ("auto,most=-1", "auto.most"),
    ],
)
def test_a_bad_option_is_refused_before_anything_runs(text: str, option: str) -> None:
    target = ToyTarget()
    with pytest.raises(OptionError) as caught:
        prepare(text, target)
    assert caught.value.option == option
    assert target.passes == 0


@pytest.mark.parametrize("method", ["racer", "recycling", "auto"])
def test_costs_are_given_or_measured_and_only_where_a_policy_needs_them(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(cost, "load_or_measure", lambda target: asked.append(target) or COSTS)
    target = ToyTarget()
    bare = MethodContext(target, ToyTokenizer(), load_other)
    if method != "auto":
        _, policy = methods.prepare(methods.parse(f"{method},nodes=5"), bare)()
        assert policy == FixedPolicy(5)
        assert asked == []
    methods.prepare(methods.parse(method), bare)
    assert asked == [target]
    prepare(method)
    assert asked == [target]


def test_a_shortest_match_is_of_no_matter_without_retrieval() -> None:
    drafter, _ = prepare("racer:paper,ngram=0")()
    assert isinstance(drafter, Racer)
    assert drafter.ngram == 0


@pytest.mark.parametrize("method", ["racer,nodes=12", "recycling,nodes=12", "auto", "racer:paper"])
def test_nothing_is_drafted_below_an_end(method: str) -> None:
    target = ToyTarget(eos_ids=(3, 5))
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    prompt = [*prompt_of(3), 3, *prompt_of(4), 5, *prompt_of(3)]
    seen: list[Draft] = []
    drafter, policy = prepare(method, target)()
    whole = drafter.propose

    def watched(ctx: DraftContext, budget: Budget) -> Draft:
        seen.append(whole(ctx, budget))
        return seen[-1]

    drafter.propose = watched  # type: ignore[method-assign]
    run(target, prompt, params, drafter, policy=policy)
    nodes = [(d.tree, node) for d in seen for node in range(1, len(d.tree))]
    assert any(tree.tokens[node] in (3, 5) for tree, node in nodes), "ends are drafted themselves"
    for tree, node in nodes:
        parent = tree.parents[node]
        assert parent == 0 or tree.tokens[parent] not in (3, 5)


def test_options_reach_the_drafter() -> None:
    drafter, policy = prepare("racer:paper,breadth=5,ngram=7,capacity=500")()
    assert isinstance(drafter, Racer)
    assert policy == FixedPolicy(64)
    assert (drafter.breadth, drafter.ngram, drafter.min_match) == (5, 7, 2)
    assert (drafter.retrieved, drafter.decay, drafter.refill, drafter.graft) == (
        1.0,
        None,
        False,
        False,
    )
    assert drafter._state.ngrams.capacity == 500
    tr, policy = prepare("recycling:paper")()
    assert isinstance(tr, TokenRecycling)
    assert policy == FixedPolicy(81)
    assert not tr.needs.prompt


@pytest.mark.parametrize("method", ["racer", "recycling"])
def test_a_cache_that_cannot_be_cut_back_is_refused(method: str) -> None:
    with pytest.raises(CapabilityError, match="rollback"):
        prepare(method, ToyTarget(rollback=False, tree=False))


@pytest.mark.parametrize("method", ["racer", "recycling", "auto", "racer,nodes=1"])
@pytest.mark.parametrize("tree", [True, False])
def test_answers_are_plain_decodings_under_the_prepared_policy(method: str, tree: bool) -> None:
    target, maker = ToyTarget(tree=tree), prepare(method)
    for seed in range(4):
        for params in (PARAMS, SamplingParams(max_new_tokens=40, temperature=0.8)):
            drafter, policy = maker()
            got = run(target, prompt_of(seed), params, drafter, policy=policy, seed=seed)
            assert got.tokens == target.plain(prompt_of(seed), params, seed=seed)
            if method.endswith("=1"):
                assert all(r.drafted == 0 for r in got.rounds)


def test_plain_makers_have_nothing_to_reset() -> None:
    for text in ("ar", "prompt-lookup"):
        maker = prepare(text)
        assert maker.shares == ()
        maker.reset()
        assert maker.fork()()[0].name == maker()[0].name


def test_auto_is_plain_decoding_where_the_cache_cannot_be_cut_back_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = ToyTarget(rollback=False, tree=False)
    maker = prepare("auto", target)
    assert "plain decoding" in caplog.text
    drafter, policy = maker()
    prompt = prompt_of(1)
    got = run(target, prompt, PARAMS, drafter, policy=policy)
    assert got.tokens == target.plain(prompt, PARAMS)
    assert all(made.drafted == 0 for made in got.rounds)

"""AdaPLD as registered: its options, its variants, and the paper's ablation."""

from __future__ import annotations

import pytest
from tests.conformance.harness import COSTS, load_other, prompt_of, run
from tests.conformance.toy_target import ToyTarget, ToyTokenizer

from hasten import methods
from hasten.errors import CapabilityError, OptionError
from hasten.methods import MethodContext, RequestMaker
from hasten.policies.budget import BudgetPolicy
from hasten.targets.base import Capabilities
from hasten.types import SamplingParams


def prepare(text: str, target: ToyTarget | None = None) -> RequestMaker:
    context = MethodContext(target or ToyTarget(), ToyTokenizer(), load_other, COSTS)
    return methods.prepare(methods.parse(text), context)


@pytest.mark.parametrize(
    ("text", "layers", "layer"),
    [
        ("adapld", 30, 20),
        ("adapld:paper", 32, 9),
        ("adapld,layer=7", 30, 7),
        ("adapld,layer_share=1", 30, 30),
        ("adapld,layer_share=0.01", 30, 1),
        ("adapld,layer_share=0.01", 1, 1),
    ],
)
def test_the_layer_is_a_share_of_the_depth_or_the_one_named(
    text: str, layers: int, layer: int
) -> None:
    drafter, _ = prepare(text, ToyTarget(layers=layers))()
    assert drafter.needs.hidden == (layer,)


def test_the_default_asks_for_what_the_budget_policy_wants() -> None:
    _, policy = prepare("adapld,most=12")()
    assert isinstance(policy, BudgetPolicy)
    assert policy.most == 12


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("layer=5", r"adapld\.layer.*at most 4"),
        ("layer=-1", r"adapld\.layer"),
        ("layer_share=0", r"adapld\.layer_share"),
        ("layer_share=1.1", r"adapld\.layer_share"),
        ("breadth=0", r"adapld\.breadth"),
        ("copy=0", r"adapld\.copy"),
        ("successor_length=0", r"adapld\.successor_length"),
        ("max_cand=0", r"adapld\.max_cand"),
        ("tau=1.5", r"adapld\.tau"),
        ("blend=-1", r"adapld\.blend"),
        ("rerank=best", r"adapld\.rerank.*hidden, latest"),
        ("succ_query=next", r"adapld\.succ_query.*anchor, previous"),
        ("nodes=-1", r"adapld\.nodes"),
    ],
)
def test_bad_options_are_refused_before_any_pass(options: str, named: str) -> None:
    target = ToyTarget()
    with pytest.raises(OptionError, match=named):
        prepare(f"adapld,{options}", target)
    assert target.passes == 0


def test_a_target_without_hidden_states_is_refused() -> None:
    target = ToyTarget()
    target.capabilities = Capabilities(taps=False)
    with pytest.raises(CapabilityError, match="taps"):
        prepare("adapld", target)


ABLATION = {
    "full": "adapld:paper",
    "no successors": "adapld:paper,successors=off",
    "no semantic": "adapld:paper,semantic=off",
    "copy alone": "adapld:paper,semantic=off,branches=off",
}


def test_each_part_of_the_method_saves_passes() -> None:
    passes = dict.fromkeys(ABLATION, 0)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    for seed in range(12):
        for name, text in ABLATION.items():
            target = ToyTarget(bigram=0.8)
            got = run(target, prompt_of(seed), params, prepare(text, target)()[0], nodes=47)
            assert got.tokens == target.plain(prompt_of(seed), params)
            passes[name] += len(got.rounds)
    assert passes["full"] < passes["no successors"] < passes["copy alone"]
    assert passes["full"] <= passes["no semantic"] < passes["copy alone"]


def test_the_copy_alone_is_the_pld_plus_variant() -> None:
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    drafts = []
    for text in ("adapld:pld-plus", "adapld:paper,semantic=off,branches=off"):
        target = ToyTarget()
        got = run(target, prompt_of(3), params, prepare(text, target)()[0], nodes=31)
        assert all(r.tree is None or r.tree.is_chain for r in got.rounds)
        drafts.append([r.tree for r in got.rounds])
    assert drafts[0] == drafts[1]

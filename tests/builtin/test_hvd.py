"""``hvd`` as users name it: its rules, its arms and their options, its answers, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.conformance.harness import _registered, prompt_of, run
from tests.conformance.toy_target import ToyTarget
from tests.dflash import dflash_models
from tests.exits.layerskip import COSTS
from tests.payoff.cases import save_for
from tests.tiny_llm import PLAIN, meter, metered

from hasten import methods
from hasten.api import LLM
from hasten.builtin import hvd
from hasten.dflash import store as dflash_store
from hasten.drafters.early_exit import EarlyExit
from hasten.drafters.exit_lookup import ExitTree
from hasten.drafters.hybrid import Hybrid
from hasten.errors import HastenError, ModelError, OptionError
from hasten.exits import store as exit_store
from hasten.payoff.predictor import CacheOptions
from hasten.policies import cost
from hasten.types import SamplingParams


@pytest.fixture(autouse=True)
def _known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured here."""
    monkeypatch.setattr(cost, "load_or_measure", lambda target: COSTS)


@pytest.fixture(scope="module")
def files(
    layerskip: LLM, exits_folder: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Words that stand for files and folders in method strings."""
    root = tmp_path_factory.mktemp("hvd")
    return {
        "EXITS": exits_folder,
        "BLOCK": str(dflash_models.save_for(root / "dflash", layerskip.target.info)),
        "GOOD": save_for(root / "good.npz", layerskip),
        "RIDGE": save_for(root / "ridge.npz", layerskip, kind="ridge"),
        "FOREIGN": save_for(root / "foreign.npz", layerskip, target="else"),
        "WORDS": save_for(root / "words.npz", layerskip, tokenizer="else"),
        "SHORT": save_for(root / "short.npz", layerskip, cache=CacheOptions(longest=8)),
    }


def named(method: str, files: dict[str, str]) -> str:
    for word, path in files.items():
        method = method.replace(f"={word}", f"={path}")
    return method


# -- answers ---------------------------------------------------------------------------------------

METHODS = [
    "hvd,predictor=GOOD,model=none",
    "hvd,predictor=RIDGE,tau=2,model=early-exit;modules=EXITS;exits=2;length=3",
    "hvd:frequency,s0=0.4,model=early-exit:tree;modules=EXITS;most=6",
    "hvd:frequency,s0=0.4,model=early-exit:lookup;modules=EXITS",
    "hvd:frequency,s0=0.4,model=del;modules=EXITS",
    "hvd,rule=cache,model=dflash;model=BLOCK;length=2,longest=6",
    "hvd,rule=cache,model=dflash:cost;model=BLOCK",
    "hvd,rule=model,model=dflash;model=BLOCK",
    "hvd:cost,predictor=GOOD,plain=on,model=early-exit;modules=EXITS",
    "hvd:cost,predictor=SHORT,longest=8,model=dflash;model=BLOCK",
]


@pytest.mark.parametrize("method", METHODS)
def test_every_way_answers_as_plain_decoding_greedy_and_sampled(
    method: str, layerskip: LLM, files: dict[str, str]
) -> None:
    method = named(method, files)
    with metered(layerskip):
        for options in ({}, {"temperature": 0.8, "seed": 3}):
            want = layerskip.generate("Again and again and again.", **options, **PLAIN)
            got = layerskip.generate(
                "Again and again and again.", method=method, **options, **PLAIN
            )
            assert got.tokens == want.tokens


TOY = [
    "hvd:frequency,s0=0.4,model=none",
    "hvd,rule=cache,longest=5,model=early-exit:lookup;modules=toy",
    "hvd:frequency,s0=0.5,model=early-exit;modules=toy;exits=2",
    "hvd:frequency,s0=0.5,model=dflash;model=toy",
    "hvd:frequency,s0=0.4,model=draft:near",
    "hvd,rule=model,model=draft:near;nodes=3",
]


@pytest.mark.parametrize("text", TOY)
@pytest.mark.parametrize("tree", [True, False], ids=["tree", "chain"])
def test_on_the_toy_target_too(text: str, tree: bool) -> None:
    target = ToyTarget(tree=tree)
    for temperature in (0.0, 0.9):
        params = SamplingParams(max_new_tokens=33, temperature=temperature)
        for case, nodes in enumerate((1, 3, 24)):
            prompt = prompt_of(case)
            plain = target.plain(prompt, params, seed=case)
            drafter = _registered(text)(target, prompt + plain, case)
            assert run(target, prompt, params, drafter, nodes=nodes, seed=case).tokens == plain


def test_requests_that_share_passes_are_answered_as_alone(
    layerskip: LLM, files: dict[str, str]
) -> None:
    prompts = ["One.", "Two, please.", "And three, three, three."]
    want = [layerskip.generate(prompt, **PLAIN).tokens for prompt in prompts]
    for method in (METHODS[2], METHODS[5], METHODS[8]):
        got = layerskip.generate_many(prompts, method=named(method, files), **PLAIN)
        assert [each.tokens for each in got] == want


def test_a_trace_shows_which_arm_drafted(layerskip: LLM, files: dict[str, str]) -> None:
    method = named("hvd:frequency,s0=1.5,model=dflash;model=BLOCK", files)
    options: dict[str, Any] = {**PLAIN, "max_new_tokens": 80}
    got = layerskip.generate("Again and again.", method=method, trace=True, **options)
    by_round = [set(each.sources[1:]) for each in got.rounds if each.drafted]
    assert {"suffix"} in by_round
    assert {"dflash"} in by_round
    assert all(len(sources) == 1 for sources in by_round), "one arm a round"


# -- arms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("early-exit:tree;steps=2", "early-exit:tree,steps=2"),
        ("dflash; length=2 ;model=/a/b", "dflash,length=2,model=/a/b"),
        ("draft:near", "draft-model,model=near"),
        ("draft:org/name;nodes=3", "draft-model,model=org/name,nodes=3"),
        ("draft-model;model=near", "draft-model,model=near"),
        ("eagle3:tree;top_k=4;depth=8", "eagle3:tree,top_k=4,depth=8"),
    ],
)
def test_an_arm_is_a_method_with_its_own_options(text: str, spec: str) -> None:
    assert hvd.arm_of(text, ToyTarget()) == methods.parse(spec)


def test_no_arm_is_none() -> None:
    assert hvd.arm_of("none", ToyTarget()) is None


def test_where_no_arm_is_named_it_is_one_that_is_shipped(
    layerskip: LLM, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = layerskip.target
    assert hvd.arm_of("", target) is None, "nothing is shipped for these weights"
    monkeypatch.setattr(dflash_store, "shipped", lambda info: Path(files["BLOCK"]))
    assert hvd.arm_of("", target) == methods.parse("dflash")
    stored = exit_store.read(files["EXITS"])
    monkeypatch.setattr(exit_store, "shipped", lambda info: stored)
    assert hvd.arm_of("", target) == methods.parse("early-exit:tree")
    got = layerskip.generate("Say it.", method="hvd:frequency,s0=99", trace=True, **PLAIN)
    assert set(got.metrics.source_drafted) <= {"module"}
    assert hvd.arm_of("", ToyTarget(layer_ranges=False)) != methods.parse("early-exit:tree")


def context(llm: LLM) -> methods.MethodContext:
    return methods.MethodContext(llm.target, llm.tokenizer, lambda name: (llm.target, None), COSTS)


def made(llm: LLM, method: str) -> Hybrid:
    drafter, _ = methods.prepare(methods.parse(method), context(llm))()
    assert isinstance(drafter, Hybrid)
    return drafter


def test_arms_get_the_options_that_were_given(layerskip: LLM, files: dict[str, str]) -> None:
    chain = made(layerskip, named(METHODS[1], files))
    assert isinstance(chain.model, EarlyExit)
    assert (chain.model.length, chain.model.bank.layers) == (3, (2,))
    tree = made(layerskip, named(METHODS[2], files))
    assert isinstance(tree.model, ExitTree)
    assert tree.needs == tree.model.needs
    alone = made(layerskip, named(METHODS[0], files))
    assert alone.model is None
    assert (alone.cache.mode, alone.cache.depth) == ("path", 64)


def test_what_requests_learn_can_be_forgotten_and_forked(
    layerskip: LLM, files: dict[str, str]
) -> None:
    method = named("hvd:cost,predictor=GOOD,model=early-exit:tree;modules=EXITS", files)
    maker = methods.prepare(methods.parse(method), context(layerskip))
    learned = maker._shared["counts"]
    assert isinstance(learned, hvd._Learned)
    assert learned.arm is not None
    learned.record.learn(9, 3.0)
    book = learned.arm._shared["counts"]
    book.add(("module", 1, 1), True)
    other = maker.fork()
    maker.reset()
    assert (learned.record.rounds, book.counts) == (1, {})
    kept = other._shared["counts"]
    assert kept.record.rounds == 2
    assert kept.arm._shared["counts"].counts
    drafter, _ = other()
    assert drafter.gate.record is kept.record


# -- refusals --------------------------------------------------------------------------------------

REFUSED: list[tuple[str, type[HastenError], str]] = [
    ("hvd,model=none", OptionError, "hvd.predictor: no payoff predictor is shipped"),
    ("hvd,predictor=FOREIGN,model=none", ModelError, "trained for other weights"),
    ("hvd,predictor=WORDS,model=none", ModelError, "trained with another tokenizer"),
    ("hvd,predictor=SHORT,model=none", OptionError, "hvd.longest: .*longest=8, got 64"),
    ("hvd,predictor=GOOD,min_token_prob=0.2,model=none", OptionError, "hvd.min_token_prob: .*0.1"),
    ("hvd,predictor=/no/file,model=none", ModelError, "/no/file holds no payoff predictor"),
    ("hvd,rule=luck", OptionError, "hvd.rule: must be one of payoff, cost"),
    ("hvd,tau=inf,predictor=GOOD", OptionError, "hvd.tau: must be finite"),
    ("hvd:frequency,tau=3", OptionError, "hvd.tau: plays no part with rule=frequency"),
    ("hvd:frequency,predictor=GOOD", OptionError, "hvd.predictor: plays no part"),
    ("hvd,predictor=GOOD,s0=3", OptionError, "hvd.s0: plays no part with rule=payoff"),
    ("hvd,predictor=GOOD,plain=on", OptionError, "hvd.plain: plays no part with rule=payoff"),
    ("hvd,rule=model,longest=3,model=none", OptionError, "hvd.longest: plays no part"),
    ("hvd,rule=model,model=none", OptionError, "hvd.rule: always drafts by the model arm"),
    ("hvd:frequency,longest=0,model=none", OptionError, "hvd.longest: must be at least 1"),
    ("hvd:frequency,max_tree_depth=1,model=none", OptionError, "hvd.max_tree_depth"),
    ("hvd:frequency,max_spec_factor=-1,model=none", OptionError, "hvd.max_spec_factor"),
    ("hvd:frequency,min_token_prob=0,model=none", OptionError, "hvd.min_token_prob"),
    ("hvd:frequency,model=suffix", OptionError, "hvd.model: no such model arm: 'suffix'"),
    ("hvd:frequency,model=draft", OptionError, "draft-model.model: is missing"),
    ("hvd:frequency,model=dflash;model=/no/folder", OptionError, "dflash.model: there is no"),
    ("hvd:frequency,model=dflash;steps=3", OptionError, "dflash.steps: no such option"),
    ("hvd:frequency,model=early-exit", OptionError, "early-exit.modules: no exit modules"),
    ("hvd:frequency,model=early-exit;length=40", OptionError, "early-exit.length"),
]


@pytest.mark.parametrize(("method", "kind", "words"), REFUSED)
def test_what_makes_no_sense_is_refused_before_anything_runs(
    method: str, kind: type[HastenError], words: str, layerskip: LLM, files: dict[str, str]
) -> None:
    with metered(layerskip):
        with pytest.raises(kind, match=words):
            layerskip.generate("Say it.", method=named(method, files), **PLAIN)
        assert meter(layerskip).rows == 0


def test_a_model_without_a_tokenizer_has_no_kinds_of_tokens(
    layerskip: LLM, files: dict[str, str]
) -> None:
    spec = methods.parse(named(METHODS[0], files))
    blind = methods.MethodContext(layerskip.target, None, lambda name: None, COSTS)  # type: ignore[arg-type, return-value]
    with pytest.raises(ModelError, match="another tokenizer"):
        methods.prepare(spec, blind)

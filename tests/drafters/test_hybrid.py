"""Hybrid decoding: answers are the target's whatever the gate says, and no arm loses its place."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.conformance.harness import prompt_of as toy_prompt
from tests.conformance.harness import request, run
from tests.conformance.test_distribution import BIASED, CUT, FAIR, FLAT, IDS, VOCAB, exact
from tests.conformance.test_distribution import p_value as chance_of
from tests.conformance.toy_target import ToyTarget
from tests.dflash import dflash_models
from tests.exits import exit_models as tiny
from tests.exits.exit_requests import EVEN, GREEDY, bank, prompt_of, rounds_of, tokens_of
from tests.payoff.cases import Dice, Says

from hasten.decode import decode
from hasten.dflash.lengths import BlockLength
from hasten.drafters.base import BaseDrafter, DraftContext, Drafter
from hasten.drafters.dflash import DFlash
from hasten.drafters.draft_model import DraftModel
from hasten.drafters.early_exit import EarlyExit
from hasten.drafters.exit_lookup import ExitTree
from hasten.drafters.exit_tree import Growth
from hasten.drafters.hybrid import Hybrid
from hasten.drafters.ranks import SUFFIX
from hasten.payoff.gate import Gate, Predicts, Rule
from hasten.payoff.policy import HybridPolicy
from hasten.payoff.predictor import CacheOptions
from hasten.policies import exit_rules
from hasten.policies.base import FixedPolicy
from hasten.policies.length import LengthPolicy
from hasten.types import Budget, Draft, DraftTree, Round, RowSignals, SamplingParams, Signals

CACHE = CacheOptions(longest=12, max_spec_factor=0.0, min_token_prob=0.05)
TABLE = np.zeros((300, 5), np.uint8)


def hybrid(
    predictor: Predicts | None, model: Drafter | None, *, rule: str = "payoff", **more: Any
) -> Hybrid:
    gate = Gate(Rule(rule, **more), predictor, TABLE, model=model is not None)
    return Hybrid(CACHE.cache(frozenset()), gate, model, longest=CACHE.longest)


# -- answers ---------------------------------------------------------------------------------------

PREDICTORS: dict[str, Callable[[], Predicts]] = {
    "always": lambda: Says(float("inf")),
    "never": lambda: Says(float("-inf")),
    "by chance": Dice,
}
REPEATING = {"bigram": 0.97, "scale": 4.0, "seed": 3}
"""A toy target that says the same again and again."""


def near_model(target: ToyTarget) -> DraftModel:
    other = ToyTarget(**{**REPEATING, "bigram": 0.9})
    return DraftModel(other, vocab_size=target.info.vocab_size, num_tokens=3)


@pytest.mark.parametrize("says", PREDICTORS)
@pytest.mark.parametrize("tree", [True, False], ids=["tree", "chain"])
def test_answers_are_plain_decodings_whatever_is_predicted(says: str, tree: bool) -> None:
    target = ToyTarget(tree=tree, **REPEATING)
    drafted: Counter[str] = Counter()
    for options in ({}, {"temperature": 0.7}):
        params = SamplingParams(max_new_tokens=40, ignore_eos=True, **options)
        for case, nodes in enumerate((2, 4, 16)):
            prompt = toy_prompt(case)
            drafter = hybrid(PREDICTORS[says](), near_model(target))
            asked = run_repeating(target, prompt, params, drafter, nodes=nodes, seed=case)
            assert tokens_of(asked) == target.plain(prompt, params, case)
            for made in asked:
                drafted.update(made.sources[1:])
    assert (drafted[SUFFIX] > 0) == (says != "never")
    assert drafted["draft-model"] > 0


def run_repeating(
    target: ToyTarget, prompt: Sequence[int], params: SamplingParams, drafter: Drafter, **how: Any
) -> list[Round]:
    """A request's rounds; nothing is left open."""
    rounds = [made for _, made in decode([request(target, prompt, params, drafter, **how)])]
    assert target.live == []
    return rounds


def test_the_hybrid_keeps_the_books_of_the_loop() -> None:
    target = ToyTarget()
    prompt = toy_prompt(1)
    params = SamplingParams(max_new_tokens=33)
    plain = target.plain(prompt, params)
    assert run(target, prompt, params, hybrid(Dice(), near_model(target))).tokens == plain
    assert run(target, prompt, params, hybrid(Says(99.0), None)).tokens == plain


def test_always_is_the_cache_and_never_is_the_model_arm_alone() -> None:
    """tau below all, or above all: the rounds are those of the one drafter."""
    target = ToyTarget(**REPEATING)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    prompt = toy_prompt(2)

    def trees(drafter: Drafter) -> list[DraftTree | None]:
        return [made.tree for made in run_repeating(target, prompt, params, drafter, nodes=13)]

    alone = trees(CACHE.cache(frozenset()))
    assert max(len(tree or ()) for tree in alone) > 5
    assert trees(hybrid(Dice(), None, tau=-1e9)) == alone
    assert trees(hybrid(None, None, rule="cache")) == alone
    model = trees(near_model(target))
    assert trees(hybrid(Dice(), near_model(target), tau=1e9)) == model
    assert trees(hybrid(None, near_model(target), rule="model")) == model


def test_drafts_that_copy_a_text_are_predicted_and_kept() -> None:
    """A stand-in of an agent's text: the answer repeats the prompt with a change now and then."""
    dice = random.Random(4)
    body = [dice.randrange(3, 200) for _ in range(160)]
    answer = list(body)
    for place in range(30, 160, 45):
        answer[place] = 201 + place // 45

    def after(ids: Sequence[int]) -> int:
        return answer[len(ids) - len(body)] if len(ids) - len(body) < len(answer) else 0

    drafter = Hybrid(CacheOptions().cache(frozenset()), Gate(Rule("frequency")), None, longest=64)
    ids = [*body, answer[0]]
    drafter.begin(tuple(body), RowSignals())
    drafter.observe(Round(0, (answer[0],)))
    kept: list[int] = []
    while len(ids) < len(body) + len(answer):
        ctx = DraftContext(ids=ids, sample=None, warp=None, greedy=True)  # type: ignore[arg-type]
        draft = drafter.propose(ctx, Budget(65, 64))
        tokens, emitted = draft.tree.tokens[1:], []
        while not emitted or (
            len(emitted) <= len(tokens) and emitted[-1] == tokens[len(emitted) - 1]
        ):
            emitted.append(after([*ids, *emitted]))
        if tokens:
            kept.append(len(emitted) - 1)
        accepted = tuple(range(len(emitted)))
        drafter.observe(Round(1, tuple(emitted), draft.tree, accepted, sources=draft.sources))
        ids += emitted
    assert max(kept) >= 16
    assert sum(kept) / len(kept) >= 10
    assert sum(k >= 6 for k in kept) / len(kept) > 0.9, "precision at the paper's threshold"


# -- the model arm keeps its place -----------------------------------------------------------------

ARMS: dict[str, Callable[[], Drafter]] = {
    "exit 0, attending": lambda: EarlyExit(bank((("deep", 0),)), exit_rules.Static(0, 3), length=3),
    "exit 2, attending": lambda: EarlyExit(
        bank((("adapter", 2),)), exit_rules.Static(0, 3), length=3
    ),
    "exit 4, a lens": lambda: EarlyExit(bank((("lens", 4),)), exit_rules.Static(0, 3), length=3),
    "a tree from exit 0": lambda: ExitTree(bank((("deep", 0),)), Growth(steps=2)),
    "a block": lambda: DFlash(block_bank(), BlockLength(LengthPolicy(5, policy="fixed"))),
    "a draft model": lambda: DraftModel(tiny.target((), 127), vocab_size=tiny.VOCAB, num_tokens=3),
}


def block_bank() -> Any:
    return dflash_models.bank(ids=EVEN, target_layer_ids=(1, 4))


class Silent(FixedPolicy):
    """Everything is drafted and nothing verified."""

    def select(self, draft: Draft) -> Draft:
        return Draft(DraftTree.chain(draft.tree.tokens[0]))


class Noting(BaseDrafter):
    """Another drafter's drafts, by their place in the text, where the answer's end isn't near."""

    name = "noting"

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.needs = inner, inner.needs
        self.drafts: dict[int, Draft] = {}

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        self.inner.begin(prompt, signals)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        room = Budget(min(budget.nodes, 8), min(budget.depth, 7))
        draft = self.inner.propose(ctx, room)
        if room == Budget(8, 7):
            self.drafts[len(ctx.ids)] = draft
        return draft

    def observe(self, round: Round) -> None:
        self.inner.observe(round)

    def end(self) -> None:
        self.inner.end()


def everywhere(arm: str, prompt: Sequence[int], params: SamplingParams) -> dict[int, Draft]:
    """What the arm drafts at every place of the answer, a token at a time."""
    noting = Noting(ARMS[arm]())
    asked = request(tiny.target(), prompt, params, noting, policy=Silent(8))  # type: ignore[arg-type]
    assert len([made for _, made in decode([asked])]) == params.max_new_tokens
    return noting.drafts


@pytest.mark.parametrize("arm", ARMS)
def test_after_rounds_of_the_cache_the_model_arm_drafts_what_it_would_have_alone(arm: str) -> None:
    params = replace(GREEDY, max_new_tokens=40)
    compared = caught_up = 0
    for case in range(3):
        prompt = prompt_of(case)
        alone = everywhere(arm, prompt, params)
        noting = Noting(ARMS[arm]())
        drafter = hybrid(Dice(case), noting)
        rounds = rounds_of(tiny.target(), prompt, params, drafter, nodes=13)
        place, last = len(prompt), ""
        for made in rounds:
            source = made.sources[1] if made.drafted else ""
            if source != SUFFIX and place in noting.drafts:
                assert noting.drafts[place].tree == alone[place].tree, (case, place)
                compared += 1
                caught_up += last == SUFFIX
            place, last = place + len(made.emitted), source
    assert compared >= 5
    assert caught_up >= 2, "no model round came after a round of the cache: this shows nothing"


def test_a_round_of_the_cache_runs_nothing_of_the_model_arm() -> None:
    target = tiny.target()
    drafter = hybrid(Says(99.0), ARMS["exit 2, attending"](), rule="cache")
    rounds = rounds_of(target, prompt_of(0), replace(GREEDY, max_new_tokens=40), drafter, nodes=13)
    copied = [made for made in rounds if made.drafted and made.sources[1] == SUFFIX]
    assert copied
    assert all(made.times.draft_model == 0.0 for made in copied)


class Greedy(BaseDrafter):
    """A model arm that drafts as much as it may."""

    name = "greedy"
    needs = Signals()

    def __init__(self) -> None:
        self.budgets: list[Budget] = []

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        self.budgets.append(budget)
        count = min(budget.nodes - 1, budget.depth)
        return Draft(DraftTree.chain(ctx.ids[-1], range(3, 3 + count)))


def test_the_model_arm_gets_its_own_policys_budget_and_its_name_is_its_source() -> None:
    target = ToyTarget(vocab=80, **REPEATING)
    model = Greedy()
    drafter = hybrid(Says(0.0), model)
    policy = HybridPolicy(drafter.gate, FixedPolicy(5, 4), longest=40)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    rounds = run_repeating(target, toy_prompt(0), params, drafter, policy=policy)
    assert set(model.budgets) >= {Budget(5, 4)}
    assert all(budget.nodes <= 5 and budget.depth <= 4 for budget in model.budgets)
    assert {source for made in rounds for source in made.sources[1:]} == {"greedy"}


def test_where_the_models_policy_pauses_only_the_cache_drafts() -> None:
    target = ToyTarget(**REPEATING)
    model = Greedy()
    drafter = hybrid(Dice(2), model)
    policy = HybridPolicy(drafter.gate, FixedPolicy(1, 0), longest=12)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    rounds = run_repeating(target, toy_prompt(2), params, drafter, policy=policy)
    assert model.budgets == []
    assert {source for made in rounds for source in made.sources[1:]} == {SUFFIX}


# -- the law of sampled answers --------------------------------------------------------------------

LAW = ToyTarget(vocab=VOCAB, scale=1.0, seed=5, eos_ids=())
RUNS = 400


class Drawing(BaseDrafter):
    """A model arm that draws two tokens from a law of its own."""

    name = "drawing"

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        prefix, tokens, q = list(ctx.ids), [], {}
        for node in range(min(2, budget.depth, budget.nodes - 1)):
            q[node] = torch.softmax(0.5 * LAW.logits_after([*prefix, *tokens]), -1)
            tokens += ctx.sample(q[node], len(prefix) + node, 1)
        return Draft(DraftTree.chain(prefix[-1], tokens), q=q)


class Copying(Hybrid):
    """A hybrid whose cache has a draft from the first round on."""

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        super().begin(prompt, signals)
        self.cache.begin([*range(VOCAB), *range(VOCAB)], signals)


def joint(
    make: Callable[[int], Hybrid], params: SamplingParams, verifier: str, runs: int = RUNS
) -> Counter[Any]:
    """The first three tokens of many answers, and who drafted."""
    counts: Counter[Any] = Counter()
    longer = replace(params, max_new_tokens=4)
    for seed in range(runs):
        asked = request(LAW, IDS, longer, make(seed), nodes=6, verifier=verifier, seed=seed)
        tokens: list[int] = []
        for _, made in decode([asked]):
            tokens += made.emitted
            counts.update(f"by {name}" for name in made.sources[1:2])
            if len(tokens) >= 3:
                break
        counts[tuple(tokens[:3])] += 1
    return counts


def split(counts: Counter[Any]) -> tuple[Counter[tuple[int, ...]], set[str]]:
    arms = {key for key in counts if isinstance(key, str)}
    return Counter({k: n for k, n in counts.items() if k not in arms}), arms


def copying(seed: int, drafter: type[Hybrid] = Copying) -> Hybrid:
    gate = Gate(Rule("payoff"), Dice(seed), TABLE)
    return drafter(CACHE.cache(frozenset()), gate, Drawing(), longest=4)


@pytest.mark.parametrize(("params", "verifier"), [(CUT, "rejection"), (FLAT, "match")])
def test_a_gated_draft_keeps_the_targets_distribution(
    params: SamplingParams, verifier: str
) -> None:
    counts, arms = split(joint(copying, params, verifier))
    assert chance_of(counts, exact(params, IDS, 3)) > FAIR
    assert arms == {f"by {SUFFIX}", "by drawing"}


class Looking(Copying):
    """Asks the model arm first, and takes the copy where it doesn't like what was drawn."""

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        assert self.model is not None
        drawn = self.model.propose(ctx, budget)
        if len(drawn.tree) > 1 and drawn.tree.tokens[1] % 2 == 0:
            return drawn
        return Draft(DraftTree.chain(ctx.ids[-1], [1]) if budget.nodes > 1 else drawn.tree)


def test_the_measure_finds_a_gate_that_looks_at_what_was_drawn() -> None:
    counts, _ = split(joint(lambda seed: copying(seed, Looking), FLAT, "rejection", 700))
    assert chance_of(counts, exact(FLAT, IDS, 3)) < BIASED

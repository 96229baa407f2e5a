"""`lede`'s drafter: every arm, and any change of arms, gives plain decoding's answers; each arm
drafts from what it names."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from tests.exits import exit_models as tiny
from tests.exits.exit_models import LAYERS
from tests.exits.exit_requests import (
    EVEN,
    GREEDY,
    SAMPLED,
    answer,
    kept,
    plain,
    prompt_of,
    tokens_of,
)
from tests.policies import lede_cases
from tests.policies.lede_cases import CHEAP

from hasten.decode import decode
from hasten.decoding import Decoding
from hasten.drafters.lede import Lede
from hasten.drafters.lede_chain import LedeChain
from hasten.exits.bank import ExitBank
from hasten.policies.base import FixedPolicy
from hasten.policies.budget import AcceptanceBook
from hasten.policies.cost_model import CostTable
from hasten.policies.lede import ArmBudget, LedePolicy
from hasten.policies.lede_arms import ARMS, PLAIN, Arm, Floats
from hasten.policies.lede_chooser import Chooser
from hasten.policies.lede_guard import Guard
from hasten.types import Round, SamplingParams
from hasten.verify import VERIFIERS

TABLE = CostTable("t", (1, 16, 64), (64,), ((10.0, 10.2, 14.0),))
NAMES = [arm.name for arm in ARMS]
COPYING = [9, 12, 33, 14, 52, 70, 88, 9, 12, 33, 14, 52, 70, 88, 9, 12]


class Tossed(Chooser):
    """Any arm, by a coin."""

    dice = random.Random(5)

    def choose(self, x: Floats, others: int = 0) -> Arm:
        assert x.shape == (19,)
        self.arm = self.dice.choice(self.arms)
        return self.arm


@cache
def zero(bank_over: tuple[int, ...] = ()) -> ExitBank:
    return tiny.bank((("deep", 0),), EVEN, over=tiny.target(eos_ids=bank_over))


@cache
def above() -> ExitBank:
    return tiny.bank((("adapter", 2), ("lens", 4)), EVEN)


def made_of(
    chooser: Chooser, eos_ids: Sequence[int] = (), *, walks: bool = True
) -> tuple[Lede, ArmBudget]:
    """The drafter and its policy; chains from exit 4."""
    deep = lede_cases.Ruled(lambda x: x[lede_cases.feature("layer")] > 0.5)
    policy = LedePolicy(deep, lede_cases.facts((2, 4), LAYERS), steps=4)
    walk = LedeChain(above(), policy, length=4) if walks else None
    drafter = Lede(zero(tuple(eos_ids)), chooser, walk=walk, eos_ids=frozenset(eos_ids))
    book = AcceptanceBook()
    return drafter, ArmBudget(TABLE, book, chooser, most=24, walk=policy if walks else None)


def always(name: str, guard: Guard | None = None) -> Chooser:
    return Chooser(lede_cases.arms(name), CHEAP, ARMS, online=False, guard=guard)


def tossed() -> Chooser:
    return Tossed(lede_cases.arms(), CHEAP, ARMS)


def rounds_of(
    chooser: Chooser,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    verifier: str | None = None,
    seed: int = 0,
    eos_ids: Sequence[int] = (),
    sequence: object = None,
    nodes: int = 0,
) -> list[Round]:
    """A request's rounds; the target's books are checked, and no row has run a layer twice. With
    `nodes` all that is drafted is verified, whatever it costs."""
    over = tiny.target(eos_ids=tuple(eos_ids))
    drafter, budget = made_of(chooser, eos_ids)
    policy = FixedPolicy(nodes) if nodes else budget
    name = verifier or ("greedy" if params.is_greedy else "match")
    asked = Decoding(
        over, prompt, params, drafter=drafter, policy=policy, verifier=VERIFIERS[name], seed=seed
    )
    if sequence is not None:
        asked.lend(sequence)
    rounds: list[Round] = []
    before = over.layer_rows
    for _, made in decode([asked]):
        ran, before = over.layer_rows - before, over.layer_rows
        if made.tree is not None:
            assert made.layer_rows == ran == len(made.tree) * LAYERS
        rounds.append(made)
    over.check()
    assert not rounds or drafter._session.runs == [], "nothing of a request is kept"
    return rounds


@pytest.mark.parametrize("name", NAMES)
def test_every_arm_gives_plain_decodings_answers(name: str) -> None:
    for case, params in enumerate((GREEDY, SAMPLED)):
        rounds = rounds_of(always(name), prompt_of(case), params, seed=case)
        assert tokens_of(rounds) == answer(case, params.is_greedy)
    if name != "walk":  # chains are drawn there: right in distribution, not by token
        rounds = rounds_of(always(name), prompt_of(1), SAMPLED, verifier="rejection", seed=1)
        assert tokens_of(rounds) == answer(1, False)


def test_any_change_of_arms_gives_plain_decodings_answers() -> None:
    params = SamplingParams(max_new_tokens=60)
    count = 0
    for case in range(3):
        rounds = rounds_of(tossed(), prompt_of(case), params)
        assert tokens_of(rounds) == tokens_of(plain(tiny.target(), prompt_of(case), params))
        count += kept(rounds_of(always("walk"), prompt_of(case), params))
    assert count > 3, "nearly nothing is kept: this shows little"


EXPECTED = {
    "plain": set(),
    "copy": {"copied", "logits"},
    "tree-2": {"module"},
    "chain-2": {"module"},
    "copy+tree-2": {"copied", "checked", "logits", "module"},
    "walk": {"exit-4"},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_arm_drafts_from_what_it_names(name: str) -> None:
    params = SamplingParams(max_new_tokens=40)
    rounds = rounds_of(always(name), COPYING, params, nodes=12)
    drafted = {source for each in rounds for source in each.sources[1:]}
    assert drafted <= EXPECTED[name]
    assert bool(drafted) == bool(EXPECTED[name])


def test_chains_dont_branch_and_trees_do() -> None:
    shapes: dict[str, set[bool]] = {}
    for name in ("chain-4", "tree-3"):
        drafter, policy = made_of(always(name), walks=False)
        over = tiny.target()
        asked = Decoding(
            over, prompt_of(0), GREEDY, drafter=drafter, policy=policy, verifier=VERIFIERS["greedy"]
        )
        shapes[name] = set()
        drafts = policy.select
        policy.select = lambda draft, name=name, drafts=drafts: (  # type: ignore[method-assign]
            shapes[name].add(draft.tree.is_chain),
            drafts(draft),
        )[1]
        for _ in decode([asked]):
            pass
    assert shapes["chain-4"] == {True}
    assert False in shapes["tree-3"]


def test_steps_asked_are_told_to_the_chooser() -> None:
    seen: list[int] = []
    chooser = always("tree-3")
    learn = chooser.learn

    class Watched(Chooser):
        def learn(self, tokens: int, time: float) -> None:
            seen.append(self.steps)
            super().learn(tokens, time)

    watched = Watched(lede_cases.arms("tree-3"), CHEAP, ARMS, online=False)
    rounds_of(watched, prompt_of(0), GREEDY)
    assert learn is not None
    assert set(seen) <= {0, 1, 2, 3}
    assert max(seen) >= 1


def test_nothing_is_drafted_after_an_end_id_and_it_ends_the_answer() -> None:
    inside = 0
    for end in answer(0)[::2]:
        for name in ("copy+tree-3", "tree-2", "copy"):
            got = rounds_of(always(name), prompt_of(0), GREEDY, eos_ids=(end,))
            assert tokens_of(got) == answer(0)[: answer(0).index(end) + 1]
            for each in got[1:]:
                assert each.tree is not None
                ends = [n for n, token in enumerate(each.tree.tokens) if token == end]
                assert not set(ends) & set(each.tree.parents)
                inside += bool(ends)
    assert inside


def test_exactly_as_many_tokens_as_asked_for() -> None:
    for count in (0, 1, 2, 3):
        got = rounds_of(always("copy+tree-3"), prompt_of(0), SamplingParams(max_new_tokens=count))
        assert tokens_of(got) == answer(0)[:count]


@pytest.mark.parametrize("name", ["copy+tree-2", "walk"])
def test_a_prompt_of_one_token_works(name: str) -> None:
    want = tokens_of(plain(tiny.target(), [7], GREEDY))
    assert tokens_of(rounds_of(always(name), [7], GREEDY)) == want


def test_a_conversation_goes_on_with_signals_of_its_new_tokens_only() -> None:
    over, sequence, text = tiny.target(), tiny.target().open(), prompt_of(1)
    for _ in range(3):
        want = tokens_of(plain(over, text, GREEDY))
        assert tokens_of(rounds_of(tossed(), text, GREEDY, sequence=sequence)) == want
        text = [*text, *want, *prompt_of(5, 4)]
    over.close(sequence)


def test_requests_share_passes_and_keep_their_answers() -> None:
    params = SamplingParams(max_new_tokens=24)
    asked = []
    for case, name in enumerate(("copy+tree-2", "tree-3", "copy", "walk")):
        drafter, policy = made_of(always(name))
        asked.append(
            Decoding(
                tiny.target(),
                prompt_of(case),
                params,
                drafter=drafter,
                policy=policy,
                verifier=VERIFIERS["greedy"],
                seed=case,
            )
        )
    answers: dict[int, list[int]] = {}
    for index, made in decode(asked):
        answers.setdefault(index, []).extend(made.emitted)
    want = {c: tokens_of(plain(tiny.target(), prompt_of(c), params)) for c in range(4)}
    assert answers == want
    tiny.target().check()


def test_a_guard_leaves_few_passes_wider_than_plain_ones() -> None:
    chooser = always("tree-5", Guard())
    chooser.costs = lede_cases.ArmCosts((0.0, *(1.0 + 0.5 * n for n in range(64))), 0.5, 0.5)
    params = SamplingParams(max_new_tokens=70)
    rounds = rounds_of(chooser, prompt_of(3), params)
    assert tokens_of(rounds) == tokens_of(plain(tiny.target(), prompt_of(3), params))
    assert chooser.guard is not None
    assert chooser.arm is PLAIN
    assert sum(each.drafted > 0 for each in rounds) < 20


def test_choices_and_their_seconds_are_counted_and_outlive_the_request() -> None:
    drafter, policy = made_of(always("copy"))
    asked = Decoding(
        tiny.target(), prompt_of(0), GREEDY,
        drafter=drafter, policy=policy, verifier=VERIFIERS["greedy"],
    )  # fmt: skip
    rounds = [made for _, made in decode([asked])]
    assert 0 < drafter.decided < len(rounds)
    assert drafter.deciding_s > 0.0


def test_half_precision_runs_with_each_row_through_each_layer_once() -> None:
    over = tiny.target(dtype=torch.bfloat16)
    bank = tiny.bank((("deep", 0),), EVEN, over=over)
    chooser = always("copy+tree-3")
    drafter = Lede(bank, chooser)
    policy = ArmBudget(TABLE, AcceptanceBook(), chooser, most=16)
    asked = Decoding(
        over, prompt_of(0), GREEDY, drafter=drafter, policy=policy, verifier=VERIFIERS["greedy"]
    )
    rounds = [made for _, made in decode([asked])]
    assert len(tokens_of(rounds)) == GREEDY.max_new_tokens
    assert all(r.layer_rows == LAYERS * len(r.tree) for r in rounds[1:] if r.tree is not None)
    over.check()

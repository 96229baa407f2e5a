"""Requests that join, pause and leave beside others get the answers they get alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from hasten.decode import Batch
from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.policies.base import FixedPolicy, PlanContext, Policy
from hasten.policies.budget import AcceptanceBook, BudgetPolicy
from hasten.policies.cost_model import CostModel
from hasten.types import (
    Budget,
    Draft,
    DraftTree,
    Round,
    RowSignals,
    SamplingParams,
    Signals,
)
from tests.conformance.harness import (
    COSTS,
    DRAWING,
    TREE_DRAFTERS,
    Answer,
    check_rounds,
    prompt_of,
    request,
)
from tests.conformance.toy_target import ToyTarget

GREEDY = SamplingParams(max_new_tokens=30)
SAMPLED = SamplingParams(max_new_tokens=26, temperature=0.9, top_k=12)


class Pausing(FixedPolicy):
    """Drafts now and then, with pauses of every length."""

    __slots__ = ("random",)

    def __init__(self, seed: int) -> None:
        super().__init__(nodes=7)
        self.random = random.Random(seed)

    def plan(self, context: PlanContext) -> Budget:
        return Budget(7 if self.random.random() < 0.4 else 1, 20)


def policy(name: str, seed: int, costs: CostModel, book: AcceptanceBook) -> Policy:
    if name == "riding":  # it takes for granted that what it proposed was run
        return FixedPolicy(8)
    if seed % 3 == 0:
        return Pausing(seed)
    return FixedPolicy(5) if seed % 3 == 1 else BudgetPolicy(costs, book, most=8)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", TREE_DRAFTERS)
def test_answers_beside_others_are_those_alone(name: str, packed: bool) -> None:
    target = ToyTarget(packed=packed)
    rng = random.Random(name)
    costs, book = CostModel(COSTS), AcceptanceBook()
    plain: list[list[int]] = []
    waiting = []
    for seed in range(7):
        params = SAMPLED if seed % 2 else GREEDY
        prompt = prompt_of(seed, length=rng.randrange(4, 20))
        plain.append(target.plain(prompt, params, seed=seed))
        drafter = TREE_DRAFTERS[name](target, prompt + plain[-1], seed)
        verifier = "rejection" if seed == 4 and name not in DRAWING else None
        how = {"policy": policy(name, seed, costs, book), "verifier": verifier, "seed": seed}
        waiting.append((seed, request(target, prompt, params, drafter, **how)))
    batch, answers = Batch(target), [Answer() for _ in waiting]
    gone = rng.randrange(7)
    while waiting or len(batch):
        if waiting and rng.random() < 0.4:
            batch.join(*waiting.pop(0))
        for key, made in [*batch.read_prompt(), *batch.step()]:
            assert isinstance(made, Round), made
            answers[key].rounds.append(made)
            answers[key].tokens.extend(made.emitted)
            if key == gone and len(answers[key].rounds) == 3:
                batch.leave(key)
    for key, (answer, want) in enumerate(zip(answers, plain, strict=True)):
        if key == gone:
            assert answer.tokens == want[: len(answer.tokens)]
        else:
            assert answer.tokens == want
            check_rounds(answer, SAMPLED if key % 2 else GREEDY)
    assert target.live == [], "a sequence leaked"


class Recorder(BaseDrafter):
    """Remembers what it is told, and checks that it is told everything before it drafts."""

    name = "recorder"

    def __init__(self, sparse: bool) -> None:
        self.needs = Signals(topk=2, hidden=(1,), sparse=sparse)
        self.told: list[int] = []
        self.rounds: list[Round] = []
        self.drafts = 0

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        assert list(ctx.ids[12:]) == self.told
        self.drafts += 1
        return Draft(DraftTree.chain(ctx.ids[-1], (3,)))

    def observe(self, round: Round) -> None:
        self.told.extend(round.emitted)
        self.rounds.append(round)


@pytest.mark.parametrize("sparse", [True, False])
def test_a_drafter_that_paused_has_seen_everything_when_it_is_asked_again(sparse: bool) -> None:
    target = ToyTarget(packed=True, eos_ids=())
    drafters = [Recorder(sparse), Recorder(sparse)]
    batch = Batch(target)
    for key, drafter in enumerate(drafters):
        batch.join(key, request(target, prompt_of(key), GREEDY, drafter, policy=Pausing(key)))
    while batch.joining:
        batch.read_prompt()
    while len(batch):
        list(batch.step())
    for key, drafter in enumerate(drafters):
        assert drafter.drafts > 3
        assert drafter.told == target.plain(prompt_of(key), GREEDY), "also at the end"
        read = [r.signals.topk_ids is not None for r in drafter.rounds[1:]]
        assert all(read) != sparse, "a paused drafter that can spare it gets no top-k"
        assert all(len(r.signals.hidden[1]) == len(r.tree or ()) for r in drafter.rounds[1:])


class Late(Recorder):
    """A recorder that may be told late."""

    def __init__(self, start: int) -> None:
        super().__init__(sparse=True)
        self.needs = Signals(topk=2, hidden=(1,), prompt=True, sparse=True, late=True)
        self.calls: list[str] = []
        self.start = start

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        assert len(prompt) == 12
        assert len(signals.hidden[1]) == 12
        self.calls.append("begin")

    def observe(self, round: Round) -> None:
        self.calls.append("observe")
        super().observe(round)

    def end(self) -> None:
        self.calls.append("end")


class From(FixedPolicy):
    """Drafts from its n-th round on."""

    __slots__ = ("left",)

    def __init__(self, start: int) -> None:
        super().__init__(nodes=3)
        self.left = start

    def plan(self, context: PlanContext) -> Budget:
        self.left -= 1
        return Budget(3 if self.left < 0 else 1, 2)


def test_where_memory_ends_with_the_request_a_drafter_is_told_at_its_first_draft_or_never() -> None:
    target = ToyTarget(packed=True, eos_ids=())
    drafters = [Late(100), Late(9)]
    batch = Batch(target)
    for key, drafter in enumerate(drafters):
        made = request(target, prompt_of(key), GREEDY, drafter, policy=From(drafter.start))
        batch.join(key, made)
    while batch.joining:
        batch.read_prompt()
    answers: dict[int, list[int]] = {0: [], 1: []}
    while len(batch):
        for key, round in batch.step():
            assert isinstance(round, Round)
            answers[key] += round.emitted
        if len(answers[1]) == 8:
            assert drafters[1].calls == []
    never, late = drafters
    # The first to join is alone then, and told at once; the other never needs to be.
    assert never.calls[:2] == ["begin", "observe"]
    assert late.calls[0] == "begin"
    assert late.calls[-1] == "end"
    assert late.drafts > 2
    for key in answers:
        plain = target.plain(prompt_of(key), GREEDY)
        assert answers[key] == plain[1:]


def test_a_request_that_never_drafts_beside_others_never_begins() -> None:
    target = ToyTarget(packed=True, eos_ids=())
    drafters = [Late(100), Late(100)]
    batch = Batch(target)
    for key, drafter in enumerate(drafters):
        batch.join(key, request(target, prompt_of(key), GREEDY, drafter, policy=From(100)))
    while batch.joining:
        batch.read_prompt()
    while len(batch):
        list(batch.step())
    assert drafters[1].calls == [] or drafters[0].calls == []


class Fails(BaseDrafter):
    """Raises at its third draft."""

    name = "fails"

    def __init__(self) -> None:
        self.left = 3

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        self.left -= 1
        if not self.left:
            raise RuntimeError("on purpose")
        return Draft(DraftTree.chain(ctx.ids[-1]))


@pytest.mark.parametrize("packed", [True, False])
def test_one_that_fails_leaves_and_the_others_go_on(packed: bool) -> None:
    target = ToyTarget(packed=packed, eos_ids=())
    batch = Batch(target)
    drafters: Sequence[BaseDrafter] = [Recorder(False), Fails(), Recorder(False)]
    for key, drafter in enumerate(drafters):
        batch.join(key, request(target, prompt_of(key), GREEDY, drafter))
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    errors = []
    while len(batch):
        for key, made in [*batch.read_prompt(), *batch.step()]:
            if isinstance(made, Exception):
                errors.append((key, str(made)))
            else:
                tokens[key].extend(made.emitted)
    assert [key for key, _ in errors] == [1]
    assert "on purpose" in errors[0][1]
    for key in (0, 2):
        assert tokens[key] == target.plain(prompt_of(key), GREEDY)
    assert target.live == []


def test_a_long_prompt_runs_in_parts_between_the_passes_of_others() -> None:
    target = ToyTarget(packed=True, eos_ids=(), context_limit=2000)
    batch = Batch(target)
    batch.join(0, request(target, prompt_of(0), GREEDY, Recorder(False)))
    batch.read_prompt()
    long = prompt_of(1, length=900)
    batch.join(1, request(target, long, GREEDY, Recorder(False)))
    before, emitted, first = target.prefilled, [], []
    for _ in range(4):
        first += batch.read_prompt()
        emitted += [key for key, _ in batch.step()]
    assert target.prefilled - before == 900
    assert [key for key, _ in first] == [1]
    assert emitted.count(0) == 4, "the other went on meanwhile"
    batch.close()
    assert target.live == []

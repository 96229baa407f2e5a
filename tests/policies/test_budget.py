"""The budget policy verifies what pays, counts what would have been kept, and stays out of the way
when nothing pays. Costs are synthetic: no test looks at a clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from tests.conformance.drafters import Adversarial, DrawnTree, Flaky, Mixed, Oracle, Wide
from tests.conformance.harness import TREE_DRAFTERS, prompt_of, run
from tests.conformance.toy_target import ToyTarget

from hasten.drafters.ranks import LOGITS, LOOKUP, RETRIEVAL, logits_rank, prior, retrieval_rank
from hasten.policies.base import PlanContext
from hasten.policies.budget import LONGEST_PAUSE, AcceptanceBook, BudgetPolicy
from hasten.policies.cost_model import CostTable
from hasten.types import Budget, Draft, DraftTree, ExtraRows, Round, SamplingParams, Times

ROWS = (1, 2, 4, 8, 16, 32)


def costs(per_row: float, first: float = 10.0) -> CostTable:
    line = tuple(first + per_row * (rows - 1) for rows in ROWS)
    return CostTable("test", ROWS, (64,), (line,))


FLAT, STEEP = costs(0.0), costs(9.0)


def book(rates: dict[tuple[str, int, int], float], weight: float = 1e6) -> AcceptanceBook:
    """A book that is as good as certain."""
    counts = {key: [rate * weight, weight] for key, rate in rates.items()}
    return AcceptanceBook(limit=1e12, counts=counts)


def chain(length: int, source: str = "a") -> Draft:
    tree = DraftTree.chain(0, list(range(1, length + 1)))
    return Draft(tree, sources=(source,) * (length + 1), ranks=(0,) * (length + 1))


def certain(rate: float) -> AcceptanceBook:
    return book({("a", 0, depth): rate for depth in (1, 2, 3)})


def selected(draft: Draft, table: CostTable, known: AcceptanceBook, most: int = 24) -> Draft:
    policy = BudgetPolicy(table, known, most=most)
    policy.plan(PlanContext(100, 1000))
    return policy.select(draft)


@pytest.mark.parametrize(
    ("table", "rate", "rows"),
    [
        pytest.param(FLAT, 0.5, 13, id="rows are free: all of it"),
        pytest.param(STEEP, 0.5, 1, id="rows are dear: plain"),
        pytest.param(costs(2.0), 0.99, 13, id="dear, but all is kept"),
        pytest.param(costs(1.0), 0.98, 13, id="kept nearly always: deep"),
        pytest.param(costs(1.0), 0.001, 1, id="never kept: plain"),
    ],
)
def test_costs_and_acceptance_decide_how_deep_a_chain_is(
    table: CostTable, rate: float, rows: int
) -> None:
    assert len(selected(chain(12), table, certain(rate)).tree) == rows


@pytest.mark.parametrize("rate", [0.2, 0.4, 0.6, 0.8])
@pytest.mark.parametrize("per_row", [0.3, 1.0, 3.0])
def test_the_chain_chosen_has_the_most_tokens_per_time(rate: float, per_row: float) -> None:
    table = costs(per_row)

    def speed(guesses: int) -> float:
        return sum(rate**i for i in range(guesses + 1)) / table.pass_ms(guesses + 1, 100)

    best = max(range(13), key=speed)
    assert len(selected(chain(12), table, certain(rate)).tree) - 1 == best


def _random_draft(rng: random.Random, size: int) -> Draft:
    parents = [-1] + [rng.randrange(i) for i in range(1, size)]
    tree = DraftTree(tuple(range(size)), tuple(parents))
    return Draft(tree, sources=("a",) * size, ranks=tuple(rng.randrange(4) for _ in range(size)))


@pytest.mark.parametrize("seed", range(8))
def test_the_set_chosen_is_the_best_of_all_sets_closed_under_parents(seed: int) -> None:
    rng = random.Random(seed)
    rates = {("a", rank, d): rng.uniform(0.05, 0.9) for rank in range(4) for d in (1, 2, 3)}
    table = costs(rng.choice([0.3, 1.0, 3.0]))
    draft = _random_draft(rng, 9)
    tree = draft.tree
    chance = [1.0]
    for node in range(1, 9):
        key = ("a", draft.ranks[node], min(tree.depths[node], 3))
        chance.append(chance[tree.parents[node]] * rates[key])
    best = 1 / table.pass_ms(1, 100)
    for count in range(1, 9):
        for nodes in combinations(range(1, 9), count):
            if all(tree.parents[n] in (0, *nodes) for n in nodes):
                tokens = 1 + sum(chance[n] for n in nodes)
                best = max(best, tokens / table.pass_ms(count + 1, 100))
    got = selected(draft, table, book(rates))
    tokens = sum(chance[t] for t in got.tree.tokens)  # tokens are node numbers here
    assert tokens / table.pass_ms(len(got.tree), 100) == pytest.approx(best, rel=1e-4)


def test_decisions_do_not_depend_on_the_tokens() -> None:
    for seed in range(5):
        rng = random.Random(seed)
        draft = _random_draft(rng, 20)
        other = Draft(
            DraftTree(tuple(rng.sample(range(1000), 20)), draft.tree.parents),
            sources=draft.sources,
            ranks=draft.ranks,
        )
        one, two = (selected(d, costs(0.4), AcceptanceBook()) for d in (draft, other))
        assert one.tree.parents == two.tree.parents
        assert one.ranks == two.ranks


def test_drawn_siblings_are_dropped_from_the_end_of_their_draw_order() -> None:
    q = torch.full((100,), 0.01)
    for seed in range(20):
        rng = random.Random(seed)
        draft = _random_draft(rng, 16)
        parents = draft.tree.parents
        draft = Draft(draft.tree, q={0: q, 2: q, 5: q}, ranks=draft.ranks, sources=draft.sources)
        rates = {("a", rank, d): rng.uniform(0.05, 0.95) for rank in range(4) for d in (1, 2, 3)}
        kept = set(selected(draft, costs(rng.uniform(0.1, 1.0)), book(rates)).tree.tokens)
        assert all(parents[n] in kept for n in kept - {0})
        for drawn in (0, 2, 5):
            kids = [n for n in range(16) if parents[n] == drawn]
            inside = [k in kept for k in kids]
            assert inside == sorted(inside, reverse=True)


def test_a_draft_with_extra_or_resumed_rows_is_run_whole_or_not_at_all() -> None:
    extra = ExtraRows((5, 6), (1, 4))
    q = {0: torch.full((10,), 0.1)}
    for draft in (Draft(chain(4).tree, q=q, extra=extra), Draft(chain(4).tree, frontiers=(2, 1))):
        known = {("", 0, depth): 0.9 for depth in (1, 2, 3)}
        assert selected(draft, FLAT, book(known)) is draft
        assert selected(draft, costs(30.0), book(known)) == Draft(DraftTree.chain(0))


# -- plans -----------------------------------------------------------------------------------------


def test_no_more_is_planned_than_may_still_come() -> None:
    policy = BudgetPolicy(FLAT, AcceptanceBook(), most=8)
    assert policy.plan(PlanContext(100, 1000)) == Budget(8, 8)
    assert policy.plan(PlanContext(100, 4)) == Budget(8, 3)
    assert policy.plan(PlanContext(100, 1)) == Budget(1, 0)
    assert BudgetPolicy(FLAT, AcceptanceBook(), most=1).plan(PlanContext(9, 9)) == Budget(1, 0)


def rounds(
    policy: BudgetPolicy,
    table: CostTable,
    draft: Callable[[int], tuple[Draft, Sequence[int]]],
    count: int,
    draft_ms: float = 0.5,
) -> list[int]:
    """Play `count` rounds; `draft(i)` gives what is proposed and what the target goes on with.
    The rows verified, 0 for a round that was not drafted."""
    out = []
    for index in range(count):
        budget = policy.plan(PlanContext(100 + index, 10_000))
        if budget.nodes == 1:
            tree, emitted, spent = DraftTree.chain(0), (1,), 0.0
            out.append(0)
        else:
            proposed, text = draft(index)
            tree, spent = policy.select(proposed).tree, draft_ms
            kids = {
                (p, t): n for n, (p, t) in enumerate(zip(tree.parents, tree.tokens, strict=True))
            }
            node, kept = 0, 0
            while kept < len(text) - 1 and (node, text[kept]) in kids:
                node = kids[node, text[kept]]
                kept += 1
            emitted = tuple(text[: kept + 1])
            out.append(len(tree))
        target = table.pass_ms(len(tree), 100)
        times = Times((target + spent) / 1e3, spent / 1e3, target / 1e3)
        policy.learn(Round(index, emitted, tree, times=times))
    return out


def wrong(index: int) -> tuple[Draft, Sequence[int]]:
    return chain(12), (99,)


def right(index: int) -> tuple[Draft, Sequence[int]]:
    return chain(12), [*range(1, 13), 13]


def test_an_adversary_costs_little_and_drafting_pauses() -> None:
    table = costs(0.5)
    known = AcceptanceBook()
    for request in range(3):
        played = rounds(BudgetPolicy(table, known), table, wrong, 200)
        spent = sum(table.pass_ms(max(rows, 1), 100) + 0.5 * (rows > 0) for rows in played)
        assert spent <= 1.05 * 200 * table.pass_ms(1, 100)
        assert played[-64:].count(0) >= 56, "mostly pauses"
        if request:
            assert max(played) == 1, "what was learned holds for the next request"


def test_pauses_grow_to_a_bound_and_end() -> None:
    table = costs(9.0)
    played = rounds(BudgetPolicy(table, AcceptanceBook()), table, wrong, 300)
    text = "".join("." if rows == 0 else "x" for rows in played)
    pauses = [len(run) for run in text.strip(".").split("x") if run]
    assert pauses[:3] == [2, 4, 8]
    assert set(pauses[3:]) == {LONGEST_PAUSE}


def test_drafting_resumes_when_drafts_come_true() -> None:
    table = costs(0.5)
    policy = BudgetPolicy(table, AcceptanceBook())
    assert rounds(policy, table, wrong, 100)[-16:].count(0) >= 14
    later = rounds(policy, table, right, 150)
    assert later[-20:].count(0) == 0
    assert min(later[-20:]) > 8


def test_what_is_always_kept_is_soon_verified_in_full() -> None:
    table = costs(1.0)
    played = rounds(BudgetPolicy(table, AcceptanceBook()), table, right, 40)
    assert played[-10:] == [13] * 10


def test_a_dear_drafter_pauses_where_a_cheap_one_does_not() -> None:
    table = costs(1.0)
    rng = random.Random(0)

    def sometimes(index: int) -> tuple[Draft, Sequence[int]]:
        return chain(6), ([1, 2, 99] if rng.random() < 0.5 else [99])

    cheap = rounds(BudgetPolicy(table, AcceptanceBook()), table, sometimes, 200, draft_ms=0.1)
    dear = rounds(BudgetPolicy(table, AcceptanceBook()), table, sometimes, 200, draft_ms=30.0)
    assert cheap.count(0) == 0
    assert dear.count(0) > 150


def crowd(known: AcceptanceBook, others: int, played: int = 6) -> list[int]:
    """Rounds of one request beside `others`, none of whose drafts comes true; nodes asked for."""
    table = costs(9.0)
    policy = BudgetPolicy(table, known)
    asked = []
    for index in range(played):
        budget = policy.plan(PlanContext(100, 100, others))
        asked.append(budget.nodes)
        draft = chain(budget.nodes) if budget.nodes > 1 else None
        if draft is not None:
            policy.weigh(draft)
            policy.keep(draft, (), 0.0)
        tree = DraftTree((0,), (-1,))
        policy.learn(Round(index, (99,), tree, times=Times(12e-3, 2e-3, 9e-3)))
    return asked


def test_a_request_that_joins_a_crowd_where_drafting_never_paid_only_looks_now_and_then() -> None:
    known = AcceptanceBook()
    assert crowd(known, 15)[0] > 1, "the first one finds out"
    looks = [crowd(known, 15)[0] > 1 for _ in range(16)]
    assert looks.count(True) == 2
    assert crowd(known, 1)[0] > 1, "a smaller crowd is another matter"
    assert crowd(known, 0)[0] > 1
    copy = known.fork()
    assert crowd(copy, 15)[0] == 1
    known.reset()
    assert crowd(known, 15)[0] > 1


def test_a_pause_made_in_a_crowd_is_short_for_who_is_left_alone() -> None:
    known = AcceptanceBook()
    for _ in range(3):
        crowd(known, 15)
    policy = BudgetPolicy(costs(9.0), known)
    assert policy.plan(PlanContext(100, 100, 15)).nodes == 1
    asked = [policy.plan(PlanContext(100, 100, 0)).nodes for _ in range(LONGEST_PAUSE + 1)]
    assert asked[-1] > 1


# -- counts ----------------------------------------------------------------------------------------


def test_every_candidate_whose_parent_was_reached_is_counted_pruned_or_not() -> None:
    # 0 -> 1, 2, 3; 1 -> 4; 2 -> 5; 5 -> 6
    tree = DraftTree((0, 1, 2, 3, 4, 5, 6), (-1, 0, 0, 0, 1, 2, 5))
    draft = Draft(tree, sources=("a",) * 7, ranks=(0, 1, 2, 3, 4, 5, 6))
    known = AcceptanceBook()
    policy = BudgetPolicy(costs(1000.0), known)  # nothing is verified
    policy.plan(PlanContext(10, 100))
    assert len(policy.select(draft).tree) == 1
    policy.learn(Round(1, (2,), DraftTree.chain(0), (0,)))
    assert known.counts == {("a", 1, 1): [0, 1], ("a", 2, 1): [1, 1], ("a", 3, 1): [0, 1]}
    policy = BudgetPolicy(FLAT, known)
    policy.plan(PlanContext(10, 100))
    policy.select(draft)
    policy.learn(Round(2, (2, 5, 9), tree, (0, 2, 5)))
    assert known.counts[("a", 2, 1)] == [2, 2]
    assert known.counts[("a", 5, 2)] == [1, 1]
    assert known.counts[("a", 6, 3)] == [0, 1]
    assert ("a", 4, 2) not in known.counts


def test_nothing_is_counted_without_a_draft() -> None:
    known = AcceptanceBook()
    policy = BudgetPolicy(FLAT, known)
    policy.learn(Round(0, (5,)))  # the prefill
    policy.plan(PlanContext(10, 1))
    policy.learn(Round(1, (5,), DraftTree.chain(0), (0,)))
    assert known.counts == {}


def _depth_kept(policy: BudgetPolicy, rounds_: int, kept: int) -> list[int]:
    """Rows verified in rounds of which only a chain's first `kept` guesses come true."""
    return rounds(policy, costs(0.5), lambda i: (chain(12), [*range(1, kept + 1), 99]), rounds_)


def test_a_request_unlike_the_earlier_ones_is_noticed_in_a_dozen_rounds() -> None:
    worse = _depth_kept(BudgetPolicy(costs(0.5), certain(0.9)), 60, 0)
    assert worse[0] == 13
    assert max(worse[14:]) < 4
    assert max(worse[50:]) <= 1
    better = _depth_kept(BudgetPolicy(costs(0.5), certain(0.02)), 40, 12)
    assert better[0] == 1
    assert better[14] > 1
    assert better[-1] > better[14]


def test_a_request_that_is_like_the_earlier_ones_changes_nothing() -> None:
    played = _depth_kept(
        BudgetPolicy(costs(0.5), book({("a", 0, 1): 0.999, ("a", 0, 2): 0.001})), 40, 1
    )
    assert set(played) == {2}


def test_old_counts_fade_and_stay_bounded() -> None:
    known = AcceptanceBook(limit=50)
    for _ in range(500):
        known.add(("a", 0, 1), False)
    for _ in range(100):
        known.add(("a", 0, 1), True)
    kept, offered = known.counts[("a", 0, 1)]
    assert 0 <= kept <= offered <= 51
    assert known.rate(("a", 0, 1), 0.5, 4.0) > 0.6


def test_a_book_can_be_emptied_and_copied() -> None:
    known = AcceptanceBook()
    known.add(("a", 0, 1), True)
    other = known.fork()
    known.add(("a", 0, 1), True)
    assert other.counts == {("a", 0, 1): [1, 1]}
    known.reset()
    assert known.counts == {}
    assert other.counts


@pytest.mark.parametrize("source", [RETRIEVAL, LOGITS, LOOKUP, "", "another"])
def test_first_guesses_are_probabilities(source: str) -> None:
    for rank in range(60):
        for depth in (1, 2, 3):
            assert 0 < prior(source, rank, depth) < 1 or source not in (RETRIEVAL, LOOKUP)


def test_first_guesses_follow_what_a_rank_says() -> None:
    def retrieved(length: int, share: float, token: int) -> float:
        return prior(RETRIEVAL, retrieval_rank(length, share, token, [7, 8]), 1)

    assert retrieved(1, 0.2, 9) < retrieved(1, 1.0, 9) < retrieved(4, 1.0, 9)
    assert retrieved(4, 1.0, 9) < retrieved(4, 1.0, 8) < retrieved(4, 1.0, 7) < 1
    assert retrieved(5, 1.0, 7) == retrieved(9, 1.0, 7)
    copied = [prior(LOGITS, logits_rank(place, 0), 1) for place in range(8)]
    assert copied == sorted(copied, reverse=True)
    assert prior(LOGITS, logits_rank(0, 4), 1) < copied[0]


# -- in the loop -----------------------------------------------------------------------------------


@pytest.mark.parametrize("per_row", [0.0, 0.5, 50.0])
@pytest.mark.parametrize("name", [n for n in TREE_DRAFTERS if n != "riding"])
def test_under_the_policy_answers_are_plain_decodings(name: str, per_row: float) -> None:
    target = ToyTarget()
    for params in (
        SamplingParams(max_new_tokens=33),
        SamplingParams(max_new_tokens=33, temperature=0.9),
    ):
        plain = target.plain(prompt_of(2), params, seed=2)
        drafter = TREE_DRAFTERS[name](target, prompt_of(2) + plain, 2)
        policy = BudgetPolicy(costs(per_row), AcceptanceBook(), most=9)
        assert run(target, prompt_of(2), params, drafter, policy=policy, seed=2).tokens == plain


@pytest.mark.parametrize("kind", [DrawnTree, Mixed, Flaky])
def test_under_the_policy_rejection_runs_with_drawn_and_other_drafts(kind: type) -> None:
    target = ToyTarget(eos_ids=())
    params = SamplingParams(max_new_tokens=40, temperature=1.0)
    for seed in range(3):
        plain = target.plain(prompt_of(seed), params, seed=seed)
        policy = BudgetPolicy(costs(0.5), AcceptanceBook(), most=9)
        drafter = kind(prompt_of(seed) + plain, 24, seed)
        how = {"policy": policy, "verifier": "rejection", "seed": seed}
        assert len(run(target, prompt_of(seed), params, drafter, **how).tokens) == 40


class OnPaper(BudgetPolicy):
    """Is told that passes took what the table says and drafting nothing, whatever they took."""

    def learn(self, round: Round) -> None:
        rows = 1 if round.tree is None else len(round.tree)
        seconds = self.costs.table.pass_ms(rows, 100) / 1e3
        super().learn(replace(round, times=Times(seconds, 0.0, seconds)))


def test_in_the_loop_an_oracle_is_followed_and_an_adversary_is_not() -> None:
    target, params = ToyTarget(eos_ids=()), SamplingParams(max_new_tokens=61)
    prompt = prompt_of(8)
    plain = target.plain(prompt, params)
    passes, late = {}, {}
    for kind in (Oracle, Wide, Adversarial):
        policy = OnPaper(costs(0.3), AcceptanceBook(), most=9)
        got = run(target, prompt, params, kind(prompt + plain, 24, 0), policy=policy)
        passes[kind] = len(got.rounds) - 1
        late[kind] = sum(r.drafted for r in got.rounds[-20:])
        assert got.tokens == plain
    assert passes[Oracle] < 15
    assert passes[Wide] < 30
    assert passes[Adversarial] == 60
    assert late[Adversarial] == 0

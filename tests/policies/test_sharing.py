"""Candidates of several requests compete for the rows of one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from hasten.policies.budget import AcceptanceBook, BudgetPolicy
from hasten.policies.cost_model import CostModel, CostTable
from hasten.policies.sharing import WORTH, Shared, observe_pass, share_pass
from hasten.types import Draft, DraftTree, ExtraRows

ROWS = tuple(range(1, 65))


def costs(*ms: float) -> CostModel:
    """Milliseconds of 1, 2, ... rows; straight on after the last."""
    step = ms[-1] - ms[-2]
    line = tuple(ms) + tuple(ms[-1] + step * i for i in range(1, len(ROWS) - len(ms) + 1))
    return CostModel(CostTable("t", ROWS, (100,), (line,)))


@dataclass
class Knows:
    """A policy that is told its chances, and remembers what it was told to keep."""

    costs: CostModel
    chances: list[float]
    draft_ms: float = 0.0
    kept: list[int] = field(default_factory=list)
    gain_ms: float = 0.0

    def weigh(self, draft: Draft) -> list[float]:
        return self.chances

    def keep(self, draft: Draft, nodes: Sequence[int], gain_ms: float) -> Draft:
        self.kept, self.gain_ms = list(nodes), gain_ms
        return draft


def chain(length: int) -> Draft:
    return Draft(DraftTree.chain(1, range(2, 2 + length)))


def kept(costs: CostModel, *chances: Sequence[float], fixed: int = 0) -> list[list[int]]:
    policies = [Knows(costs, [1.0, *each]) for each in chances]
    share_pass([(p, chain(len(p.chances) - 1)) for p in policies], fixed, 100)
    return [p.kept for p in policies]


CHEAP_TO_8 = costs(*[10.0] * 8, 12.0, 14.0)
"""Eight rows cost what one costs; each further one two milliseconds."""


def test_candidates_of_all_requests_compete_and_the_likelier_win() -> None:
    # two rows are taken anyway; six more are free, and a row costs 2 of 10 ms after that
    assert kept(CHEAP_TO_8, [0.9, 0.8, 0.7, 0.6, 0.5], [0.55, 0.2, 0.1]) == [[1, 2, 3, 4, 5], [1]]


def test_rows_that_others_take_leave_less_for_drafts() -> None:
    assert kept(CHEAP_TO_8, [0.2, 0.2, 0.2], fixed=4) == [[1, 2, 3]]
    assert kept(CHEAP_TO_8, [0.2, 0.2, 0.2], fixed=6) == [[]], "one free row, worth under 3%"
    assert kept(CHEAP_TO_8, [0.95, 0.2, 0.2], fixed=6) == [[1]]
    assert kept(CHEAP_TO_8, [0.5, 0.2, 0.2], fixed=20) == [[]]


def test_when_nothing_pays_nothing_is_verified() -> None:
    steep = costs(10.0, 20.0)
    assert kept(steep, [0.9], [0.9]) == [[], []]


def test_a_child_is_never_taken_without_its_parent() -> None:
    # equal chances: ties go by index, and a parent's index is smaller
    for row_ms in (0.0, 0.5, 1.0, 2.0):
        policies = [Knows(costs(10.0, 10.0 + row_ms), [1.0, 0.5, 0.5, 0.5]) for _ in range(3)]
        share_pass([(p, chain(3)) for p in policies], 0, 100)
        for policy in policies:
            assert policy.kept == list(range(1, len(policy.kept) + 1))


def test_a_draft_with_extra_rows_is_taken_whole_or_not_at_all() -> None:
    riding = Draft(DraftTree.chain(1, (2, 3)), extra=ExtraRows((7, 8), (0, 3)))
    for chances, want in (([1.0, 0.9, 0.9], [1, 2]), ([1.0, 0.1, 0.05], [])):
        policy = Knows(costs(10.0, 11.0), chances)
        share_pass([(policy, riding)], 0, 100)
        assert policy.kept == want


def test_a_request_is_told_what_its_own_candidates_save() -> None:
    sure, unsure = Knows(CHEAP_TO_8, [1.0, 0.9]), Knows(CHEAP_TO_8, [1.0, 0.1])
    share_pass([(sure, chain(1)), (unsure, chain(1))], 0, 100)
    # a token costs 10 / 3 ms then, and the rows are free
    assert sure.gain_ms == pytest.approx(0.9 * 10 / 3)
    assert unsure.gain_ms == pytest.approx(0.1 * 10 / 3)


def test_a_lone_root_and_no_drafts_at_all_are_no_error() -> None:
    assert share_pass([], 3, 100) == []
    assert kept(CHEAP_TO_8, []) == [[]]


def test_the_taken_set_is_the_best_of_all_prefixes() -> None:
    model = costs(10.0, 10.5, 11.5, 13.0, 15.0, 18.0, 22.0)
    chances = [[0.9, 0.5, 0.3], [0.8, 0.7], [0.4, 0.1]]
    got = sum(map(len, kept(model, *chances)))
    ordered = sorted((c for each in chances for c in each), reverse=True)
    curve = model.curve(64, 100)
    price = [curve[2 + n] / (3 + sum(ordered[:n])) for n in range(len(ordered) + 1)]
    best = min(range(len(price)), key=price.__getitem__)
    assert price[best] < WORTH * price[0]
    assert got == best


def test_the_budget_policy_shares_and_observes_a_shared_pass_once() -> None:
    model = costs(10.0, 11.0)
    policies = [BudgetPolicy(model, AcceptanceBook()) for _ in range(3)]
    assert all(isinstance(policy, Shared) for policy in policies)
    before = model._total
    observe_pass(policies, 12, 100, 30.0)
    assert model._total == before + 1

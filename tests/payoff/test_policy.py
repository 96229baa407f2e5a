"""The hybrid policy: room for both arms, and each arm's rounds told to whom they concern."""

from __future__ import annotations

from typing import Any

from hasten.payoff.gate import Gate, Rule
from hasten.payoff.policy import HybridPolicy
from hasten.policies.base import PlanContext
from hasten.types import Budget, Draft, DraftTree, Round
from tests.payoff.cases import query


class Watched:
    """A model arm's policy that notes what it is told and keeps one token of each draft."""

    def __init__(self, nodes: int = 4, depth: int = 3) -> None:
        self.budget = Budget(nodes, depth)
        self.learned: list[Round] = []

    def plan(self, context: PlanContext) -> Budget:
        return self.budget

    def select(self, draft: Draft) -> Draft:
        return Draft(DraftTree.chain(draft.tree.tokens[0], draft.tree.tokens[1:2]))

    def learn(self, round: Round) -> None:
        self.learned.append(round)


def hybrid(rule: str, longest: int = 16, **planned: Any) -> tuple[HybridPolicy, Gate, Watched]:
    gate, model = Gate(Rule(rule)), Watched(**planned)
    gate.begin(9)
    return HybridPolicy(gate, model, longest=longest), gate, model


def chain(count: int) -> Draft:
    return Draft(DraftTree.chain(9, range(1, count + 1)))


ROUND = Round(1, (1,), DraftTree.chain(9), (0,))


def test_the_budget_has_room_for_either_arm_and_no_more_than_may_come() -> None:
    policy, gate, _ = hybrid("cache")
    assert policy.plan(PlanContext(10, 100)) == Budget(17, 16)
    assert gate.model_budget == Budget(4, 3)
    assert policy.plan(PlanContext(10, 6)) == Budget(6, 5)
    assert policy.plan(PlanContext(10, 1)) == Budget(4, 3), "the loop sees to the end of the answer"
    policy, _, _ = hybrid("cache", nodes=40, depth=30)
    assert policy.plan(PlanContext(10, 100)) == Budget(40, 30)
    policy, _, _ = hybrid("model", longest=0)
    assert policy.plan(PlanContext(10, 100)) == Budget(4, 3)


def test_the_caches_draft_is_kept_whole_and_the_models_as_its_policy_wants() -> None:
    policy, gate, _ = hybrid("cache")
    policy.plan(PlanContext(10, 100))
    gate.choose(query(8), 10)
    assert len(policy.select(chain(8)).tree) == 9
    policy.plan(PlanContext(10, 100))
    gate.choose(query(0), 10)
    assert len(policy.select(chain(8)).tree) == 2


def test_the_models_policy_learns_from_its_own_rounds_only() -> None:
    policy, gate, model = hybrid("cache")
    first = Round(0, (1,))
    policy.learn(first)
    policy.plan(PlanContext(10, 100))
    gate.choose(query(8), 10)
    policy.learn(ROUND)
    assert model.learned == [first]
    policy.plan(PlanContext(11, 100))
    gate.choose(query(0), 11)
    policy.learn(ROUND)
    assert model.learned == [first, ROUND]
    policy.plan(PlanContext(12, 100))
    policy.learn(ROUND)
    assert model.learned == [first, ROUND], "nobody was asked, though it had planned a draft"


def test_a_plain_round_that_the_models_policy_planned_is_told_to_it() -> None:
    policy, gate, model = hybrid("cache", nodes=1, depth=0)
    policy.plan(PlanContext(10, 100))
    policy.learn(ROUND)
    assert model.learned == [ROUND]
    policy.plan(PlanContext(10, 100))
    gate.choose(query(8), 10)
    policy.learn(ROUND)
    assert model.learned == [ROUND], "that was the cache's"

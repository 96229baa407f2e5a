"""The fixed policy asks for the same and keeps all of it."""

from __future__ import annotations

from hasten.policies.base import FixedPolicy, PlanContext
from hasten.types import Budget, Draft, DraftTree, Round


def test_a_fixed_policy_never_changes_its_mind() -> None:
    policy = FixedPolicy(nodes=5, depth=3)
    for context, remaining in ((1, 1), (1000, 7)):
        assert policy.plan(PlanContext(context, remaining)) == Budget(5, 3)
        policy.learn(Round(1, (1,)))


def test_a_fixed_policy_keeps_the_whole_draft() -> None:
    draft = Draft(DraftTree.chain(1, [2, 3]))
    assert FixedPolicy(nodes=5).select(draft) is draft


def test_without_a_depth_the_loop_sets_it() -> None:
    assert FixedPolicy(nodes=5).plan(PlanContext(1, 1)).depth > 100_000

"""A policy decides, before each round, how much to draft, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hasten.types import Budget, Draft, Round


@dataclass(frozen=True, slots=True)
class PlanContext:
    """What is known before a round: `context` tokens so far (the root included), how many more may
    come (`remaining` >= 1), and how many `others` share the pass."""

    context: int
    remaining: int
    others: int = 0


class Policy(Protocol):
    """One request's policy."""

    def plan(self, context: PlanContext) -> Budget:
        """The budget of the next round; ``nodes == 1`` is a plain step."""
        ...

    def select(self, draft: Draft) -> Draft:
        """The part of the proposed draft that is worth verifying (`hasten.drafts.prune`); never
        decided from the value of a drawn token."""
        ...

    def learn(self, round: Round) -> None:
        """See what came of it, times included."""
        ...


@dataclass(slots=True)
class FixedPolicy:
    """The same budget every round."""

    nodes: int
    depth: int = 1_000_000

    def plan(self, context: PlanContext) -> Budget:
        """The fixed budget."""
        return Budget(self.nodes, self.depth)

    def select(self, draft: Draft) -> Draft:
        """All of it."""
        return draft

    def learn(self, round: Round) -> None:
        """Nothing to learn."""

"""LEDE at work: the agent's decisions in a request, and the rows that `lede`'s arms verify.

`LedePolicy` is the paper's part (arXiv 2606.03113): one network, two actions, *exit* (take this
row's token and go on drafting) and *continue* (deeper on the walk, to verification in the draft).
Its state, reward and training are a reconstruction (docs/methods/lede.md). `ArmBudget` is ours.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar, Protocol

from hasten.policies.base import PlanContext
from hasten.policies.budget import AcceptanceBook, BudgetPolicy
from hasten.policies.cost_model import CostModel, CostTable
from hasten.policies.exit_adaptive import check_costs, round_cost
from hasten.policies.exit_rules import need_count
from hasten.policies.exits import SELECT, ExitCosts, Outcome, Probe
from hasten.policies.lede_arms import PLAIN
from hasten.policies.lede_chooser import Chooser
from hasten.policies.lede_features import FeatureFacts, Floats, LiveFeatures
from hasten.policies.lede_guard import Guard
from hasten.types import Budget, Draft, Round


class Agent(Protocol):
    """What decides from features: `hasten.policies.lede_agent.LedeAgent`, or one of a test."""

    def q_values(self, features: Floats) -> tuple[float, float]:
        """Values of going on and of taking the row's token."""
        ...


class LedePolicy:
    """One request's decisions by an agent.

    facts   what its features need to know; `facts.costs` are this machine's
    steps   most tokens of a draft
    guard   rounds are plain while drafting doesn't pay; None: never

    Its drafter tells it of each round's pending token (`root`) and of the tokens drafted (`drew`).
    Raises OptionError where costs and steps don't fit.
    """

    __slots__ = (
        "_agent", "_at", "_costs", "_features", "_guard", "decided", "deciding_s", "spent",
        "steps",
    )  # fmt: skip
    shadow: bool = False
    source: ClassVar[str] = (
        "LEDE (arXiv 2606.03113): one agent, two actions, abstract and Fig. 1; the rest is a "
        "reconstruction"
    )

    def __init__(
        self, agent: Agent, facts: FeatureFacts, *, steps: int, guard: Guard | None = None
    ) -> None:
        need_count("length", steps, 1)
        check_costs(facts.costs, facts.at, steps)
        self._agent, self._guard, self.steps = agent, guard, steps
        self._costs: ExitCosts = facts.costs
        self._at: Sequence[int] = facts.at
        self._features = LiveFeatures(facts)
        self.decided, self.deciding_s = 0, 0.0
        """Decisions taken, and the seconds they took, features included."""
        self.spent = 1.0
        """What the last round cost by the table, in plain steps."""

    def root(self, token: int) -> None:
        """A round begins at this pending token."""
        self._features.root(token)

    def drew(self, token: int) -> None:
        """The token drafted last: the input of the next row."""
        self._features.drew(token)

    def wants(self, phase: str, exit: int, drafted: int) -> bool:
        """False where no decision is left: the draft is full, or drafting pauses."""
        if phase == SELECT:
            return self._guard is None or self._guard.drafting
        return drafted < self.steps

    def leave(self, probe: Probe) -> bool:
        """What the agent values more; of equals, going on."""
        started = time.perf_counter()
        go_on, take = self._agent.q_values(self._features.features(probe))
        leaves = take > go_on
        if leaves:
            self._features.took()
        self.decided += 1
        self.deciding_s += time.perf_counter() - started
        return leaves

    def learn(self, outcome: Outcome) -> None:
        """Running means, and whether drafting pays."""
        self._features.learn(outcome)
        self.spent = round_cost(outcome, self._costs, self._at)
        if self._guard is not None:
            self._guard.learn(outcome.accepted + 1, self.spent)


class ArmBudget(BudgetPolicy):
    """The budget policy under a choice of arms: it picks the rows of the arm's draft, and tells the
    chooser what the round cost.

    walk   decides in the arm of that name, whose chain is verified whole; None: there is none
    """

    def __init__(
        self,
        costs: CostTable | CostModel,
        book: AcceptanceBook,
        chooser: Chooser,
        *,
        most: int,
        walk: LedePolicy | None = None,
    ) -> None:
        super().__init__(costs, book, most=most)
        self.chooser, self._walk = chooser, walk
        self.spent = 1.0
        """What the last round cost by the table, in plain steps."""

    def plan(self, context: PlanContext) -> Budget:
        """All that could be verified, or none during a pause."""
        self.chooser.start()
        return super().plan(context)

    def select(self, draft: Draft) -> Draft:
        """The rows worth verifying; of a walk all."""
        arm = self.chooser.arm
        return draft if arm is PLAIN or arm.walk else super().select(draft)

    def learn(self, round: Round) -> None:
        """Count what was kept, by arm and by candidate."""
        chooser, walked = self.chooser, self.chooser.arm.walk
        if not walked:  # a walk's pass is resumed: its time isn't one of so many rows
            super().learn(round)
        if round.tree is None or self._others:
            return
        if walked and self._walk is not None:
            self.spent = self._walk.spent
        else:
            self.spent = chooser.costs.of(len(round.tree), chooser.steps)
        chooser.learn(len(round.emitted), self.spent)

"""How much a hybrid round may draft: the cache's draft whole, the model arm's by its own policy."""

from __future__ import annotations

from hasten.payoff.gate import MODEL, PLAIN, Gate
from hasten.policies.base import PlanContext, Policy
from hasten.types import Budget, Draft, Round


class HybridPolicy:
    """One request's policy.

    gate      chooses the arm, in the drafter
    model     the model arm's own policy: it plans that arm's budget, picks from its drafts and
              learns from its rounds, and sees nothing of the cache's
    longest   tokens that the cache drafts at most; 0: it never does
    """

    def __init__(self, gate: Gate, model: Policy, *, longest: int) -> None:
        self._gate, self._model, self._longest = gate, model, longest
        self._planned = Budget(1, 0)

    def plan(self, context: PlanContext) -> Budget:
        """Room for either arm's draft."""
        model = self._planned = self._model.plan(context)
        self._gate.plan(context, model)
        depth = min(self._longest, context.remaining - 1)
        return Budget(max(model.nodes, depth + 1), max(model.depth, depth))

    def select(self, draft: Draft) -> Draft:
        """The cache's draft whole; of the model arm's what its policy finds worth verifying."""
        return self._model.select(draft) if self._gate.arm == MODEL else draft

    def learn(self, round: Round) -> None:
        """Tell the model arm's policy of its own rounds, and of plain ones that it planned."""
        self._gate.learn(round)
        planned_plain = self._planned.nodes <= 1 and self._gate.arm == PLAIN
        if round.tree is None or self._gate.arm == MODEL or planned_plain:
            self._model.learn(round)

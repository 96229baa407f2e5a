"""Self-speculation under LEDE's agent: a chain from the exit that it leaves at.

As `hasten.drafters.early_exit`; the agent also hears which tokens its rows stand for: the pending
one, and those drafted (never the one that is being decided on, which isn't drawn yet).
"""

from __future__ import annotations

from typing import Any

import torch

from hasten.drafters.base import DraftContext
from hasten.drafters.early_exit import EarlyExit
from hasten.exits.bank import ExitBank
from hasten.policies.exits import Probe
from hasten.policies.lede import LedePolicy
from hasten.types import Budget, Draft


class LedeChain(EarlyExit):
    """`EarlyExit` with a `LedePolicy`; options are its."""

    name = "lede"

    def __init__(self, bank: ExitBank, policy: LedePolicy, **options: Any) -> None:
        super().__init__(bank, policy, **options)
        self._agent = policy

    @property
    def decided(self) -> int:
        """Decisions of the agent."""
        return self._agent.decided

    @property
    def deciding_s(self) -> float:
        """Seconds they took, features included."""
        return self._agent.deciding_s

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """Walk up to the exit the agent leaves at, and draft from there until it stops."""
        self._agent.root(ctx.ids[-1])
        return super().propose(ctx, budget)

    def _token(
        self, ctx: DraftContext, prefix: list[int], probe: Probe
    ) -> tuple[int | None, torch.Tensor | None]:
        token, probs = super()._token(ctx, prefix, probe)
        if token is not None:
            self._agent.drew(token)
        return token, probs

"""Plain decoding: nothing is drafted."""

from __future__ import annotations

from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.types import Budget, Draft, DraftTree


class Plain(BaseDrafter):
    """One token a pass: the baseline every speedup is measured against."""

    name = "ar"

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """The lone root."""
        return Draft(DraftTree.chain(ctx.ids[-1]))

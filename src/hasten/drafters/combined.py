"""Several drafters in one tree: what each proposes is fused, the first named first."""

from __future__ import annotations

from collections.abc import Sequence

from hasten.drafters.base import BaseDrafter, DraftContext, Drafter
from hasten.drafters.tree_builder import TreeBuilder
from hasten.types import Budget, Draft, Round, RowSignals, Signals


class Combined(BaseDrafter):
    """Fuses point-mass drafts (no q, no extra rows) of several drafters.

    shares   the most nodes each drafter may add, as shares of the budget
    """

    def __init__(self, drafters: Sequence[Drafter], *, name: str, shares: Sequence[float]) -> None:
        self.name = name
        self._drafters = tuple(drafters)
        self._shares = tuple(shares)
        needs = [d.needs for d in self._drafters]
        self.needs = Signals(
            topk=max(n.topk for n in needs),
            hidden=tuple(sorted({layer for n in needs for layer in n.hidden})),
            embeddings=any(n.embeddings for n in needs),
            prompt=any(n.prompt for n in needs),
        )

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Begin each."""
        for drafter in self._drafters:
            drafter.begin(prompt, signals)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """One tree of all proposals; nodes proposed twice keep their first source."""
        tree = TreeBuilder(ctx.ids[-1], budget.nodes, budget.depth)
        for drafter, share in zip(self._drafters, self._shares, strict=True):
            most = min(1 + round(share * (budget.nodes - 1)), budget.nodes - len(tree) + 1)
            if most > 1:
                self._fuse(tree, drafter.propose(ctx, Budget(most, budget.depth)))
        return tree.draft()

    @staticmethod
    def _fuse(tree: TreeBuilder, draft: Draft) -> None:
        nodes: list[int | None] = [0]
        for node in range(1, len(draft.tree)):
            parent = nodes[draft.tree.parents[node]]
            source, rank = draft.sources[node], draft.ranks[node]
            token = draft.tree.tokens[node]
            nodes.append(None if parent is None else tree.add(parent, token, source, rank))

    def observe(self, round: Round) -> None:
        """Tell each."""
        for drafter in self._drafters:
            drafter.observe(round)

    def end(self) -> None:
        """End each, also when one fails."""
        errors: list[Exception] = []
        for drafter in self._drafters:
            try:
                drafter.end()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

"""Several drafters in one tree: what each proposes is fused, the first named first."""

from __future__ import annotations

from collections.abc import Sequence

from hasten.drafters.base import BaseDrafter, DraftContext, Drafter
from hasten.drafters.tree_builder import TreeBuilder
from hasten.types import Budget, Draft, Round, RowSignals, Signals


class Combined(BaseDrafter):
    """Fuses the drafts of several drafters; point-mass drafts only (no q, no extra rows).

    shares   the most nodes each drafter may propose, as shares of the budget; a node two of them
             propose counts once, and what one leaves unused the later ones may use
    """

    def __init__(self, drafters: Sequence[Drafter], *, name: str, shares: Sequence[float]) -> None:
        self.name = name
        self._drafters = tuple(drafters)
        self._shares = tuple(shares)
        needs = [d.needs for d in self._drafters]
        self.needs = Signals(
            topk=max(n.topk for n in needs),
            hidden=tuple(sorted({layer for n in needs for layer in n.hidden})),
            probs=any(n.probs for n in needs),
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
            if tree.full:
                break
            nodes = min(max(round(share * (budget.nodes - 1)), 1) + 1, budget.nodes)
            self._fuse(tree, drafter.propose(ctx, Budget(nodes, budget.depth)))
        return tree.draft()

    @staticmethod
    def _fuse(tree: TreeBuilder, draft: Draft) -> None:
        size = len(draft.tree)
        sources, ranks = draft.sources or ("",) * size, draft.ranks or (0,) * size
        nodes: list[int | None] = [0]
        for node in range(1, size):
            parent = nodes[draft.tree.parents[node]]
            token = draft.tree.tokens[node]
            nodes.append(
                None if parent is None else tree.add(parent, token, sources[node], ranks[node])
            )

    def observe(self, round: Round) -> None:
        """Tell each."""
        for drafter in self._drafters:
            drafter.observe(round)

    def end(self) -> None:
        """End each, also when one fails; the first error wins."""
        errors: list[Exception] = []
        for drafter in self._drafters:
            try:
                drafter.end()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

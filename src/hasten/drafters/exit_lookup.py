"""Trees from an exit module, alone or where a copy of the text is silent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.drafters.exit_session import ExitSession
from hasten.drafters.exit_tree import Growth, grow
from hasten.drafters.prompt_lookup import PromptLookup
from hasten.drafters.tree_builder import TreeBuilder
from hasten.exits.bank import ExitBank
from hasten.types import Budget, Draft, DraftTree, Round, RowSignals, Signals


class ExitTree(BaseDrafter):
    """A small tree from the bank's first module, which must stand at exit 0.

    lookup   copy what followed the text's last tokens where they occurred before, and ask the
             module only where nothing did (or a copy shorter than `least` n-gram tokens)
    """

    name = "early-exit"

    def __init__(
        self,
        bank: ExitBank,
        growth: Growth,
        *,
        lookup: bool = False,
        least: int = 2,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.bank, self.growth, self._eos_ids = bank, growth, eos_ids
        self.needs = Signals(hidden=bank.taps, prompt=True)
        self._session = ExitSession(bank)
        self._lookup = PromptLookup(min_ngram=least, max_ngram=4) if lookup else None

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Feed the prompt to the module and index it."""
        self._session.begin(prompt, signals)
        if self._lookup is not None:
            self._lookup.begin(prompt, signals)

    @torch.inference_mode()
    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """The copy, or the module's tree."""
        root = ctx.ids[-1]
        if root in self._eos_ids:
            return Draft(DraftTree.chain(root))
        if self._lookup is not None:
            copy = self._lookup.propose(ctx, budget)
            if len(copy.tree) > 1:
                return copy
        tree = TreeBuilder(root, budget.nodes, budget.depth)
        grow(tree, self._session, self._session.runs[0], ctx, self.growth, eos_ids=self._eos_ids)
        return tree.draft()

    @torch.inference_mode()
    def observe(self, round: Round) -> None:
        """Feed what was verified; index what was emitted."""
        self._session.observe(round)
        if self._lookup is not None:
            self._lookup.observe(round)

    def end(self) -> None:
        """Keep nothing of the request."""
        self._session.end()
        if self._lookup is not None:
            self._lookup.end()

"""`auto`'s drafter (ours): what followed the text's suffixes elsewhere, phrases, stored candidates.

Suffix counts (`hasten.drafters.suffix`, blend) guess what the text repeats, and the latest top-k of
each token (RACER's and token recycling's table) the rest. The table also has a say in the copies: a
copied token that the model itself ranked first, or nowhere, after its parent is a better or a worse
guess, which its rank tells the budget policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.drafters.copies import COPIES, add_copies, check_copies
from hasten.drafters.exit_session import ExitSession
from hasten.drafters.exit_tree import Growth, grow
from hasten.drafters.logits_tree import grow_logits
from hasten.drafters.phrase_tree import grow_phrases, usual
from hasten.drafters.ranks import MAX_LENGTH
from hasten.drafters.successors import SuccessorTable
from hasten.drafters.suffix import Suffix
from hasten.drafters.suffix_guess import Guess
from hasten.drafters.tree_builder import TreeBuilder
from hasten.exits.bank import ExitBank
from hasten.phrases import Phrases
from hasten.types import Budget, Draft, Round, RowSignals, Signals

SURE = 0.8
"""Where a copy's first token has at least this chance, the module isn't asked."""
GROWTH = Growth(steps=2)
FEW = 4
"""Candidates of a row that are likely to be verified."""


class Worth:
    """Whether the module is worth asking in this text: how often, lately, it alone named the token
    that came next among its first few.

    A question costs the share `least` of a pass, whatever comes of it; where it helps less often
    than that it is only asked now and then, to see whether that has changed.
    """

    LEAST, HOPE, FADES, PATIENCE, NEVER = 0.12, 0.3, 0.08, 8, 0.45
    __slots__ = ("_helps", "_least", "_named", "_theirs", "_waited", "asked")

    def __init__(self, least: float = LEAST) -> None:
        self._least, self._helps = least, max(self.HOPE, least)
        self._waited, self.asked = 0, False
        self._theirs: frozenset[int] = frozenset()
        self._named: frozenset[int] = frozenset()

    def ask(self, others: int) -> bool:
        """Whether to ask now, in a pass shared with `others`: a question costs as much as alone,
        and a request's part of the pass is smaller."""
        least = self._least * (1 + others)
        if least > self.NEVER:
            return False
        self._waited += 1
        return self._helps >= least or self._waited >= self.PATIENCE

    def note(self, said: Sequence[int], others: Sequence[int]) -> None:
        """What the module and the other sources named after the pending token."""
        self.asked, self._waited = True, 0
        self._theirs, self._named = frozenset(others), frozenset(said[:FEW])

    def learn(self, token: int) -> None:
        """The token that came."""
        if self.asked:
            helped = token in self._named and token not in self._theirs
            self._helps += self.FADES * (helped - self._helps)
            self.asked = False


class Auto(BaseDrafter):
    """A tree of copies and stored candidates.

    breadth   candidates kept per token
    start     candidates of tokens not seen yet (`hasten.start_rows`); None: there are none
    phrases   what the model often says (`hasten.phrases`); None: there are none
    exits     a module at exit 0, asked where copies aren't sure; None: there is none
    least     how often it must help for a question to pay (`Worth`)
    eos_ids   nothing is drafted after these
    """

    name = "auto"

    def __init__(
        self,
        *,
        breadth: int = 8,
        start: np.ndarray[Any, Any] | None = None,
        phrases: Phrases | None = None,
        exits: ExitBank | None = None,
        growth: Growth = GROWTH,
        sure: float = SURE,
        least: float = Worth.LEAST,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.breadth, self._start, self._eos_ids = breadth, start, eos_ids
        self._phrases = phrases
        self._session = None if exits is None else ExitSession(exits)
        self._growth, self._sure, self._least = growth, sure, least
        self._worth = Worth(least)
        taps = () if exits is None else exits.taps
        # A prompt's candidates cost a quarter of reading it, and spare one pass in seventy.
        asks = exits is not None
        self.needs = Signals(
            topk=breadth, hidden=taps, prompt=asks, prompt_topk=False, sparse=True, late=True
        )
        self._suffix = Suffix(eos_ids=eos_ids)
        self._successors = SuccessorTable(start=start)

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Count the prompt."""
        self._suffix.begin(prompt, signals)
        self._successors = SuccessorTable(start=self._start)
        if self._session is not None:
            self._session.begin(prompt, signals)
            self._worth = Worth(self._least)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """Copies first, then the module's candidates, phrases, and the logits tree."""
        tree = TreeBuilder(ctx.ids[-1], budget.nodes, budget.depth, self._eos_ids)
        guess = self._suffix.guess(round(COPIES * (budget.nodes - 1)), budget.depth)
        copied = add_copies(tree, guess, self._successors)
        rivals: dict[int, int] = {}
        if (
            self._session is not None
            and not self._copies_are_sure(guess)
            and self._worth.ask(ctx.others)
        ):
            rivals = self._ask(tree, ctx, copied)
        if self._phrases is not None:
            grow_phrases(tree, self._phrases, self._successors, ctx.ids)
        grow_logits(tree, self._successors, self.breadth, rivals=rivals)
        return tree.draft()

    def _copies_are_sure(self, guess: Guess) -> bool:
        return any(
            parent < 0 and chance >= self._sure
            for parent, chance in zip(guess.parents, guess.chances, strict=True)
        )

    @torch.inference_mode()
    def _ask(
        self, tree: TreeBuilder, ctx: DraftContext, copied: dict[int, float]
    ) -> dict[int, int]:
        """Add the module's candidates; what it says about copied tokens goes into their ranks. The
        nodes it was asked at, which make stored candidates below them less likely."""
        session = self._session
        assert session is not None
        run = session.runs[0]
        root = tree.tokens[0]
        others = [tree.tokens[n] for n, parent in enumerate(tree.parents) if parent == 0]
        if self._phrases is not None:
            others += usual(self._phrases, ctx.ids)
        said = grow(tree, session, run, ctx, self._growth, eos_ids=self._eos_ids)
        named = [token for token, _ in said[0]]
        self._worth.note(named, [*others, *self._successors.get(root)[:FEW]])
        check_copies(tree, copied, said)
        return dict.fromkeys(said, MAX_LENGTH)

    def observe(self, round: Round) -> None:
        """Count what was emitted, store what was evaluated."""
        self._suffix.observe(round)
        if self._session is not None:
            self._session.observe(round)
            self._worth.learn(round.emitted[0])
        if round.tree is not None and round.signals.topk_ids is not None:
            self._successors.update(round.tree.tokens, round.signals.topk_ids, round.accepted)

    def end(self) -> None:
        """Leave no trace of the request."""
        self._suffix.end()
        if self._session is not None:
            self._session.end()
        self._successors.reset()

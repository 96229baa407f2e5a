"""`lede`'s drafter: each round drafts from the arm that its chooser finds worth most.

The parts are those of other methods: copies by suffix counts and stored candidates (`auto`), small
trees or chains from the module at exit 0 (`early-exit:tree`), chains from higher exits
(`early-exit`). Which of them a round uses is `hasten.policies.lede_arms`'s.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.drafters.copies import COPIES, add_copies, check_copies
from hasten.drafters.early_exit import EarlyExit
from hasten.drafters.exit_session import ExitSession
from hasten.drafters.exit_tree import grow
from hasten.drafters.logits_tree import grow_logits
from hasten.drafters.ranks import MAX_LENGTH, MODULE
from hasten.drafters.successors import SuccessorTable
from hasten.drafters.suffix import Suffix
from hasten.drafters.suffix_guess import Guess
from hasten.drafters.tree_builder import TreeBuilder
from hasten.exits.bank import ExitBank
from hasten.policies.lede_arms import PLAIN, Arm, RoundState
from hasten.policies.lede_chooser import Chooser
from hasten.types import Budget, Draft, DraftTree, Round, RowSignals, Signals

BREADTH = 8
"""Candidates stored for each token."""


class Lede(BaseDrafter):
    """A draft from the arm chosen for the round.

    bank      its first module stands at exit 0
    chooser   this request's choice of arms
    start     candidates of tokens not seen yet (`hasten.start_rows`); None: there are none
    walk      what drafts in the arm of that name; None: it isn't among the arms
    eos_ids   nothing is drafted after these

    Trees are chosen without chance; nothing is decided from a drawn token.
    """

    name = "lede"

    def __init__(
        self,
        bank: ExitBank,
        chooser: Chooser,
        *,
        start: np.ndarray[Any, Any] | None = None,
        walk: EarlyExit | None = None,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.chooser, self._start, self._walk, self._eos_ids = chooser, start, walk, eos_ids
        self._session = ExitSession(bank)
        taps = {*bank.taps, *(walk.needs.hidden if walk is not None else ())}
        self.needs = Signals(
            topk=BREADTH,
            hidden=tuple(sorted(taps)),
            prompt=True,
            prompt_topk=False,
            sparse=True,
            late=True,
        )
        self.decided = 0
        """Choices made; `deciding_s`: seconds they took, features included. Both of the last
        request."""
        self.deciding_s = 0.0
        self._suffix = Suffix(eos_ids=eos_ids)
        self._forget()

    def _forget(self) -> None:
        self._successors = SuccessorTable(start=self._start)
        self._state = RoundState()
        self._answer_from = 0

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Count the prompt and feed the modules."""
        self._forget()
        self._answer_from = len(prompt)
        self.decided, self.deciding_s = 0, 0.0
        self._session.begin(prompt, signals)
        if self.chooser.copies:
            self._suffix.begin(prompt, signals)
        if self._walk is not None:
            self._walk.begin(prompt, signals)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """The chosen arm's draft; a lone root where that is plain decoding."""
        root = ctx.ids[-1]
        if root in self._eos_ids:
            return Draft(DraftTree.chain(root))
        guess = self._guess(budget)
        started = time.perf_counter()
        arm = self.chooser.choose(self._features(ctx, guess), ctx.others)
        self.deciding_s += time.perf_counter() - started
        self.decided += 1
        return self.draft(arm, guess, ctx, budget)

    def _guess(self, budget: Budget) -> Guess:
        """What followed the text's end elsewhere in it, within the copies' part of the budget."""
        if not self.chooser.copies:
            return Guess()
        return self._suffix.guess(round(COPIES * (budget.nodes - 1)), budget.depth)

    def _features(self, ctx: DraftContext, guess: Guess) -> np.ndarray[Any, Any]:
        firsts = sorted(
            (
                (chance, token)
                for token, chance, parent in zip(
                    guess.tokens, guess.chances, guess.parents, strict=True
                )
                if parent < 0
            ),
            reverse=True,
        )
        root, stored = ctx.ids[-1], 0.0
        if self.chooser.copies:
            known = self._successors
            stored = 1.0 if known.get(root) else 0.5 if known.start is not None else 0.0
        return self._state.features(
            len(ctx.ids),
            len(ctx.ids) - self._answer_from,
            [token for _, token in firsts],
            [chance for chance, _ in firsts],
            guess.match,
            guess.score,
            stored,
        )

    @torch.inference_mode()
    def draft(self, arm: Arm, guess: Guess, ctx: DraftContext, budget: Budget) -> Draft:
        """The draft of `arm`, where the text's suffixes say `guess`."""
        if arm is PLAIN:
            return Draft(DraftTree.chain(ctx.ids[-1]))
        if arm.walk:
            assert self._walk is not None
            return self._walk.propose(ctx, budget)
        tree = TreeBuilder(ctx.ids[-1], budget.nodes, budget.depth, self._eos_ids)
        copied = add_copies(tree, guess, self._successors) if arm.copies else {}
        rivals = {} if arm.growth is None else self._ask(tree, arm, ctx, copied)
        if arm.copies:
            grow_logits(tree, self._successors, BREADTH, rivals=rivals)
        return tree.draft()

    def _ask(
        self, tree: TreeBuilder, arm: Arm, ctx: DraftContext, copied: dict[int, float]
    ) -> dict[int, int]:
        """Add the module's candidates; what it says about copied tokens goes into their ranks. The
        nodes it was asked at, which make stored candidates below them less likely."""
        assert arm.growth is not None
        run = self._session.runs[0]
        said = grow(tree, self._session, run, ctx, arm.growth, eos_ids=self._eos_ids)
        self.chooser.steps = 1 + max(tree.depths[node] for node in said)
        named, chance = said[0][0] if said[0] else (None, 0.0)
        self._state.asked(named, chance)
        check_copies(tree, copied, said)
        return dict.fromkeys(said, MAX_LENGTH)

    @torch.inference_mode()
    def observe(self, round: Round) -> None:
        """Count what was emitted, store what was evaluated, feed what was verified."""
        self._session.observe(round)
        if self._walk is not None:
            self._walk.observe(round)
        top, values = round.signals.topk_ids, round.signals.topk_logits
        if self.chooser.copies:
            self._suffix.observe(round)
            if round.tree is not None and top is not None:
                self._successors.update(round.tree.tokens, top, round.accepted)
        if round.tree is not None:
            kept = sum(round.sources[node] == MODULE for node in round.accepted[1:])
            self._state.learn(round.emitted, round.drafted, kept, _margin(values, round))

    def end(self) -> None:
        """Leave no trace of the request."""
        self._session.end()
        self._suffix.end()
        if self._walk is not None:
            self._walk.end()
        self._forget()


def _margin(values: torch.Tensor | None, round: Round) -> float | None:
    """The target's margin between its two likeliest tokens at the round's last row, logits / 10;
    None where it isn't known."""
    if values is None or values.shape[1] < 2:
        return None
    best, second = values[round.accepted[-1], :2].tolist()
    margin = 0.1 * (best - second)
    return margin if math.isfinite(margin) else None

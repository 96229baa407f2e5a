"""DFlash: a whole block of tokens drafted in one pass of a small network (arXiv 2602.06036).

The block is the pending token and mask tokens; its slots see each other and the target's own states
of all tokens before the pending one. Slot k guesses the token k places after it. How much of the
block is verified may be decided by a length head (AdaFlash, arXiv 2607.19223) from the network's
states alone, never from a token drawn, so that every verifier stays exact.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from hasten.dflash.bank import DFlashBank
from hasten.dflash.lengths import BlockLength
from hasten.drafters.base import DraftContext
from hasten.drafters.blocks import BlockDrafter
from hasten.drafters.ranks import SLOT
from hasten.errors import ModelError, OptionError
from hasten.types import Budget, Draft, DraftTree, Round


class DFlash(BlockDrafter):
    """A chain from one block.

    bank         the network, the head, the mask token's embedding
    length       how much of a block is verified
    draw         draw each slot's token from its distribution in a sampled request; off: take its
                 likeliest id
    temperature  of the drafter's logits, before the request's own options
    eos_ids      nothing is drafted after these

    Slots are independent of each other's tokens, so that the q of a slot is exact whatever was
    drawn before it.
    """

    name = "dflash"

    def __init__(
        self,
        bank: DFlashBank,
        length: BlockLength,
        *,
        draw: bool = False,
        temperature: float = 1.0,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        if not 0 < temperature < float("inf"):
            raise OptionError("dflash.draft_temperature", f"must be above 0, got {temperature}")
        super().__init__(bank, eos_ids)
        self.length, self.draw, self.temperature = length, draw, temperature

    def _start(self, prompt: Sequence[int], features: list[torch.Tensor]) -> None:
        super()._start(prompt, features)
        self._guesses: list[int] = []
        """Tokens of the last block's slots, verified or not."""
        self._fraction: float | None = None

    @torch.inference_mode()
    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """The block's tokens, as many of them as are worth verifying."""
        self._guesses = []
        room, root = min(budget.nodes - 1, budget.depth), ctx.ids[-1]
        if room < 1 or root in self._eos_ids:
            return Draft(DraftTree.chain(root))
        started = time.perf_counter()
        drawn = self.draw and not ctx.greedy
        self._wanted = 0 if drawn else self._sure(room)
        hidden = self._block(ctx)
        self._fraction = self._worth(hidden)
        count = min(self.length.rows(self._fraction) - 1, room)
        q: dict[int, torch.Tensor] = {}
        if drawn:  # dear, so that one more is guessed to learn from
            wanted = min(count + self.length.learns, room)
            self._guesses, q = self._drawn(ctx, hidden[0, 1 : 1 + wanted])
            q.pop(count, None)
        else:
            wanted = room if self.length.learns else count
            self._guesses = self._likeliest(hidden[0, 1 : 1 + wanted])
        tokens = self._guesses[:count]
        ctx.model_seconds += time.perf_counter() - started
        sources = ("", *[SLOT] * len(tokens))
        return Draft(DraftTree.chain(root, tokens), q=q, sources=sources)

    def _sure(self, room: int) -> int:
        """How many slots' likeliest ids to ask for with the block: all that may be verified, also
        where the length head is asked after it. A call of its own would cost more than their rows.
        """
        return room if self.length.asks else min(self.length.rows(None) - 1, room)

    def _worth(self, hidden: torch.Tensor) -> float | None:
        """The length head's word, where it is wanted and there is one."""
        if not self.length.asks or not self.bank.config.length_head:
            return None
        said = self.bank.worth(hidden)
        return said if math.isfinite(said) else None

    def _likeliest(self, slots: torch.Tensor) -> list[int]:
        """Each slot's likeliest id, up to an end of sequence (or a slot that says nothing)."""
        out: list[int] = []
        for token in self._run.likeliest(slots):
            if token < 0 or (out and out[-1] in self._eos_ids):
                break
            out.append(token)
        return out

    def _drawn(
        self, ctx: DraftContext, slots: torch.Tensor
    ) -> tuple[list[int], dict[int, torch.Tensor]]:
        """A token drawn from each slot's distribution, and those distributions."""
        out: list[int] = []
        q: dict[int, torch.Tensor] = {}
        for row in self._head(slots) / self.temperature if len(slots) else ():
            prefix = [*ctx.ids, *out]
            try:
                probs = ctx.warp(prefix, self._head.spread(row))
            except (OptionError, ModelError):  # the options leave nothing that the head knows
                break
            q[len(out)] = probs
            out.append(ctx.sample(probs, len(prefix), 1)[0])
            if out[-1] in self._eos_ids:
                break
        return out, q

    def observe(self, round: Round) -> None:
        """Keep the states of the rows that were kept; tell the rule what became of the block."""
        if self._guesses and round.tree is not None:
            self.length.judged(self._fraction, self._guesses, round.emitted)
            self._guesses = []
        super().observe(round)

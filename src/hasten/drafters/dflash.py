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
from hasten.dflash.net import DraftCache, check_frontier
from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.errors import DrafterError, ModelError, OptionError
from hasten.types import Budget, Draft, DraftTree, Round, RowSignals, Signals

SOURCE = "dflash"
MOST_WAITING = 64
"""Verified rows wait for the next draft; so many are put into the cache without one."""


class DFlash(BaseDrafter):
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
        self.bank, self.length, self.draw, self.temperature = bank, length, draw, temperature
        self._eos_ids = eos_ids
        self.needs = Signals(hidden=tuple(sorted(bank.config.taps)), prompt=True, embeddings=True)
        self._start((), [])

    def _start(self, prompt: Sequence[int], features: list[torch.Tensor]) -> None:
        """A request with this prompt, and states of its last rows; ((), []): none yet."""
        self._head = self.bank.head.local(prompt)
        self._waiting = features
        """States of verified rows that the cache doesn't hold yet, ``(rows, K * hidden)`` each."""
        self._run = self.bank.open(self._head, len(prompt) - self._rows_waiting())
        self._guesses: list[int] = []
        """Tokens of the last block's slots, verified or not."""
        self._wanted = 0
        """Slots of the block under way whose likeliest ids are wanted, as far as is known."""
        self._fraction: float | None = None

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Read the prompt's states. Rows of an earlier turn that weren't run again are left out:
        the context starts behind them."""
        self._start(prompt, [self._features(signals, None)] if signals.hidden else [])
        self._catch_up()  # the first draft mustn't pay for the prompt

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
        sources = ("", *[SOURCE] * len(tokens))
        return Draft(DraftTree.chain(root, tokens), q=q, sources=sources)

    def _sure(self, room: int) -> int:
        """How many slots' likeliest ids to ask for with the block: all that may be verified, also
        where the length head is asked after it. A call of its own would cost more than their rows.
        """
        return room if self.length.asks else min(self.length.rows(None) - 1, room)

    def _block(self, ctx: DraftContext) -> torch.Tensor:
        """One pass of the network over a new block: its states ``(1, block_size, hidden)``."""
        if ctx.embed is None:
            raise DrafterError("embeddings were asked for and aren't there")
        anchor = len(ctx.ids) - 1
        check_frontier(self._cache, self._rows_waiting(), anchor)
        hidden = self._run.block(ctx.embed([ctx.ids[-1]]), self._context(), self._wanted)
        check_frontier(self._cache, 0, anchor)
        return hidden

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

    @torch.inference_mode()
    def observe(self, round: Round) -> None:
        """Keep the states of the rows that were kept; tell the rule what became of the block."""
        if round.tree is None:
            return
        if self._guesses:
            self.length.judged(self._fraction, self._guesses, round.emitted)
            self._guesses = []
        self._waiting.append(self._features(round.signals, round.accepted))
        if self._rows_waiting() >= MOST_WAITING:
            self._catch_up()

    def end(self) -> None:
        """Keep nothing of the request."""
        self._start((), [])

    # -- the context -----------------------------------------------------------------------------

    @property
    def _cache(self) -> DraftCache:
        """Where the context starts and how many rows the network holds of it."""
        return self._run.cache

    def _features(self, signals: RowSignals, kept: Sequence[int] | None) -> torch.Tensor:
        """States of the tapped layers side by side, of all rows or of those `kept`: a copy."""
        states = [signals.hidden[layer] for layer in self.bank.config.taps]
        both = torch.cat(states, -1)
        if kept is None:
            return both
        return both[torch.tensor(list(kept), device=both.device)]

    def _rows_waiting(self) -> int:
        return sum(len(each) for each in self._waiting)

    def _context(self) -> torch.Tensor:
        """The states that wait, ``(rows, K * hidden)``; they wait no more."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            config = self.bank.config
            return self.bank.mask.new_empty(0, len(config.taps) * config.hidden_size)
        return waiting[0] if len(waiting) == 1 else torch.cat(waiting)

    @torch.inference_mode()
    def _catch_up(self) -> None:
        """Put what waits into the cache."""
        if self._waiting:
            self._run.catch_up(self._context())

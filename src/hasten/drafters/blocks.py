"""What block drafters have in common: a request's context in the network, and its next block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hasten.dflash.bank import DFlashBank
from hasten.dflash.net import DraftCache, check_frontier
from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.errors import DrafterError
from hasten.types import Round, RowSignals, Signals

MOST_WAITING = 64
"""Verified rows wait for the next draft; so many are put into the cache without one."""


class BlockDrafter(BaseDrafter):
    """Feeds the target's states to the network of `bank`; subclasses draft from its blocks.

    eos_ids  nothing is drafted after these
    """

    def __init__(self, bank: DFlashBank, eos_ids: frozenset[int] = frozenset()) -> None:
        self.bank = bank
        self._eos_ids = eos_ids
        self.needs = Signals(hidden=tuple(sorted(bank.config.taps)), prompt=True, embeddings=True)
        self._start((), [])

    def _start(self, prompt: Sequence[int], features: list[torch.Tensor]) -> None:
        """A request with this prompt, and states of its last rows; ((), []): none yet."""
        self._head = self.bank.head.local(prompt)
        self._waiting = features
        """States of verified rows that the cache doesn't hold yet, ``(rows, K * hidden)`` each."""
        self._run = self.bank.open(self._head, len(prompt) - self._rows_waiting())
        self._wanted, self._width = 0, 0
        """Slots of the block under way that are going to be asked about, as far as is known, and
        how many candidates of each (0: the likeliest id alone)."""

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Read the prompt's states. Rows of an earlier turn that weren't run again are left out:
        the context starts behind them."""
        self._start(prompt, [self._features(signals, None)] if signals.hidden else [])
        self._catch_up()  # the first draft mustn't pay for the prompt

    def _block(self, ctx: DraftContext) -> torch.Tensor:
        """One pass of the network over a new block: its states ``(1, block_size, hidden)``."""
        if ctx.embed is None:
            raise DrafterError("embeddings were asked for and aren't there")
        anchor = len(ctx.ids) - 1
        check_frontier(self._cache, self._rows_waiting(), anchor)
        embedded = ctx.embed([ctx.ids[-1]])
        hidden = self._run.block(embedded, self._context(), self._wanted, self._width)
        check_frontier(self._cache, 0, anchor)
        return hidden

    @torch.inference_mode()
    def observe(self, round: Round) -> None:
        """Keep the states of the rows that were kept."""
        if round.tree is None:
            return
        self._waiting.append(self._features(round.signals, round.accepted))
        if self._rows_waiting() >= MOST_WAITING:
            self._catch_up()

    def end(self) -> None:
        """Keep nothing of the request."""
        self._start((), [])

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

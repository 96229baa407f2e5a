"""A DFlash drafter drafts a block for every particle in one pass of its network.

A block's slots don't see each other's tokens, so one pass gives all K laws at once, whatever is
drawn from them. Each particle has a row of its own in the drafter's cache: all particles are of one
length, so the rows stay in step, and a copy of a particle copies a row. (The prompt's keys and
values of the drafter, a few thin layers, are therefore held N times; the target's once.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hasten.dflash.bank import DFlashBank
from hasten.dflash.net import DraftCache, check_frontier
from hasten.smc.proposals import Choose, Lane
from hasten.targets.base import Target


class DFlashProposal:
    """Blocks of `bank` over `target`; see `hasten.smc.proposals.Proposal`.

    Rows of particles that have ended go on holding whatever they held; nobody looks.
    """

    name = "dflash"

    def __init__(self, target: Target, bank: DFlashBank) -> None:
        self._target, self._bank, self._size = target, bank, bank.config.hidden_size
        self.taps = tuple(sorted(bank.config.taps))
        self.full_support = len(bank.head.ids) >= target.info.vocab_size
        self._start((), 0)

    def _start(self, prompt: Sequence[int], count: int) -> None:
        """Nothing has been drafted yet."""
        self._head = self._bank.head.local(prompt)
        self._cache = DraftCache(start=len(prompt))
        self._length = len(prompt)
        """Verified rows of each particle, the prompt's included."""
        self._waiting = self._nothing(count, 0)
        """States of verified rows that the cache doesn't hold, ``(N, rows, taps * hidden)``."""

    def room(self, length: int) -> int:
        """A block's slots but the anchor's."""
        return self._bank.config.block_size - 1

    @torch.inference_mode()
    def begin(self, prompt: Sequence[int], hidden: Mapping[int, torch.Tensor], count: int) -> None:
        """Read the prompt's states once, and hold a row of the cache for each particle."""
        self._start(prompt, count)
        features = self._features(hidden, len(next(iter(hidden.values()))))
        self._cache.start -= len(features)
        context = self._bank.net.context(features.unsqueeze(0))
        self._bank.net.remember(context, self._positions(1, context.shape[1]), self._cache)
        self._cache.select([0] * count)

    @torch.inference_mode()
    def draft(self, lanes: Sequence[Lane], length: int, choose: Choose) -> int:
        """One pass of the network, then a token for each lane from each slot."""
        hidden = self._blocks({lane.slot: lane.root for lane in lanes})
        mine = hidden[[lane.slot for lane in lanes]]
        for slot in range(1, 1 + length):
            choose(self._spread(self._head(mine[:, slot])), range(len(lanes)))
        return 0

    def _blocks(self, roots: Mapping[int, int]) -> torch.Tensor:
        """Blocks of all slots, ``(N, block_size, hidden)``; where there is no root, of anything."""
        net, size = self._bank.net, self._bank.config.block_size
        waiting, count = self._waiting, len(self._waiting)
        check_frontier(self._cache, waiting.shape[1], self._length)
        context = net.context(waiting) if waiting.shape[1] else waiting[:, :, : self._size]
        anchors = self._target.embed([roots.get(slot, 0) for slot in range(count)])
        mask = self._bank.mask.expand(count, size - 1, -1)
        block = torch.cat([anchors.to(mask.dtype).unsqueeze(1), mask], 1)
        positions = self._positions(count, context.shape[1] + size)
        hidden: torch.Tensor = net(block, context, positions, self._cache)
        self._waiting = self._nothing(count, 0)
        return hidden

    @torch.inference_mode()
    def observe(
        self, lanes: Sequence[Lane], kept: int, hidden: Sequence[Mapping[int, torch.Tensor]]
    ) -> None:
        """The states of what was kept wait for the next block."""
        self._waiting = self._nothing(len(self._waiting), kept)
        for lane, states in zip(lanes, hidden, strict=True):
            self._waiting[lane.slot] = self._features(states, kept)
        self._length += kept

    def retire(self, slots: Sequence[int]) -> None:
        """Their rows stay, unused."""

    @torch.inference_mode()
    def fork(self, copies: Mapping[int, int]) -> None:
        """Copy rows of the cache, and what waits."""
        if copies:
            of = [copies.get(slot, slot) for slot in range(len(self._waiting))]
            self._waiting = self._waiting[of]
            self._cache.select(of)

    def close(self) -> None:
        """Keep nothing of the request."""
        self._start((), 0)

    # tensors

    def _features(self, hidden: Mapping[int, torch.Tensor], rows: int) -> torch.Tensor:
        """The first rows' states side by side ``(rows, taps * hidden)``, in the drafter's order."""
        return torch.cat([hidden[layer][:rows] for layer in self._bank.config.taps], 1)

    def _positions(self, count: int, rows: int) -> torch.Tensor:
        """``(count, rows)``: those behind the cache."""
        first = self._cache.start + self._cache.length
        device = self._bank.mask.device
        return torch.arange(first, first + rows, device=device).expand(count, -1)

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Draft logits ``(n, draft_vocab)`` by the target's ids."""
        return logits if self.full_support else self._head.spread(logits)

    def _nothing(self, count: int, rows: int) -> torch.Tensor:
        width = self._size * len(self._bank.config.taps)
        return self._bank.mask.new_zeros(count, rows, width)

"""A proposal at work for a population: what it drafts each round, and with which probability."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hasten.smc import weights
from hasten.smc.laws import DraftLaw
from hasten.smc.population import Particle
from hasten.smc.proposals import Lane, Proposal


@dataclass(frozen=True, slots=True)
class Block:
    """What a round drafted.

    prefixes  prompt and answer so far of each particle
    lanes     the particles as the proposal sees them
    tokens    K drafted tokens of each; log_q: their log q ``(n, K)``, float64 on the CPU
    frontier  the target's layers that roots and drafts have run already
    """

    particles: list[Particle]
    prefixes: list[list[int]]
    lanes: list[Lane]
    tokens: list[list[int]]
    log_q: torch.Tensor
    frontier: int

    @property
    def length(self) -> int:
        """K."""
        return self.log_q.shape[1]


class Drafting:
    """Asks the proposal, draws from its law, and tells it what became of the particles.

    length  tokens drafted a round at most
    """

    def __init__(self, proposal: Proposal, law: DraftLaw, *, length: int, seed: int) -> None:
        self._proposal, self._law, self._length, self._seed = proposal, law, length, seed
        self._begun = False
        self.choosing = 0.0
        """Seconds of the last round that went into drawing."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target that the proposal wants to see."""
        return self._proposal.taps

    def begin(self, prompt: Sequence[int], hidden: Mapping[int, torch.Tensor], count: int) -> None:
        """Start after the prompt, unless there is no room for drafts at all."""
        if self._proposal.room(len(prompt) + 1) > 0:
            self._begun = True
            self._proposal.begin(prompt, hidden, count)

    def draft(
        self, prompt: Sequence[int], particles: list[Particle], most: int, round: int
    ) -> Block:
        """Up to `most` tokens for each of the particles, which are all of one length; perhaps
        none. `round` keys the draws."""
        prefixes = [[*prompt, *p.ids] for p in particles]
        room = self._proposal.room(len(prefixes[0]))
        length = max(min(self._length, most, room), 0) if self._begun else 0
        lanes = [Lane(p.slot, p.ids[-1], p.sequence) for p in particles]
        slots = [p.slot for p in particles]
        tokens: list[list[int]] = [[] for _ in particles]
        log_q: list[torch.Tensor] = []
        self.choosing = 0.0

        def choose(logits: torch.Tensor, of: Sequence[int]) -> list[int]:
            began = time.perf_counter()
            paths: list[list[int]] = []
            if not self._law.plain:
                owners = {row: lane for lane, row in enumerate(of)}
                paths = [[*prefixes[at], *tokens[at]] for _, at in sorted(owners.items())]
            law = self._law(paths, logits)
            position = len(prefixes[0]) + len(tokens[0])
            drawn = weights.draw(law, slots, self._seed, position, f"smc-draft-{round}", of)
            log_q.append(law[list(of), drawn].cpu().double())
            for draft, token in zip(tokens, drawn, strict=True):
                draft.append(token)
            self.choosing += time.perf_counter() - began
            return drawn

        frontier = self._proposal.draft(lanes, length, choose) if length else 0
        drawn = torch.stack(log_q, 1) if log_q else torch.zeros(len(lanes), 0, dtype=torch.float64)
        return Block(particles, prefixes, lanes, tokens, drawn, frontier)

    def observe(
        self,
        block: Block,
        places: Sequence[int],
        kept: int,
        hidden: Sequence[Mapping[int, torch.Tensor]],
    ) -> None:
        """The particles at these places of the block go on with `kept` of its rows."""
        if places and block.length:
            self._proposal.observe([block.lanes[at] for at in places], kept, hidden)

    def retire(self, slots: Sequence[int]) -> None:
        """These particles draft no more."""
        if slots and self._begun:
            self._proposal.retire(slots)

    def fork(self, copies: Mapping[int, int]) -> None:
        """These particles (keys) are copies of others now."""
        if copies and self._begun:
            self._proposal.fork(copies)

    def close(self) -> None:
        """Free what the proposal holds."""
        self._proposal.close()

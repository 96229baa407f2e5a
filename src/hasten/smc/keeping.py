"""The target's sequences of a population: what is kept of a round, and who goes on with it."""

from __future__ import annotations

from typing import Any

from hasten.smc.drafting import Block, Drafting
from hasten.smc.population import Particle, Population
from hasten.smc.verifying import Verified
from hasten.targets.base import Target


class Keeper:
    """Opens, commits, forks and closes sequences.

    single  all particles share one lineage, and one sequence, whose rows branch
    """

    def __init__(
        self, target: Target, population: Population, drafting: Drafting, *, single: bool
    ) -> None:
        self._target, self._population, self._drafting = target, population, drafting
        self._single = single

    def open(self, base: Any) -> None:
        """Let the running particles start after the prompt, which `base` holds."""
        shared: Any = None
        for particle in self._population.running:
            if shared is None or not self._single:
                shared = self._target.open(base)
            particle.sequence = shared

    def settle(self, block: Block, kept: int, found: Verified, round: int) -> None:
        """Keep the first `kept` rows of the particles that go on, free what the others hold, and
        resample; `round` keys the draws."""
        if self._single:
            self._settle_one(block, kept, found, round)
            return
        going = {p.slot for p in self._population.running}
        stay = [at for at, p in enumerate(block.particles) if p.slot in going]
        for at in stay:
            self._target.commit(block.lanes[at].sequence, found.paths[at][:kept])
        self._drafting.observe(block, stay, kept, [found.hidden_of(at) for at in stay])
        gone = [p for p in block.particles if p.slot not in going]
        for particle in gone:
            self._drop(particle)
        self._drafting.retire([p.slot for p in gone])
        if going:
            self._resample(round)
        else:
            self._population.note()

    def _resample(self, round: int) -> None:
        """Resample where weights are uneven, and let sequences follow: only the dead are copied
        over, and a copy shares what it can with its source."""
        particles = self._population.particles
        copies = self._population.resample(round)
        for to, source in copies.items():
            self._drop(particles[to])
            held = particles[source].sequence
            if held is not None:
                particles[to].sequence = self._target.open(held)
        self._drafting.fork(copies)

    def _settle_one(self, block: Block, kept: int, found: Verified, round: int) -> None:
        """Choose the particle that goes on, and keep its rows: all others become copies of it."""
        population = self._population
        going = bool(population.running)
        copies = population.resample(round) if going else {}
        if not population.running:
            if not going:
                population.note()
            self._drafting.retire([p.slot for p in population.particles])
            self.close()
            return
        winner = next(iter(copies.values()), 0)
        self._target.commit(block.lanes[winner].sequence, found.paths[winner][:kept])
        self._drafting.observe(block, [winner], kept, [found.hidden_of(winner)])
        self._drafting.fork(copies)

    def _drop(self, particle: Particle) -> None:
        if particle.sequence is not None:
            self._target.close(particle.sequence)
            particle.sequence = None

    def close(self) -> None:
        """Close every sequence. Safe to call twice."""
        held = {id(p.sequence): p.sequence for p in self._population.particles}
        for particle in self._population.particles:
            particle.sequence = None
        for sequence in held.values():
            if sequence is not None:
                self._target.close(sequence)

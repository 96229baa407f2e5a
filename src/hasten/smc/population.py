"""The particles of a request: their texts, their weights, and who is copied over whom."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hasten import keyed
from hasten.smc import weights
from hasten.smc.info import WeightedAnswer
from hasten.smc.resampling import SCHEMES, assign
from hasten.stopping import Cut, Stopper
from hasten.types import FinishReason, TokenLogprob


@dataclass(slots=True, eq=False)
class Particle:
    """One partial answer.

    slot      its place in the population, and in the noise it is drawn with
    ids       the answer so far; the last one hasn't run through the target while it goes on
    sequence  the target's, holding prompt and answer but the last id; None once it has ended
    """

    slot: int
    stopper: Stopper
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    sequence: Any = None
    finish: FinishReason | None = None
    stop_reason: int | str | None = None

    def ended(self, cut: Cut) -> None:
        """Note where the answer ended, if it did."""
        self.finish, self.stop_reason = cut.finish, cut.stop_reason


class Population:
    """N particles with log weights ``log_weights`` (N,), those since the last resampling.

    make_stopper  makes a fresh `Stopper` of the request's options: each particle ends for itself
    threshold     resample below so many N of effective sample size
    single        keep one lineage each round (``population="committed"``)
    """

    def __init__(
        self,
        count: int,
        make_stopper: Callable[[], Stopper],
        *,
        seed: int,
        resampler: str,
        threshold: float,
        single: bool,
    ) -> None:
        self._make_stopper, self._seed = make_stopper, seed
        self._scheme, self._threshold, self._single = SCHEMES[resampler], threshold, single
        self.particles = [Particle(slot, make_stopper()) for slot in range(count)]
        self.log_weights = torch.zeros(count, dtype=torch.float64)
        self.log_evidence = 0.0
        """Of the weights up to the last resampling."""
        self.ess: list[float] = []
        self.resampled: list[int] = []
        self.copies = 0

    @property
    def live(self) -> list[Particle]:
        """Particles that have a weight: one of them, or of their descendants, is the answer."""
        kept = (self.log_weights > -math.inf).tolist()
        return [p for p, has in zip(self.particles, kept, strict=True) if has]

    @property
    def running(self) -> list[Particle]:
        """Live particles that haven't ended. They are all of the same length."""
        return [p for p in self.live if p.finish is None]

    def add(self, slots: Sequence[int], terms: torch.Tensor) -> None:
        """Add `terms` ``(n,)`` float64 to the log weights of `slots`."""
        self.log_weights[list(slots)] += terms

    def restart(self, particle: Particle) -> None:
        """Bring the particle's stopper to where its ids are."""
        particle.stopper = self._make_stopper()
        particle.stopper.push(particle.ids)

    def resample(self, round: int) -> dict[int, int]:
        """Note the effective sample size and resample where it is low: ``slot -> slot copied``.

        Texts are copied here; sequences are the caller's.
        """
        share = weights.normalised(self.log_weights)
        size = self.note(share)
        if not self._is_due(size):
            return {}
        copies = assign(self._offspring(share, round))
        self.resampled.append(round)
        self._reset_weights()
        for to, source in copies.items():
            self._copy(self.particles[to], self.particles[source])
        self.copies += len(copies)
        return copies

    def note(self, share: torch.Tensor | None = None) -> float:
        """Note the effective sample size, and give it; `share`: the normalised weights."""
        size = weights.ess(weights.normalised(self.log_weights) if share is None else share)
        self.ess.append(size)
        return size

    def _is_due(self, size: float) -> bool:
        count = len(self.particles)
        return count > 1 and (self._single or size < self._threshold * count)

    def _offspring(self, share: torch.Tensor, round: int) -> list[int]:
        count = len(self.particles)
        if self._single:
            counts = [0] * count
            counts[self._draw(share, round, "smc-commit")] = count
            return counts
        return self._scheme(share, keyed.uniforms(self._seed, round, "smc-resample", count))

    def _reset_weights(self) -> None:
        self.log_evidence += weights.log_mean(self.log_weights)
        self.log_weights = torch.zeros_like(self.log_weights)

    def _copy(self, to: Particle, source: Particle) -> None:
        to.ids, to.logprobs = list(source.ids), list(source.logprobs)
        to.finish, to.stop_reason = source.finish, source.stop_reason
        if source.finish is None:
            self.restart(to)

    def pick(self) -> int:
        """The answer's slot, drawn by weight. Never the heaviest: that one has the largest p / q,
        which isn't a likely text."""
        return self._draw(weights.normalised(self.log_weights), 0, "smc-pick")

    def _draw(self, share: torch.Tensor, position: int, purpose: str) -> int:
        ids = torch.arange(len(share))
        return keyed.race(share.log(), ids, self._seed, position, purpose)

    def answers(self) -> tuple[WeightedAnswer, ...]:
        """Every particle's text and weight, by slot."""
        shares = weights.normalised(self.log_weights).tolist()
        return tuple(
            WeightedAnswer(tuple(p.ids), share, p.finish, p.stop_reason)
            for p, share in zip(self.particles, shares, strict=True)
        )

    def total_log_evidence(self) -> float:
        """The log evidence with the weights gathered since the last resampling."""
        return self.log_evidence + weights.log_mean(self.log_weights)

    def agreed(self, start: int) -> list[int]:
        """Ids from `start` on that all live particles share: they can't change any more."""
        texts = [p.ids for p in self.live]
        end = min(map(len, texts))
        first = texts[0]
        stop = start
        while stop < end and all(text[stop] == first[stop] for text in texts):
            stop += 1
        return first[start:stop]

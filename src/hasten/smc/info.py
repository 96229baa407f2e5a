"""What a finished population says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.types import FinishReason


@dataclass(frozen=True, slots=True)
class WeightedAnswer:
    """One particle's answer: its ids (the one that ended it included) and its weight; the weights
    of a population sum to 1. One that lost all its weight on the way may be cut off, without a
    finish reason."""

    tokens: tuple[int, ...]
    weight: float
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class SMCInfo:
    """The population behind an answer.

    answers        every particle's answer; the one given was drawn among them by weight
    picked         its index
    log_evidence   log of the estimate of the target's normaliser: with alpha = 1 the estimate is 1
                   on average, and how far it varies says how far the answers' law is off
                   (`hasten.smc.diagnose`)
    ess            effective sample size after each round that drafted, before resampling
    resampled      the rounds after which particles were resampled
    rounds         of drafting and weighing, the prompt's left out
    drafted        tokens drafted, all particles together
    target_rows    rows run through the target after the prompt
    target_passes  passes of the target after the prompt (one a round where it packs sequences)
    copies         particles overwritten by copies of others
    collapsed      rounds in which no particle kept any weight: one token a particle was then drawn
                   from the target itself. The evidence isn't unbiased where this isn't 0
    """

    answers: tuple[WeightedAnswer, ...]
    picked: int
    log_evidence: float
    ess: tuple[float, ...]
    resampled: tuple[int, ...]
    rounds: int
    drafted: int
    target_rows: int
    target_passes: int
    copies: int
    collapsed: int

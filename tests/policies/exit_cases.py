"""Probes and rounds made by hand, for the tests of exit policies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hasten.policies.exits import DRAFT, SELECT, ExitCosts, ExitPolicy, Outcome, Probe

VOCAB = 8


def probe(
    phase: str = DRAFT, p1: float = 0.5, *, exit: int = 0, drafted: int = 0, layer: int = 4
) -> Probe:
    """A row whose likeliest id has `p1`; the others share the rest evenly."""
    rest = (1.0 - p1) / (VOCAB - 1)
    logits = torch.tensor([p1] + [rest] * (VOCAB - 1), dtype=torch.float32).log()
    return Probe(phase, layer, exit, drafted, logits, torch.zeros(4), 100)


def entropy_of(p1: float) -> float:
    rest = (1.0 - p1) / (VOCAB - 1)
    return -p1 * math.log(p1) - (VOCAB - 1) * rest * math.log(rest)


def drafted(policy: ExitPolicy, first: float, later: Sequence[float], exit: int = 0) -> int:
    """How many tokens the policy drafts at the exit, where rows have these p1."""
    if not policy.leave(probe(SELECT, first, exit=exit)):
        return 0
    for count, p1 in enumerate(later, start=1):
        if not policy.leave(probe(DRAFT, p1, exit=exit, drafted=count)):
            return count
    return len(later) + 1


def drafts(count: int, kept: int, layer: int = 4) -> Outcome:
    return Outcome(layer, count, kept)


PLAIN = Outcome(None, 0, 0)


def costs(
    at: Sequence[int], layers: int = 12, probe: float = 0.05, row: float = 0.02, rows: int = 16
) -> ExitCosts:
    """A layer of one row costs 1/layers, a row more in a pass `row`, a probe `probe`."""
    verify = (0.0, *(1.0 + row * n for n in range(rows)))
    return ExitCosts(tuple(e / layers for e in at), (probe,) * len(at), verify, layers)

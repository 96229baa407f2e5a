"""Log weights, and draws for many particles at once.

Weights are float64 on the CPU; laws are log-probabilities in float32 (float64 where the logits
are), on whatever device they came from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hasten import keyed

_BLOCK = 256
_LANE = 1 << 32
"""Ids of one particle's noise start so far from another's: no vocabulary reaches the next."""


def normalised(log_weights: torch.Tensor) -> torch.Tensor:
    """Weights ``(N,)`` that sum to 1, from log weights of which one at least is finite."""
    return torch.softmax(log_weights, 0)


def ess(weights: torch.Tensor) -> float:
    """Effective sample size of normalised weights ``(N,)``, in [1, N]."""
    return float(1 / (weights * weights).sum())


def log_mean(log_weights: torch.Tensor) -> float:
    """The logarithm of the mean weight."""
    return float(torch.logsumexp(log_weights, 0)) - math.log(len(log_weights))


def powered(log_probs: torch.Tensor, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Laws ``(n, vocab)`` to the power `alpha`: normalised again, and the log normalisers ``(n,)``
    in float64 on the CPU (0 where `alpha` is 1)."""
    if alpha == 1:
        return log_probs, torch.zeros(len(log_probs), dtype=torch.float64)
    raised = alpha * log_probs
    totals = torch.logsumexp(raised, 1)
    return raised - totals.unsqueeze(1), totals.cpu().double()


def draw(
    log_probs: torch.Tensor,
    slots: Sequence[int],
    seed: int,
    position: int,
    purpose: str,
    of: Sequence[int] | None = None,
) -> list[int]:
    """One id for each slot, with noise keyed by (seed, position, purpose, slot).

    Slot i draws from row ``of[i]`` of the laws ``(n, vocab)``; None: from row i.

    Two Gumbel-max races, over blocks of ids and inside the winner, as in `hasten.keyed.draw`.
    """
    vocab = log_probs.shape[1]
    masses = F.pad(log_probs.exp(), (0, -vocab % _BLOCK)).view(len(log_probs), -1, _BLOCK)
    masses = masses.cpu() if masses.device.type == "mps" else masses
    home = masses.device
    lanes = torch.tensor(list(slots), device=home).unsqueeze(1) * _LANE
    rows = torch.tensor(list(range(len(slots)) if of is None else of), device=home)
    sums = masses.sum(2, dtype=torch.float64)[rows]
    numbers = torch.arange(sums.shape[1], device=home)
    noise = keyed.gumbels(seed, position, purpose + "#block", lanes + numbers)
    block = (sums.log() + noise).argmax(1, keepdim=True)
    inside = masses[rows, block.squeeze(1)]
    ids = block * _BLOCK + torch.arange(_BLOCK, device=home)
    noise = keyed.gumbels(seed, position, purpose, lanes + ids)
    winner = (inside.double().log() + noise).argmax(1, keepdim=True)
    drawn: list[int] = ids.gather(1, winner).squeeze(1).tolist()
    return drawn

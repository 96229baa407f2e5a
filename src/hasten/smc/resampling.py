"""Resampling: how many copies each particle gets, and the fewest copies that bring this about.

Every scheme is unbiased: particle i gets N * weight_i copies on average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Scheme = Callable[[torch.Tensor, torch.Tensor], list[int]]
"""``(weights (N,), uniforms (N,)) -> counts``, which sum to N; both float64 on the CPU."""


def _look_up(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Which particle's share of [0, 1) each point falls into."""
    edges = weights.cumsum(0)
    edges[-1] = 1.0  # a sum that rounds below it would give an index past the end
    return torch.searchsorted(edges, points, right=True).clamp_(max=len(weights) - 1)


def _counts(weights: torch.Tensor, points: torch.Tensor) -> list[int]:
    chosen = _look_up(weights, points)
    counts: list[int] = torch.bincount(chosen, minlength=len(weights)).tolist()
    return counts


def _grid(weights: torch.Tensor, offsets: torch.Tensor) -> list[int]:
    """One point in each N-th of [0, 1)."""
    steps = torch.arange(len(weights), dtype=torch.float64)
    return _counts(weights, (steps + offsets) / len(weights))


def systematic(weights: torch.Tensor, uniforms: torch.Tensor) -> list[int]:
    """An even grid with one random offset: counts are the floor or the ceiling of N * weight."""
    return _grid(weights, uniforms[:1])


def stratified(weights: torch.Tensor, uniforms: torch.Tensor) -> list[int]:
    """A grid with an offset for each point."""
    return _grid(weights, uniforms)


def multinomial(weights: torch.Tensor, uniforms: torch.Tensor) -> list[int]:
    """Independent draws: the simplest and the noisiest."""
    return _counts(weights, uniforms)


def residual(weights: torch.Tensor, uniforms: torch.Tensor) -> list[int]:
    """The whole parts of N * weight for certain, independent draws for the rest."""
    expected = len(weights) * weights
    # 3 - 1e-16 is a 3 that was rounded: losing it would leave a copy to chance
    whole = (expected + 1e-9).floor()
    rest = len(weights) - int(whole.sum())
    if not rest:
        return [int(count) for count in whole.tolist()]
    left = (expected - whole).clamp_(min=0)
    drawn = _counts(left / left.sum(), uniforms[:rest])
    return [int(count) + more for count, more in zip(whole.tolist(), drawn, strict=True)]


SCHEMES: dict[str, Scheme] = {
    "systematic": systematic,
    "stratified": stratified,
    "residual": residual,
    "multinomial": multinomial,
}


def assign(counts: Sequence[int]) -> dict[int, int]:
    """``slot -> slot it is copied from`` with the fewest copies: who survives stays where it is."""
    spare = [slot for slot, count in enumerate(counts) for _ in range(count - 1)]
    gone = [slot for slot, count in enumerate(counts) if not count]
    return dict(zip(gone, spare, strict=True))

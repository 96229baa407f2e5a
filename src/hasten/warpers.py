"""Temperature, top-k, top-p and min-p on one row: transformers' definitions without its full sort.

The survivors are those of transformers' warpers, edges included. Of equal tokens at the border of
top_p as many stay as there, the lowest ids; transformers leaves the choice to an unstable sort.
"""

from __future__ import annotations

import math

import torch

from hasten.types import SamplingParams

_EDGE = 1e-6
"""Mass within which float32 and exact sums may disagree on which side of top_p a token lies."""


def tempered(row: torch.Tensor, top: float, temperature: float) -> torch.Tensor:
    """``row / temperature`` in float32; `top` is the row's largest value, finite."""
    if temperature < 1e-30 or abs(top) > 1e38 * temperature:
        # float32 would overflow, but the distances to the top still divide well
        return ((_exact(row) - top) / temperature).to(row.device, torch.float32)
    return row / temperature


def survivors(
    scores: torch.Tensor, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scores ``(n,)`` that pass top_k, top_p and min_p, and their ids, increasing.

    `scores` ``(vocab,)`` float32 after temperature, at least one of them finite. The ids are None
    when no filter is on and all scores stay.
    """
    ids: torch.Tensor | None = None
    vocab = scores.numel()
    if 0 < params.top_k < vocab:
        kept = _where(scores >= scores.topk(params.top_k).values[-1])
        ids, scores = kept, scores[kept]
    if params.top_p < 1:
        fast = _top_p(scores, params.top_p)
        kept = _top_p_by_sorting(scores, ids, vocab, params.top_p) if fast is None else fast
        ids, scores = _of(ids, kept), scores[kept]
    if params.min_p > 0:
        soft = torch.softmax(scores, 0)
        kept = _where(soft >= params.min_p * soft.max())
        ids, scores = _of(ids, kept), scores[kept]
    return scores, ids


def _top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor | None:
    """Increasing indices of the scores that top_p keeps, without sorting all of them.

    An index goes when the mass above it reaches top_p. Tokens below a small probability are
    dropped unsorted once the others' mass is seen to reach top_p. None when that fails, or when
    a border is so near that rounding decides: then the definition itself must be asked.
    """
    soft = torch.softmax(scores, 0)
    # the softmax of an unsorted float32 row may sum to 1 +- 6e-6, that of a sorted one is exact
    total = _exact(soft).sum().cpu()
    rest = 1 - top_p
    for least in (rest / 64, rest / soft.numel()):
        some = _where(soft >= least)
        order = scores[some].sort(descending=True, stable=True).indices
        mass = _exact(soft[some][order]).cumsum(0).cpu() / total
        if not mass.numel() or mass[-1] < top_p + _EDGE:
            continue
        if bool(((mass - top_p).abs() < _EDGE).any()):
            break
        count = int((mass < top_p).sum()) + 1
        return some[order[:count].sort().values]
    return None


def _top_p_by_sorting(
    scores: torch.Tensor, ids: torch.Tensor | None, vocab: int, top_p: float
) -> torch.Tensor:
    """The same by transformers' own steps, on the whole vocabulary so that it rounds alike."""
    row = scores
    if ids is not None:
        row = torch.full((vocab,), -math.inf, device=scores.device).index_copy_(0, ids, scores)
    order = row.sort(descending=True, stable=True).indices.flip(0)
    gone = row[order].softmax(0).cumsum(0) <= 1 - top_p
    gone[-1] = False
    kept = torch.empty_like(gone).scatter_(0, order, ~gone)
    return _where(kept if ids is None else kept[ids])


def _exact(values: torch.Tensor) -> torch.Tensor:
    """In float64; on the CPU where the device has none."""
    return (values.cpu() if values.device.type == "mps" else values).to(torch.float64)


def _where(mask: torch.Tensor) -> torch.Tensor:
    return mask.nonzero().squeeze(1)


def _of(ids: torch.Tensor | None, kept: torch.Tensor) -> torch.Tensor:
    return kept if ids is None else ids[kept]

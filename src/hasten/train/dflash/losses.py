"""The losses: decayed cross entropy, reverse KL with its clip, and the length head's squared error.

All take the supervised slots of a batch as rows: logits ``(rows, draft_vocab)``, weights
``(rows,)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

_TINY = 1e-6


def sft_loss(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean of the cross entropy with `labels` (places in the draft vocabulary)."""
    each = F.cross_entropy(logits.float(), labels, reduction="none")
    return (weights * each).sum() / (weights.sum() + _TINY)


@dataclass(frozen=True, slots=True)
class Distilled:
    """A distillation loss, and what it is made of.

    ce, kl    weighted means, before the clip, in nats
    cap       the largest divergence of a slot that isn't clipped, in nats
    clipped   weighted share of the slots beyond it
    """

    loss: torch.Tensor
    ce: float
    kl: float
    cap: float
    clipped: float


def reverse_kl_loss(
    student: torch.Tensor,
    teacher: torch.Tensor,
    weights: torch.Tensor,
    *,
    alpha: float,
    temperature: float = 1.0,
    clip: float = 0.0,
    clip_before_norm: bool = False,
) -> Distilled:
    """alpha * cross entropy with the teacher's first choice + (1 - alpha) * KL(student, teacher).

    Both distributions are over the draft vocabulary; the divergence is multiplied by the square of
    `temperature`. The published clip comes after the division by the summed weights W, so a slot's
    divergence is cut at ``clip * W`` nats, which depends on the batch; with `clip_before_norm` it
    is cut at ``clip`` nats. A clipped slot gives no gradient; 0 is no clip.
    """
    teacher = teacher.detach().float()
    total = weights.sum() + _TINY
    ce = F.cross_entropy(student.float(), teacher.argmax(-1), reduction="none")
    log_s = torch.log_softmax(student.float() / temperature, -1)
    log_t = torch.log_softmax(teacher / temperature, -1)
    kl = temperature**2 * (log_s.exp() * (log_s - log_t)).sum(-1)
    cap = float("inf")
    if clip:
        cap = clip if clip_before_norm else clip * float(total)
    mean_ce = (weights * ce).sum() / total
    loss = alpha * mean_ce + (1.0 - alpha) * (weights * kl.clamp(max=cap)).sum() / total
    with torch.no_grad():
        mean_kl = float((weights * kl).sum() / total)
        clipped = float((weights * (kl > cap)).sum() / total)
    return Distilled(loss, float(mean_ce.detach()), mean_kl, cap, clipped)


def accepted(right: torch.Tensor) -> torch.Tensor:
    """How many drafts are kept, int64 ``(...)``: the leading Trues of `right` ``(..., B)`` after
    slot 0."""
    return right[..., 1:].long().cumprod(-1).sum(-1)


def length_labels(kept: torch.Tensor, block: int, lookahead: int = 1) -> torch.Tensor:
    """The part of the block worth verifying, float32: the drafts kept and `lookahead` more rows."""
    return (kept + lookahead).clamp(0, block).float() / block


def length_loss(fractions: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Mean squared error over the `valid` blocks; 0 where there are none."""
    squares = (fractions.float() - labels).square() * valid
    return squares.sum() / valid.sum().clamp(min=1)

"""Distances between two laws, and laws between them, as the rules need them; all ``(vocab,)``."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from hasten.arbitration.features import FLOOR

_TINY = math.exp(FLOOR)
_STEPS = 60
"""Halvings of an interval of logarithms: far below rounding."""


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    """KL(p, q) in nats; what q can't give counts as exp(-20), so that it stays finite."""
    return float((p * (p.clamp_min(_TINY).log() - q.clamp_min(_TINY).log())).sum().clamp_min(0))


def js(p: torch.Tensor, q: torch.Tensor) -> float:
    """Jensen-Shannon divergence in nats, at most log 2."""
    middle = (p + q) / 2
    return (kl(p, middle) + kl(q, middle)) / 2


def tv(p: torch.Tensor, q: torch.Tensor) -> float:
    """Total variation, in [0, 1]."""
    return float((p - q).abs().sum()) / 2


DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor], float]] = {
    "kl": kl,
    "js": js,
    "tv": tv,
}


def typical_bound(p: torch.Tensor, epsilon: float, delta: float) -> float:
    """Medusa's bound on p of a token: min(epsilon, delta exp(-H(p))), H with log(p + 1e-5) as in
    its code."""
    entropy = -float((p * (p + 1e-5).log()).sum())
    return min(epsilon, delta * math.exp(-entropy))


# -- mentored decoding -----------------------------------------------------------------------------


def mentored(p: torch.Tensor, q: torch.Tensor, budget: float) -> torch.Tensor:
    """The law that accepts most of q's drafts among those with KL(p, law) <= `budget`.

    It is q clipped to between p/a and p/b, b <= 1 <= a: b so that it sums to 1, a so that the KL is
    the budget (nested bisection, in float64); q itself where that is near enough, p for budget 0.
    The closed form is ours; the goal is the method's author's.
    """
    mine, theirs = _double(p), _double(q)
    bounds = _Clipped(mine / mine.sum(), theirs / theirs.sum())
    law = bounds.law(budget)
    return torch.from_numpy(law).to(p.device, torch.float32)


class _Clipped:
    """clip(q, p/a, p/b) for any a and b, from sums over ids in the order of q/p: what is clipped
    from below are the first ids, from above the last ones."""

    def __init__(self, p: npt.NDArray[np.float64], q: npt.NDArray[np.float64]) -> None:
        self.p, self.q = p, q
        given = p > 0
        self.free = float(q[~given].sum())
        """The draft's mass on ids that the target never gives; KL(p, law) doesn't see them."""
        ratio = q[given] / p[given]
        order = np.argsort(ratio, kind="stable")
        self.ratio = ratio[order]
        ps, qs = p[given][order], q[given][order]
        with np.errstate(divide="ignore", invalid="ignore"):
            terms = np.where(qs > 0, ps * -np.log(self.ratio), 0.0)  # without q: clipped below
        self.p_sum, self.q_sum, self.kl_sum = (_sums(each) for each in (ps, qs, terms))
        self.distance = float(self.kl_sum[-1]) if (qs > 0).all() else math.inf

    def _parts(self, low: float, high: float) -> tuple[float, float]:
        """Sum of the law, and its KL, with ratios clipped to [low, high]."""
        first = int(np.searchsorted(self.ratio, low))
        last = max(int(np.searchsorted(self.ratio, high)), first)
        below, above = self.p_sum[first], self.p_sum[-1] - self.p_sum[last]
        total = low * below + self.q_sum[last] - self.q_sum[first] + high * above
        middle = self.kl_sum[last] - self.kl_sum[first] if last > first else 0.0
        loss = middle - math.log(high) * above
        return total, loss - (math.log(low) * below if below else 0.0)

    def _cap(self, low: float) -> float:
        """The upper bound 1/b with which the law sums to 1, or nearest to it."""
        bottom, top = 0.0, max(math.log(float(self.ratio[-1])), 0.0) + 1.0
        for _ in range(_STEPS):
            half = (bottom + top) / 2
            bottom, top = (half, top) if self._parts(low, math.exp(half))[0] < 1 else (bottom, half)
        return math.exp((bottom + top) / 2)

    def law(self, budget: float) -> npt.NDArray[np.float64]:
        if budget <= 0:
            return self.p
        if self.distance <= budget:
            return self.q
        bottom, top = -745.0, 0.0  # of log(1/a), from all but nothing to p itself
        for _ in range(_STEPS):
            half = (bottom + top) / 2
            low = math.exp(half)
            within = self._parts(low, self._cap(low))[1] <= budget
            bottom, top = (bottom, half) if within else (half, top)
        low = math.exp(top)
        law = np.clip(self.q, low * self.p, self._cap(low) * self.p)
        missing = 1.0 - float(law.sum())
        if self.free > 0 and missing > 0:
            spare = np.where(self.p > 0, 0.0, self.q)
            law = law + spare * min(missing / self.free, 1.0)
        return np.asarray(law / law.sum())


def _sums(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.concatenate([[0.0], np.cumsum(values)])


def _double(law: torch.Tensor) -> npt.NDArray[np.float64]:
    return np.asarray(law.detach().cpu().numpy(), dtype=np.float64)


# -- speculative cascades --------------------------------------------------------------------------

CASCADES = ("chow", "diff", "opt", "token")


def defers(kind: str, p: torch.Tensor, q: torch.Tensor, alpha: float) -> bool:
    """Whether a cascade of this kind (not ``token``) hands the position to the target."""
    sure = float(q.max())
    if kind == "chow":
        return sure < 1 - alpha
    bound = alpha if kind == "diff" else alpha * tv(p, q)
    return sure < float(p.max()) - bound


def kept_tokens(p: torch.Tensor, alpha: float) -> torch.Tensor:
    """Of the token-level cascade: the ids that a draft may keep, bool ``(vocab,)``."""
    return p >= (1 - alpha) * p.max()


def cascade(kind: str, p: torch.Tensor, q: torch.Tensor, alpha: float) -> torch.Tensor:
    """The law that a cascade emits from."""
    if kind != "token":
        return p if defers(kind, p, q, alpha) else q
    kept = kept_tokens(p, alpha)
    return torch.where(kept, q, 0.0) + p * torch.where(kept, 0.0, q).sum()

"""Why two answers differ: a measured near tie, or a fault.

In float32 every lossless method must give plain decoding's ids. In lower precision a pass over
several rows may round differently from a pass over one, and two candidates that all but tie may
swap. That is the only excuse, and it is measured: both candidates are scored again by plain passes
of the same precision and of float32, and must lie within 4 units in the last place (of the lower
precision) of the top logit in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hasten.targets.base import Target
from hasten.types import Rows

NEAR_TIE_ULPS = 4.0


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between a plain answer and another one.

    position    index into the answers; tokens at it: `plain` and `other` (-1: that answer had
                ended)
    gap         |logit(plain) - logit(other)| by a plain pass of the target itself
    gap_float32 the same by the float32 reference; None without one
    ulp         one unit in the last place of the target's precision at its top logit
    """

    position: int
    plain: int
    other: int
    top_logit: float
    gap: float
    gap_float32: float | None
    ulp: float

    @property
    def near_tie(self) -> bool:
        """True when the difference is excused: within 4 ulps by both measures, and both tokens
        exist."""
        if min(self.plain, self.other) < 0 or self.gap_float32 is None:
            return False
        return max(self.gap, self.gap_float32) <= NEAR_TIE_ULPS * self.ulp

    def describe(self) -> str:
        """One line for people."""
        verdict = "near tie" if self.near_tie else "NOT a near tie: a fault, please report it"
        if self.gap_float32 is None:
            wide = "not re-scored in float32 (no reference)"
        else:
            wide = f"{self.gap_float32 / self.ulp:.2f} ulp in float32"
        return (
            f"token {self.position}: plain {self.plain}, other {self.other}; "
            f"gap {self.gap / self.ulp:.2f} ulp here, {wide} "
            f"(1 ulp = {self.ulp:g} at top logit {self.top_logit:.2f}): {verdict}"
        )


def ulp_at(value: float, dtype: torch.dtype) -> float:
    """One unit in the last place of `dtype` at `value`."""
    bits = -math.log2(torch.finfo(dtype).eps)
    exponent = math.floor(math.log2(abs(value))) if value else 0
    return float(2.0 ** (exponent - bits))


def last_logits(target: Target, ids: Sequence[int]) -> torch.Tensor:
    """Logits ``(vocab,)`` float32 after `ids`, as plain decoding would compute them: all but the
    last id in a prefill, the last one as a pass of its own."""
    sequence = target.open()
    try:
        if len(ids) > 1:
            target.prefill(sequence, ids[:-1])
            logits = target.forward([Rows(sequence, (ids[-1],), (-1,))])[0].logits
        else:
            logits = target.prefill(sequence, ids).logits
    finally:
        target.close(sequence)
    assert logits is not None
    return logits[-1].float()


def explain_divergence(
    target: Target,
    prompt: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    *,
    reference: Target | None = None,
) -> Divergence | None:
    """Where and why two greedy answers to `prompt` (all ids) part; None when they are identical.

    `reference` is the same model in float32; without it a lower-precision difference can't be
    excused. A float32 target is its own reference.
    """
    length = max(len(plain), len(other))
    at = next((i for i in range(length) if _get(plain, i) != _get(other, i)), None)
    if at is None:
        return None
    a, b = _get(plain, at), _get(other, at)
    prefix = [*prompt, *plain[:at]]
    own = last_logits(target, prefix)
    if reference is None and target.info.dtype == torch.float32:
        reference = target
    wide = None if reference is None else last_logits(reference, prefix)
    top = float(own.max())

    def gap(logits: torch.Tensor) -> float:
        return abs(float(logits[a]) - float(logits[b])) if min(a, b) >= 0 else math.inf

    return Divergence(
        at, a, b, top, gap(own), None if wide is None else gap(wide), ulp_at(top, target.info.dtype)
    )


def _get(ids: Sequence[int], index: int) -> int:
    return ids[index] if index < len(ids) else -1

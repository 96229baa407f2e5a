"""What the arbiter knows of a mismatch: eighteen numbers, and hidden states where it wants them.

Order and choice are a reconstruction (the CoSpec paper's inputs aren't known); R2R and AutoJudge
look at like things. None of them knows a gold answer, a task's name, or a token that comes later.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from hasten.arbitration.mismatch import Mismatch

FLOOR = -20.0
"""Log-probabilities below this count as this: ids that a draft can't draft have -inf."""

MOST_KL = 10.0

SCALARS = (
    "log p(t)",
    "log p(d)",
    "log q(d)",
    "log q(t)",
    "log p(t) - log p(d)",
    "log q(d) - log q(t)",
    "entropy of p / log V",
    "entropy of q / log V",
    "KL(p, q), at most 10",
    "TV(p, q)",
    "log(1 + rank of d under p)",
    "log(1 + rank of t under q)",
    "place in the draft / K",
    "tanh(tokens answered / 64)",
    "overrides so far / 8, at most 1",
    "d ends the answer",
    "t ends the answer",
    "both are digits",
)
"""p is the target's law, q the draft's, t and d their tokens; ranks count from 0."""


def scalars(m: Mismatch) -> npt.NDArray[np.float32]:
    """The numbers named in `SCALARS`, float32 ``(18,)``."""
    flags = (m.drafted_ends, m.target_ends, m.both_digits)
    rest = (
        m.place / m.length,
        math.tanh(m.position / 64),
        min(m.chosen / 8, 1.0),
        *map(float, flags),
    )
    return np.array([*_of_laws(m), *rest], dtype=np.float32)


def _of_laws(m: Mismatch) -> list[float]:
    """The first twelve, in one transfer from the device."""
    p, q = m.p, m.q
    log_p, log_q = m.log_p.clamp_min(FLOOR), m.log_q.clamp_min(FLOOR)
    d, t, size = m.drafted, m.target, math.log(max(len(p), 2))
    pt, pd, qd, qt = log_p[t], log_p[d], log_q[d], log_q[t]
    values = (
        pt,
        pd,
        qd,
        qt,
        pt - pd,
        qd - qt,
        -(p * log_p).sum() / size,
        -(q * log_q).sum() / size,
        (p * (log_p - log_q)).sum().clamp(0.0, MOST_KL),
        0.5 * (p - q).abs().sum(),
        (m.log_p > m.log_p[d]).sum().float().log1p(),
        (m.log_q > m.log_q[t]).sum().float().log1p(),
    )
    out: list[float] = torch.stack(values).tolist()
    return out


def hidden(m: Mismatch) -> npt.NDArray[np.float16]:
    """The target's state that predicts the token, the drafter's, and the difference of the two
    tokens' embeddings (d - t), each normalised by itself; float16 ``(2 * size + draft size,)``."""
    embedded = m.embed([m.drafted, m.target]).float()
    parts = (m.target_hidden.float(), m.draft_hidden.float(), embedded[0] - embedded[1])
    normed = [F.layer_norm(part, part.shape).cpu() for part in parts]
    return torch.cat(normed).to(torch.float16).numpy()

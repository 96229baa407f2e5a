"""Ranks of AdaPLD's nodes, and how likely nodes of a rank are kept.

The drafter orders its candidates by these chances, which is all that counts where the budget is
fixed; a budget policy starts from them and goes on by its own counts. They were measured on the
package's mini suite with the embedded model: what counts is how many tokens *before* the anchor
agree too, then where the target itself had the token among its candidates there, and only where
nothing before the anchor agrees, how near the hidden states are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

COPY, BRANCH, SEMANTIC, SUCCESSOR = "copy", "branch", "semantic", "successor"

ARGMAX, LISTED, UNLISTED = 0, 1, 2
"""A copied token's place among the target's candidates at the anchor: first, lower, not there (or
unknown)."""

MOST_AGREEMENT = 10
"""Longer agreements are not told apart."""

_NEARNESS = (0.5, 0.6, 0.7, 0.8, 0.9)
_NEAR = len(_NEARNESS) + 1
_AGREEING = (1, 2, 4, 6, 10)
_BRANCH_AGREEING = (1, 3, 5)
_PLACES = 8
_SEMANTIC_PLACES = 4
_STRENGTH = tuple(
    _NEAR - 1 + bisect_right(_AGREEING, agreement) for agreement in range(MOST_AGREEMENT + 1)
)
_BRANCH_LEVEL = tuple(
    bisect_right(_BRANCH_AGREEING, agreement) for agreement in range(MOST_AGREEMENT + 1)
)
BY_RESEMBLANCE = _NEAR + len(_AGREEING)
"""Strength of a successor whose anchor only resembles it."""


def nearness(cosine: float) -> int:
    """Level of a similarity, 0 to 5."""
    return bisect_right(_NEARNESS, cosine)


def strength(agreement: int, near: int = 0) -> int:
    """How good an anchor is: by the number of agreeing tokens before it, and where none does by
    the level `near`."""
    return _STRENGTH[min(agreement, MOST_AGREEMENT)] if agreement else near


def place_of(token: int, row: Sequence[int]) -> int:
    """ARGMAX, LISTED or UNLISTED."""
    if token not in row:
        return UNLISTED
    return ARGMAX if row[0] == token else LISTED


def copy_rank(strength: int, place: int) -> int:
    """Rank of a copied token."""
    return strength * 3 + place


def branch_rank(place: int, agreement: int) -> int:
    """Rank of a branch: its place among the target's candidates (0 is best), and the anchor's
    agreement."""
    level = _BRANCH_LEVEL[min(agreement, MOST_AGREEMENT)]
    return min(place, _PLACES - 1) * (len(_BRANCH_AGREEING) + 1) + level


def semantic_rank(place: int, near: int, agreement: int) -> int:
    """Rank of a branch at an anchor that only resembles the token: its place, and the level of the
    similarity, one more where two tokens before agree."""
    level = min(near + (agreement >= 2), _NEAR - 1)
    return min(place, _SEMANTIC_PLACES - 1) * _NEAR + level


_COPY = (0.03, 0.14, 0.22, 0.33, 0.52, 0.68, 0.57, 0.67, 0.79, 0.90, 0.95)
_COPY_PLACE = (
    *((1.0, 0.8, 0.4),) * _NEAR,
    (1.0, 0.9, 0.47),
    *((1.0, 0.9, 0.9),) * (len(_AGREEING) - 1),
)
_BRANCH = (
    (0.10, 0.23, 0.23, 0.23),
    (0.095, 0.095, 0.07, 0.04),
    (0.042, 0.042, 0.03, 0.017),
    (0.03, 0.03, 0.02, 0.012),
    (0.02, 0.02, 0.014, 0.008),
    (0.012, 0.012, 0.008, 0.005),
    (0.011, 0.011, 0.008, 0.004),
    (0.01, 0.01, 0.007, 0.004),
)
_SEMANTIC = (
    (0.035, 0.055, 0.10, 0.28, 0.60, 0.85),
    (0.03, 0.05, 0.06, 0.09, 0.09, 0.05),
    (0.02, 0.022, 0.025, 0.03, 0.03, 0.02),
    (0.010, 0.011, 0.012, 0.015, 0.015, 0.01),
)
_SUCCESSOR = (*(0.3,) * _NEAR, 0.42, 0.6, 0.7, 0.8, 0.85, 0.1)

CHANCES: dict[str, tuple[float, ...]] = {
    COPY: tuple(c * f for c, factors in zip(_COPY, _COPY_PLACE, strict=True) for f in factors),
    BRANCH: tuple(c for row in _BRANCH for c in row),
    SEMANTIC: tuple(c for row in _SEMANTIC for c in row),
    SUCCESSOR: _SUCCESSOR,
}
"""For each source, by rank: the probability that a node is kept, given that its parent is."""

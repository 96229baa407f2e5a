"""What a drafter tells the budget policy about a node: a rank, one small number per source.

A rank says which nodes are alike, so that their acceptance can be counted together, and `prior`
guesses that acceptance before anything was counted. Guesses are deliberately low: a new source has
to earn its rows. Sources not listed here have the candidate's place (0 is best) as their rank.
"""

from __future__ import annotations

from collections.abc import Sequence

RETRIEVAL, LOGITS, START, LOOKUP = "retrieval", "logits", "start", "lookup"
MAX_LENGTH = 5
"""Matches of this length and more are counted together."""


def retrieval_rank(length: int, share: float, token: int, row: Sequence[int]) -> int:
    """Rank of a retrieved node: match length, share of its parent's continuations (thirds), and
    whether the copied logits `row` of its parent propose `token` too (2: first of all)."""
    agreement = 0 if token not in row else 2 if row[0] == token else 1
    return (min(length, MAX_LENGTH) * 3 + min(int(3 * share), 2)) * 3 + agreement


def logits_rank(place: int, rival: int) -> int:
    """Rank of a node from copied logits or start rows: its place in the row, and the match length
    of retrieved nodes beside it (0: none), which make it less likely."""
    return place * (MAX_LENGTH + 1) + min(rival, MAX_LENGTH)


def prior(source: str, rank: int, depth: int) -> float:
    """Guess of the probability that a node is kept, given that its parent is."""
    if source == RETRIEVAL:
        rest, agreement = divmod(rank, 3)
        length, third = divmod(rest, 3)
        return (0.1 + 0.09 * length) * (0.4 + 0.3 * third) * (0.6 + 0.2 * agreement)
    if source == LOGITS:
        place, rival = divmod(rank, MAX_LENGTH + 1)
        return 0.35 * 0.4**place / (1 + rival)
    if source == START:
        return 0.2 * 0.5 ** (rank // (MAX_LENGTH + 1))
    if source == LOOKUP:  # the rank is the match length, and a copy that has held is a good one
        return min(0.15 + 0.1 * rank + 0.1 * (depth - 1), 0.7)
    return 0.3 * 0.5**rank

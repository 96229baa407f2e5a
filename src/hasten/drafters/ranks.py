"""What a drafter tells the budget policy about a node: a rank, one small number per source.

A rank says which nodes are alike, so that their acceptance can be counted together, and `prior`
guesses that acceptance before anything was counted. Guesses are deliberately low: a new source has
to earn its rows. Sources not listed here have the candidate's place (0 is best) as their rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from hasten.drafters import reuse_ranks

RETRIEVAL, LOGITS, START, LOOKUP = "retrieval", "logits", "start", "lookup"
MAX_LENGTH = 5
"""Matches of this length and more are counted together."""
POOL = "pool"
PHRASE = "phrase"
SUFFIX, COPIED = "suffix", "copied"
MODULE, CHECKED = "module", "checked"
SLOT, BESIDE = "dflash", "dflash-beside"
"""A block's token where all before it are the slots' likeliest ones, and another."""
MODULE_CHANCES = (0.03, 0.06, 0.12, 0.2, 0.3, 0.45, 0.6, 0.8)
"""Where a module's probabilities are told apart."""
SUFFIX_SIZES = (1, 2, 3, 5, 8, 16)
"""Longest match of each size but the last."""


_SUFFIX_ONE = (0.07, 0.13, 0.18, 0.33, 0.31, 0.54, 0.73, 0.87)
_SUFFIX_MORE = (0.08, 0.17, 0.26, 0.38, 0.55, 0.70, 0.83, 0.95)
"""Kept / offered by eighths of the chance, after a match of one token and of more: counted over
greedy answers of the embedded model to training prompts (no measuring suite)."""


_PHRASE = (0.06, 0.13, 0.22, 0.31, 0.41, 0.58, 0.71, 0.85)
"""Kept / offered by eighths of the share, a little below what was counted on held-out answers of
the embedded model to training prompts (0.07, 0.14, 0.24, 0.32, 0.42, 0.59, 0.72, 0.91)."""


def retrieval_rank(length: int, share: float, token: int, row: Sequence[int]) -> int:
    """Rank of a retrieved node: match length, share of its parent's continuations (thirds), and
    whether the copied logits `row` of its parent propose `token` too (2: first of all)."""
    return (min(length, MAX_LENGTH) * 3 + min(int(3 * share), 2)) * 3 + agreement(token, row)


def agreement(token: int, row: Sequence[int]) -> int:
    """Whether stored candidates `row`, best first, propose `token`: 2 first of all, 1 too, 0 no."""
    return 0 if token not in row else 2 if row[0] == token else 1


def copied_rank(length: int, chance: float, agrees: int) -> int:
    """Rank of a node as `suffix_rank`, and whether stored candidates propose it (`agreement`)."""
    return suffix_rank(length, chance) * 3 + agrees


def logits_rank(place: int, rival: int) -> int:
    """Rank of a node from copied logits or start rows: its place in the row, and the match length
    of retrieved nodes beside it (0: none), which make it less likely."""
    return place * (MAX_LENGTH + 1) + min(rival, MAX_LENGTH)


def suffix_rank(length: int, chance: float) -> int:
    """Rank of a node that followed a string of `length` tokens elsewhere, and is kept with
    probability `chance` by the counts alone: seven sizes of match, eighths of the chance."""
    return 8 * bisect_left(SUFFIX_SIZES, length) + min(int(8 * chance), 7)


def module_rank(chance: float) -> int:
    """Rank of a node that an exit module, or a block's slot, gives the probability `chance`."""
    return bisect_left(MODULE_CHANCES, chance)


def checked_rank(chance: float, said: float) -> int:
    """Rank of a copied token that an exit module was asked about too: quarters of the chance by the
    counts alone, and the module's probability (0 where it didn't name the token)."""
    return 10 * min(int(4 * chance), 3) + (1 + module_rank(said) if said else 0)


def phrase_rank(length: int, share: float, agrees: int) -> int:
    """Rank of a node from phrases: eighths of its share of the context, whether the context has
    three tokens, and whether stored candidates propose it (`agreement`)."""
    return (min(int(8 * share), 7) * 2 + (length > 2)) * 3 + agrees


def pool_rank(place: int, *, single: bool) -> int:
    """Rank of a guess from a pool: its place among its siblings, the newest first (from the third
    on alike), and whether it was found by a single token."""
    return 3 * single + min(place, 2)


_SLOT = (0.02, 0.04, 0.09, 0.14, 0.22, 0.31, 0.41, 0.6, 0.85)
_BESIDE = (0.02, 0.04, 0.07, 0.12, 0.18, 0.25, 0.33, 0.45, 0.7)
"""Kept / offered by the slot's probability: the first as counted over the embedded model's greedy
answers to training prompts, the second lower than the little that was counted."""


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
    if source == SUFFIX:
        return (_SUFFIX_ONE if rank < 8 else _SUFFIX_MORE)[rank % 8]
    if source == MODULE:
        return (0.02, 0.04, 0.08, 0.14, 0.22, 0.33, 0.47, 0.62, 0.8)[rank % 9]
    if source in (SLOT, BESIDE):
        return (_SLOT if source == SLOT else _BESIDE)[rank]
    if source == CHECKED:
        level, said = divmod(rank, 10)
        copied = (0.12, 0.3, 0.5, 0.75)[level]
        alone = prior(MODULE, said - 1, depth) if said else 0.0
        return 1.0 - (1.0 - 0.7 * copied) * (1.0 - alone)
    if source == PHRASE:
        return min(_PHRASE[rank // 6] * (0.7, 1.0, 1.25)[rank % 3], 0.97)
    if source == POOL:
        single, place = divmod(rank, 3)
        return (0.2 if single else 0.3) * 0.5**place
    if source == COPIED:
        alone = prior(SUFFIX, rank // 3, depth)
        return min(alone * (0.75, 1.0, 1.35)[rank % 3], 0.97)
    if source in reuse_ranks.CHANCES:
        return 0.7 * reuse_ranks.CHANCES[source][rank]
    return 0.3 * 0.5**rank

"""Phrases: what a model often goes on with after two or three tokens, counted over its own text.

Copied logits and the request's own n-grams know nothing of a turn of phrase until the request has
used it once. Phrases are n-gram counts over many earlier answers of the model, made once for a set
of weights and read only: they hold what the model says to anybody, and nothing of a request (ours;
a small static datastore, as REST's, arXiv 2311.08252, with counts for an exact match of a fixed
length instead of a search for the longest).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from hasten import _tables
from hasten._tables import Array
from hasten.targets.base import TargetInfo

BREADTH = 4
"""Followers kept of a context."""
LEAST = 3
"""A context seen less often isn't kept, nor a follower seen once."""
FEWEST = 0.08
"""A follower with a smaller share of its context isn't kept."""
_KIND = "phrases"
_NOTHING: tuple[int, list[int], list[int]] = (0, [], [])


class Phrases:
    """Followers of contexts of two and three tokens.

    contexts  ``(n, 3)`` integers: ids one up, 0 first where the context has two tokens
    ids       ``(n, 4)``: followers, the most frequent first
    shares    ``(n, 4)`` uint8: their shares of the context's occurrences in 255ths; 0: there is
              none
    """

    def __init__(self, contexts: Array, ids: Array, shares: Array) -> None:
        self.contexts, self.ids, self.shares = contexts, ids, shares
        first, second, last = contexts.astype(np.int64).T
        keys = (first << 42 | second << 21 | last).tolist()
        self._index = dict(zip(keys, range(len(keys)), strict=True))

    def __len__(self) -> int:
        """Contexts held."""
        return len(self.contexts)

    def after(self, first: int, second: int, last: int) -> tuple[int, list[int], list[int]]:
        """What follows these tokens (-1: there is none): the length of the longest context known,
        2 or 3, its followers and their shares in 255ths; ``(0, [], [])`` where there is none."""
        at, length = self._index.get(_key(first + 1, second + 1, last + 1)), 3
        if at is None or first < 0:
            at, length = self._index.get(_key(0, second + 1, last + 1)), 2
            if at is None:
                return _NOTHING
        return length, self.ids[at].tolist(), self.shares[at].tolist()


def _key(first: int, second: int, last: int) -> int:
    return (first << 42) | (second << 21) | last


def build(texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Phrases:
    """Count over ``(prompt, answer)`` pairs of ids; contexts may reach into the prompt, followers
    are of answers. Takes about 200 bytes of memory a token."""
    grams = [_windows(prompt, answer) for prompt, answer in texts]
    four = np.concatenate(grams) if grams else np.zeros((0, 4), dtype=np.int64)
    four = four[four[:, 1] > 0]  # a context has two tokens at least
    three = four.copy()
    three[:, 0] = 0
    parts = [_count(each) for each in (three, four[four[:, 0] > 0])]
    return Phrases(*map(np.concatenate, zip(*parts, strict=True)))


def _windows(prompt: Sequence[int], answer: Sequence[int]) -> Array:
    """Each token of an answer after the three before it, all ids one up, ``(answer, 4)``."""
    ids = np.array([-1, -1, -1, *prompt[-3:], *answer], dtype=np.int64) + 1
    windows = np.lib.stride_tricks.sliding_window_view(ids, 4)
    return np.array(windows[len(windows) - len(answer) :])


def _count(grams: Array) -> tuple[Array, Array, Array]:
    """Contexts of `grams`, their followers and shares, as `Phrases` takes them."""
    unlike, counts = np.unique(grams, axis=0, return_counts=True)
    contexts, of, sizes = np.unique(unlike[:, :3], axis=0, return_inverse=True, return_counts=True)
    of = of.reshape(-1)  # numpy 2.0.0 gave it another shape
    totals = np.bincount(of, weights=counts, minlength=len(contexts))
    order = np.lexsort((unlike[:, 3], -counts, of))
    place = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    of, counts, tokens = of[order], counts[order], unlike[order, 3] - 1
    share = counts / (totals[of] + 1)
    kept = (place < BREADTH) & (counts > 1) & (share >= FEWEST) & (totals[of] >= LEAST)
    ids = np.zeros((len(contexts), BREADTH), dtype=np.int64)
    shares = np.zeros((len(contexts), BREADTH), dtype=np.uint8)
    ids[of[kept], place[kept]] = tokens[kept]
    shares[of[kept], place[kept]] = np.round(255 * share[kept])
    some = shares[:, 0] > 0
    return contexts[some], ids[some], shares[some]


def load(info: TargetInfo) -> Phrases | None:
    """The phrases kept or shipped for these weights; None when there are none."""
    for arrays in _tables.find(info, _KIND):
        if (found := _checked(arrays, info.vocab_size)) is not None:
            return found
    return None


def save(info: TargetInfo, phrases: Phrases) -> Path:
    """Keep phrases for these weights; the file. Raises ModelError when it can't be written."""
    return _tables.keep(info, _KIND, _arrays(phrases))


def write(path: Path, fingerprint: str, phrases: Phrases) -> None:
    """Write phrases to `path`, atomically."""
    _tables.write(path, fingerprint, _arrays(phrases))


def _arrays(phrases: Phrases) -> dict[str, Array]:
    return {
        "contexts": _tables.small(phrases.contexts),
        "ids": _tables.small(phrases.ids),
        "shares": phrases.shares,
    }


def _checked(arrays: dict[str, Array], vocab: int) -> Phrases | None:
    """The phrases of a file, if it holds some of a vocabulary of this size."""
    contexts, ids, shares = (arrays.get(name) for name in ("contexts", "ids", "shares"))
    if contexts is None or ids is None or shares is None or shares.dtype != np.uint8:
        return None
    whole = contexts.ndim == 2 and contexts.shape[1] == 3 and ids.shape == shares.shape
    whole = whole and ids.shape == (len(contexts), BREADTH)
    for numbers, most in ((contexts, vocab), (ids, vocab - 1)):
        whole = whole and numbers.dtype.kind in "iu"
        whole = whole and (numbers.size == 0 or 0 <= numbers.min() <= numbers.max() <= most)
    return Phrases(contexts, ids, shares) if whole else None

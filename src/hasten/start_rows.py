"""What a model says after each token alone: successor rows for tokens a request hasn't seen yet.

A table of copied logits knows nothing of a token until it was evaluated once, and a quarter of the
tokens of an answer are new to it. Start rows fill the gap: for every id of the vocabulary the top-k
after a line break and that id. They hold the model's own words and nobody's text, so they are the
same for all requests, and no training is needed: one pass over the vocabulary, once for a set of
weights, kept in the cache or shipped with an embedded model (ours).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hasten import _tables
from hasten.errors import CapabilityError
from hasten.selection import topk_rows
from hasten.targets.base import Target, TargetInfo
from hasten.types import Rows

BREADTH = 8
_KIND = "successors"


def context_token(tokenizer: Any, eos_ids: frozenset[int]) -> int:
    """The id that start rows stand after: a line break, or an end of text if that isn't one id."""
    if tokenizer is not None:
        with contextlib.suppress(Exception):  # any tokenizer, and this is only a preference
            ids = tokenizer("\n", add_special_tokens=False)["input_ids"]
            if len(ids) == 1:
                return int(ids[0])
    return min(eos_ids, default=0)


def build(
    target: Target,
    context: int,
    *,
    batch: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray[Any, Any]:
    """Top-8 ids after `context` and each id of the vocabulary, ``(vocab, 8)`` int32.

    Takes vocabulary / `batch` passes: about a minute for 49,152 ids of a 135M model on two cores.
    `progress` is called with (ids done, ids in all). Raises CapabilityError without tree masks.
    """
    if not target.capabilities.tree:
        raise CapabilityError(
            f"{target.info.name} can't run branches in one pass, which start rows are made by"
        )
    vocab = target.info.vocab_size
    out = np.zeros((vocab, min(BREADTH, vocab)), dtype=np.int32)
    sequence = target.open()
    try:
        for first in range(0, vocab, batch):
            ids = range(first, min(first + batch, vocab))
            rows = Rows(sequence, (context, *ids), (-1, *[0] * len(ids)))
            (passed,) = target.forward([rows])
            assert passed.logits is not None
            out[first : ids.stop] = topk_rows(passed.logits[1:], BREADTH)[1].numpy()
            target.rollback(sequence)
            if progress is not None:
                progress(ids.stop, vocab)
    finally:
        target.close(sequence)
    return out


def load(info: TargetInfo) -> np.ndarray[Any, Any] | None:
    """The rows kept or shipped for these weights; None when there are none."""
    for arrays in _tables.find(info, _KIND):
        if "ids" in arrays and _fits(rows := arrays["ids"], info.vocab_size):
            return rows.astype(np.int32)
    return None


def save(info: TargetInfo, rows: np.ndarray[Any, Any]) -> Path:
    """Keep rows for these weights; the file. Raises ModelError when the cache can't be written."""
    return _tables.keep(info, _KIND, {"ids": _tables.small(rows)})


def write(path: Path, fingerprint: str, rows: np.ndarray[Any, Any]) -> None:
    """Write rows to `path`, atomically."""
    _tables.write(path, fingerprint, {"ids": _tables.small(rows)})


def _fits(rows: np.ndarray[Any, Any], vocab: int) -> bool:
    """Whether these are rows of ids for each id of a vocabulary."""
    whole = rows.ndim == 2 and len(rows) == vocab and rows.size > 0 and rows.dtype.kind in "iu"
    return whole and bool(rows.min() >= 0 and rows.max() < vocab)

"""The latest next-token candidates of every token ("copy-logit", token recycling's matrix).

Row v holds the ids of the k largest logits after the latest evaluated position whose input token
was v. Unlike the released codes' zero-filled tables, rows never written are known to be empty.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch


class SuccessorTable:
    """Top-k ids per token, best first; only tokens seen take memory.

    capacity   most rows held, the one written longest ago goes first; None: as many as there are
               tokens in the vocabulary, which is enough of a bound for one request
    start      candidates of tokens not seen yet, ``(vocab, k)`` integers (`hasten.start_rows`);
               read only, and no part of what is learned
    """

    __slots__ = ("_lock", "capacity", "rows", "start")

    def __init__(
        self, capacity: int | None = None, start: np.ndarray[Any, Any] | None = None
    ) -> None:
        self.rows: dict[int, list[int]] = {}
        self.capacity, self.start = capacity, start
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Rows learned."""
        return len(self.rows)

    def update(
        self, tokens: Sequence[int], topk_ids: torch.Tensor, last: Iterable[int] = ()
    ) -> None:
        """Write the rows of evaluated tokens, in order; those at the indices `last` once more.

        topk_ids ``(rows, k)`` int64, best first; rows beyond the tokens are ignored. `last` are the
        accepted nodes: a token that occurs twice in a tree keeps what followed it in the real text.
        """
        listed = topk_ids.numpy()[: len(tokens)].tolist()  # torch's own takes several times as long
        with self._lock:
            rows = self.rows
            if self.capacity is not None:  # written rows move to the end: the first is the oldest
                for token in tokens:
                    rows.pop(token, None)
            for token, ids in zip(tokens, listed, strict=True):
                rows[token] = ids
            for index in last:
                rows[tokens[index]] = listed[index]
            while self.capacity is not None and len(rows) > self.capacity:
                del rows[next(iter(rows))]

    def get(self, token: int) -> Sequence[int]:
        """Candidates after `token`, best first; nothing when it was never evaluated."""
        return self.rows.get(token, ())

    def first(self, token: int) -> Sequence[int]:
        """Start candidates of `token`, best first; nothing without start rows."""
        if self.start is None or not 0 <= token < len(self.start):
            return ()
        row: list[int] = self.start[token].tolist()
        return row

    def reset(self) -> None:
        """Forget everything learned."""
        with self._lock:
            self.rows.clear()

    def fork(self) -> SuccessorTable:
        """A copy that shares nothing that changes."""
        other = SuccessorTable(self.capacity, self.start)
        with self._lock:
            other.rows = dict(self.rows)
        return other

"""The latest next-token candidates of every token ("copy-logit", token recycling's adjacency
matrix).

Row v holds the ids of the k largest logits after the latest evaluated position whose input token
was v.
Unlike the released codes' zero-filled tables, rows never written are known to be empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class SuccessorTable:
    """Top-k ids per token, best first; only tokens seen take memory. ``rows`` maps token -> ids."""

    __slots__ = ("capacity", "rows")

    def __init__(self, capacity: int | None = None) -> None:
        """`capacity`: most rows held; the oldest written goes first. None: as many as the
        vocabulary has."""
        self.rows: dict[int, list[int]] = {}
        self.capacity = capacity

    def update(
        self, tokens: Sequence[int], topk_ids: torch.Tensor, last: Iterable[int] = ()
    ) -> None:
        """Write a row for each evaluated token; rows listed in `last` win over the others.

        topk_ids ``(len(tokens), k)`` int64, best first. `last` are indices of accepted rows: a
        token that
        occurs twice in a tree keeps what followed it in the real text.
        """
        rows = self.rows
        listed = topk_ids.tolist()
        for token, ids in zip(tokens, listed, strict=True):
            rows[token] = ids
        for index in last:
            rows[tokens[index]] = listed[index]
        if self.capacity is not None:
            while len(rows) > self.capacity:
                del rows[next(iter(rows))]

    def get(self, token: int) -> list[int]:
        """Candidates after `token`, best first; [] when it was never evaluated."""
        return self.rows.get(token, [])

"""Rows of a sequence that ran, through some layers or all, and wait for commit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hasten.errors import CacheStateError


class Pending:
    """The pending rows of one sequence: a forest whose roots follow the last committed token.

    frontier[i]  number of layers row i has passed
    held[i]      its hidden state there, ``(1, hidden_size)``, while layers above are still to come
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.frontier: list[int] = []
        self.held: dict[int, torch.Tensor] = {}
        self._mask: npt.NDArray[np.float32] = _hidden(16)

    def __len__(self) -> int:
        return len(self.tokens)

    def admit(
        self, tokens: Sequence[int], parents: Sequence[int], layers: tuple[int, int]
    ) -> tuple[list[int], int]:
        """Which rows a pass over these layers would run, and the greatest depth among them.

        With ``layers[0] == 0`` the rows are new (their indices are those `add` will give), else
        they must be exactly those standing at that layer. Changes nothing; raises
        `CacheStateError`.
        """
        if not tokens or len(tokens) != len(parents):
            raise CacheStateError(
                f"{len(tokens)} tokens and {len(parents)} parents: as many of both, at least one"
            )
        (lo, hi), before = layers, len(self)
        if lo:
            indices = [row for row, passed in enumerate(self.frontier) if passed == lo]
            standing = [(self.tokens[i], self.parents[i]) for i in indices]
            if standing != list(zip(tokens, parents, strict=True)):
                raise CacheStateError(
                    f"layers {layers}: the rows named aren't the {len(indices)} rows that stand "
                    f"at layer {lo}"
                )
        else:
            indices = list(range(before, before + len(tokens)))
        members, depths = set(indices), list(self.depths)
        for row, parent in zip(indices, parents, strict=True):
            if not -1 <= parent < row:
                raise CacheStateError(f"row {row}: parent {parent} must come before it, or be -1")
            if parent >= 0 and parent not in members and self.frontier[parent] < hi:
                raise CacheStateError(
                    f"row {row} can't run to layer {hi}: its parent {parent} stands at layer "
                    f"{self.frontier[parent]}"
                )
            if row >= before:
                depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return indices, max(depths[row] for row in indices)

    def add(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Append rows at frontier 0; they were admitted."""
        total = len(self) + len(tokens)
        if total > len(self._mask):
            grown = _hidden(2 * total)
            grown[: len(self), : len(self)] = self._mask[: len(self), : len(self)]
            self._mask = grown
        for token, parent in zip(tokens, parents, strict=True):
            row = len(self.tokens)
            self._mask[row] = self._mask[parent] if parent >= 0 else -np.inf
            self._mask[row, row] = 0.0
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
            self.frontier.append(0)

    def advance(self, rows: Sequence[int], frontier: int, hidden: torch.Tensor | None) -> None:
        """These rows have passed `frontier` layers; `hidden` ``(len(rows), hidden_size)`` is kept
        for the layers above, None at the top."""
        for i, row in enumerate(rows):
            self.frontier[row] = frontier
            if hidden is None:
                self.held.pop(row, None)
            else:
                self.held[row] = hidden[i : i + 1]

    def drop_last(self, rows: int) -> None:
        """Forget the last `rows` rows."""
        keep = len(self) - rows
        for row in range(keep, len(self)):
            self.held.pop(row, None)
        for values in (self.tokens, self.parents, self.depths, self.frontier):
            del values[keep:]

    def clear(self) -> None:
        """Forget all rows."""
        if self.tokens:
            self.drop_last(len(self))

    def mask(self, rows: Sequence[int], device: torch.device) -> torch.Tensor | None:
        """What each of `rows` may see of all pending rows: float32 ``(len(rows), len(self))``.

        0 for itself and its ancestors, else -inf; None for one row that sees everything.
        """
        if len(rows) == 1 and self.depths[rows[0]] + 1 == len(self):
            return None
        return torch.from_numpy(self._mask[list(rows), : len(self)]).to(device)

    def check_path(self, rows: Sequence[int], layers: int) -> None:
        """Raise `CacheStateError` unless `rows` lead down from a root, through all `layers`."""
        previous = -1
        for row in rows:
            if not 0 <= row < len(self) or self.parents[row] != previous:
                raise CacheStateError(
                    f"commit {list(rows)}: row {row} isn't a child of row {previous} among the "
                    f"{len(self)} pending rows"
                )
            if self.frontier[row] != layers:
                raise CacheStateError(
                    f"commit {list(rows)}: row {row} has passed {self.frontier[row]} of {layers} "
                    "layers"
                )
            previous = row


def _hidden(rows: int) -> npt.NDArray[np.float32]:
    """A mask that shows nothing: C-ordered, so that picking rows copies them in one go."""
    return np.full((rows, rows), -np.inf, dtype=np.float32)

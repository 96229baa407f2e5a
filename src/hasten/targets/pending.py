"""Rows of a sequence that ran, through some layers or all, and wait for commit."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence

import torch

from hasten.errors import CacheStateError

_SHOWN, _HIDDEN = struct.pack("f", 0.0), struct.pack("f", -math.inf)
"""What a mask adds to a score."""


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
        # What each row sees of the rows up to itself, float32: a parent's begins its children's.
        self._seen: list[bytes] = []

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
        seen, depths = self._seen, self.depths
        for row, parent in enumerate(parents, len(self.tokens)):
            above = seen[parent] if parent >= 0 else b""
            seen.append(above + _HIDDEN * (row - parent - 1 if parent >= 0 else row) + _SHOWN)
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        self.tokens.extend(tokens)
        self.parents.extend(parents)
        self.frontier.extend([0] * len(tokens))

    def advance(self, rows: Sequence[int], frontier: int, hidden: torch.Tensor | None) -> None:
        """These rows have passed `frontier` layers; `hidden` ``(len(rows), hidden_size)`` is kept
        for the layers above, None at the top."""
        for row in rows:
            self.frontier[row] = frontier
            if self.held:
                self.held.pop(row, None)
        if hidden is not None:
            for i, row in enumerate(rows):
                self.held[row] = hidden[i : i + 1]

    def drop_last(self, rows: int) -> None:
        """Forget the last `rows` rows."""
        keep = len(self) - rows
        if self.held:
            for row in range(keep, len(self)):
                self.held.pop(row, None)
        for values in (self.tokens, self.parents, self.depths, self.frontier, self._seen):
            del values[keep:]

    def clear(self) -> None:
        """Forget all rows."""
        if self.tokens:
            self.drop_last(len(self))

    def mask(self, rows: Sequence[int], device: torch.device) -> torch.Tensor | None:
        """What each of `rows` may see of all pending rows: float32 ``(len(rows), len(self))``.

        0 for itself and its ancestors, else -inf; None for one row that sees everything.
        """
        numbers = self.mask_numbers(rows)
        if numbers is None:
            return None
        return torch.frombuffer(numbers, dtype=torch.float32).view(len(rows), -1).to(device)

    def mask_numbers(self, rows: Sequence[int]) -> array[float] | None:
        """The same as plain numbers, row by row: cheaper than a tensor where none is needed."""
        total = len(self.tokens)
        if len(rows) == 1 and self.depths[rows[0]] + 1 == total:
            return None
        seen = self._seen
        return array("f", b"".join([seen[row] + _HIDDEN * (total - row - 1) for row in rows]))

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

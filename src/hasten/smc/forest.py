"""What lanes draft, as rows of their sequences.

Lanes on one sequence share a row for as long as they drafted the same tokens: a population of one
lineage runs each text once, however many of its particles drafted it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hasten.smc.proposals import Lane
from hasten.types import Rows


@dataclass(frozen=True, slots=True)
class Level:
    """The rows at one depth, in the order of their lanes.

    of      for each lane, the number of its row
    firsts  for each row, the first of its lanes
    """

    of: list[int]
    firsts: list[int]


@dataclass(slots=True)
class _Tree:
    """A sequence's rows; `added` is how many of them were there before the last level."""

    sequence: Any
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    known: dict[tuple[int, int], int] = field(default_factory=dict)
    added: int = 0

    def node(self, above: int, token: int) -> int:
        """The row of `token` below row `above`; a new one unless it is there."""
        found = self.known.setdefault((above, token), len(self.tokens))
        if found == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(above)
        return found


class Forest:
    """Starts with the lanes' roots; ``grow`` adds a level. Lanes of one sequence must stand
    together.

    levels  one a depth
    paths   for each lane its rows in its sequence, the root's first
    trees   for each lane the number of its sequence
    """

    def __init__(self, lanes: Sequence[Lane], drafts: Sequence[Sequence[int]] = ()) -> None:
        numbers: dict[int, int] = {}
        self.trees = [numbers.setdefault(id(lane.sequence), len(numbers)) for lane in lanes]
        held = dict(zip(self.trees, lanes, strict=True))
        self._trees = [_Tree(held[number].sequence) for number in range(len(held))]
        self.levels: list[Level] = []
        self.paths: list[list[int]] = [[] for _ in lanes]
        self.grow([lane.root for lane in lanes])
        for tokens in zip(*drafts, strict=True):
            self.grow(tokens)

    def grow(self, tokens: Sequence[int]) -> Level:
        """Each lane's next token below its last row."""
        numbers: dict[tuple[int, int], int] = {}
        level = Level([], [])
        for tree in self._trees:
            tree.added = len(tree.tokens)
        for at, (number, path, token) in enumerate(
            zip(self.trees, self.paths, tokens, strict=True)
        ):
            path.append(self._trees[number].node(path[-1] if path else -1, token))
            row = numbers.setdefault((number, path[-1]), len(level.firsts))
            if row == len(level.firsts):
                level.firsts.append(at)
            level.of.append(row)
        self.levels.append(level)
        return level

    def rows(self) -> list[Rows]:
        """All rows of each sequence."""
        return [Rows(t.sequence, tuple(t.tokens), tuple(t.parents)) for t in self._trees]

    def last_rows(self) -> list[Rows]:
        """Those of the last level."""
        return [
            Rows(t.sequence, tuple(t.tokens[t.added :]), tuple(t.parents[t.added :]))
            for t in self._trees
        ]

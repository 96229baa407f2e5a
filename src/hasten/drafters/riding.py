"""What drafters with rows that ride along unverified have in common.

Rows are equal when their tokens and all they see are, so a riding row that repeats a row of the
verified tree, or another riding row, is that row: it is run once.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Sequence

from hasten.drafters.tree_builder import TreeBuilder
from hasten.types import Draft, ExtraRows


class Riders:
    """Extra rows below a finished tree; equal rows are one."""

    __slots__ = ("_draft", "_index", "_parents", "_size", "_tokens")

    def __init__(self, tree: TreeBuilder) -> None:
        self._draft = tree.draft()
        self._index = {
            pair: row for row, pair in enumerate(zip(tree.parents, tree.tokens, strict=True))
        }
        self._size = len(tree)
        self._tokens: list[int] = []
        self._parents: list[int] = []

    def __len__(self) -> int:
        """Rows of the pass, the tree's included."""
        return self._size + len(self._tokens)

    def add(self, parent: int, token: int) -> int:
        """The row of `token` after row `parent` (0: the pending token): the one there is, or a new
        one."""
        found = self._index.get((parent, token))
        if found is None:
            found = self._index[parent, token] = len(self)
            self._tokens.append(token)
            self._parents.append(parent)
        return found

    def draft(self) -> Draft:
        """The tree with what rides along."""
        made = self._draft
        if not self._tokens:
            return made
        extra = ExtraRows(tuple(self._tokens), tuple(self._parents))
        return Draft(made.tree, extra=extra, sources=made.sources, ranks=made.ranks)


def prompt_random(prompt: Sequence[int]) -> random.Random:
    """A request's own random numbers: the same for the same prompt, in every process."""
    return random.Random(zlib.crc32(array("q", prompt).tobytes()))


def prompt_kinds(prompt: Sequence[int], ends: frozenset[int]) -> list[int]:
    """The prompt's different tokens, in order, without `ends`."""
    return [token for token in dict.fromkeys(prompt) if token not in ends]

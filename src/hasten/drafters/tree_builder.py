"""Growing a draft tree from several sources: shared prefixes fuse, every node knows its source."""

from __future__ import annotations

from collections.abc import Collection

from hasten.types import Draft, DraftTree


class TreeBuilder:
    """A draft under construction; node 0 is the root and counts in `limit`.

    The lists are for reading; nodes are made by `add` alone.
    """

    __slots__ = (
        "_final",
        "_index",
        "depths",
        "limit",
        "max_depth",
        "parents",
        "ranks",
        "sources",
        "tokens",
    )

    def __init__(self, root: int, limit: int, max_depth: int, final: Collection[int] = ()) -> None:
        """At most `limit` nodes with the root, none deeper than `max_depth`, and none below the
        ids `final` (ends of sequence) but for the root."""
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self.sources = [""]
        self.ranks = [0]
        self.limit, self.max_depth = limit, max_depth
        self._final = final
        self._index: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def full(self) -> bool:
        """No room for another node."""
        return len(self.tokens) >= self.limit

    def add(self, parent: int, token: int, source: str, rank: int = 0) -> int | None:
        """The child of `parent` with `token`: the one there is, with its source, else a new one.

        None when there is no room for a new one, it would be too deep, or nothing follows there.
        """
        key = (parent, token)
        found = self._index.get(key)
        if found is not None:
            return found
        node = len(self.tokens)
        depth = self.depths[parent] + 1
        if node >= self.limit or depth > self.max_depth:
            return None
        if parent and self.tokens[parent] in self._final:
            return None
        self._index[key] = node
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(depth)
        self.sources.append(source)
        self.ranks.append(rank)
        return node

    def draft(self) -> Draft:
        """The finished draft."""
        tree = DraftTree.trusted(self.tokens, self.parents, self.depths)
        return Draft(tree, sources=tuple(self.sources), ranks=tuple(self.ranks))

"""A bounded pool of guessed continuations: for each key a trie of what may follow it.

Source: the pool of Progressive Tree Drafting (arXiv 2607.10661) and its authors' code. Trees of
guesses are merged in whole, every node of theirs being a key; what comes out are continuations of
the pending token. Ours: keys of two tokens beside those of one, the newest first, and the bounds on
depth and on the pool as a whole (docs/methods/ptd.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from hasten.drafters.ranks import POOL, pool_rank
from hasten.drafters.tree_builder import TreeBuilder

NOTHING = -1
"""No prediction, or no token before."""

Key = int | tuple[int, int]


class _Node:
    """A continuation: its children by token in the order of insertion, and when the target (or the
    text) last put it there."""

    __slots__ = ("kids", "stamp")

    def __init__(self) -> None:
        self.kids: dict[int, _Node] = {}
        self.stamp = 0


class _Trie:
    """The continuations of a key: `size` nodes, its root not counted."""

    __slots__ = ("root", "size")

    def __init__(self) -> None:
        self.root = _Node()
        self.size = 0

    def cut(self) -> None:
        """Remove the root's oldest child with all below it."""
        kids = self.root.kids
        stack = [kids.pop(next(iter(kids)))]
        while stack:
            self.size -= 1
            stack.extend(stack.pop().kids.values())


_Place = tuple[_Trie, _Node, int]
"""Where a node stands in a trie, and how deep (the trie's root: 0)."""


class NGramPool:
    """Tries by key: one token, and with ``key=2`` also by that and the token before it.

    max_nodes   most nodes of a trie; beyond it the oldest child of its root goes, with all below
    max_depth   longest continuation kept
    capacity    most nodes of all tries, their roots counted; the key touched longest ago goes first
    """

    def __init__(
        self, *, key: int = 2, max_nodes: int = 60, max_depth: int = 8, capacity: int = 50_000
    ) -> None:
        self.key, self.max_nodes, self.max_depth = key, max_nodes, max_depth
        self.capacity = capacity
        self._tries: dict[Key, _Trie] = {}
        self._size = 0
        self._clock = 0

    def __len__(self) -> int:
        """Nodes of all tries, their roots counted."""
        return self._size

    def merge(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        predictions: Sequence[int],
        previous: Sequence[int],
        *,
        text: bool = False,
    ) -> None:
        """Merge the subtree of every node into the tries of the node's keys, with the node's
        prediction as one more child.

        parents       index of each node's parent, which comes before it, or -1
        predictions   what the target put after each node, or `NOTHING`
        previous      the token before each node, or `NOTHING`
        text          nodes come one after the other in time, as in a text, not all at once
        """
        touched: dict[Key, _Trie] = {}
        places: list[list[_Place]] = []
        self._clock += 1
        for node, token in enumerate(tokens):
            parent = parents[node]
            here = self._below(places[parent], token) if parent >= 0 else []
            keys: tuple[Key, ...] = (token,)
            if self.key > 1 and previous[node] >= 0:
                keys = (token, (previous[node], token))
            for key in keys:
                trie = touched.get(key)
                if trie is None:
                    trie = touched[key] = self._touch(key)
                here.append((trie, trie.root, 0))
            places.append(here)
            if predictions[node] >= 0:
                for _, child, _ in self._below(here, predictions[node]):
                    child.stamp = self._clock
            self._clock += text
        self._shrink(touched)

    def _touch(self, key: Key) -> _Trie:
        """The trie of `key`, now the one touched last."""
        trie = self._tries.pop(key, None)
        if trie is None:
            trie = _Trie()
            self._size += 1
        self._tries[key] = trie
        return trie

    def _below(self, places: list[_Place], token: int) -> list[_Place]:
        """The child with `token` at each place, made where there is none and it isn't too deep."""
        out: list[_Place] = []
        for trie, node, depth in places:
            if depth < self.max_depth:
                child = node.kids.get(token)
                if child is None:
                    child = node.kids[token] = _Node()
                    trie.size += 1
                    self._size += 1
                out.append((trie, child, depth + 1))
        return out

    def _shrink(self, touched: dict[Key, _Trie]) -> None:
        for trie in touched.values():
            if trie.size > self.max_nodes:
                before = trie.size
                while trie.size > self.max_nodes:
                    trie.cut()
                self._size -= before - trie.size
        while self._size > self.capacity:
            self._size -= self._tries.pop(next(iter(self._tries))).size + 1

    def fill(self, tree: TreeBuilder, before: int) -> None:
        """Add continuations of the tree's root until it is full: those of the longer key first,
        among these the newest.

        before   the token before the root, or `NOTHING`
        """
        root = tree.tokens[0]
        count = 0
        keys: tuple[Key, ...] = (root,) if self.key == 1 else ((before, root), root)
        for backed, key in enumerate(keys):
            trie = self._tries.get(key)
            heap: list[tuple[int, int, int, int, int, _Node]] = []
            at, node = 0, None if trie is None else trie.root
            while node is not None and not tree.full:
                newest = sorted(node.kids.items(), key=_stamp, reverse=True)
                for place, (token, kid) in enumerate(newest[: tree.limit]):
                    count += 1  # unique: nodes are never compared
                    rank = pool_rank(place, single=backed > 0 or self.key == 1)
                    heappush(heap, (-kid.stamp, count, at, token, rank, kid))
                node = None
                while heap and node is None:
                    _, _, parent, token, rank, kid = heappop(heap)
                    made = tree.add(parent, token, POOL, rank)
                    if made is not None:
                        at, node = made, kid

    def paths(self, key: Key) -> Iterator[tuple[int, ...]]:
        """Every continuation of `key`, as tokens; parents before children."""
        trie = self._tries.get(key)
        stack: list[tuple[tuple[int, ...], _Node]] = [] if trie is None else [((), trie.root)]
        while stack:
            path, node = stack.pop()
            if path:
                yield path
            stack.extend(((*path, token), kid) for token, kid in node.kids.items())

    def keys(self) -> list[Key]:
        """All keys, the one touched longest ago first."""
        return list(self._tries)


def _stamp(item: tuple[int, _Node]) -> int:
    return item[1].stamp

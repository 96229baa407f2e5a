"""A bounded pool of guessed continuations: for each key a trie of what may follow it.

Source: the pool of Progressive Tree Drafting (arXiv 2607.10661) and its authors' code. Trees of
guesses are merged in whole, every node of theirs being a key; what comes out are continuations of
the pending token. Ours: keys of two tokens beside those of one, the newest first, the text's own
n-grams, and the bounds on depth and on the pool as a whole (docs/methods/ptd.md).
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
    """A continuation: its children by token in the order of insertion (None: never had one), and
    when it came or the target last put it there."""

    __slots__ = ("kids", "stamp")

    def __init__(self, stamp: int) -> None:
        self.kids: dict[int, _Node] | None = None
        self.stamp = stamp


class _Trie:
    """The continuations of a key: `size` nodes, its root not counted."""

    __slots__ = ("root", "size")

    def __init__(self) -> None:
        self.root = _Node(0)
        self.size = 0

    def cut(self) -> None:
        """Remove the root's oldest child with all below it."""
        kids = self.root.kids
        assert kids
        stack = [kids.pop(next(iter(kids)))]
        while stack:
            self.size -= 1
            stack.extend((stack.pop().kids or {}).values())


_Place = tuple[_Trie, _Node, int]
"""Where a node stands in a trie, and how deep (the trie's root: 0)."""

_Found = tuple[int, int, int, int, int, "_Node | int"]
"""A continuation to come, the newest sorting first: minus its stamp, a number of its own, its
parent in the tree, its token, its rank, and the trie node or text position it was found at."""


class NGramPool:
    """Tries by key (one token, and with ``key=2`` also that and the token before it), and a text.

    max_nodes   most nodes of a trie; beyond it the oldest child of its root goes, with all below
    max_depth   longest continuation
    capacity    most nodes of all tries, their roots counted; the key touched longest ago goes first
    """

    def __init__(
        self, *, key: int = 2, max_nodes: int = 60, max_depth: int = 8, capacity: int = 20_000
    ) -> None:
        self.key, self.max_nodes, self.max_depth = key, max_nodes, max_depth
        self.capacity = capacity
        self._tries: dict[Key, _Trie] = {}
        self._size = 0
        self._clock = 0
        self._text: list[int] = []
        self._stamps: list[int] = []
        """When each token of the text came."""
        self._latest: dict[Key, int] = {}
        """Position after the latest occurrence of a key in the text."""
        self._earlier: tuple[list[int], ...] = tuple([] for _ in range(key))
        """By key length and position: the position after the key's occurrence before, or -1."""

    def __len__(self) -> int:
        """Nodes of all tries, their roots counted."""
        return self._size

    # -- in ----------------------------------------------------------------------------------------

    def merge(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        predictions: Sequence[int],
        previous: Sequence[int],
    ) -> None:
        """Merge the subtree of every node into the tries of the node's keys, with the node's
        prediction as one more child.

        parents       index of each node's parent, which comes before it, or -1
        predictions   what the target put after each node, or `NOTHING`
        previous      the token before each node, or `NOTHING`
        """
        touched: dict[Key, _Trie] = {}
        places: list[list[_Place]] = []
        self._clock += 1
        for node, token in enumerate(tokens):
            parent = parents[node]
            here = self._below(places[parent], token) if parent >= 0 else []
            for key in self._keys(previous[node], token):
                trie = touched.get(key)
                if trie is None:
                    trie = touched[key] = self._touch(key)
                here.append((trie, trie.root, 0))
            places.append(here)
            if predictions[node] >= 0:
                for _, child, _ in self._below(here, predictions[node]):
                    child.stamp = self._clock
        self._shrink(touched)

    def extend(self, tokens: Sequence[int]) -> None:
        """Go on with the text: what followed each of its keys is a continuation too.

        It is looked up by position, so a token costs the same however long the continuations.
        """
        text, latest = self._text, self._latest
        for token in tokens:
            position = len(text)
            if position:
                before = text[-2] if position > 1 else NOTHING
                for length, key in enumerate(self._keys(before, text[-1])):
                    earlier = self._earlier[length]
                    earlier.extend([-1] * (position - len(earlier)))
                    earlier.append(latest.get(key, -1))
                    latest[key] = position
            self._clock += 1
            text.append(token)
            self._stamps.append(self._clock)

    def _keys(self, before: int, token: int) -> tuple[Key, ...]:
        """The keys of a token, the shorter first."""
        return (token, (before, token)) if self.key > 1 and before >= 0 else (token,)

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
                kids = node.kids
                if kids is None:
                    kids = node.kids = {}
                child = kids.get(token)
                if child is None:
                    child = kids[token] = _Node(self._clock)
                    trie.size += 1
                    self._size += 1
                out.append((trie, child, depth + 1))
        return out

    def _shrink(self, touched: dict[Key, _Trie]) -> None:
        for trie in touched.values():
            before = trie.size
            while trie.size > self.max_nodes:
                trie.cut()
            self._size -= before - trie.size
        while self._size > self.capacity:
            self._size -= self._tries.pop(next(iter(self._tries))).size + 1

    # -- out ---------------------------------------------------------------------------------------

    def fill(self, tree: TreeBuilder, before: int) -> None:
        """Add continuations of the tree's root until it is full: those of the longer key first,
        among these the newest.

        before   the token before the root, or `NOTHING`
        """
        for key in reversed(self._keys(before, tree.tokens[0])):
            found = self._first(key, tree.limit)
            single = not isinstance(key, tuple)
            count = len(found)
            while found and not tree.full:
                _, _, parent, token, rank, at = heappop(found)
                node = tree.add(parent, token, POOL, rank)
                if node is None or tree.depths[node] >= self.max_depth:
                    continue
                for place, (stamp, token, after) in enumerate(self._after(at, tree.limit)):
                    rank = pool_rank(place, single=single)
                    heappush(found, (-stamp, count, node, token, rank, after))
                    count += 1

    def _first(self, key: Key, most: int) -> list[_Found]:
        """A heap of the newest first tokens after `key`."""
        single = not isinstance(key, tuple)
        trie = self._tries.get(key)
        after = [] if trie is None else self._after(trie.root, most)
        position = self._latest.get(key, -1)
        earlier = self._earlier[0 if single else 1]
        for _ in range(most):
            if position < 0:
                break
            after.append((self._stamps[position], self._text[position], position))
            position = earlier[position]
        after.sort(key=_stamp, reverse=True)
        # Sorted is a heap already.
        return [
            (-stamp, count, 0, token, pool_rank(count, single=single), at)
            for count, (stamp, token, at) in enumerate(after)
        ]

    def _after(self, at: _Node | int, most: int) -> list[tuple[int, int, _Node | int]]:
        """What comes after a place, the newest first: stamp, token and place of each."""
        if isinstance(at, int):
            at += 1
            return [(self._stamps[at], self._text[at], at)] if at < len(self._text) else []
        if not at.kids:
            return []
        kids: list[tuple[int, int, _Node | int]] = [
            (kid.stamp, token, kid) for token, kid in at.kids.items()
        ]
        if len(kids) > 1:
            kids.sort(key=_stamp, reverse=True)
        return kids[:most]

    def paths(self, key: Key) -> Iterator[tuple[int, ...]]:
        """Every continuation in the trie of `key`, as tokens; parents before children."""
        trie = self._tries.get(key)
        stack: list[tuple[tuple[int, ...], _Node]] = [] if trie is None else [((), trie.root)]
        while stack:
            path, node = stack.pop()
            if path:
                yield path
            stack.extend(((*path, token), kid) for token, kid in (node.kids or {}).items())

    def keys(self) -> list[Key]:
        """Keys of all tries, the one touched longest ago first."""
        return list(self._tries)


def _stamp(found: tuple[int, int, _Node | int]) -> int:
    return found[0]

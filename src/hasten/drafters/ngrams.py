"""A bounded store of n-gram counts with exact suffix cursors.

RACER (arXiv 2604.14885) keeps the n-grams of prompt and answer in a trie with Aho-Corasick failure
links and a list of least recently used nodes. The released code's links decay and its list can cut
off living subtrees, so this store keeps neither. As n is small, each text has a *cursor*: the trie
nodes of its last tokens, one node for each length below n, all moved by every pushed token. Counts
equal those of inserting every window, prompts shorter than n count too, and lookups are exact.

Memory is bounded by two generations: when the young trie has half the capacity it becomes the old
one, and the older one goes. Counts of both are added up; only windows across the change are lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

FAN = 32
"""Children of a node looked at, the most frequent first: a token may be followed by thousands."""

WORK = 32
"""Trie nodes looked at in a search, for each continuation asked for."""

Continuation = tuple[int, int, float, int]
"""``(parent, token, share, length)``: `parent` indexes the list it stands in (-1: the text's end),
`share` is the node's part of its parent's continuations, in (0, 1], `length` the longest suffix of
the text that was followed by this path."""


class _Trie:
    """Flat lists; node 0 is the root. Below the root no node's count exceeds its parent's."""

    __slots__ = ("children", "count", "stamp", "token", "top")

    def __init__(self) -> None:
        self.children: list[dict[int, int] | None] = [None]
        self.token = [-1]
        self.count = [0]
        self.stamp = [0]
        self.top: dict[int, list[int]] = {}
        """The FAN most frequent children (ties: the latest) of the nodes that have more."""

    def push(self, nodes: Sequence[int], token: int, now: int) -> list[int]:
        """Count `token` after each of `nodes`; the nodes it led to, in the same order."""
        moved = []
        children, count, stamp = self.children, self.count, self.stamp
        for node in nodes:
            kids = children[node]
            if kids is None:
                kids = children[node] = {}
            child = kids.get(token)
            if child is None:
                child = kids[token] = len(count)
                children.append(None)
                self.token.append(token)
                count.append(0)
                stamp.append(0)
            count[child] += 1
            stamp[child] = now
            moved.append(child)
            if len(kids) > FAN and node:  # the root's children are never looked at
                self._promote(node, child, kids)
        return moved

    def _promote(self, node: int, child: int, kids: dict[int, int]) -> None:
        """Keep `node`'s most frequent children up to date after `child` was counted."""
        count, stamp = self.count, self.stamp

        def rank(each: int) -> tuple[int, int]:
            return count[each], stamp[each]

        top = self.top.get(node)
        if top is None:
            self.top[node] = sorted(kids.values(), key=rank)[-FAN:]
        elif child not in top:
            worst = min(top, key=rank)
            if rank(child) > rank(worst):
                top[top.index(worst)] = child

    def best(self, node: int) -> Iterable[int]:
        """The node's most frequent children, at most FAN, in no particular order."""
        kids = self.children[node]
        if kids is None:
            return ()
        return kids.values() if len(kids) <= FAN else self.top[node]

    def find(self, path: Sequence[int]) -> int | None:
        """The node of exactly this token path, or None."""
        node = 0
        for token in path:
            kids = self.children[node]
            if kids is None or (found := kids.get(token)) is None:
                return None
            node = found
        return node

    def fork(self) -> _Trie:
        """A copy that shares nothing."""
        other = _Trie()
        other.children = [None if kids is None else dict(kids) for kids in self.children]
        other.token, other.count = list(self.token), list(self.count)
        other.stamp = list(self.stamp)
        other.top = {node: list(top) for node, top in self.top.items()}
        return other


class Cursor:
    """Where one text stands in a store. A text that is done simply drops its cursor."""

    __slots__ = ("nodes", "tail", "trie")

    def __init__(self) -> None:
        self.trie: _Trie | None = None
        """The trie that `nodes` belong to; a store that has moved on re-roots the cursor."""
        self.nodes: list[int] = [0]
        """``nodes[i]`` is the node of the text's last i tokens."""
        self.tail: list[int] = []
        """The text's last tokens, n - 1 of them or a few more."""


class NGramStore:
    """Counts of all n-grams up to length `n` of what was pushed, in at most `capacity` trie nodes.

    Pushing a token costs n dictionary steps. A search looks at a bounded number of nodes, so no
    text (one token repeated thousands of times, a token with thousands of followers) makes a round
    slow. Several texts may be pushed in turn, each with its own `Cursor`, from several threads.
    """

    def __init__(self, n: int = 10, capacity: int = 10_000) -> None:
        self.n, self.capacity = n, capacity
        # A trie grows by n nodes at most before its size is looked at.
        self._half = max(capacity // 2 - n, 1)
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget everything; cursors in use go on from their next token."""
        with self._lock:
            self._young, self._old = _Trie(), _Trie()
            self._now = 0

    def fork(self) -> NGramStore:
        """A copy that shares nothing; cursors of this store are at its beginning there."""
        other = NGramStore(self.n, self.capacity)
        with self._lock:
            other._young, other._old, other._now = self._young.fork(), self._old.fork(), self._now
        return other

    def __len__(self) -> int:
        """Trie nodes held, the two roots left out."""
        return len(self._young.count) + len(self._old.count) - 2

    def push(self, cursor: Cursor, tokens: Sequence[int]) -> None:
        """Append to the cursor's text."""
        with self._lock:
            for token in tokens:
                if len(self._young.count) > self._half:
                    self._old, self._young = self._young, _Trie()
                if cursor.trie is not self._young:
                    cursor.trie, cursor.nodes = self._young, [0]
                self._now += 1
                moved = self._young.push(cursor.nodes, token, self._now)
                cursor.nodes = [0, *moved[: self.n - 1]]  # a node at depth n has no children
            tail = cursor.tail
            tail.extend(tokens[-self.n :])
            del tail[: -self.n]

    def count(self, path: Sequence[int]) -> int:
        """How often `path` (at most n tokens) was seen, as far as it is remembered."""
        total = 0
        for trie in (self._young, self._old):
            node = trie.find(path)
            total += 0 if node is None else trie.count[node]
        return total

    def borders(self, cursor: Cursor) -> list[int]:
        """Lengths of the suffixes of the text, up to n - 1, that were followed by something before,
        longest first."""
        with self._lock:
            return list(dict.fromkeys(length for _, _, length, _ in self._borders(cursor, 1)))

    def _borders(self, cursor: Cursor, min_match: int) -> list[_Border]:
        """Trie nodes of the borders, longest first."""
        found: list[_Border] = []
        young, old, tail = self._young, self._old, cursor.tail
        nodes = cursor.nodes if cursor.trie is young else [0]
        in_old = len(old.count) > 1
        for length in range(min(self.n - 1, len(tail)), min_match - 1, -1):
            # The text's end itself is counted, and not followed yet.
            if length < len(nodes) and young.children[node := nodes[length]]:
                found.append((young, node, length, max(young.count[node] - 1, 1)))
            if in_old and (at := old.find(tail[-length:])) is not None and old.children[at]:
                found.append((old, at, length, old.count[at]))
        return found

    def continuations(
        self, cursor: Cursor, limit: int, *, min_match: int = 1, decay: float | None = None
    ) -> list[Continuation]:
        """The `limit` best paths after the text's borders of length `min_match` and more.

        Borders are fused by token path. With ``decay=None`` a path's score is its largest count,
        ties to the shallower and then the later one (the paper's order). With a number it is the
        largest, over the borders, of ``count / count of the border * decay ** (longest - length)``:
        each occurrence of a longer border is one of the shorter too, so raw counts always favour
        the shortest, though the longest predicts best (ours).
        """
        with self._lock:
            return _search(self._borders(cursor, min_match), limit, decay)


_Border = tuple[_Trie, int, int, int]
"""``(trie, node, length, how often it was followed)``."""

_Entry = tuple[_Trie, int, int]
"""A trie node on the way: ``(trie, node, border length)``."""


def _search(borders: Sequence[_Border], limit: int, decay: float | None) -> list[Continuation]:
    """Best-first search over fused paths; about ``WORK * limit`` trie nodes are looked at."""
    if not borders or limit < 1:
        return []
    out: list[Continuation] = []
    heap: list[tuple[float, int, int, int, int, list[_Entry], float]] = []
    group: list[_Entry] = [(trie, node, length) for trie, node, length, _ in borders]
    followed = _total((length, count) for _, _, length, count in borders)
    weights = _weights(followed, decay)
    depth, left, tick = 1, WORK * limit, 0
    while True:
        above = len(out) - 1
        for entries in _children(group):
            trie, node, length = entries[0]
            if len(entries) == 1:
                count = trie.count[node]
                score = count * weights[length]
            else:
                counts = _total((size, t.count[n]) for t, n, size in entries)
                count = counts[length]
                score = max([each * weights[size] for size, each in counts.items()])
            share = min(count / followed[length], 1.0)
            left -= len(entries)
            tick += 1
            heappush(heap, (-score, depth, -trie.stamp[node], tick, above, entries, share))
        if not heap:
            return out
        _, depth, _, _, parent, entries, share = heappop(heap)
        trie, node, length = entries[0]
        out.append((parent, trie.token[node], share, length))
        if len(out) >= limit:
            return out
        depth += 1
        group = entries if left > 0 else []
        followed = _total((size, t.count[n]) for t, n, size in group)


def _weights(followed: dict[int, int], decay: float | None) -> dict[int, float]:
    """What one occurrence after a border of each length is worth."""
    if decay is None:
        return dict.fromkeys(followed, 1.0)
    longest = max(followed)
    return {length: decay ** (longest - length) / count for length, count in followed.items()}


def _total(counts: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Sums by border length."""
    out: dict[int, int] = {}
    for length, count in counts:
        out[length] = out.get(length, 0) + count
    return out


def _children(group: Sequence[_Entry]) -> Iterable[list[_Entry]]:
    """The children of some nodes, grouped by token, longest border first."""
    if len(group) == 1:
        trie, node, length = group[0]
        return [[(trie, child, length)] for child in trie.best(node)]
    grouped: dict[int, list[_Entry]] = {}
    for trie, node, length in group:
        token = trie.token
        for child in trie.best(node):
            grouped.setdefault(token[child], []).append((trie, child, length))
    return grouped.values()

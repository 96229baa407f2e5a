"""Counts of everything a text has said: the suffix trie of SuffixDecoding, with its twins merged.

SuffixDecoding (arXiv 2411.04975) keeps a trie of all suffixes up to `depth` tokens, each node with
the number of its occurrences. Written out, that is up to 64 nodes for every token. Here nodes whose
strings end at the same places are one node (a suffix automaton, Blumer et al. 1985): the counts are
the same and exact, memory is two nodes a token at most, and a token costs a few steps.

A string grows to the right along `followers`; `link` leads to its longest suffix that occurs
elsewhere too. So the node of a text's end, kept in a `TextEnd`, gives all suffixes of the text
without a walk from the root. Each node's most frequent follower is kept up to date, so that
following the majority costs one step for a token, however many kinds of tokens followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROOT = 0

Match = tuple[int, int]
"""A node, and the length of the string that led there."""


@dataclass(slots=True)
class TextEnd:
    """Where one text ends in a tree.

    whole    the node of the whole text
    node     the node of its last `size` tokens, `size` being ``min(length, depth)``
    length   tokens of the text
    """

    whole: int = ROOT
    node: int = ROOT
    size: int = 0
    length: int = 0


class SuffixTree:
    """Counts of all strings of at most `depth` tokens in one text or several.

    Texts grow at their ends, in any order (`append`). A token adds two nodes at most and costs, on
    average, as many steps as its text's suffixes have different counts. Of strings longer than
    `depth` only the shape is kept, not the count. The lists, one entry for each node, are for
    reading:

    followers   the node of the string with one more token, by token
    link        the node of the longest suffix that occurs elsewhere too; -1 at the root
    lengths     tokens of the node's longest string; its shortest has one more than `link`'s longest
    counts      occurrences, of strings up to `depth`
    best        the most frequent next token, of equals the latest one; -1: nothing followed, or
                the string is as long as `depth`
    """

    __slots__ = ("best", "counts", "depth", "followers", "lengths", "link")

    def __init__(self, depth: int = 64) -> None:
        self.depth = depth
        self.followers: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.lengths = [0]
        self.counts = [0]
        self.best = [-1]

    def __len__(self) -> int:
        """Nodes, the root left out."""
        return len(self.link) - 1

    def copy(self) -> SuffixTree:
        """The same counts, nothing shared."""
        other = SuffixTree(self.depth)
        other.followers = [dict(kids) for kids in self.followers]
        other.link, other.lengths = list(self.link), list(self.lengths)
        other.counts, other.best = list(self.counts), list(self.best)
        return other

    # -- growing ---------------------------------------------------------------------------------

    def append(self, end: TextEnd, tokens: Sequence[int]) -> None:
        """The text that ends at `end` goes on with `tokens`."""
        followers, link, counts, best = self.followers, self.link, self.counts, self.best
        longest = self.depth - 1
        for token in tokens:
            end.whole = self._grow(end.whole, token)
            before = self.suffix(end.node, min(end.size, longest))
            end.node = node = followers[before][token]
            end.size = min(end.size, longest) + 1
            end.length += 1
            while node > 0:
                counts[node] += 1
                node = link[node]
            node = before
            while node > 0:
                known = best[node]
                if known != token:
                    kids = followers[node]
                    if known < 0 or counts[kids[token]] >= counts[kids[known]]:
                        best[node] = token
                node = link[node]

    def suffix(self, node: int, size: int) -> int:
        """The node of the last `size` tokens of a string of `node` that is no shorter.

        Also brings a node noted earlier up to date: another text may have split it since.
        """
        link, lengths = self.link, self.lengths
        while node and lengths[link[node]] >= size:
            node = link[node]
        return node

    def _grow(self, last: int, token: int) -> int:
        """The node of a text that ended at `last` (as its longest string) and goes on with
        `token`."""
        followers, link, lengths = self.followers, self.link, self.lengths
        known = followers[last].get(token)
        if known is not None:  # another text said all this before
            return known if lengths[known] == lengths[last] + 1 else self._split(last, token, known)
        new = self._new({}, lengths[last] + 1, 0, -1)
        node = last
        while node >= 0 and token not in followers[node]:
            followers[node][token] = new
            node = link[node]
        if node < 0:
            link[new] = ROOT
        else:
            known = followers[node][token]
            fits = lengths[known] == lengths[node] + 1
            link[new] = known if fits else self._split(node, token, known)
        return new

    def _split(self, node: int, token: int, known: int) -> int:
        """Part from `known` its strings up to `node`'s longest and `token`: from now on they occur
        elsewhere too. Gives their node."""
        followers, link = self.followers, self.link
        part = self._new(
            dict(followers[known]), self.lengths[node] + 1, self.counts[known], self.best[known]
        )
        link[part], link[known] = link[known], part
        while node >= 0 and followers[node].get(token) == known:
            followers[node][token] = part
            node = link[node]
        return part

    def _new(self, followers: dict[int, int], length: int, count: int, best: int) -> int:
        self.followers.append(followers)
        self.link.append(ROOT)
        self.lengths.append(length)
        self.counts.append(count)
        self.best.append(best)
        return len(self.link) - 1

    # -- looking up ------------------------------------------------------------------------------

    def count(self, tokens: Sequence[int]) -> int:
        """How often this string (of `depth` tokens at most) occurs."""
        node = ROOT
        for token in tokens:
            found = self.followers[node].get(token)
            if found is None:
                return 0
            node = found
        return self.counts[node]

    def match(self, end: TextEnd) -> Match:
        """The longest suffix of the text that is shorter than the text and than `depth`."""
        limit = min(self.depth, end.length) - 1
        return (self.suffix(end.node, limit), limit) if limit > 0 else (ROOT, 0)

    def find(self, text: Sequence[int]) -> Match:
        """The same for a text that isn't in the tree, or not all of it."""
        limit = min(self.depth, len(text)) - 1
        followers, link, lengths = self.followers, self.link, self.lengths
        node, size = ROOT, 0
        for token in text[len(text) - limit :] if limit > 0 else ():
            while node and token not in followers[node]:
                node = link[node]
                size = lengths[node]
            found = followers[node].get(token)
            if found is not None:
                node = found
                size += 1
        return node, size

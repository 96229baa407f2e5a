"""The draft tree of progressive tree drafting: guesses that are grown, never verified.

A forest under an invisible root: its *subtrees* stand in a row, oldest first, and every node has
at most one new child a round. Between rounds nodes are numbered in preorder, so the numbers are
the rows of the next pass. Source: Progressive Tree Drafting (arXiv 2607.10661) and its authors'
code; docs/methods/ptd.md says what follows which.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

EOS_CLIMB = 4
"""Ancestors that go with an end-of-sequence node (the authors' code)."""


class FlatTree:
    """A forest as lists, one entry for each node; the lists are for reading.

    tokens, parents   of each node; a subtree's root has parent -1
    kids              children of each node, oldest first
    roots             roots of the subtrees, oldest first
    """

    __slots__ = ("kids", "parents", "roots", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.kids: list[list[int]] = []
        self.roots: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int:
        """A new node, the newest child of `parent` (-1: a new subtree); its number."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.kids.append([])
        (self.roots if parent < 0 else self.kids[parent]).append(node)
        return node

    def seed(self, chains: Sequence[Sequence[int]]) -> None:
        """Add a subtree for each chain; one whose first token is a root's already is left out."""
        for chain in chains:
            if chain[0] not in self.root_tokens():
                node = -1
                for token in chain:
                    node = self.add(node, token)

    def root_tokens(self) -> set[int]:
        """Tokens of the subtrees' roots: no two share one."""
        return {self.tokens[root] for root in self.roots}

    def heights(self) -> list[int]:
        """For each node the edges to its deepest descendant."""
        out = [0] * len(self.tokens)
        for node in range(len(out) - 1, -1, -1):  # children have larger numbers than parents
            parent = self.parents[node]
            if parent >= 0 and out[parent] <= out[node]:
                out[parent] = out[node] + 1
        return out

    @property
    def depth(self) -> int:
        """Nodes on the longest path; 0 for an empty tree."""
        heights = self.heights()
        return max((heights[root] + 1 for root in self.roots), default=0)

    def row_parents(self, spine: bool) -> list[int]:
        """Each node's parent in the pass, -1 for the pending token.

        With `spine` a subtree's root follows the root of the subtree before it, so that the roots
        see one another and stand one position apart; without it all follow the pending token.
        """
        out = list(self.parents)
        if spine:
            for before, root in pairwise(self.roots):
                out[root] = before
        return out

    # -- one round ---------------------------------------------------------------------------------

    def advance(
        self,
        predictions: Sequence[int],
        next_token: int,
        *,
        width: int,
        depth: int,
        roots: int,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Everything that happens to the tree after a pass: grow, keep up the number of subtrees,
        slide, drop ends, number anew.

        predictions   the target's argmax after each node
        next_token    what the target put after the pending token: the root of a new subtree when
                      none is left
        """
        self.grow(predictions, width)
        self.fix_roots(predictions, next_token, roots)
        self.slide(depth)
        self.drop(eos_ids)
        self.renumber()

    def grow(self, predictions: Sequence[int], width: int) -> None:
        """Give each node its prediction as a child, unless it has that one or `width` of them."""
        tokens = self.tokens
        for node, token in enumerate(predictions):
            kids = self.kids[node]
            if len(kids) < width and all(tokens[kid] != token for kid in kids):
                self.add(node, token)

    def fix_roots(self, predictions: Sequence[int], next_token: int, count: int) -> None:
        """Bring the number of subtrees one nearer to `count`: without the oldest, or with one whose
        root is the newest root's prediction (which that root then loses as a child)."""
        if len(self.roots) > count:
            self._remove(self.roots[0])
        elif not self.roots:
            self.add(-1, next_token)
        elif len(self.roots) < count:
            last = self.roots[-1]
            token = predictions[last]
            if token not in self.root_tokens():
                for kid in self.kids[last]:
                    if self.tokens[kid] == token:
                        self._remove(kid)
                        break
                self.add(-1, token)

    def slide(self, depth: int) -> None:
        """Subtrees that are `depth` edges high make way for their root's oldest child whose token
        is no other root's; without such a child they go."""
        heights = self.heights()
        for root in [r for r in self.roots if heights[r] >= depth]:
            self.roots.remove(root)
            taken = self.root_tokens()
            for kid in self.kids[root]:
                if self.tokens[kid] not in taken:
                    self.parents[kid] = -1
                    self.roots.append(kid)
                    break

    def drop(self, ends: frozenset[int]) -> None:
        """Remove nodes that carry one of `ends`, with up to four ancestors and what hangs below:
        what leads to an end and what follows it is no use as a guess."""
        if ends.isdisjoint(self.tokens):
            return
        for node, token in enumerate(self.tokens):
            if token in ends:
                for _ in range(EOS_CLIMB):
                    if self.parents[node] < 0:
                        break
                    node = self.parents[node]
                self._remove(node)

    def _remove(self, node: int) -> None:
        """Unlink a node (for good) from its parent; it goes when nodes are numbered anew."""
        parent = self.parents[node]
        among = self.roots if parent < 0 else self.kids[parent]
        if node in among:
            among.remove(node)
        self.parents[node] = -1

    def renumber(self) -> None:
        """Number the nodes in preorder and forget what hangs on no root."""
        tokens, kids = self.tokens, self.kids
        stack = [(root, -1) for root in reversed(self.roots)]
        self.tokens, self.parents, self.kids, self.roots = [], [], [], []
        while stack:
            old, parent = stack.pop()
            node = self.add(parent, tokens[old])
            for kid in reversed(kids[old]):
                stack.append((kid, node))

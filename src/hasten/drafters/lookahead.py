"""Lookahead decoding (Fu et al., arXiv 2402.02057): n-grams from a window of parallel guesses.

A window of W columns and N - 1 levels rides along in each pass. The target's choice at its last
level completes one n-gram a column; these are stored by their first token, and those of the pending
token are verified. docs/methods/lookahead.md says what follows the paper's code and what is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.drafters.ranks import POOL, pool_rank
from hasten.drafters.riding import Riders, prompt_kinds, prompt_random
from hasten.drafters.tree_builder import TreeBuilder
from hasten.types import Budget, Draft, Round, RowSignals, Signals

CAPACITY = 20_000
"""N-grams held at most; those of the key touched longest ago go first."""


class Grams:
    """For each token at most `count` n-grams that follow it, each a tuple of the tokens after it.

    capacity   n-grams held in all
    """

    __slots__ = ("_keys", "_size", "capacity", "count")

    def __init__(self, count: int, capacity: int = CAPACITY) -> None:
        self.count, self.capacity = count, capacity
        self._keys: dict[int, dict[tuple[int, ...], None]] = {}
        self._size = 0

    def __len__(self) -> int:
        """N-grams held."""
        return self._size

    def add(self, key: int, gram: tuple[int, ...]) -> None:
        """Store an n-gram as the newest of its key; the key's oldest goes when there are too
        many."""
        grams = self._keys.pop(key, None)
        if grams is None:
            grams = {}
        self._keys[key] = grams
        self._size -= len(grams)
        grams.pop(gram, None)
        grams[gram] = None
        if len(grams) > self.count:
            del grams[next(iter(grams))]
        self._size += len(grams)
        while self._size > self.capacity:
            self._size -= len(self._keys.pop(next(iter(self._keys))))

    def get(self, key: int) -> list[tuple[int, ...]]:
        """The key's n-grams, the newest first."""
        return list(reversed(self._keys.get(key, {})))


class Lookahead(BaseDrafter):
    """N-grams that the target completes in a window beside the text.

    ngram    n-gram size, its key included (the paper's N, at least 2)
    window   columns of the window (W); 0 switches it off
    guesses  n-grams kept for a key, and verified in a pass (G)
    text     store the n-grams of prompt and answer too (the code's POOL_FROM_PROMPT)
    eos_ids  replaced by prompt tokens in the window
    """

    name = "lookahead"
    needs = Signals(topk=1)

    def __init__(
        self,
        *,
        ngram: int = 3,
        window: int = 1,
        guesses: int = 4,
        text: bool = True,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.ngram, self.window, self.guesses = ngram, window, guesses
        self.text, self.eos_ids = text, eos_ids
        self._forget()

    def _forget(self) -> None:
        self._grams = Grams(self.guesses)
        self._levels: list[list[int]] = []
        """Level 0 without the pending token, which is its first entry; then the levels below."""
        self._tail: list[int] = []
        self._rows: list[int] = []
        """The window's last level in the pass under way, of `_size` rows."""
        self._size = 0

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Fill the window's first level with prompt tokens."""
        self._forget()
        self._random = prompt_random(prompt)
        self._kinds = prompt_kinds(prompt, self.eos_ids) or list(prompt[:1])
        if self.window:
            self._levels = [
                self._random.choices(self._kinds, k=max(self.window + self.ngram - 3, 0))
            ]
        self._learn(prompt)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """The pending token's n-grams, merged into a tree; the window rides along."""
        pending = ctx.ids[-1]
        most = 1 + self.guesses * (self.ngram - 1)
        tree = TreeBuilder(pending, min(budget.nodes, most), budget.depth)
        for place, gram in enumerate(self._grams.get(pending)):
            node = 0
            for token in gram:
                made = tree.add(node, token, POOL, pool_rank(place, single=True))
                if made is None:
                    break
                node = made
        riders = Riders(tree)
        if self._levels:
            rows = [0]
            for token in self._levels[0]:
                rows.append(riders.add(rows[-1], token))
            for level in self._levels[1:]:
                rows = [riders.add(above, token) for above, token in zip(rows, level, strict=True)]
            self._rows, self._size = rows, len(riders)
        return riders.draft()

    def observe(self, round: Round) -> None:
        """Store the completed n-grams, move the window on by one position."""
        size, self._size = self._size, 0
        if round.tree is not None and round.signals.topk_ids is not None:
            best = round.signals.topk_ids[:, 0].tolist()
            if len(best) == size:  # else the window was left out of this pass
                self._shift(round.tree.tokens[0], [best[row] for row in self._rows])
        self._learn(round.emitted)

    def _shift(self, pending: int, new: list[int]) -> None:
        """The target's choices after the last level become the new last one.

        Until there are N - 1 levels nothing is stored: a level is added a round, and the others
        lose their first column, which now lies in the past.
        """
        new = [self._random.choice(self._kinds) if t in self.eos_ids else t for t in new]
        levels = self._levels
        if len(levels) < self.ngram - 1:
            self._levels = [level[1:] for level in (*levels, new)]
            return
        columns = zip(*levels[1:], new, strict=True)
        for key, gram in zip((pending, *levels[0]), columns, strict=True):
            self._grams.add(key, gram)
        levels = [*levels[1:], new]
        self._levels = [levels[0][1:], *levels[1:]]

    def _learn(self, tokens: Sequence[int]) -> None:
        """With `text`, store the n-grams of the text."""
        if self.text:
            for token in tokens:
                self._tail.append(token)
                if len(self._tail) >= self.ngram:
                    self._grams.add(self._tail[0], tuple(self._tail[1:]))
                    del self._tail[0]

    def end(self) -> None:
        """Drop window and n-grams."""
        self._forget()

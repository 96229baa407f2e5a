"""Suffix decoding: copy what followed earlier occurrences of the text's end (arXiv 2411.04975).

A request has a suffix tree of its prompt and answer; on request all share a bounded tree of answers
too. What follows the paper and its published code, and what is ours: docs/methods/suffix.md.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.drafters.ranks import SUFFIX, suffix_rank
from hasten.drafters.suffix_guess import Guess, Knobs, blend, branches, nothing_after, path
from hasten.drafters.suffix_tree import Match, SuffixTree, TextEnd
from hasten.errors import OptionError
from hasten.types import Budget, Draft, DraftTree, Round, RowSignals

MODES = ("blend", "path", "tree")
LOCAL, GLOBAL = "local", "global"

_Ask = Callable[[SuffixTree, Match, int], Guess]
"""``(tree, where a text's end matches, how much of the text's end is in the tree)``."""


@dataclass(frozen=True, slots=True)
class SuffixQuery:
    """What the trees said before a round, for those who decide by it.

    score    sum of `probs`; in modes ``path`` and ``tree`` on the published scale, where the text's
             own end counts as an occurrence: a text seen once before gives 1/2 for each token
    match    length of the suffix that was found; 0: none was
    probs    estimated probability of the path to each drafted token, in the draft's order
    tokens   the drafted tokens
    source   ``"local"`` (this request's text) or ``"global"`` (shared answers)
    """

    score: float = 0.0
    match: int = 0
    probs: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    source: str = LOCAL


class Answer:
    """One request's answer in a `SharedAnswers`."""

    __slots__ = ("end", "tree")

    def __init__(self) -> None:
        self.tree: SuffixTree | None = None
        """The tree it stands in; one that the store has dropped is not read any more."""
        self.end = TextEnd()


class SharedAnswers:
    """A suffix tree of many requests' answers, first in, first out.

    At most `requests` answers and `nodes` nodes are kept, in two generations: when the young tree
    holds half of either, it becomes the old one, and the older one goes. A guess comes from the
    better of the two; while the first half lasts there is one, and it is exact. Requests may take
    turns, also from several threads.
    """

    def __init__(self, depth: int = 64, requests: int = 1000, nodes: int = 100_000) -> None:
        self.depth, self.requests, self.nodes = depth, requests, nodes
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget everything; answers under way go on from their next token."""
        with self._lock:
            self._young, self._old = SuffixTree(self.depth), SuffixTree(self.depth)
            self._texts = [0, 0]

    def fork(self) -> SharedAnswers:
        """A copy that shares nothing; answers under way here are none of its."""
        other = SharedAnswers(self.depth, self.requests, self.nodes)
        with self._lock:
            other._young, other._old = self._young.copy(), self._old.copy()
            other._texts = list(self._texts)
        return other

    def __len__(self) -> int:
        """Nodes held."""
        return len(self._young) + len(self._old)

    @property
    def texts(self) -> int:
        """Answers held; one that was under way when the generations changed counts twice."""
        return sum(self._texts)

    def append(self, answer: Answer, tokens: Sequence[int]) -> None:
        """The answer goes on with `tokens`."""
        most = max(self.nodes // 4, 1)  # two nodes a token, half of them in a generation
        with self._lock:
            for at in range(0, len(tokens), most):
                part = tokens[at : at + most]
                new = answer.tree is not self._young
                full = len(self._young) + 2 * len(part) > self.nodes // 2
                if full or (new and self._texts[0] >= self.requests // 2):
                    self._old, self._young = self._young, SuffixTree(self.depth)
                    self._texts = [0, self._texts[0]]
                    new = True
                if new:
                    answer.tree, answer.end = self._young, TextEnd()
                    self._texts[0] += 1
                self._young.append(answer.end, part)

    def guess(self, ask: _Ask, answer: Answer, tail: Sequence[int]) -> Guess:
        """The better guess of the two generations; `tail` holds the text's last tokens."""
        with self._lock:
            found = Guess()
            for tree in (self._young, self._old):
                own = answer.end.length if answer.tree is tree else 0
                made = ask(tree, tree.find(tail), own) if len(tree) else found
                if made.score > found.score:
                    found = made
        return found


class Suffix(BaseDrafter):
    """A chain or a tree copied from what followed earlier occurrences of the text's end.

    mode       ``blend`` (ours): a tree from suffixes of all lengths; ``path`` and ``tree``: the
               published ones, from one suffix
    depth      longest string counted, a match and what it drafts together
    factor     ``path`` and ``tree``: a match of m tokens drafts ``floor(factor * m + offset)`` at
               most; ``factor=0`` lifts the bound (the budget's remains)
    offset     see `factor`
    least      no drafted path is less likely
    shared     answers shared with other requests; None: there are none
    eos_ids    nothing is drafted after these
    """

    name = "suffix"

    def __init__(
        self,
        *,
        mode: str = "blend",
        depth: int = 64,
        factor: float = 0.0,
        offset: float = 0.0,
        least: float = 0.05,
        shared: SharedAnswers | None = None,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        if mode not in MODES:
            raise OptionError(
                "suffix.mode", f"unknown mode {mode!r}", f"Choose one of {', '.join(MODES)}"
            )
        self.mode, self.depth = mode, depth
        self._knobs = Knobs(factor or math.inf, offset, least)
        self._shared, self._eos_ids = shared, eos_ids
        self._forget()

    def _forget(self) -> None:
        self._tree, self._end = SuffixTree(self.depth), TextEnd()
        self._answer = Answer()
        self._tail: list[int] = []
        self.last_query: SuffixQuery | None = None
        """What the last `propose` found; None before the first."""

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Count the prompt."""
        self._forget()
        self._append(prompt)

    def _append(self, tokens: Sequence[int]) -> None:
        self._tree.append(self._end, tokens)
        self._tail = [*self._tail, *tokens[-self.depth :]][-self.depth :]

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """The likeliest continuation within the budget."""
        guess = self.guess(budget.nodes - 1, budget.depth)
        size = len(guess.tokens) + 1
        tree = DraftTree((ctx.ids[-1], *guess.tokens), (-1, *(p + 1 for p in guess.parents)))
        ranks = map(suffix_rank, guess.lengths, guess.chances)
        return Draft(tree, sources=(SUFFIX,) * size, ranks=(0, *ranks))

    def guess(self, most: int, depth: int) -> Guess:
        """What the trees say comes next: `most` tokens at most, none deeper than `depth`."""
        knobs = self._knobs

        def ask(tree: SuffixTree, start: Match, own: int) -> Guess:
            if self.mode == "blend":
                return blend(tree, start, own, most, depth, knobs)
            grow = path if self.mode == "path" else branches
            return grow(tree, start, own, min(most, depth), knobs)

        guess, source = ask(self._tree, self._tree.match(self._end), self._end.length), LOCAL
        if self._shared is not None:
            other = self._shared.guess(ask, self._answer, self._tail)
            if other.score > guess.score:
                guess, source = other, GLOBAL
        guess = nothing_after(guess, self._eos_ids)
        self.last_query = SuffixQuery(guess.score, guess.match, guess.probs, guess.tokens, source)
        return guess

    def observe(self, round: Round) -> None:
        """Count what was emitted."""
        self._append(round.emitted)
        if self._shared is not None:
            self._shared.append(self._answer, round.emitted)

    def end(self) -> None:
        """Leave no trace of the request, but for its answer where answers are shared."""
        self._forget()

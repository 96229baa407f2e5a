"""What a suffix tree's counts say comes next: PATH, TREE and BLEND.

PATH and TREE are SuffixDecoding's (arXiv 2411.04975; details from ArcticInference's code): each
suffix of the text that occurred before drafts as many tokens as it is long, and the draft with the
best score is taken. BLEND is ours: one tree from the suffixes of all lengths, where a shorter one
has its say as far as the longer ones leave doubt (as in compression by partial matching).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from hasten.drafters.suffix_tree import Match, SuffixTree

FAN = 64
"""Of a node with more kinds of followers than this, BLEND looks at the most frequent one only."""

TRUST = 0.2
"""How fast doubt shrinks with the length of what matched."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A continuation as counts see it; ``tokens[i]`` follows ``tokens[parents[i]]``.

    parents   -1: follows the text itself
    probs     estimated probability of the path to each token
    chances   estimated probability of each token given its parent
    lengths   for each token the length of the longest string before it that it followed elsewhere
    match     length of the suffix of the text that was followed by all this
    score     sum of `probs`: the tokens that would be kept if the estimates were right
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: tuple[float, ...] = ()
    chances: tuple[float, ...] = ()
    lengths: tuple[int, ...] = ()
    match: int = 0
    score: float = 0.0


def nothing_after(guess: Guess, ends: Collection[int]) -> Guess:
    """The guess without what follows one of the tokens `ends`: an answer is over there."""
    if not any(token in ends for token in guess.tokens):
        return guess
    kept: list[int] = []
    place = {-1: -1}
    for at, parent in enumerate(guess.parents):
        if parent in place and (parent < 0 or guess.tokens[parent] not in ends):
            place[at] = len(kept)
            kept.append(at)
    probs = tuple(guess.probs[at] for at in kept)
    return Guess(
        tuple(guess.tokens[at] for at in kept),
        tuple(place[guess.parents[at]] for at in kept),
        probs,
        tuple(guess.chances[at] for at in kept),
        tuple(guess.lengths[at] for at in kept),
        guess.match,
        sum(probs),
    )


@dataclass(frozen=True, slots=True)
class Knobs:
    """What may be guessed.

    factor, offset   PATH and TREE: a suffix of m tokens drafts ``floor(factor * m + offset)``
                     tokens at most; ``factor=inf`` lifts the bound
    least            no path's probability is lower
    """

    factor: float = 1.0
    offset: float = 0.0
    least: float = 0.1


class _Growing:
    """A guess under construction."""

    __slots__ = ("chances", "lengths", "parents", "probs", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.probs: list[float] = []
        self.chances: list[float] = []
        self.lengths: list[int] = []

    def add(self, token: int, parent: int, prob: float, chance: float, length: int) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.probs.append(prob)
        self.chances.append(chance)
        self.lengths.append(length)

    def guess(self, match: int) -> Guess:
        return Guess(
            tuple(self.tokens),
            tuple(self.parents),
            tuple(self.probs),
            tuple(self.chances),
            tuple(self.lengths),
            match,
            sum(self.probs),
        )


def _chance(share: float, occurrences: int, kinds: int, length: int) -> float:
    """Probability of a token that has `share` of what followed a string of `length` tokens."""
    return share * (1.0 - _doubt(occurrences, kinds, length))


def _doubt(occurrences: int, kinds: int, length: int) -> float:
    """Probability of something else than what followed before: kinds / (occurrences + kinds)
    (method C of partial matching), less after longer strings."""
    return kinds / ((occurrences + kinds) * (1.0 + TRUST * (length - 1)))


# -- PATH and TREE ---------------------------------------------------------------------------------

_Grow = Callable[[SuffixTree, int, int, int, int, float], _Growing]
"""``(tree, node, length, ends, cap, least)``: nothing followed `ends` of the occurrences."""


def path(tree: SuffixTree, start: Match, own: int, most: int, knobs: Knobs) -> Guess:
    """Always the most frequent next token; see `_best`."""
    return _best(tree, start, own, most, knobs, _path)


def branches(tree: SuffixTree, start: Match, own: int, most: int, knobs: Knobs) -> Guess:
    """The likeliest paths, as a tree; see `_best`."""
    return _best(tree, start, own, most, knobs, _branches)


def _best(tree: SuffixTree, start: Match, own: int, most: int, knobs: Knobs, grow: _Grow) -> Guess:
    """The guess with the best score after a suffix of `start`; of equals the longest suffix's.

    `most` tokens at most. The end of the text is counted among the occurrences of suffixes up to
    `own` tokens, though nothing followed it: that keeps probabilities, and so the score, on the
    published scale, where a suffix seen once before gives 1/2.
    """
    followers, counts, best = tree.followers, tree.counts, tree.best
    tries: list[tuple[float, int, int, int]] = []
    node, size = start
    while node > 0:
        if followers[node] and best[node] >= 0:
            longest = min(tree.lengths[node], size)
            cap = _cap(tree, node, longest, most, knobs)
            if cap > 0:
                # No token is likelier than the first.
                bound = cap * counts[followers[node][best[node]]] / counts[node]
                tries.append((-bound, -longest, node, cap))
        node = tree.link[node]
    found, top, match = _Growing(), 0.0, 0
    for minus_bound, minus_length, node, cap in sorted(tries):  # the most promising first
        if -minus_bound * (1 + 1e-9) < top:
            break
        length = -minus_length
        made = grow(tree, node, length, 1 if length <= own else 0, cap, knobs.least)
        score = sum(made.probs)
        if made.tokens and (score, length) > (top, match):
            found, top, match = made, score, length
    return found.guess(min(match, tree.depth - len(found.tokens)))


def _cap(tree: SuffixTree, node: int, longest: int, most: int, knobs: Knobs) -> int:
    """The most tokens one of the node's strings may draft. Longer ones may draft more, but leave
    less room below `depth`, so the best length is where both bounds meet."""
    shortest, room = tree.lengths[tree.link[node]] + 1, tree.depth
    meet = int((room - knobs.offset) / (knobs.factor + 1.0))
    cap = 0
    for wanted in (meet, meet + 1):
        size = min(max(wanted, shortest), longest)
        cap = max(cap, int(min(most, knobs.factor * size + knobs.offset + 1e-6, room - size)))
    return cap


def _path(tree: SuffixTree, node: int, length: int, ends: int, cap: int, least: float) -> _Growing:
    followers, counts, best = tree.followers, tree.counts, tree.best
    made = _Growing()
    prob = 1.0
    for at in range(cap):
        token = best[node]
        if token < 0:
            break
        kids, above = followers[node], counts[node]
        prob *= counts[kids[token]] / above
        if prob < least:
            break
        above -= ends
        chance = _chance(counts[kids[token]] / above, above, len(kids), length)
        made.add(token, at - 1, prob, chance, length)
        node, ends, length = kids[token], 0, length + 1
    return made


def _branches(
    tree: SuffixTree, node: int, length: int, ends: int, cap: int, least: float
) -> _Growing:
    followers, counts, best = tree.followers, tree.counts, tree.best
    made = _Growing()
    heap: list[tuple[float, int, int, int, int, float, int]] = []
    prob, tick = 1.0, 0
    while True:
        above, kids = counts[node], followers[node]
        if kids and prob * counts[kids[best[node]]] / above >= least:
            parent, sure = len(made.tokens) - 1, _chance(1.0, above - ends, len(kids), length)
            for token, child in kids.items():
                if (each := prob * counts[child] / above) >= least:
                    tick += 1
                    chance = sure * counts[child] / (above - ends)
                    heappush(heap, (-each, tick, token, child, parent, chance, length))
        if not heap:
            return made
        minus_prob, _, token, node, parent, chance, length = heappop(heap)
        prob, ends = -minus_prob, 0
        made.add(token, parent, prob, chance, length)
        if len(made.tokens) >= cap:
            return made
        length += 1


# -- BLEND -----------------------------------------------------------------------------------------


def blend(tree: SuffixTree, start: Match, own: int, most: int, depth: int, knobs: Knobs) -> Guess:
    """The likeliest paths, by what followed the text's (and the draft's) suffixes of all lengths.

    At most `most` tokens, none deeper than `depth`. Probabilities are estimates of what is kept:
    the text's own end isn't among the occurrences (unlike the published scale).
    """
    made = _Growing()
    heap: list[tuple[float, int, int, int, int, int, int, float, int]] = []
    prob, tick, level, match = 1.0, 0, 0, 0
    node, size = start
    while True:
        if level < depth:
            parent = len(made.tokens) - 1
            for token, child, chance, length in _followers(
                tree, node, size, own, knobs.least / prob
            ):
                tick += 1
                match = match or length
                each = -prob * chance
                heappush(
                    heap, (each, tick, token, child, length + 1, level + 1, parent, chance, length)
                )
        if not heap or len(made.tokens) >= most:
            return made.guess(match)
        minus_prob, _, token, node, size, level, parent, chance, length = heappop(heap)
        prob, own = -minus_prob, 0
        made.add(token, parent, prob, chance, length)
        if size >= tree.depth:
            size = tree.depth - 1
            node = tree.suffix(node, size)


def _followers(
    tree: SuffixTree, node: int, size: int, own: int, least: float
) -> Iterable[tuple[int, int, float, int]]:
    """``(token, node, chance, length)`` of what followed the suffixes of a string, each token after
    the longest suffix it followed, where its chance is `least` or more."""
    counts, best = tree.counts, tree.best
    found: list[tuple[int, int, float, int]] = []
    seen: set[int] = set()
    left = 1.0
    while node > 0 and left >= least:
        kids = tree.followers[node]
        if kids:
            length = min(tree.lengths[node], size)
            occurrences = counts[node] - (1 if length <= own else 0)
            doubt = _doubt(occurrences, len(kids), length)
            each = left * (1.0 - doubt) / occurrences
            first = best[node]
            if first in seen or each * counts[kids[first]] >= least:
                few = kids.items() if len(kids) <= FAN else ((first, kids[first]),)
                for token, child in few:
                    chance = each * counts[child]
                    if chance >= least and token not in seen:
                        seen.add(token)
                        found.append((token, child, chance, length))
            left *= doubt
        node = tree.link[node]
    return found

"""The suffix tree against a trie written out, and its guesses against slow ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from hasten.drafters import suffix_guess
from hasten.drafters.suffix_guess import Guess, Knobs, blend, branches, path
from hasten.drafters.suffix_tree import ROOT, SuffixTree, TextEnd

Text = tuple[int, ...]


class Trie:
    """All strings of at most `depth` tokens of some texts, written out."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.count: Counter[Text] = Counter()
        self.latest: dict[Text, int] = {}
        self.followers: dict[Text, set[int]] = {}

    def append(self, text: list[int], tokens: Sequence[int]) -> None:
        for token in tokens:
            text.append(token)
            now = len(self.latest) + sum(self.count.values())
            for length in range(1, min(self.depth, len(text)) + 1):
                string = tuple(text[-length:])
                self.count[string] += 1
                self.latest[string] = now
                self.followers.setdefault(string[:-1], set()).add(token)

    def next(self, string: Text) -> list[int]:
        """What followed, the most frequent first, of equals the latest."""
        return sorted(
            self.followers.get(string, ()),
            key=lambda t: (self.count[(*string, t)], self.latest[(*string, t)]),
            reverse=True,
        )


Probs = list[float]


def slow_path(trie: Trie, string: Text, cap: int, least: float) -> tuple[list[int], Probs]:
    """PATH as the specification words it."""
    tokens: list[int] = []
    probs: Probs = []
    prob = 1.0
    while len(tokens) < cap and len(string) < trie.depth and trie.next(string):
        token = trie.next(string)[0]
        prob *= trie.count[(*string, token)] / trie.count[string]
        if prob < least:
            break
        tokens.append(token)
        probs.append(prob)
        string = (*string, token)
    return tokens, probs


def slow_tree(trie: Trie, string: Text, cap: int, least: float) -> tuple[list[int], Probs]:
    """TREE: again and again the likeliest node whose parent is in."""
    tokens: list[int] = []
    probs: Probs = []
    kept = {string: 1.0}
    while len(tokens) < cap:
        offered = {
            (*at, token): prob * trie.count[(*at, token)] / trie.count[at]
            for at, prob in kept.items()
            for token in trie.next(at)
        }
        likely = {s: p for s, p in offered.items() if p >= least and s not in kept}
        if not likely:
            break
        best = max(likely, key=lambda s: likely[s])
        kept[best] = likely[best]
        tokens.append(best[-1])
        probs.append(likely[best])
    return tokens, probs


Slow = Callable[[Trie, Text, int, float], tuple[list[int], Probs]]


def slow_guess(trie: Trie, text: Sequence[int], most: int, knobs: Knobs, grow: Slow) -> Guess:
    """The published choice among all match lengths."""
    context = text[-trie.depth :]
    found = Guess()
    for length in range(1, len(context)):
        string = tuple(context[-length:])
        if not trie.count[string]:
            break
        cap = max(0, min(most, int(knobs.factor * length + knobs.offset + 1e-6)))
        tokens, probs = grow(trie, string, cap, knobs.least)
        if sum(probs) >= found.score:
            found = Guess(tuple(tokens), (), tuple(probs), match=length, score=sum(probs))
    return found


def some_texts(seed: int, depth: int) -> tuple[SuffixTree, Trie, list[TextEnd], list[list[int]]]:
    """One to three texts grown in turns, full of repeats, in a tree and in a trie."""
    rng = random.Random(seed)
    alphabet = rng.choice([1, 2, 3, 6])
    ends = [TextEnd() for _ in range(rng.choice([1, 1, 2, 3]))]
    texts: list[list[int]] = [[] for _ in ends]
    tree, trie = SuffixTree(depth), Trie(depth)
    for _ in range(rng.randint(1, 14)):
        which = rng.randrange(len(ends))
        text = texts[which]
        if rng.random() < 0.4 and len(text) > 4:
            at = rng.randrange(len(text) - 3)
            chunk = text[at : at + rng.randint(2, 12)]
        else:
            chunk = [rng.randrange(alphabet) for _ in range(rng.randint(1, 5))]
        tree.append(ends[which], chunk)
        trie.append(text, chunk)
    return tree, trie, ends, texts


def grown(text: Sequence[int], depth: int = 64) -> tuple[SuffixTree, TextEnd]:
    tree, end = SuffixTree(depth), TextEnd()
    tree.append(end, text)
    return tree, end


@pytest.mark.parametrize("depth", [1, 2, 3, 7, 64])
def test_counts_are_those_of_a_trie_written_out(depth: int) -> None:
    for seed in range(30):
        tree, trie, _, texts = some_texts(seed, depth)
        for string, count in trie.count.items():
            assert tree.count(string) == count
        rng = random.Random(seed)
        for _ in range(20):
            string = tuple(rng.randrange(6) for _ in range(rng.randint(1, depth)))[:8]
            assert tree.count(string) == trie.count[string]
        assert len(tree) <= 2 * sum(map(len, texts))


@pytest.mark.parametrize("depth", [2, 3, 7, 64])
def test_the_end_of_a_text_is_found_without_a_walk(depth: int) -> None:
    for seed in range(40):
        tree, _, ends, texts = some_texts(seed, depth)
        for end, text in zip(ends, texts, strict=True):
            assert tree.match(end) == tree.find(text)
            assert end.length == len(text)


@pytest.mark.parametrize(("factor", "offset"), [(1.0, 0.0), (0.5, 2.0), (2.0, -1.0), (100.0, 0.0)])
@pytest.mark.parametrize("depth", [2, 3, 9, 64])
def test_path_is_the_published_one(depth: int, factor: float, offset: float) -> None:
    knobs = Knobs(factor, offset, 0.1)
    drafted = 0
    for seed in range(40):
        tree, trie, ends, texts = some_texts(seed, depth)
        for end, text in zip(ends, texts, strict=True):
            got = path(tree, tree.match(end), end.length, 12, knobs)
            want = slow_guess(trie, text, 12, knobs, slow_path)
            assert (got.tokens, got.probs) == (want.tokens, want.probs)
            assert got.score == pytest.approx(want.score)
            assert got.match == (want.match if got.tokens else 0)
            assert got.parents == tuple(range(-1, len(got.tokens) - 1))
            drafted += len(got.tokens)
    assert drafted > 50


def test_the_tree_is_the_published_one() -> None:
    knobs = Knobs(3.0, 0.0, 0.1)
    branching = 0
    for seed in range(60):
        tree, trie, ends, texts = some_texts(seed, 64)
        for end, text in zip(ends, texts, strict=True):
            if len(text) > 50:
                continue  # so that depth never matters: it bounds nodes here, levels there
            got = branches(tree, tree.match(end), end.length, 8, knobs)
            want = slow_guess(trie, text, 8, knobs, slow_tree)
            assert got.probs == pytest.approx(want.probs)
            assert got.match == (want.match if got.tokens else 0)
            branching += got.parents != tuple(range(-1, len(got.tokens) - 1))
            for token, parent, prob in zip(got.tokens, got.parents, got.probs, strict=True):
                string = path_to(got, parent, text[len(text) - got.match :])
                assert trie.count[(*string, token)] > 0
                above = got.probs[parent] if parent >= 0 else 1.0
                share = trie.count[(*string, token)] / trie.count[tuple(string)]
                assert prob == pytest.approx(above * share)
    assert branching > 10


def path_to(guess: Guess, node: int, start: Sequence[int]) -> list[int]:
    """The tokens before a child of `node`."""
    tail: list[int] = []
    while node >= 0:
        tail.append(guess.tokens[node])
        node = guess.parents[node]
    return [*start, *tail[::-1]]


def slow_blend(trie: Trie, text: Sequence[int], most: int, depth: int, least: float) -> list[Text]:
    """BLEND from counts alone, for a single text: the drafted paths with their probabilities."""
    drafted: list[tuple[float, Text]] = []
    waiting: list[tuple[float, int, Text]] = []
    at: tuple[float, Text] = (1.0, ())
    while True:
        if len(at[1]) < depth:
            string = (*text, *at[1])
            for token, chance in slow_followers(trie, string, not at[1], least / at[0]).items():
                waiting.append((-at[0] * chance, len(waiting) + len(drafted), (*at[1], token)))
        if not waiting or len(drafted) >= most:
            return [each for _, each in drafted]
        best = min(waiting)
        waiting.remove(best)
        at = (-best[0], best[2])
        drafted.append(at)


def slow_followers(trie: Trie, string: Text, end: bool, least: float) -> dict[int, float]:
    found: dict[int, float] = {}
    left, before = 1.0, -1
    for length in range(min(trie.depth, len(string)) - 1, 0, -1):
        suffix = string[-length:]
        kids = trie.next(suffix)
        if not kids or trie.count[suffix] == before or left < least:
            continue  # the same occurrences as the longer suffix
        before = trie.count[suffix]
        seen = trie.count[suffix] - end
        doubt = len(kids) / ((seen + len(kids)) * (1 + suffix_guess.TRUST * (length - 1)))
        for token in kids:
            chance = left * (1 - doubt) * trie.count[(*suffix, token)] / seen
            if token not in found and chance >= least:
                found[token] = chance
        left *= doubt
    return found


def all_paths(guess: Guess) -> list[Text]:
    return [tuple(path_to(guess, n, ())) for n in range(len(guess.tokens))]


@pytest.mark.parametrize("depth", [3, 64])
def test_blend_is_what_the_counts_of_all_suffixes_say(depth: int) -> None:
    drafted = 0
    for seed in range(60):
        rng = random.Random(seed)
        text = [rng.randrange(rng.choice([2, 3, 6])) for _ in range(rng.randint(2, 40))]
        tree, end = grown(text, depth)
        trie = Trie(depth)
        trie.append([], text)
        got = blend(tree, tree.match(end), end.length, 10, 6, Knobs(least=0.05))
        want = slow_blend(trie, text, 10, 6, 0.05)
        # Of equally likely paths either may come first, and the last of them may miss out.
        worst = min(got.probs, default=0.0) * (1 + 1e-9)
        sure = {p for p, prob in zip(all_paths(got), got.probs, strict=True) if prob > worst}
        assert sure <= set(want)
        assert len(got.tokens) == len(want)
        assert list(got.probs) == sorted(got.probs, reverse=True)
        drafted += len(want)
    assert drafted > 200


def test_a_text_seen_once_before_scores_half_its_length() -> None:
    tree, end = grown([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3])
    guess = path(tree, tree.match(end), end.length, 31, Knobs())
    assert guess == Guess(
        (4, 5, 6), (-1, 0, 1), (0.5,) * 3, guess.chances, (3, 4, 5), match=3, score=1.5
    )
    tree.append(end, [4, 5, 6, 7, 8, 9, 1, 2, 3])  # twice before: 2 of 3
    assert path(tree, tree.match(end), end.length, 3, Knobs()).score == pytest.approx(2.0)


def test_chances_leave_the_texts_own_end_out() -> None:
    tree, end = grown([7, 1, 8, 7, 1, 9, 7])
    guess = path(tree, tree.match(end), end.length, 1, Knobs())
    assert guess.probs == (2 / 3,)
    assert guess.chances == (2 / 2 * (1 - 1 / 3),)


def test_the_longest_match_wins_among_equals() -> None:
    # 2 3 was always followed by 4, after 1 too: the match is 1 2 3, not 2 3.
    tree, end = grown([1, 2, 3, 4, 1, 2, 3])
    assert path(tree, tree.match(end), end.length, 1, Knobs()).match == 3


def test_a_match_and_its_draft_fit_the_depth_together() -> None:
    text = list(range(60)) * 2
    for depth, drafted in ((64, 32), (16, 8), (100, 40)):
        tree, end = grown(text, depth)
        guess = path(tree, tree.match(end), end.length, 40, Knobs())
        assert len(guess.tokens) == drafted
        assert guess.match == (60 if depth == 100 else depth - drafted)
        assert guess.tokens == tuple(range(drafted))


def test_blend_goes_on_beyond_the_depth() -> None:
    text = list(range(60)) * 2
    tree, end = grown(text, 16)
    guess = blend(tree, tree.match(end), end.length, 31, 31, Knobs(least=0.001))
    assert guess.tokens == tuple(range(31))


def test_of_many_kinds_of_followers_blend_looks_at_the_best() -> None:
    rare = [t for i in range(suffix_guess.FAN) for t in (7, 1000 + i)]
    for common, kinds in ((rare[4:], 2), (rare[2:], 1)):
        text = common + [7, 8] * 70 + [7, 9] * 50 + [5, 7]
        tree, end = grown(text)
        guess = blend(tree, tree.match(end), end.length, 31, 1, Knobs(least=0.05))
        assert guess.tokens == (8, 9)[:kinds]


def test_a_copy_and_its_origin_do_not_notice_each_other() -> None:
    tree, end = grown([1, 2, 3, 1])
    other = tree.copy()
    tree.append(end, [5])
    other_end = TextEnd()
    other.append(other_end, [2, 9])
    assert (tree.count([1, 5]), other.count([1, 5])) == (1, 0)
    assert (tree.count([2, 9]), other.count([2, 9])) == (0, 1)


def test_an_empty_tree_finds_nothing() -> None:
    tree, end = SuffixTree(), TextEnd()
    assert tree.match(end) == (ROOT, 0) == tree.find([1, 2, 3])
    for grow in (path, branches):
        assert grow(tree, (ROOT, 0), 0, 31, Knobs()) == Guess()
    assert blend(tree, (ROOT, 0), 0, 31, 31, Knobs()) == Guess()


class Counting(list[int]):
    """Counts reads of the tree's counts: a measure of work."""

    reads = 0

    def __getitem__(self, at: int) -> int:  # type: ignore[override]
        self.reads += 1
        return super().__getitem__(at)


HARD = {
    "one token": [7] * 4000,
    "hub": [t for i in range(2000) for t in (0, 5 + i)] + [0],
    "cycle of ten": list(range(10)) * 400,
    "random": [random.Random(3).randrange(40) for _ in range(4000)],
    "a copy": [random.Random(4).randrange(9) for _ in range(2000)] * 2,
}


@pytest.mark.parametrize("name", HARD)
def test_hard_texts_cost_a_bounded_number_of_steps(name: str) -> None:
    text = HARD[name]
    tree, end = grown(text)
    assert len(tree) <= 2 * len(text)
    tree.counts = Counting(tree.counts)
    tree.append(end, text[:32])
    assert tree.counts.reads < 32 * 200
    for grow in (path, branches):
        tree.counts.reads = 0
        grow(tree, tree.match(end), end.length, 31, Knobs())
        assert tree.counts.reads < 3000
    tree.counts.reads = 0
    blend(tree, tree.match(end), end.length, 31, 31, Knobs(least=0.05))
    assert tree.counts.reads < 3000

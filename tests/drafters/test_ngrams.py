"""The n-gram store counts exactly, finds what it should, and stays small and quick."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from hasten.drafters import ngrams
from hasten.drafters.ngrams import FAN, WORK, Cursor, NGramStore


def _store(text: Sequence[int], n: int = 5, capacity: int = 100_000) -> tuple[NGramStore, Cursor]:
    store, cursor = NGramStore(n, capacity), Cursor()
    store.push(cursor, text)
    return store, cursor


def _text(seed: int, length: int, alphabet: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(alphabet) for _ in range(length)]


def _windows(text: Sequence[int], n: int) -> Counter[tuple[int, ...]]:
    """Every substring up to length n, counted by brute force."""
    return Counter(
        tuple(text[i : i + size]) for size in range(1, n + 1) for i in range(len(text) - size + 1)
    )


def _occurrences(text: Sequence[int], part: Sequence[int]) -> int:
    size = len(part)
    return sum(list(text[i : i + size]) == list(part) for i in range(len(text) - size + 1))


TEXTS = [
    *(pytest.param(_text(seed, 120, 4), id=f"random-{seed}") for seed in range(4)),
    pytest.param(_text(9, 300, 40), id="wide"),
    pytest.param([7] * 60, id="one token"),
    pytest.param([1, 2, 3] * 30, id="cycle"),
    pytest.param([3, 1, 2], id="shorter than n"),
    pytest.param([5], id="one"),
]


@pytest.mark.parametrize("n", [1, 2, 5, 10])
@pytest.mark.parametrize("text", TEXTS)
def test_counts_equal_those_of_every_window(text: list[int], n: int) -> None:
    store, _ = _store(text, n)
    expected = _windows(text, n)
    assert {path: store.count(path) for path in expected} == dict(expected)
    assert len(store) == len(expected)
    assert store.count([99]) == 0


@pytest.mark.parametrize("text", TEXTS)
def test_pushing_in_pieces_counts_the_same(text: list[int]) -> None:
    rng = random.Random(1)
    store, cursor, at = NGramStore(5, 100_000), Cursor(), 0
    while at < len(text):
        size = rng.randrange(0, 8)
        store.push(cursor, text[at : at + size])
        at += size
    whole, _ = _store(text)
    assert len(store) == len(whole)
    assert all(store.count(path) == count for path, count in _windows(text, 5).items())


@pytest.mark.parametrize("text", TEXTS)
def test_borders_equal_a_suffix_search(text: list[int]) -> None:
    for end in range(1, len(text) + 1):
        part = text[:end]
        store, cursor = _store(part)
        expected = [
            size
            for size in range(min(4, end - 1), 0, -1)
            if _occurrences(part[:-1], part[-size:]) > 0
        ]
        assert store.borders(cursor) == expected
        if end > 40:
            break


def test_borders_are_found_in_both_generations() -> None:
    text = _text(3, 40, 30)
    store, cursor = _store(text, n=5, capacity=len(_windows(text, 5)) * 2 - 100)
    assert len(store._old.count) > 1
    store.push(cursor, text[:6])
    assert store.borders(cursor)[0] == 4
    first = store.continuations(cursor, 1, decay=0.5)
    assert [c[1] for c in first] == [text[6]]


@pytest.mark.parametrize("capacity", [24, 60, 500])
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(_text(1, 2000, 5), id="random"),
        pytest.param(_text(2, 2000, 1000), id="wide"),
        pytest.param([7] * 2000, id="one token"),
        pytest.param([token for i in range(1000) for token in (0, i)], id="hub"),
    ],
)
def test_the_capacity_is_never_exceeded(text: list[int], capacity: int) -> None:
    store, cursor = NGramStore(10, capacity), Cursor()
    for token in text:
        store.push(cursor, [token])
        assert len(store) <= capacity
        for trie in (store._young, store._old):
            assert len(trie.children) == len(trie.token) == len(trie.stamp) == len(trie.count)


@pytest.mark.parametrize("text", TEXTS)
def test_no_count_exceeds_that_of_its_parent_and_all_nodes_are_reachable(text: list[int]) -> None:
    store, _ = _store(text, 5, capacity=200)
    for trie in (store._young, store._old):
        reached, queue = 0, [0]
        while queue:
            node = queue.pop()
            for token, child in (trie.children[node] or {}).items():
                assert trie.token[child] == token
                assert node == 0 or 0 < trie.count[child] <= trie.count[node]
                reached += 1
                queue.append(child)
        assert reached == len(trie.count) - 1


def _brute_force(text: Sequence[int], border: int, n: int) -> list[tuple[int, int]]:
    """(count, depth) of every path after the earlier occurrences of the text's last tokens."""
    suffix = list(text[-border:])
    paths: Counter[tuple[int, ...]] = Counter()
    for i in range(len(text) - border):
        if list(text[i : i + border]) == suffix:
            for size in range(1, n - border + 1):
                if i + border + size <= len(text):
                    paths[tuple(text[i + border : i + border + size])] += 1
    return sorted(((c, len(p)) for p, c in paths.items()), key=lambda x: (-x[0], x[1]))


@pytest.mark.parametrize("limit", [1, 3, 8, 30])
@pytest.mark.parametrize("seed", range(6))
def test_best_first_is_the_brute_force_top_by_count_then_depth(seed: int, limit: int) -> None:
    text = _text(seed, 400, 3)
    n = 8
    store, cursor = _store(text, n)
    longest = store.borders(cursor)[0]
    got = store.continuations(cursor, limit, min_match=longest)
    paths: list[list[int]] = []
    for parent, token, share, length in got:
        assert parent < len(paths)
        assert 0 < share <= 1
        assert length == longest
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    counts = [(store.count([*text[-longest:], *path]), len(path)) for path in paths]
    assert counts == _brute_force(text, longest, n)[:limit]


@pytest.mark.parametrize("decay", [None, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_borders_are_fused_and_scored_as_they_say(seed: int, decay: float | None) -> None:
    """Against every path of every border, scored one by one."""
    text, n, limit = _text(seed, 300, 4), 6, 12
    store, cursor = _store(text, n)
    borders = store.borders(cursor)
    scores: dict[tuple[int, ...], float] = {}
    for border in borders:
        followed = _occurrences(text[:-1], text[-border:])
        weight = 1.0 if decay is None else decay ** (borders[0] - border) / followed
        starts = [i for i in range(len(text) - border) if text[i : i + border] == text[-border:]]
        paths = Counter(
            tuple(text[i + border : i + border + size])
            for i in starts
            for size in range(1, n - border + 1)
            if i + border + size <= len(text)
        )
        for path, count in paths.items():
            scores[path] = max(scores.get(path, 0.0), count * weight)
    # Equal but for rounding is equal.
    best = sorted((-round(score, 12), len(path)) for path, score in scores.items())[:limit]
    made: list[tuple[int, ...]] = []
    for parent, token, _, _ in store.continuations(cursor, limit, decay=decay):
        made.append((*(made[parent] if parent >= 0 else ()), token))
    assert len(set(made)) == len(made) == limit
    assert [scores[p] for p in made] == pytest.approx([-score for score, _ in best])
    assert [len(p) for p in made] == [depth for _, depth in best]


def test_the_longest_border_comes_first_where_borders_are_weighed() -> None:
    text = [1, 2, 9] * 5 + [5, 1, 2, 3] + [5, 1, 2]
    store, cursor = _store(text)
    assert store.continuations(cursor, 1)[0][1] == 9  # the paper's order: five times after "1 2"
    assert store.continuations(cursor, 1, decay=0.5)[0][1] == 3


def test_among_equals_the_latest_comes_first() -> None:
    store, cursor = _store([1, 4, 8, 1, 5, 8, 1, 3, 8, 1])
    assert [c[1] for c in store.continuations(cursor, 3)] == [3, 5, 4]


def test_shares_add_up_over_both_generations() -> None:
    store, cursor = NGramStore(3, 100_000), Cursor()
    store.push(cursor, [1, 4, 1, 4, 1, 5])
    store._old, store._young = store._young, store._old  # a change of generation
    store.push(cursor, [1, 4, 1, 6, 1])
    found = {token: share for _, token, share, _ in store.continuations(cursor, 9) if token != 1}
    assert found == pytest.approx({4: 3 / 5, 5: 1 / 5, 6: 1 / 5})


@pytest.mark.parametrize("seed", range(3))
def test_of_a_crowd_of_followers_the_most_frequent_are_kept(seed: int) -> None:
    rng = random.Random(seed)
    weights = [1 / (1 + i) for i in range(2000)]
    followers = rng.choices(range(100, 2100), weights, k=4000)
    text = [token for follower in followers for token in (7, follower)] + [7]
    store, cursor = _store(text, n=2, capacity=1_000_000)
    last = {token: i for i, token in enumerate(followers)}
    best = sorted(set(followers), key=lambda t: (-followers.count(t), -last[t]))[:FAN]
    assert [c[1] for c in store.continuations(cursor, FAN)] == best


def _looked_at(monkeypatch: pytest.MonkeyPatch, text: Sequence[int], limit: int) -> int:
    """Trie nodes a search looks at after `text`, at its worst over the last tokens."""
    seen = 0
    original = ngrams._children

    def counting(group: list[ngrams._Entry]) -> list[list[ngrams._Entry]]:
        nonlocal seen
        found = list(original(group))
        seen += sum(map(len, found))
        return found

    monkeypatch.setattr(ngrams, "_children", counting)
    store, cursor = NGramStore(10, 100_000), Cursor()
    store.push(cursor, text[:-20])
    worst = 0
    for token in text[-20:]:
        store.push(cursor, [token])
        seen = 0
        store.continuations(cursor, limit, decay=0.5)
        worst = max(worst, seen)
    return worst


@pytest.mark.parametrize("limit", [8, 24])
@pytest.mark.parametrize(
    "text",
    [
        pytest.param([7] * 4000, id="one token"),
        pytest.param([token for i in range(3000) for token in (0, 5 + i)] + [0], id="hub"),
        pytest.param(list(range(10)) * 400, id="cycle of ten"),
        pytest.param(_text(5, 6000, 2), id="two tokens"),
        pytest.param([0 if i % 3 else 5 + i * i % 977 for i in range(6000)], id="hub of pairs"),
    ],
)
def test_a_search_looks_at_a_bounded_number_of_nodes(
    monkeypatch: pytest.MonkeyPatch, text: list[int], limit: int
) -> None:
    # The last expansion may overshoot: FAN children in each generation of each border.
    assert _looked_at(monkeypatch, text, limit) <= WORK * limit + 2 * FAN * 9


def test_texts_do_not_run_into_each_other() -> None:
    one, two = _text(1, 50, 3), _text(2, 50, 3)
    store, first, second = NGramStore(4, 100_000), Cursor(), Cursor()
    for a, b in zip(one, two, strict=True):
        store.push(first, [a])
        store.push(second, [b])
    expected = _windows(one, 4) + _windows(two, 4)
    assert all(store.count(path) == count for path, count in expected.items())
    assert len(store) == len(expected)


def test_a_reset_forgets_everything_and_texts_under_way_go_on() -> None:
    store, cursor = _store([1, 2, 3, 1, 2])
    store.reset()
    assert len(store) == 0
    assert store.borders(cursor) == []
    assert store.continuations(cursor, 5) == []
    store.push(cursor, [4, 5, 4])
    assert store.count([2, 4]) == 0
    assert [c[1] for c in store.continuations(cursor, 5)] == [5, 4]


def test_a_fork_and_its_origin_do_not_notice_each_other() -> None:
    text = [token for i in range(60) for token in (0, 5 + i % 50)]
    store, cursor = _store(text)
    other, theirs = store.fork(), Cursor()
    before = {path: store.count(path) for path in _windows(text, 5)}
    other.push(theirs, [0, 77] * 40)
    assert {path: store.count(path) for path in before} == before
    assert store.count([0, 77]) == 0
    assert other.count([0, 77]) == 40
    store.push(cursor, [88, 88])
    assert other.count([88]) == 0
    assert [c[1] for c in other.continuations(theirs, 1, min_match=2)] == [0]


def test_an_empty_store_and_an_empty_push_are_fine() -> None:
    store, cursor = NGramStore(5, 1000), Cursor()
    store.push(cursor, [])
    assert store.borders(cursor) == []
    assert store.continuations(cursor, 4) == []
    store.push(cursor, [3])
    assert store.continuations(cursor, 4) == []
    assert store.continuations(cursor, 0) == []

"""Blocks, forks and pending rows, with the token ids themselves stored as keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hasten.errors import CacheStateError
from hasten.targets.cache import CachedSequence, KVStore
from hasten.targets.pending import Pending

LAYERS = 2
LIMIT = 1000


@pytest.fixture
def store() -> KVStore:
    return KVStore(
        layers=LAYERS,
        kv_heads=1,
        width=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        limit=LIMIT,
        copy_below=0,
    )


def write(sequence: CachedSequence, first: int, values: Sequence[int]) -> None:
    """Puts `values` into the tail's slots from `first` on."""
    assert sequence.tail is not None
    marks = torch.tensor(list(values), dtype=torch.float32).view(1, 1, -1, 1)
    sequence.tail.kv[:, :, first : first + len(values)] = marks


def append(sequence: CachedSequence, values: Sequence[int]) -> None:
    """Commits tokens as a prefill does."""
    sequence.reserve(len(values))
    write(sequence, sequence.tail_length, values)
    sequence.append(len(values))


def pend(sequence: CachedSequence, values: Sequence[int], parents: Sequence[int]) -> None:
    """Makes rows pending as a full pass does."""
    rows, _ = sequence.pending_rows.admit(values, parents, (0, LAYERS))
    sequence.add(values, parents)
    write(sequence, sequence.tail_length + rows[0], values)
    sequence.pending_rows.advance(rows, LAYERS, None)


def stored(sequence: CachedSequence) -> list[int]:
    """The committed tokens as the cache holds them, the same in every layer and head."""
    parts = [(s.block.kv, s.length) for s in sequence.segments]
    if sequence.tail is not None:
        parts.append((sequence.tail.kv, sequence.tail_length))
    out: list[int] = []
    for kv, length in parts:
        cut = kv[:, :, :length]
        assert torch.equal(cut, cut[:1, :1, :, :1].expand_as(cut))
        out += [int(value) for value in cut[0, 0, :, 0]]
    return out


def test_growth_keeps_what_was_stored_and_copies_seldom(store: KVStore) -> None:
    sequence, buffers = store.open(), set()
    for token in range(900):
        append(sequence, [token])
        assert sequence.tail is not None
        buffers.add(sequence.tail.kv.data_ptr())
    assert stored(sequence) == list(range(900))
    assert len(buffers) <= 6


def test_growth_stops_at_the_context_limit(store: KVStore) -> None:
    sequence = store.open()
    append(sequence, range(600))
    append(sequence, range(600, LIMIT))
    assert sequence.tail is not None
    assert LIMIT <= sequence.tail.capacity < LIMIT + 64


def test_fork_shares_its_parents_block(store: KVStore) -> None:
    parent = store.open()
    append(parent, range(500))
    alone = store.bytes_in_use
    forks = [store.open(parent) for _ in range(8)]
    assert store.bytes_in_use == alone
    assert parent.tail is not None
    pointer = parent.tail.kv.data_ptr()
    assert all(fork.segments[0].block.kv.data_ptr() == pointer for fork in forks)
    for i, fork in enumerate(forks):
        append(fork, [1000 + i])
    assert store.bytes_in_use < 2.5 * alone
    for i, fork in enumerate(forks):
        assert stored(fork) == [*range(500), 1000 + i]
    store.check()


def test_parent_and_fork_go_on_independently(store: KVStore) -> None:
    parent = store.open()
    append(parent, range(10))
    child = store.open(parent, 7)
    append(parent, [90, 91])
    append(child, [80])
    assert stored(parent) == [*range(10), 90, 91]
    assert stored(child) == [*range(7), 80]
    store.check()


def test_truncated_parent_does_not_overwrite_what_a_fork_reads(store: KVStore) -> None:
    parent = store.open()
    append(parent, range(10))
    child = store.open(parent, 8)
    parent.truncate(4)
    append(parent, [90, 91, 92, 93, 94])
    assert stored(child) == list(range(8))
    assert stored(parent) == [0, 1, 2, 3, 90, 91, 92, 93, 94]
    store.check()


def test_parent_truncated_above_the_fork_goes_on_in_place(store: KVStore) -> None:
    parent = store.open()
    append(parent, range(10))
    child = store.open(parent, 5)
    parent.truncate(6)
    append(parent, [90])
    assert parent.segments == []
    assert stored(child) == list(range(5))
    assert stored(parent) == [*range(6), 90]


def test_truncate_to_nothing_gives_the_memory_back(store: KVStore) -> None:
    sequence = store.open()
    append(sequence, range(10))
    child = store.open(sequence)
    sequence.truncate(0)
    child.truncate(0)
    assert stored(sequence) == stored(child) == []
    append(child, [5])
    assert stored(child) == [5]
    store.check()


def test_truncate_within_the_prefix_of_a_fork_of_a_fork(store: KVStore) -> None:
    first = store.open()
    append(first, range(10))
    second = store.open(first)
    append(second, range(10, 20))
    third = store.open(second, 15)
    append(third, [30])
    third.truncate(12)
    append(third, [40])
    third.truncate(3)
    append(third, [50])
    assert stored(first) == list(range(10))
    assert stored(second) == list(range(20))
    assert stored(third) == [0, 1, 2, 50]
    store.check()


def test_fork_grown_parent_still_serves_the_fork(store: KVStore) -> None:
    parent = store.open()
    append(parent, range(60))
    child = store.open(parent)
    append(parent, range(60, 300))
    assert stored(child) == list(range(60))
    assert stored(parent) == list(range(300))


def test_closing_frees_each_block_with_its_last_user(store: KVStore) -> None:
    parent = store.open()
    append(parent, range(100))
    child = store.open(parent)
    append(child, [1])
    whole = store.bytes_in_use
    parent.close()
    assert store.bytes_in_use == whole
    assert stored(child) == [*range(100), 1]
    parent.close()
    store.check()
    child.close()
    assert store.bytes_in_use == 0


def test_a_forgotten_sequence_gives_its_memory_back(store: KVStore) -> None:
    sequence = store.open()
    append(sequence, range(100))
    child = store.open(sequence)
    del sequence
    store.check()
    child.close()
    assert store.bytes_in_use == 0


def test_fork_adopts_the_block_of_a_closed_parent(store: KVStore) -> None:
    parent = store.open()
    append(parent, range(20))
    child = store.open(parent, 12)
    parent.close()
    append(child, [90])
    assert child.segments == []
    assert stored(child) == [*range(12), 90]
    store.check()


def test_fork_copies_a_short_last_piece_only(store: KVStore) -> None:
    store.copy_below = 64
    parent = store.open()
    append(parent, range(100))
    short, long = store.open(parent, 63), store.open(parent)
    assert short.segments == []
    assert [s.length for s in long.segments] == [100]
    append(long, [200])
    again = store.open(long)
    assert [s.length for s in again.segments] == [100]
    append(again, [201])
    append(short, [202])
    parent.truncate(0)
    assert stored(again) == [*range(100), 200, 201]
    assert stored(long) == [*range(100), 200]
    assert stored(short) == [*range(63), 202]
    store.check()


def test_commit_gathers_a_scattered_path(store: KVStore) -> None:
    sequence = store.open()
    append(sequence, [1, 2])
    pend(sequence, [10, 11, 12, 13, 14, 15], [-1, 0, 0, 2, 2, 4])
    sequence.commit([0, 2, 4, 5], LAYERS)
    assert stored(sequence) == [1, 2, 10, 12, 14, 15]
    assert sequence.pending == 0
    store.check()


def test_commit_of_leading_rows_copies_nothing(store: KVStore) -> None:
    sequence = store.open()
    append(sequence, [1])
    pend(sequence, [10, 11, 12], [-1, 0, 1])
    assert sequence.tail is not None
    before = sequence.tail.kv.clone()
    sequence.commit([0, 1], LAYERS)
    assert torch.equal(sequence.tail.kv, before)
    assert stored(sequence) == [1, 10, 11]


def test_pending_rows_survive_growth(store: KVStore) -> None:
    sequence = store.open()
    append(sequence, range(60))
    pend(sequence, [90], [-1])
    pend(sequence, range(100, 200), range(100))
    sequence.commit(range(101), LAYERS)
    assert stored(sequence) == [*range(60), 90, *range(100, 200)]


@pytest.mark.parametrize("rows", [[1], [0, 2], [0, 1, 1], [5], [-1], [1, 0]])
def test_commit_refuses_what_is_no_path(store: KVStore, rows: list[int]) -> None:
    sequence = store.open()
    pend(sequence, [10, 11, 12], [-1, 0, 1])
    with pytest.raises(CacheStateError, match="isn't a child"):
        sequence.commit(rows, LAYERS)
    sequence.commit([0, 1, 2], LAYERS)
    assert stored(sequence) == [10, 11, 12]


def test_commit_refuses_rows_that_stopped_below_the_top(store: KVStore) -> None:
    sequence = store.open()
    sequence.add([10], [-1])
    sequence.pending_rows.advance([0], 1, torch.zeros(1, 4))
    with pytest.raises(CacheStateError, match="has passed 1 of 2 layers"):
        sequence.commit([0], LAYERS)


def test_a_closed_sequence_is_refused(store: KVStore) -> None:
    sequence = store.open()
    sequence.close()
    for use in (
        lambda: sequence.truncate(0),
        lambda: sequence.commit([], LAYERS),
        lambda: store.open(sequence),
        sequence.need_open,
    ):
        with pytest.raises(CacheStateError, match="closed"):
            use()


def test_lengths_outside_the_sequence_are_refused(store: KVStore) -> None:
    sequence = store.open()
    append(sequence, [1, 2, 3])
    for length in (-1, 4):
        with pytest.raises(CacheStateError, match="holds 3 tokens"):
            sequence.truncate(length)
        with pytest.raises(CacheStateError, match="holds 3 tokens"):
            store.open(sequence, length)
    with pytest.raises(CacheStateError, match="without a parent"):
        store.open(None, 2)
    with pytest.raises(CacheStateError, match="another target"):
        KVStore(
            layers=1, kv_heads=1, width=2, dtype=torch.float32, device=store.device, limit=8
        ).open(sequence)


def test_check_notices_a_wrong_count(store: KVStore) -> None:
    sequence = store.open()
    append(sequence, [1])
    assert sequence.tail is not None
    sequence.tail.refs += 1
    with pytest.raises(CacheStateError, match="counts 2 users"):
        store.check()
    sequence.tail.refs -= 1
    child = store.open(sequence)
    sequence.tail_length = 0
    with pytest.raises(CacheStateError, match="may overwrite"):
        store.check()
    child.close()


def test_mask_shows_each_row_its_ancestors_only() -> None:
    pending = Pending()
    pending.add([1, 2, 3, 4], [-1, 0, 0, 2])
    mask = pending.mask([0, 1, 2, 3], torch.device("cpu"))
    assert mask is not None
    assert (mask == 0).tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, False, True, False],
        [True, False, True, True],
    ]


def test_mask_is_left_out_for_one_row_that_sees_all() -> None:
    pending, cpu = Pending(), torch.device("cpu")
    pending.add([1], [-1])
    assert pending.mask([0], cpu) is None
    pending.add([2], [0])
    assert pending.mask([1], cpu) is None
    assert pending.mask([0], cpu) is not None
    pending.add([3], [0])
    assert pending.mask([2], cpu) is not None


def test_mask_forgets_dropped_rows() -> None:
    pending, cpu = Pending(), torch.device("cpu")
    pending.add(range(40), range(-1, 39))
    pending.clear()
    pending.add([1, 2], [-1, -1])
    mask = pending.mask([0, 1], cpu)
    assert mask is not None
    assert (mask == 0).tolist() == [[True, False], [False, True]]

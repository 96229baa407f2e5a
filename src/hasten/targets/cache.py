"""The fused target's sequences: keys and values in blocks that sequences share.

A sequence is a list of read-only prefix segments, each the first slots of some block, and one
*tail* block of its own that grows. A fork references its parent's blocks, so N answers to one
prompt hold the prompt once; each goes on in a tail of its own. Blocks are freed when nobody
references them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hasten.errors import CacheStateError
from hasten.targets.pending import Pending

_STEP = 64
"""Block capacities are multiples of this many slots."""

_FEW = 2
"""Rows that are moved one by one, which takes fewer operations than picking them together."""


class Block:
    """Keys and values of consecutive tokens, all layers in one tensor.

    kv      ``(layers, 2 * kv_heads, capacity, width)``: key heads first, then value heads.
    refs    sequences that use the block.
    pinned  slots that a sequence other than the tail's owner may read; meaningless when refs is 1.
    """

    __slots__ = ("kv", "pinned", "refs")

    def __init__(self, kv: torch.Tensor) -> None:
        self.kv = kv
        self.refs = 1
        self.pinned = 0

    @property
    def capacity(self) -> int:
        """Slots the block has room for."""
        return self.kv.shape[2]


@dataclass(slots=True)
class Segment:
    """The first `length` slots of a block, read-only."""

    block: Block
    length: int


class CachedSequence:
    """A sequence of committed tokens and its pending rows; made by `KVStore.open`."""

    __slots__ = (
        "__weakref__",
        "_prefix",
        "closed",
        "pending_rows",
        "segments",
        "store",
        "tail",
        "tail_length",
    )

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self.segments: list[Segment] = []
        self.tail: Block | None = None
        self.tail_length = 0
        self.pending_rows = Pending()
        self.closed = False
        self._prefix = 0

    def __del__(self) -> None:
        self.close()

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._prefix + self.tail_length

    @property
    def pending(self) -> int:
        """Rows that wait for commit."""
        return len(self.pending_rows)

    def need_open(self) -> None:
        """Raise `CacheStateError` when the sequence was closed."""
        if self.closed:
            raise CacheStateError("this sequence was closed: open another one")

    def reserve(self, rows: int) -> Block:
        """The tail, with room for `rows` slots past the committed ones, safe to write there."""
        if self.tail is None:
            self._start_tail(rows)
        tail = self.tail
        assert tail is not None
        need = self.tail_length + rows
        if need > tail.capacity:
            # Doubling amortises the copies; past the context limit only as much as the rows need.
            capacity = max(need, min(2 * tail.capacity, self.store.limit - self._prefix))
            used = self.store.whole(self.tail_length + self.pending)
            grown = self.store.allocate(capacity)
            grown[:, :, :used] = tail.kv[:, :, :used]
            tail.kv = grown
        return tail

    def _start_tail(self, rows: int) -> None:
        last = self.segments[-1] if self.segments else None
        if last is not None and last.block.refs == 1:
            # Nobody else reads the last segment any more: go on in it instead of beside it.
            self.segments.pop()
            self.tail, self.tail_length = last.block, last.length
            self._prefix -= last.length
        else:
            self.tail = Block(self.store.allocate(rows))

    def parts(self, tail_slots: int) -> list[tuple[torch.Tensor, int]]:
        """What a pass attends to: ``(kv, slots)`` of each segment, then of the tail."""
        assert self.tail is not None
        return [*((s.block.kv, s.length) for s in self.segments), (self.tail.kv, tail_slots)]

    def add(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Make these admitted rows pending, with room for their slots."""
        self.reserve(self.pending + len(tokens))
        self.pending_rows.add(tokens, parents)

    def append(self, rows: int) -> None:
        """Count `rows` slots just written past the committed ones as committed."""
        self.tail_length += rows

    def commit(self, rows: Sequence[int], layers: int) -> None:
        """Keep the path `rows` of pending rows, all through `layers` layers; drop the others."""
        self.need_open()
        pending = self.pending_rows
        pending.check_path(rows, layers)
        moved = next((i for i, row in enumerate(rows) if i != row), len(rows))
        if moved < len(rows):
            assert self.tail is not None
            start = self.tail_length
            picked = [start + row for row in rows[moved:]]
            places = range(start + moved, start + len(rows))
            self.store.move(self.tail.kv, picked, places)
        self.append(len(rows))
        pending.clear()

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed tokens; forks that read the rest keep it."""
        self.need_open()
        if not 0 <= length <= self.length:
            raise CacheStateError(f"truncate to {length}: the sequence holds {self.length} tokens")
        self.pending_rows.clear()
        if length < self._prefix:
            self._drop_tail()
            self._clip_segments(length)
            return
        self.tail_length = length - self._prefix
        tail = self.tail
        if tail is not None and tail.refs > 1 and self.tail_length < tail.pinned:
            # Writing on would overwrite slots a fork reads: leave the block to it.
            if self.tail_length:
                self.segments.append(Segment(tail, self.tail_length))
                self._prefix, self.tail, self.tail_length = length, None, 0
            else:
                self._drop_tail()

    def _clip_segments(self, length: int) -> None:
        while self._prefix > length:
            last = self.segments[-1]
            cut = min(self._prefix - length, last.length)
            last.length -= cut
            self._prefix -= cut
            if not last.length:
                self.segments.pop()
                last.block.refs -= 1

    def _drop_tail(self) -> None:
        if self.tail is not None:
            self.tail.refs -= 1
        self.tail, self.tail_length = None, 0

    def share(self, child: CachedSequence, length: int) -> None:
        """Give the empty sequence `child` this one's first `length` committed tokens.

        They aren't copied, but for a short last piece: a part more costs every later pass.
        """
        self.need_open()
        if not 0 <= length <= self.length:
            raise CacheStateError(f"fork at {length}: the sequence holds {self.length} tokens")
        held = list(self.segments)
        if self.tail is not None:
            held.append(Segment(self.tail, self.tail_length))
        for segment in held:
            taken = min(segment.length, length - child.length)
            if 0 < taken < self.store.copy_below and child.length + taken == length:
                child.tail = Block(self.store.allocate(taken))
                whole = self.store.whole(taken)
                child.tail.kv[:, :, :whole] = segment.block.kv[:, :, :whole]
                child.tail_length = taken
            elif taken:
                segment.block.refs += 1
                segment.block.pinned = (
                    max(segment.block.pinned, taken) if segment.block.refs > 2 else taken
                )
                child.segments.append(Segment(segment.block, taken))
                child._prefix += taken

    def close(self) -> None:
        """Give the blocks back; harmless when done before."""
        if not self.closed:
            self.closed = True
            self._drop_tail()
            self._clip_segments(0)
            self.pending_rows.clear()


@torch.inference_mode()
def _move(kv: torch.Tensor, moved: Sequence[int], to: Sequence[int]) -> None:
    if len(moved) <= _FEW:
        for old, new in zip(moved, to, strict=True):
            kv.select(2, new).copy_(kv.select(2, old))
    else:
        picked = kv.index_select(2, torch.tensor(list(moved), device=kv.device))
        kv[:, :, to[0] : to[-1] + 1] = picked


class KVStore:
    """All sequences of one target.

    width       numbers that a slot of one head takes
    limit       the most tokens a sequence may hold
    copy_below  a fork copies a last piece of fewer tokens than this, and shares all others
    tile        slots that lie interleaved in a block's keys: they are copied together
    move        copies slots of a block's tensor, one after another: ``to[i]`` gets what
                ``moved[i]`` held; slots only move down, past those already moved

    Tensors have the dtype and device given.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        limit: int,
        copy_below: int = _STEP,
        tile: int = 1,
        move: Callable[[torch.Tensor, Sequence[int], Sequence[int]], None] | None = None,
    ) -> None:
        self.layers, self.kv_heads, self.width = layers, kv_heads, width
        self.dtype, self.device, self.limit = dtype, device, limit
        self.copy_below, self.tile = copy_below, tile
        self.move = move or _move
        self._open: weakref.WeakSet[CachedSequence] = weakref.WeakSet()

    def whole(self, slots: int) -> int:
        """`slots`, rounded up to whole tiles."""
        return -(-slots // self.tile) * self.tile

    def allocate(self, slots: int) -> torch.Tensor:
        """A block's tensor with room for at least `slots` slots.

        Zeroed, because a masked slot never written to still enters a product: it mustn't be NaN.
        """
        capacity = -(-max(slots, 1) // _STEP) * _STEP
        return torch.zeros(
            (self.layers, 2 * self.kv_heads, capacity, self.width),
            dtype=self.dtype,
            device=self.device,
        )

    def open(
        self, parent: CachedSequence | None = None, length: int | None = None
    ) -> CachedSequence:
        """An empty sequence, or a fork of `parent`'s first `length` tokens (default all)."""
        child = CachedSequence(self)
        if parent is not None:
            if parent.store is not self:
                raise CacheStateError("fork: the parent belongs to another target")
            parent.share(child, parent.length if length is None else length)
        elif length:
            raise CacheStateError(f"open: length {length} without a parent")
        self._open.add(child)
        return child

    def _blocks(self) -> dict[Block, int]:
        """Every block in use and the number of sequences using it."""
        users: dict[Block, int] = {}
        for sequence in self._open:
            tail = [sequence.tail] if sequence.tail is not None else []
            for block in (*(s.block for s in sequence.segments), *tail):
                users[block] = users.get(block, 0) + 1
        return users

    @property
    def bytes_in_use(self) -> int:
        """Bytes of all blocks, each counted once however many sequences share it."""
        return sum(block.kv.nbytes for block in self._blocks())

    def check(self) -> None:
        """Raise `CacheStateError` unless all sequences' counts and lengths agree (for tests)."""
        for block, users in self._blocks().items():
            if block.refs != users:
                raise CacheStateError(f"a block counts {block.refs} users, {users} use it")
        for sequence in self._open:
            if sequence.closed and (sequence.segments or sequence.tail is not None):
                raise CacheStateError("a closed sequence holds blocks")
            self._check_sequence(sequence)

    def _check_sequence(self, sequence: CachedSequence) -> None:
        if sequence._prefix != sum(s.length for s in sequence.segments):
            raise CacheStateError("a sequence's prefix length isn't the sum of its segments")
        tail = sequence.tail
        for segment in sequence.segments:
            if not 0 < segment.length <= segment.block.capacity or segment.block is tail:
                raise CacheStateError("a segment is empty, longer than its block, or the tail")
        if tail is None:
            if sequence.tail_length or sequence.pending:
                raise CacheStateError("tokens without a tail to hold them")
        elif sequence.tail_length + sequence.pending > tail.capacity:
            raise CacheStateError("more tokens than the tail has room for")
        for other in self._open:
            for segment in other.segments:
                if (
                    tail is not None
                    and segment.block is tail
                    and segment.length > sequence.tail_length
                ):
                    raise CacheStateError("a fork reads slots its parent may overwrite")

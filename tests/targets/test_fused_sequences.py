"""Whatever is done to its sequences, the fused target answers as a fresh pass over the same ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.targets import tiny_models as tiny

from hasten.targets.base import Rows
from hasten.targets.cache import CachedSequence
from hasten.targets.fused import FusedTarget

MODEL = tiny.build(tiny.qwen3)
OPERATIONS = ("run", "run", "run", "commit", "commit", "rollback", "fork", "truncate", "close")


class Mirror:
    """Sequences of a target beside the ids they should hold."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.target = FusedTarget.from_tensors(
            MODEL.config,
            MODEL.state_dict(),
            name="tiny",
            dtype=torch.float32,
            device=torch.device("cpu"),
            eos_ids=[],
        )
        # Forks of these short sequences share memory in some runs, copy in the others.
        self.target._store.copy_below = self.draw(st.sampled_from((0, 0, 3, 64)))
        self.kept: list[tuple[CachedSequence, list[int]]] = []

    def whole(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def start(self) -> None:
        ids = [self.whole(0, tiny.VOCAB - 1) for _ in range(self.whole(1, 8))]
        sequence = self.target.open()
        self.target.prefill(sequence, ids)
        self.kept.append((sequence, ids))

    def step(self) -> None:
        if not self.kept:
            self.start()
        operation = self.draw(st.sampled_from(OPERATIONS))
        index = self.whole(0, len(self.kept) - 1)
        getattr(self, operation)(index)
        self.target.check()

    def run(self, index: int) -> None:
        """Runs a random tree in one pass or through a range and on; checks every row."""
        sequence, ids = self.kept[index]
        before, count = sequence.pending, self.whole(1, 5)
        if before + count + len(ids) > 60 or any(
            passed < 3 for passed in sequence.pending_rows.frontier
        ):
            return
        tokens = tuple(self.whole(0, tiny.VOCAB - 1) for _ in range(count))
        parents = tuple(self.whole(-1, before + i - 1) for i in range(count))
        rows = Rows(sequence, tokens, parents)
        if self.draw(st.booleans()):
            split = self.whole(1, 2)
            self.target.forward([rows], layers=(0, split))
            logits = self.target.forward([rows], layers=(split, 3))[0].logits
        else:
            logits = self.target.forward([rows])[0].logits
        assert logits is not None
        for row in range(count):
            path = [
                *ids,
                *(sequence.pending_rows.tokens[i] for i in self.path(sequence, before + row)),
            ]
            want = tiny.fresh_logits(MODEL, path)[-1]
            torch.testing.assert_close(logits[row], want, atol=1e-4, rtol=0)

    @staticmethod
    def path(sequence: CachedSequence, row: int) -> list[int]:
        out = []
        while row >= 0:
            out.append(row)
            row = sequence.pending_rows.parents[row]
        return out[::-1]

    def commit(self, index: int) -> None:
        sequence, ids = self.kept[index]
        path = self.path(sequence, self.whole(-1, sequence.pending - 1))
        ids.extend(sequence.pending_rows.tokens[i] for i in path)
        self.target.commit(sequence, path)
        assert sequence.length == len(ids)

    def rollback(self, index: int) -> None:
        self.target.rollback(self.kept[index][0])

    def fork(self, index: int) -> None:
        parent, ids = self.kept[index]
        length = self.whole(0, len(ids))
        self.kept.append((self.target.open(parent, length), ids[:length]))

    def truncate(self, index: int) -> None:
        sequence, ids = self.kept[index]
        del ids[self.whole(0, len(ids)) :]
        self.target.truncate(sequence, len(ids))

    def close(self, index: int) -> None:
        sequence, _ = self.kept.pop(index)
        self.target.close(sequence)

    def finish(self) -> None:
        """Every sequence goes on as a fresh one would; then no memory is left in use."""
        for sequence, ids in self.kept:
            self.target.rollback(sequence)
            logits = self.target.prefill(sequence, [7]).logits
            assert logits is not None
            want = tiny.fresh_logits(MODEL, [*ids, 7])[-1:]
            torch.testing.assert_close(logits, want, atol=1e-4, rtol=0)
            self.target.close(sequence)
        self.target.check()
        assert self.target.bytes_in_use == 0


@pytest.mark.timeout(120)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.data())
def test_any_history_answers_as_a_fresh_pass(data: st.DataObject) -> None:
    mirror = Mirror(data.draw)
    mirror.start()
    for _ in range(mirror.whole(3, 14)):
        mirror.step()
    mirror.finish()

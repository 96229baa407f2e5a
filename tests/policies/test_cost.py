"""Cost tables: what they say, how they are measured, kept and corrected. The clock is a made-up
one, and the machine is as busy as a test says."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.conformance.harness import untouched_generators
from tests.conformance.toy_target import ToyTarget

from hasten.policies import cost
from hasten.policies.cost_model import CostTable

TABLE = CostTable(
    "k", (1, 2, 4, 8), (100, 1000), ((10, 11, 12, 16), (20, 22, 24, 32)), (1, 2, 4, 8)
)


class Machine:
    """A clock that runs a millisecond each time it is read, and how busy others keep it."""

    def __init__(self) -> None:
        self.now, self.step, self.busy = 1000.0, 1e-3, [0.0]

    def perf_counter(self) -> float:
        self.now += self.step
        return self.now

    def others(self) -> float:
        return self.busy.pop(0) if len(self.busy) > 1 else self.busy[0]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    made = Machine()
    monkeypatch.setattr(cost.time, "perf_counter", made.perf_counter)
    monkeypatch.setattr(cost, "LoadMeter", lambda: made)
    monkeypatch.setattr(cost, "cpu_name", lambda: "abacus")
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    return made


# -- measuring -------------------------------------------------------------------------------------


def test_passes_are_timed_in_turns_and_nothing_stays_behind() -> None:
    target = ToyTarget()
    seen: list[tuple[int, int]] = []
    with untouched_generators():
        table = cost.measure(
            target, rows=(1, 2, 5), contexts=(8, 30), repeats=3, progress=lambda *x: seen.append(x)
        )
    assert (table.rows, table.contexts) == ((1, 2, 5), (8, 30))
    assert table.pass_ms(2, 8) == pytest.approx(1.0)  # the clock's step
    assert table.topk_ms == pytest.approx((1, 1, 1))
    assert target.live == []
    assert target.passes == 2 * (1 + 3 * 4)
    assert seen[-1] == (6, 6)
    assert table.key == cost.table_key(target)
    assert not table.busy
    assert abs(table.measured_at - time.time()) < 100


@pytest.mark.parametrize("tree", [True, False])
def test_branches_are_run_where_the_target_takes_them(tree: bool) -> None:
    target = ToyTarget(tree=tree)
    shapes: list[tuple[int, ...]] = []
    forward = target.forward

    def spy(batch: Any, **options: Any) -> Any:
        shapes.append(batch[0].parents)
        return forward(batch, **options)

    target.forward = spy  # type: ignore[method-assign]
    cost.measure(target, rows=(5,), contexts=(8,), repeats=1)
    assert set(shapes) == {(-1, 0, 0, 1, 1) if tree else (-1, 0, 1, 2, 3)}


def test_a_cache_that_cannot_be_rolled_back_is_timed_one_row_at_a_time() -> None:
    target = ToyTarget(rollback=False, tree=False)
    table = cost.measure(target, contexts=(8,), repeats=3)
    assert table.rows == (1,)
    assert target.live == []


@pytest.mark.parametrize("limit", [3, 5, 9, 40, 100, 200])
@pytest.mark.parametrize("rollback", [True, False])
def test_nothing_is_run_beyond_the_context_limit(limit: int, rollback: bool) -> None:
    target = ToyTarget(context_limit=limit, rollback=rollback, tree=rollback)  # it asserts
    table = cost.measure(target)
    assert table.contexts[-1] + table.rows[-1] <= limit
    assert len(table.curve(24, limit)) == 24


def test_measuring_ends_when_its_time_is_up(machine: Machine) -> None:
    machine.step = 0.01
    target = ToyTarget()
    quick = cost.measure(target, rows=(1, 4), contexts=(8, 30), repeats=50, seconds=0.5)
    assert target.passes < 40
    assert quick.contexts == (8, 30)
    machine.step = 1.0  # a target so slow that one context is all there is time for
    slow = cost.measure(target, rows=(1, 4), contexts=(8, 30), repeats=50, seconds=0.5)
    assert slow.contexts == (8,)
    assert all(ms > 0 for line in slow.ms for ms in line)


def test_an_error_while_measuring_closes_the_sequence() -> None:
    target = ToyTarget()

    def fail(passes: int) -> None:
        if passes == 4:
            raise RuntimeError("no power")

    target.before_pass = fail
    with pytest.raises(RuntimeError, match="no power"):
        cost.measure(target, contexts=(8,))
    assert target.live == []


def test_a_table_belongs_to_weights_engine_dtype_machine_and_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = ToyTarget()
    keys = {cost.table_key(target), cost.table_key(ToyTarget(seed=1))}
    for changes in ({"kernels": "native"}, {"quantize": "int8"}, {"quantize": "int4"}):
        other = ToyTarget()
        other.info = replace(other.info, **changes)
        keys.add(cost.table_key(other))
    for stored in (cost.torch.bfloat16, cost.torch.int8):  # keys and values
        kept: Any = ToyTarget()
        kept.shape = SimpleNamespace(cache=stored)
        keys.add(cost.table_key(kept))
    monkeypatch.setattr(cost.torch, "get_num_threads", lambda: 77)
    keys.add(cost.table_key(target))
    monkeypatch.setattr(cost, "cpu_name", lambda: "slide rule")
    keys.add(cost.table_key(target))
    target.info = replace(target.info, dtype=cost.torch.bfloat16)
    keys.add(cost.table_key(target))
    assert len(keys) == 10


# -- keeping ---------------------------------------------------------------------------------------


@pytest.fixture
def target() -> Iterator[ToyTarget]:
    made = ToyTarget()
    yield made
    assert made.live == []


def _table(target: ToyTarget, **changes: Any) -> CostTable:
    return replace(TABLE, key=cost.table_key(target), measured_at=time.time(), **changes)


def test_a_kept_table_comes_back_equal(target: ToyTarget) -> None:
    assert cost.load(target) is None
    cost.save(target, _table(target))
    assert cost.load(target) is not None
    made = cost.measure(target, rows=(1, 2), contexts=(8,), repeats=1)
    cost.save(target, made)
    assert cost.load(target) == made
    assert cost.load(ToyTarget(seed=1)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"measured_at": 1.0},
        {"measured_at": 1e12},
        {"format": 1},
        {"key": "another"},
        {"busy": True, "measured_at": time.time() - cost.BUSY_FOR_S - 1},
    ],
)
def test_a_table_that_is_stale_or_not_ours_is_not_used(
    target: ToyTarget, change: dict[str, Any]
) -> None:
    cost.save(target, replace(_table(target), **change))
    assert cost.load(target) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '{"key": "x"}',
        json.dumps({"key": "x", "rows": [1], "contexts": [8], "ms": 3, "topk_ms": []}),
        json.dumps({"key": "x", "rows": [2, 1], "contexts": [8], "ms": [[1, 2]], "topk_ms": []}),
        json.dumps({"key": "x", "rows": ["a"], "contexts": [8], "ms": [["b"]], "topk_ms": []}),
        json.dumps(
            {"key": "x", "rows": [1], "contexts": [8], "ms": [[1]], "topk_ms": [], "new": 1}
        ),
    ],
)
def test_a_file_that_makes_no_sense_is_measured_over(target: ToyTarget, text: str) -> None:
    cost.save(target, _table(target))
    path = cost._file(target)
    path.write_text(text)
    assert cost.load(target) is None
    made = cost.load_or_measure(target)
    assert cost.load(target) == made


def test_writers_at_the_same_time_leave_a_whole_table_and_no_scraps(target: ToyTarget) -> None:
    tables = [_table(target, ms=((10 + i,) * 4, (20,) * 4)) for i in range(8)]
    threads = [
        threading.Thread(target=lambda t=t: [cost.save(target, t) for _ in range(10)])
        for t in tables
    ]
    for thread in threads:
        thread.start()
    seen = [cost.load(target) for _ in range(30)]
    for thread in threads:
        thread.join()
    assert cost.load(target) in tables
    assert all(table is None or table in tables for table in seen)
    assert [p.suffix for p in cost._file(target).parent.iterdir()] == [".json"]


def test_a_cache_that_cannot_be_written_is_no_error(
    target: ToyTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "file"))
    assert cost.load_or_measure(target).rows == cost.QUICK_ROWS
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    cost._file(target).mkdir(parents=True)  # a folder where the file should be
    assert cost.load_or_measure(target).rows == cost.QUICK_ROWS
    assert list((tmp_path / "cache" / "cost").glob("*.tmp")) == []


def test_a_table_is_measured_once_and_that_is_said(
    target: ToyTarget, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="hasten"):
        first = cost.load_or_measure(target)
        passes = target.passes
        second = cost.load_or_measure(target)
    assert first == second
    assert target.passes == passes > 0
    assert [r.levelname for r in caplog.records] == ["INFO"]
    assert "measuring what a pass costs" in caplog.text


def test_on_a_busy_machine_it_is_measured_again_and_kept_once_quiet(
    target: ToyTarget, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.busy = [9.0, 0.0]
    made = cost.load_or_measure(target)
    assert not made.busy
    assert cost.load(target) == made
    assert caplog.records == []


def test_a_machine_that_stays_busy_is_warned_of_and_its_table_serves_for_minutes_only(
    target: ToyTarget, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.busy = [9.0]
    made = cost.load_or_measure(target)
    assert made.busy
    other = ToyTarget()
    assert cost.load_or_measure(other) == made, "the next process needn't measure at once"
    assert other.passes == 0
    cost.save(target, replace(made, measured_at=made.measured_at - cost.BUSY_FOR_S - 1))
    assert cost.load(target) is None
    assert [r.levelname for r in caplog.records] == ["WARNING"] * 2, "measured, and used again"
    assert "hasten calibrate" in caplog.text


def test_a_busy_table_that_was_kept_is_warned_of_when_it_serves_again(
    target: ToyTarget, caplog: pytest.LogCaptureFixture
) -> None:
    cost.save(target, _table(target, busy=True))
    with caplog.at_level(logging.WARNING):
        assert cost.load_or_measure(target).busy
        assert cost.load_or_measure(target).busy
    assert sum("kept the machine busy" in each.message for each in caplog.records) == 1


def test_a_target_is_measured_once_even_where_nothing_can_be_kept(
    target: ToyTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "save", lambda target, table: None)
    first = cost.load_or_measure(target)
    passes = target.passes
    assert cost.load_or_measure(target) is first
    assert target.passes == passes > 0


def test_a_busy_table_never_replaces_a_better_one_made_meanwhile(
    target: ToyTarget, machine: Machine
) -> None:
    machine.busy = [9.0]
    better = replace(_table(target), busy=False)

    def calibrated_elsewhere(passes: int) -> None:
        if passes == 1:
            cost.save(target, better)

    target.before_pass = calibrated_elsewhere
    assert cost.load_or_measure(target) == better
    assert cost.load(target) == better


def test_a_slow_target_is_measured_in_one_turn(target: ToyTarget, machine: Machine) -> None:
    machine.step = 1.5  # seconds a pass, as a large model's on a CPU
    table = cost.load_or_measure(target)
    assert target.passes <= len(cost.QUICK_ROWS) + 1
    assert table.contexts == cost.QUICK_CONTEXTS[:1]
    assert all(ms > 0 for line in table.ms for ms in line)

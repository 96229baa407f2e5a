from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hasten import environment
from hasten.environment import Load, LoadMeter, busy_seconds, measure_load

STAT = """cpu  100 10 50 1000 20 5 5 10 0 0
cpu0 60 10 30 400 10 5 5 10 0 0
cpu1 40 0 20 600 10 0 0 0 0 0
intr 1 2 3
"""


def test_busy_seconds_leave_out_idle_and_waiting_time() -> None:
    assert busy_seconds(STAT, None, 100) == pytest.approx(1.80)


def test_busy_seconds_count_the_usable_cores_only() -> None:
    assert busy_seconds(STAT, [1], 100) == pytest.approx(0.60)


@pytest.mark.parametrize("text", ["", "nothing here", "cpu one two three\n"])
def test_an_unreadable_stat_file_gives_none(text: str) -> None:
    assert busy_seconds(text, None, 100) is None


def test_the_machine_is_busy_when_others_use_a_part_of_a_core() -> None:
    assert not Load(average=8.0, others=0.01, cores=2).busy
    assert Load(average=0.0, others=0.5, cores=2).busy
    assert not Load(average=0.0, others=0.5, cores=64).busy


def test_without_other_facts_the_load_average_decides() -> None:
    assert Load(average=1.5, others=None, cores=2).busy
    assert not Load(average=0.5, others=None, cores=2).busy
    assert not Load(average=None, others=None, cores=2).busy


def test_off_linux_the_load_is_unknown_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environment, "STAT", tmp_path / "none")
    monkeypatch.setattr(environment, "CPUINFO", tmp_path / "none")
    monkeypatch.delattr(os, "getloadavg", raising=False)
    load = measure_load(0.0)
    assert load.others is load.average is None
    assert not load.busy
    assert isinstance(environment.cpu_name(), str)


def test_ones_own_work_is_not_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"system": 10.0, "own": 1.0, "wall": 0.0}
    monkeypatch.setattr(environment, "_system_busy", lambda: clock["system"])
    monkeypatch.setattr(environment, "_own_busy", lambda: clock["own"])
    monkeypatch.setattr(time, "perf_counter", lambda: clock["wall"])
    meter = LoadMeter()
    clock.update(system=20.0, own=9.0, wall=4.0)
    assert meter.others() == pytest.approx(0.5)


def test_the_machine_is_described_in_full() -> None:
    facts = environment.machine()
    for name in ("hasten", "python", "torch", "transformers", "cpu", "cores", "threads", "date"):
        assert facts[name]


def test_settings_that_change_speed_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMP_BLOCKTIME", "7")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    settings = environment.machine()["thread_settings"]
    assert settings["KMP_BLOCKTIME"] == "7"
    assert "GOMP_SPINCOUNT" not in settings

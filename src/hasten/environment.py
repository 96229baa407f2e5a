"""What a measurement depends on besides the code: machine, versions, and who else is using it."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

STAT = Path("/proc/stat")
CPUINFO = Path("/proc/cpuinfo")
SAMPLE_SECONDS = 0.5
_BUSY_CORES = 0.25
_BUSY_SHARE = 0.05
_SETTINGS = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "OMP_PROC_BIND",
    "GOMP_SPINCOUNT",
    "GOMP_CPU_AFFINITY",
    "KMP_BLOCKTIME",
    "KMP_AFFINITY",
    "MKL_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
)
"""Variables that change how fast, or how, torch computes."""


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_average() -> float | None:
    """Load average of the last minute; None where the system keeps none."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def busy_seconds(text: str, cores: Sequence[int] | None, ticks: float) -> float | None:
    """CPU seconds that `cores` (None: all) have worked since boot, from the text of ``/proc/stat``.

    `ticks` is the number of its units in a second. None when the text can't be read.
    """
    names = None if cores is None else {f"cpu{core}" for core in cores}
    total, found = 0.0, False
    for line in text.splitlines():
        fields = line.split()
        if not fields or not fields[0].startswith("cpu"):
            continue
        if fields[0] == "cpu" if names is None else fields[0] in names:
            try:
                # user, nice, system, idle, iowait, irq, softirq, steal: all but the two idle ones
                values = [int(value) for value in fields[1:9]]
            except ValueError:
                return None
            total += sum(values[:3]) + sum(values[5:])
            found = True
    return total / ticks if found else None


def _system_busy() -> float | None:
    """Seconds of work done so far on the cores this process may use; None off Linux."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    try:
        return busy_seconds(STAT.read_text(), cores, os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, AttributeError):
        return None


def _own_busy() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


class LoadMeter:
    """Counts how many cores' worth of work others do between its making and `others`."""

    def __init__(self) -> None:
        self._system, self._own, self._started = _system_busy(), _own_busy(), time.perf_counter()

    def others(self) -> float | None:
        """Cores kept busy by other processes, on average since the start; None where unknown."""
        system, own = _system_busy(), _own_busy()
        seconds = time.perf_counter() - self._started
        if system is None or self._system is None or seconds <= 0:
            return None
        return max((system - self._system) - (own - self._own), 0.0) / seconds


@dataclass(frozen=True, slots=True)
class Load:
    """The machine's load before a run.

    `others`: cores kept busy by other processes; None: unknown.
    """

    average: float | None
    others: float | None
    cores: int

    @property
    def busy(self) -> bool:
        """True when other work would blur the times, by `others`, else by the load average."""
        if self.others is not None:
            return is_busy(self.others, self.cores)
        return self.average is not None and self.average > self.cores / 2


def is_busy(others: float, cores: int) -> bool:
    """True when `others` cores' worth of foreign work would blur times on a machine of `cores`."""
    return others > max(_BUSY_CORES, _BUSY_SHARE * cores)


def measure_load(seconds: float = SAMPLE_SECONDS) -> Load:
    """Watch the machine for a moment, doing nothing."""
    meter = LoadMeter()
    time.sleep(seconds)
    return Load(load_average(), meter.others(), usable_cores())


def machine() -> dict[str, Any]:
    """Versions and hardware, as JSON values."""
    facts: dict[str, Any] = {
        "hasten": _version("hasten"),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "thread_settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def cpu_name() -> str:
    """The processor's name as the system knows it."""
    try:
        for line in CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def command_line() -> str:
    """This process's own command line, without the folder the program lies in."""
    import shlex

    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv and sys.argv[0] else ""

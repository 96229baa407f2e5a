"""Waiting for a worker, without a clock to assert on."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(true: Callable[[], bool]) -> None:
    """Wait until it holds; fails after half a minute."""
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)

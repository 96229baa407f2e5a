"""A lock that is taken in turns."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable


class TurnLock:
    """A reentrant lock handed to whoever has waited longest.

    An ordinary lock goes to the thread that is awake, and a loop that lets go of it between rounds
    takes it again before any other thread has woken up.
    """

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], object]] = deque()
        self._free()
        _LOCKS.add(self)

    def _free(self) -> None:
        """Held by nobody, waited for by nobody (also in a process that was forked meanwhile)."""
        self._mutex = threading.Lock()
        self._queue: deque[threading.Lock] = deque()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self) -> None:
        """Wait for one's turn."""
        me = threading.get_ident()
        turn = threading.Lock()
        turn.acquire()
        with self._mutex:
            if self._owner == me or (self._owner is None and not self._queue):
                self._owner = me
                self._depth += 1
                return
            self._queue.append(turn)
        try:
            turn.acquire()
        except BaseException:  # Ctrl-C while waiting: give up the place, or the turn just given
            with self._mutex:
                if turn in self._queue:
                    self._queue.remove(turn)
                else:
                    self._pass_on()
            raise
        with self._mutex:
            self._owner, self._depth = me, 1

    def release(self) -> None:
        """Let the next one have it."""
        if self._owner != threading.get_ident():
            raise RuntimeError("the lock isn't held by this thread")
        try:
            while self._depth == 1 and self._jobs:
                self._jobs.popleft()()
        finally:
            with self._mutex:
                self._depth -= 1
                if not self._depth:
                    self._pass_on()

    def later(self, job: Callable[[], object]) -> None:
        """Run `job` under the lock: now where it is free, else before its holder lets go.

        Never waits, so that finalizers may call it, in any thread and in the middle of anything.
        """
        self._jobs.append(job)
        if not self._mutex.acquire(blocking=False):
            return
        free = self._owner is None and not self._queue
        if free:
            self._owner, self._depth = threading.get_ident(), 1
        self._mutex.release()
        if free:
            self.release()

    def _pass_on(self) -> None:
        self._owner = _GIVEN if self._queue else None
        if self._queue:
            self._queue.popleft().release()

    def __enter__(self) -> TurnLock:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


_GIVEN = -1
"""Given to a thread that hasn't woken up yet."""

_LOCKS: weakref.WeakSet[TurnLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in _LOCKS:
        lock._free()


if hasattr(os, "register_at_fork"):  # a child has none of the threads that held or waited
    os.register_at_fork(after_in_child=_after_fork)

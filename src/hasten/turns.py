"""A lock that is taken in turns."""

from __future__ import annotations

import threading
from collections import deque


class TurnLock:
    """A reentrant lock handed to whoever has waited longest.

    An ordinary lock goes to the thread that is awake, and a loop that lets go of it between rounds
    takes it again before any other thread has woken up.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._queue: deque[threading.Lock] = deque()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self) -> None:
        """Wait for one's turn."""
        me = threading.get_ident()
        with self._mutex:
            if self._owner == me or (self._owner is None and not self._queue):
                self._owner = me
                self._depth += 1
                return
            turn = threading.Lock()
            turn.acquire()
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
        with self._mutex:
            if self._owner != threading.get_ident():
                raise RuntimeError("the lock isn't held by this thread")
            self._depth -= 1
            if not self._depth:
                self._pass_on()

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

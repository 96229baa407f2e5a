"""A request handed to a worker: its rounds and text as they come, for threads and event loops."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from hasten.streams import Request
from hasten.types import Result, Round


@dataclass(frozen=True, slots=True)
class Update:
    """A round, and the text that has become certain with it (may be empty); the last round's has
    the rest."""

    text: str
    round: Round


class Ticket:
    """What `hasten.worker.Worker.submit` gives: iterate (``for`` or ``async for``, once) for
    `Update`s.

    Iterating raises what ended the request, if it was an error; after `cancel` it just ends.
    """

    def __init__(
        self,
        request: Request,
        key: int,
        scope: str | None,
        pieces: bool,
        leader: Ticket | None,
    ) -> None:
        self.request, self.key, self.scope, self.leader = request, key, scope, leader
        self.sequence: Any = None
        self.cached_tokens = 0
        """Tokens of the prompt that didn't have to be run."""
        self.cancelled = False
        self._pieces = pieces
        self._taken: list[Update] = []
        """Made, not delivered yet."""
        self._updates: deque[Update] = deque()
        self._ended = self._done = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._listener: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.ids)

    @property
    def seed(self) -> int:
        """The seed of the request's draws."""
        return self.request.seed

    @property
    def method(self) -> str:
        """The method it is drafted with."""
        return self.request.method

    @property
    def result(self) -> Result:
        """The result so far; complete at the end."""
        return self.request.result()

    @property
    def started(self) -> bool:
        """The prompt has run."""
        return self.request.last is not None

    @property
    def ended(self) -> bool:
        """It is over, whatever the reason."""
        return self._ended

    def cancel(self) -> None:
        """End the request before the next pass; from any thread, at any time. Never waits."""
        self.cancelled = True

    # -- the worker's side -----------------------------------------------------------------------

    def take(self, made: Round) -> None:
        """Count a round."""
        self.request.take(made)
        text = self.request.text
        piece = ""
        if text is not None and made.finish is not None:
            piece = text.flush()
        elif text is not None and self._pieces:
            piece = text.take()
        self._taken.append(Update(piece, made))

    def end(self, error: BaseException | None = None) -> None:
        """No more rounds come."""
        self._ended, self._error = True, error

    def deliver(self) -> None:
        """Hand over what was taken."""
        with self._changed:
            self._updates.extend(self._taken)
            self._taken.clear()
            self._done = self._ended
            self._changed.notify_all()
            listener = self._listener
        if listener is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                listener[0].call_soon_threadsafe(listener[1].set)

    # -- the reader's side -----------------------------------------------------------------------

    def __iter__(self) -> Iterator[Update]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._updates or self._done)
                if not self._updates:
                    break
                update = self._updates.popleft()
            yield update
        if self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[Update]:
        event = asyncio.Event()
        with self._changed:
            self._listener = asyncio.get_running_loop(), event
        while True:
            event.clear()
            with self._changed:
                update = self._updates.popleft() if self._updates else None
                done = self._done
            if update is not None:
                yield update
            elif done:
                break
            else:
                await event.wait()
        if self._error is not None:
            raise self._error

    def wait(self) -> Result:
        """Run to the end and give the result."""
        for _ in self:
            pass
        return self.result

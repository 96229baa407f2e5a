"""Requests from anywhere, answered together: one thread runs the loop, others hand in and collect.

A request joins between two passes and leaves when it ends or is cancelled; all that are active
share each pass (`hasten.decode.Batch`). A long prompt runs in parts, between the passes of others.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any

from hasten.decode import Batch, Event
from hasten.decoding import Decoding
from hasten.errors import HastenError, OptionError, OverloadError
from hasten.prefixes import Prefixes
from hasten.streams import Request
from hasten.tickets import Ticket

if TYPE_CHECKING:
    from hasten.api import LLM, Prompt

logger = logging.getLogger(__name__)

IDLE_S = 1.0
"""The thread ends after so long without work, and starts again with the next request: an LLM that
nobody holds any more is freed."""


class Worker:
    """Answers requests of one `LLM` on a thread of its own.

    most          requests that share passes; others wait
    waiting       requests that may wait before more are refused (OverloadError)
    cache_tokens  tokens of finished requests kept for those that continue them; 0: none
    """

    def __init__(
        self, llm: LLM, *, most: int = 16, waiting: int = 64, cache_tokens: int = 32_768
    ) -> None:
        for name, value, least in (
            ("most", most, 1), ("waiting", waiting, 0), ("cache_tokens", cache_tokens, 0),
        ):  # fmt: skip
            if not isinstance(value, int) or value < least:
                raise OptionError(name, f"must be a whole number >= {least}, got {value!r}")
        self._llm, self._most, self._most_waiting = llm, most, waiting
        self._prefixes = Prefixes(llm.target, cache_tokens)
        self._keys = count()
        self._closed = False
        self._start_anew()
        _WORKERS.add(self)

    def _start_anew(self) -> None:
        """No thread and no requests (also in a process that was forked meanwhile)."""
        self._changed = threading.Condition()
        self._queue: deque[Ticket] = deque()
        self._active: dict[int, Ticket] = {}
        self._thread: threading.Thread | None = None

    # -- for any thread --------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """Requests that share passes now."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._queue)

    @property
    def cached_tokens(self) -> int:
        """Tokens of finished requests that are kept."""
        return self._prefixes.tokens

    def submit(
        self, prompt: Prompt, *, scope: str | None = None, pieces: bool = True, **options: Any
    ) -> Ticket:
        """Hand in a request; options as in `LLM.generate`.

        scope    requests of one scope reuse each other's prefixes; None: only those of the same
                 conversation (`hasten.prefixes`)
        pieces   False: updates carry no text before the last one, which saves its decoding

        Raises what `LLM.generate` raises before it runs, and OverloadError.
        """
        return self.enqueue(self._llm._request(prompt, **options), scope=scope, pieces=pieces)

    def submit_n(
        self,
        prompt: Prompt,
        n: int,
        *,
        scope: str | None = None,
        pieces: bool = True,
        **options: Any,
    ) -> list[Ticket]:
        """Hand in `n` requests for the same prompt, which runs once. With a seed request i has
        ``seed + i``."""
        most = self._most + self._most_waiting
        if not isinstance(n, int) or not 1 <= n <= most:
            raise OptionError("n", f"must be a whole number from 1 to {most}, got {n!r}")
        requests = [self._llm._request(prompt, **options)]
        given = requests[0].params.seed
        for index in range(1, n):
            more = {} if given is None else {"seed": given + index}
            requests.append(self._llm._request(requests[0].ids, **{**options, **more}))
        with self._changed:
            self._check_room(n)
            first = self.enqueue(requests[0], scope=scope, pieces=pieces)
            rest = [self._add(r, scope, pieces, first) for r in requests[1:]]
        return [first, *rest]

    def enqueue(self, request: Request, *, scope: str | None = None, pieces: bool = True) -> Ticket:
        """`submit` for a request that is checked already."""
        with self._changed:
            self._check_room(1)
            return self._add(request, scope, pieces, None)

    def _check_room(self, more: int) -> None:
        if self._closed:
            raise HastenError("the worker is closed: it takes no more requests")
        room = self._most - len(self._active) + self._most_waiting
        if len(self._queue) + more > room:
            raise OverloadError(
                f"{len(self._active)} requests run and {len(self._queue)} wait already: try again "
                "later, or allow more (waiting=)"
            )

    def _add(
        self, request: Request, scope: str | None, pieces: bool, leader: Ticket | None
    ) -> Ticket:
        ticket = Ticket(request, next(self._keys), scope, pieces, leader)
        if request.decoding.finish is not None:  # nothing was asked for
            ticket.end()
            ticket.deliver()
            return ticket
        self._queue.append(ticket)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hasten-worker", daemon=True)
            self._thread.start()
        self._changed.notify_all()
        return ticket

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more requests, finish those there are (or, without `drain` or after `timeout`
        seconds, cancel them), and free everything. Closing twice is harmless."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if drain:
                self._changed.wait_for(lambda: not (self._queue or self._active), timeout)
            for ticket in [*self._queue, *self._active.values()]:
                ticket.cancel()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(None if until is None else max(until - time.monotonic(), 0) + 60)
        with self._llm._lock:
            self._prefixes.clear()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        batch = Batch(self._llm.target)
        while self._wait(batch):
            try:
                with self._llm._lock:
                    self._let_go(batch)
                    self._take_in(batch)
                    touched = [self._note(batch, event) for event in batch.read_prompt()]
                    touched += [self._note(batch, event) for event in list(batch.step())]
            except BaseException as error:  # a fault of ours: nobody may wait for ever
                logger.exception("the worker failed")
                self._fail_all(batch, error)
                continue
            for ticket in dict.fromkeys(touched):
                ticket.deliver()

    def _wait(self, batch: Batch) -> bool:
        """Wait for work; False when the thread ends."""
        with self._changed:
            self._changed.notify_all()
            idle = not self._changed.wait_for(
                lambda: self._queue or self._active or self._closed, IDLE_S
            )
            if (idle or self._closed) and not (self._queue or self._active):
                self._thread = None
                return False
        return True

    def _let_go(self, batch: Batch) -> None:
        """Drop what was cancelled."""
        with self._changed:
            gone = [t for t in [*self._queue, *self._active.values()] if t.cancelled]
            for ticket in gone:
                if ticket.key in self._active:
                    del self._active[ticket.key]
                else:
                    self._queue.remove(ticket)
        for ticket in gone:
            self._end(batch, ticket)
            ticket.deliver()

    def _end(self, batch: Batch, ticket: Ticket, error: Exception | None = None) -> None:
        """Let a request go, whatever closing it raises: nobody may wait for it for ever."""
        try:
            batch.leave(ticket.key)
        except Exception as other:
            error = error or other
        try:
            self._free(ticket)
        except Exception as other:
            error = error or other
        ticket.end(None if ticket.cancelled else error)
        with self._changed:
            self._active.pop(ticket.key, None)

    def _take_in(self, batch: Batch) -> None:
        """Let waiting requests join, as many as there is room for."""
        with self._changed:
            ready = []
            for ticket in list(self._queue):
                if len(self._active) >= self._most:
                    break
                leader = ticket.leader
                if leader is not None and not leader.started and not leader.ended:
                    continue  # its prompt is being run
                self._queue.remove(ticket)
                self._active[ticket.key] = ticket
                ready.append(ticket)
        for ticket in ready:
            try:
                ticket.sequence = self._sequence_for(ticket)
                ticket.cached_tokens = ticket.sequence.length
                ticket.request.decoding.lend(ticket.sequence)
                batch.join(ticket.key, ticket.request.decoding)
            except Exception as error:
                self._end(batch, ticket, error)
                ticket.deliver()

    def _sequence_for(self, ticket: Ticket) -> Any:
        """A sequence that holds what somebody has run already of the prompt."""
        ids, leader, target = ticket.request.ids, ticket.leader, self._llm.target
        if not isinstance(ticket.request.decoding, Decoding):
            return target.open()  # a population looks at the whole prompt
        shares = target.capabilities.fork and not target.info.whole_prompt
        if leader is not None and leader.sequence is not None and shares and len(ids) > 1:
            return target.open(leader.sequence, len(ids) - 1)
        return self._prefixes.take(ids, ticket.scope)

    def _note(self, batch: Batch, event: Event) -> Ticket:
        """Take a round, or an end, into its request."""
        key, made = event
        ticket = self._active[key]
        if isinstance(made, Exception):
            self._end(batch, ticket, made)
            return ticket
        try:
            ticket.take(made)
        except Exception as error:  # its tokenizer's
            self._end(batch, ticket, error)
            return ticket
        if made.finish is not None:
            request, sequence = ticket.request, ticket.sequence
            ticket.sequence = None
            ids = [*request.ids, *request.tokens]
            self._prefixes.keep(ids, len(request.ids), sequence, ticket.scope)
            self._end(batch, ticket)
        return ticket

    def _free(self, ticket: Ticket) -> None:
        if ticket.sequence is not None:
            self._llm.target.close(ticket.sequence)
            ticket.sequence = None

    def _fail_all(self, batch: Batch, error: BaseException) -> None:
        with self._changed:
            tickets = [*self._active.values(), *self._queue]
            self._queue.clear()
        with self._llm._lock:
            for ticket in tickets:
                self._end(batch, ticket, HastenError(f"the worker failed: {error!r}"))
        for ticket in tickets:
            ticket.deliver()


_WORKERS: weakref.WeakSet[Worker] = weakref.WeakSet()


def _after_fork() -> None:
    for worker in _WORKERS:
        worker._start_anew()


@atexit.register
def _at_exit() -> None:
    """End all passes: the interpreter can't be taken down under one."""
    for worker in list(_WORKERS):
        worker.close(drain=False)


if hasattr(os, "register_at_fork"):  # a child has no thread, and answers nobody's requests
    os.register_at_fork(after_in_child=_after_fork)

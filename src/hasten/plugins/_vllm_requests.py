"""The requests of a vLLM worker: which session a row of the batch belongs to.

Rows of the batch change places, are preempted and come back; where vLLM tells the requests' ids
they are found by these, and otherwise by their tokens. Whichever way, a session is used only when
all it has read is the beginning of the row's tokens.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from hasten.errors import DrafterError
from hasten.plugins.session import Session, Source

Array = np.ndarray[Any, Any]

STALE_STEPS = 64
"""Without ids, a request that hasn't been in the batch for so many steps is taken to be over."""


class Entry:
    """One request: its session, and a copy of the tokens that it has read.

    `session` is None after its drafter has failed: nothing is drafted any more.
    """

    __slots__ = ("_read", "key", "length", "seen", "session")

    def __init__(self, key: str | None, session: Session) -> None:
        self.key = key
        self.session: Session | None = session
        self.length, self.seen = 0, 0
        self._read: Array = np.empty(0, np.int32)

    def fits(self, context: Array) -> bool:
        """Whether `context` goes on from what was read."""
        n = self.length
        if not 0 < n < len(context) or self._read[n - 1] != context[n - 1]:
            return False
        return bool(np.array_equal(self._read[:n], context[:n]))

    def catch_up(
        self, context: Array, new: int, topk_ids: torch.Tensor | None = None, waiting: int = 1
    ) -> None:
        """Tell the session of what `context` ``(n,)`` has beyond what was read; its last `new`
        tokens are this step's. See `Session.commit` for the rest."""
        start = self.length
        self._keep(context)
        if self.session is None:
            return
        if start == 0:
            start = len(context) - new
            first = None if topk_ids is None else topk_ids[:1]
            self.session.begin(context[:start].tolist(), first)
            topk_ids = None
        tokens = context[start:].tolist()
        known = topk_ids if len(tokens) == new else None
        self.session.commit(tokens, known, waiting=waiting)

    def _keep(self, context: Array) -> None:
        if len(context) > len(self._read):
            grown = np.empty(max(2 * len(self._read), len(context) + 256), np.int32)
            grown[: self.length] = self._read[: self.length]
            self._read = grown
        self._read[self.length : len(context)] = context[self.length :]
        self.length = len(context)

    def close(self) -> None:
        """Free the session, whatever its drafter says."""
        session, self.session = self.session, None
        if session is not None:
            with suppress(DrafterError):
                session.end()


class Requests:
    """The requests of a worker; `limit` of them at most, those not seen for longest go first."""

    def __init__(self, source: Source, limit: int) -> None:
        self._source, self._limit = source, limit
        self._entries: list[Entry] = []
        self._by_key: dict[str, Entry] = {}
        self._step = 0

    def __len__(self) -> int:
        return len(self._entries)

    def turn(self) -> None:
        """A new step begins."""
        self._step += 1

    def find(self, context: Array, key: str | None = None) -> Entry:
        """The request whose tokens are `context` ``(n,)`` now, a new one if there is none; `key` is
        its id, where that is known. Asked once a step for each row."""
        entry = self._known(context, key)
        if entry is None:
            entry = Entry(key, self._source.open())
            self._entries.append(entry)
            if key is not None:
                self._by_key[key] = entry
        entry.seen = self._step
        return entry

    def _known(self, context: Array, key: str | None) -> Entry | None:
        if key is None:
            fitting = [e for e in self._entries if e.seen != self._step and e.fits(context)]
            return max(fitting, key=lambda e: e.length, default=None)
        entry = self._by_key.get(key)
        if entry is not None and not entry.fits(context):
            self._drop([entry])  # an id that is used again, or a request whose text was changed
            return None
        return entry

    def retire(self, alive: Container[str] | None = None) -> None:
        """Free requests that are over: those whose ids aren't `alive`; without ids, those not seen
        for `STALE_STEPS`."""
        self._drop([entry for entry in self._entries if self._is_over(entry, alive)])
        excess = len(self._entries) - self._limit
        if excess > 0:
            self._drop(sorted(self._entries, key=lambda e: e.seen)[:excess])

    def _is_over(self, entry: Entry, alive: Container[str] | None) -> bool:
        if entry.key is not None and alive is not None:
            return entry.key not in alive
        return self._step - entry.seen > STALE_STEPS

    def _drop(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            entry.close()
            self._entries.remove(entry)
            if entry.key is not None:
                self._by_key.pop(entry.key, None)

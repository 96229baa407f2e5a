"""The one loop: requests that share passes, and a generator of their rounds.

Streaming, batches, trees and sampling are inputs to it, not variants of it. A target pass serves
all active requests at a time (packed into one where the target can, else they take turns); requests
join and leave between passes. Every emitted token is the target's own: a drafter changes speed,
never text. The methods that aren't lossless say so: `smc`, and `cospec`, whose verifier may keep a
draft's token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import cast

from hasten.decoding import Decoding
from hasten.passes import run_pass, synchronize
from hasten.policies.sharing import Shared, observe_pass, share_pass
from hasten.smc.run import SMCRun
from hasten.targets.base import Target
from hasten.types import Draft, Round

Event = tuple[int, Round | Exception]
"""A request's key, and its next round or what ended it."""


class Batch:
    """Requests on one target; each `step` is a pass of all that are active.

    A request that ends, or fails, is closed and has left; the others go on. Not thread-safe.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._packed = target.capabilities.packed
        self._joining: dict[int, Decoding | SMCRun] = {}
        self._active: dict[int, Decoding | SMCRun] = {}

    def __len__(self) -> int:
        return len(self._joining) + len(self._active)

    @property
    def joining(self) -> int:
        """Requests whose prompts haven't been read."""
        return len(self._joining)

    def join(self, key: int, request: Decoding | SMCRun) -> None:
        """Take a request in; its prompt runs in the steps to come, in order of arrival."""
        self._joining[key] = request

    def leave(self, key: int) -> None:
        """Close a request and let it go; a key that isn't there is no error."""
        request = self._joining.pop(key, None) or self._active.pop(key, None)
        if request is not None:
            request.close()

    def close(self) -> None:
        """Close every request even when closing one raises; the first error wins."""
        errors: list[BaseException] = []
        for key in [*self._joining, *self._active]:
            try:
                self.leave(key)
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def read_prompt(self) -> list[Event]:
        """Run the next part of the prompt that came first; its first token after the last part."""
        if not self._joining:
            return []
        key, request = next(iter(self._joining.items()))
        try:
            others = len(self) - 1
            made = request.prefill(others) if request.finish is None else None
            if request.finish is not None and made is None:  # nothing was asked for
                self.leave(key)
            elif made is not None:
                self._active[key] = self._joining.pop(key)
                return [self._made(key, made)]
        except Exception as error:
            return [self._failed(key, error)]
        return []

    def step(self) -> Iterator[Event]:
        """A round of every active request."""
        sharing: dict[int, Decoding] = {}
        for key, request in list(self._active.items()):
            if isinstance(request, Decoding):
                sharing[key] = request
            else:  # a population fills passes of its own
                yield self._guarded(key, request.step)
        together = [sharing] if self._packed and sharing else [{k: r} for k, r in sharing.items()]
        for group in together:
            yield from self._pass(group)

    def _guarded(self, key: int, run: Callable[[], Round]) -> Event:
        try:
            return self._made(key, run())
        except Exception as error:
            return self._failed(key, error)

    def _made(self, key: int, made: Round) -> Event:
        if made.finish is not None:
            self.leave(key)
        return key, made

    def _failed(self, key: int, error: Exception) -> Event:
        try:
            self.leave(key)
        except Exception as other:
            other.__context__ = error
        return key, error

    def _pass(self, requests: Mapping[int, Decoding]) -> list[Event]:
        """Draft for each request, run one pass, settle each."""
        events: list[Event] = []
        shared = _Pass(self._target)
        others = len(requests) - 1
        for key, request in requests.items():
            try:
                shared.draft(key, request, others)
            except Exception as error:
                events.append(self._failed(key, error))
        if not shared.requests:
            return events
        try:
            shared.run()
        except Exception as error:
            return [*events, *(self._failed(key, error) for key in shared.requests)]
        return [
            *events,
            *(self._guarded(key, partial(shared.settle, key)) for key in shared.requests),
        ]


class _Pass:
    """One pass of some requests, and whose time is whose.

    The pass's seconds are split evenly; drafting and settling of the others isn't a round's time.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.requests: dict[int, Decoding] = {}
        self._began: dict[int, float] = {}
        self._own: dict[int, float] = {}

    def draft(self, key: int, request: Decoding, others: int) -> None:
        """Draft for a request; alone, it also chooses what to verify."""
        began = time.perf_counter()
        request.draft(others)
        if not others:
            request.narrow()
        self.requests[key], self._began[key] = request, began
        self._own[key] = time.perf_counter() - began

    def run(self) -> None:
        """Choose what is verified, and run it."""
        requests = list(self.requests.values())
        first, alone = requests[0], len(requests) == 1
        weighed = [] if alone else self._share(requests)
        mark = time.perf_counter()
        rows = [request.rows() for request in requests]
        taps = first.taps if alone else tuple(sorted({t for r in requests for t in r.taps}))
        passes = run_pass(self._target, rows, taps, [r.staged for r in requests])
        if first.accelerated:
            synchronize(self._target)
        self._seconds = (time.perf_counter() - mark) / len(requests)
        self._passes = dict(zip(self.requests, passes, strict=True))
        if weighed:
            ran = sum(len(r.tokens) for r in rows)
            observe_pass(weighed, ran, self._context(requests), 1e3 * self._seconds * len(rows))

    def _share(self, requests: Sequence[Decoding]) -> list[Shared]:
        """Choose among all candidates at once where policies can be compared."""
        drafts: list[tuple[Shared, Draft]] = []
        choosers: list[Decoding] = []
        fixed = 0
        for request in requests:
            if request.shares and request.candidates is not None:
                choosers.append(request)
                drafts.append((cast(Shared, request.policy), request.candidates))
            else:
                request.narrow()
                fixed += len(request.rows().tokens)
        chosen = share_pass(drafts, fixed, self._context(requests))
        for request, draft in zip(choosers, chosen, strict=True):
            request.choose(draft)
        return [cast(Shared, request.policy) for request in requests if request.shares]

    @staticmethod
    def _context(requests: Sequence[Decoding]) -> int:
        return sum(len(r.ids) for r in requests) // len(requests)

    def settle(self, key: int) -> Round:
        """Verify and commit a request's rows."""
        request = self.requests[key]
        if len(self.requests) > 1:
            passed = time.perf_counter() - self._began[key]
            request.wait(passed - self._own[key] - self._seconds)
        return request.settle(self._passes[key], self._seconds)


def decode(requests: Sequence[Decoding | SMCRun]) -> Iterator[tuple[int, Round]]:
    """Run requests to their end; yields ``(index, round)``, round 0 (the prefill) of each first.

    All requests share one target. They are closed at their end, and all of them when the caller
    stops early or an error is raised.
    """
    if not requests:
        return
    batch = Batch(requests[0].target)
    try:
        for index, request in enumerate(requests):
            batch.join(index, request)
        while batch.joining:
            yield from _rounds(batch.read_prompt())
        while len(batch):
            yield from _rounds(batch.step())
    finally:
        batch.close()


def _rounds(events: Iterator[Event] | list[Event]) -> Iterator[tuple[int, Round]]:
    for index, made in events:
        if isinstance(made, Exception):
            raise made
        yield index, made

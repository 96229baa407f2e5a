"""The one loop: a generator of rounds, for one request or many.

Streaming, batches, trees and sampling are inputs to it, not variants of it. `decode` runs a target
pass for all active requests at a time (packed into one where the target can), and yields
``(index, Round)`` as they come. Every emitted token is the target's own: a drafter changes speed,
never text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from hasten.decoding import Decoding
from hasten.passes import run_pass, synchronize
from hasten.types import Round, Rows


def decode(requests: Sequence[Decoding]) -> Iterator[tuple[int, Round]]:
    """Run requests to their end; yields ``(index, round)``, round 0 (the prefill) of each first.

    All requests share one target. Each pass serves every active request where the target packs
    sequences, else they take turns. Requests are closed at their end, and all of them when the
    caller stops early or an error is raised.
    """
    try:
        for index, request in enumerate(requests):
            if request.finish is None:
                yield index, request.start()
            if request.finish is not None:
                request.close()
        active = [i for i, r in enumerate(requests) if r.finish is None]
        packed = bool(requests) and requests[0].target.capabilities.packed
        while active:
            groups = [active] if packed else [[i] for i in active]
            for group in groups:
                for index, made in _one_pass(requests, group):
                    if made.finish is not None:
                        requests[index].close()
                    yield index, made
            active = [i for i in active if requests[i].finish is None]
    finally:
        _close_all(requests)


def _close_all(requests: Sequence[Decoding]) -> None:
    """Close every request even when closing one raises; the first error wins."""
    errors: list[BaseException] = []
    for request in requests:
        try:
            request.close()
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _one_pass(requests: Sequence[Decoding], group: Sequence[int]) -> list[tuple[int, Round]]:
    """Draft for each request of the group, run one pass, settle each."""
    alone = len(group) == 1
    mark = time.perf_counter()
    rows: list[Rows] = []
    spent: list[float] = []
    for index in group:
        rows.append(requests[index].propose())
        now = time.perf_counter()
        spent.append(now - mark)
        mark = now
    first = requests[group[0]]
    target, taps = first.target, first.taps
    if not alone:
        taps = tuple(sorted({layer for i in group for layer in requests[i].taps}))
    passes = run_pass(target, rows, taps, [requests[i].staged for i in group])
    if first.accelerated:
        synchronize(target)
    seconds = time.perf_counter() - mark
    out: list[tuple[int, Round]] = []
    settle_from = time.perf_counter()
    for at, (index, passed) in enumerate(zip(group, passes, strict=True)):
        if not alone:
            # A shared pass is split evenly; drafting and settling of the others isn't this round's
            # time.
            before, after = sum(spent[at + 1 :]), time.perf_counter() - settle_from
            requests[index].wait(before + after + seconds * (1 - 1 / len(group)))
        out.append((index, requests[index].settle(passed, seconds / len(group))))
    return out

"""What a pass costs on this machine: a measured table, kept, and corrected by what is observed.

A table holds the median milliseconds of one target pass by number of rows and context length, and
of argmax and top-k over so many rows of logits, for one model, dtype, engine, device and thread
count. It is only ever used for decisions (how many nodes pay), never for a reported figure. A
table measured on a busy machine says so, is used for the session and measured again soon.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hasten._cache import cache_dir
from hasten.environment import Load, LoadMeter, cpu_name, load_average, usable_cores
from hasten.errors import HastenError
from hasten.passes import synchronize
from hasten.policies.cost_model import FORMAT, CostTable
from hasten.selection import argmax_rows, topk_rows
from hasten.targets.base import Target
from hasten.types import Rows

logger = logging.getLogger(__name__)

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (128, 1024)
QUICK_ROWS = (1, 2, 4, 8, 16, 32)
QUICK_CONTEXTS = (64, 512)
QUICK_SECONDS = 2.0
STALE_AFTER_S = 30 * 24 * 3600.0
BUSY_FOR_S = 600.0
"""A table measured on a busy machine serves as long; then it is measured again."""
TOPK = 8


# -- measuring -----------------------------------------------------------------------------------


def table_key(target: Target) -> str:
    """What a table belongs to: weights, engine and kernels, dtypes, machine, threads, torch."""
    info = target.info
    cache = getattr(getattr(target, "shape", None), "cache", info.dtype)
    device = info.device.type
    if device == "cuda":
        device = torch.cuda.get_device_name(info.device)
    elif device == "cpu":
        device = f"{cpu_name()} cores={usable_cores()}"
    parts = (
        info.fingerprint or info.name,
        "-".join(filter(None, (info.engine, info.kernels, info.quantize))),
        "-kv-".join(str(x).removeprefix("torch.") for x in dict.fromkeys((info.dtype, cache))),
        device,
        f"threads={torch.get_num_threads()}",
        f"torch={torch.__version__}",
    )
    return " ".join(parts)


def measure(
    target: Target,
    *,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 7,
    seconds: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CostTable:
    """Time passes of each number of rows at each context, in turns, so that a passing disturbance
    hits all of them; medians.

    Row counts and contexts beyond the target's limit are left out. `seconds` ends it early (each
    pass is run once at least, at one context at least). `progress` is called with (done, total).
    """
    limit = target.info.context_limit
    contexts = [c for c in contexts if c + max(rows) + repeats < limit] or [max(limit // 4, 1)]
    rows = [r for r in rows if contexts[-1] + r + repeats < limit] or [1]
    if not target.capabilities.rollback:  # each pass stays in the cache
        rows, repeats = [1], max(min(repeats, limit - contexts[-1] - 1), 1)
    meter = LoadMeter()
    deadline = None if seconds is None else time.perf_counter() + seconds
    lines: list[list[list[float]]] = []
    for index, context in enumerate(contexts):
        if lines and deadline is not None and time.perf_counter() > deadline:
            break
        share = None if deadline is None else deadline - time.perf_counter()
        if share is not None:
            share /= len(contexts) - index

        def tell(done: int, index: int = index) -> None:
            if progress is not None:
                progress(index * repeats + done, len(contexts) * repeats)

        lines.append(_at_context(target, rows, context, repeats, share, tell))
    load = Load(load_average(), meter.others(), usable_cores())
    return CostTable(
        key=table_key(target),
        rows=tuple(rows),
        contexts=tuple(contexts[: len(lines)]),
        ms=tuple(tuple(1e3 * statistics.median_low(s) for s in line) for line in lines),
        topk_ms=_selection(target, rows, repeats),
        measured_at=time.time(),
        busy=load.busy,
    )


def _at_context(
    target: Target,
    rows: Sequence[int],
    context: int,
    repeats: int,
    seconds: float | None,
    tell: Callable[[int], None],
) -> list[list[float]]:
    """Samples, in seconds, for each number of rows, after `context` tokens."""
    samples: list[list[float]] = [[] for _ in rows]
    started = time.perf_counter()
    sequence = target.open()
    try:
        target.prefill(sequence, [i % target.info.vocab_size for i in range(context)])
        for repeat in range(repeats + 1):
            for line, count in zip(samples, rows, strict=True):
                line.append(_one(target, sequence, count))
            tell(repeat)
            late = seconds is not None and time.perf_counter() - started > seconds
            if repeat == 0 and not late:  # the first turn warms up
                for line in samples:
                    line.clear()
            if late:
                break
    finally:
        target.close(sequence)
    return samples


def _one(target: Target, sequence: Any, count: int) -> float:
    """Seconds of a pass over `count` rows: a tree with branches where the target takes trees."""
    tokens = tuple(i % target.info.vocab_size for i in range(count))
    branching = 2 if target.capabilities.tree else 1
    parents = (-1, *((i - 1) // branching for i in range(1, count)))
    started = time.perf_counter()
    target.forward([Rows(sequence, tokens, parents)])
    synchronize(target)
    took = time.perf_counter() - started
    if target.capabilities.rollback:
        target.rollback(sequence)
    else:
        target.commit(sequence, range(count))
    return took


def _selection(target: Target, rows: Sequence[int], repeats: int) -> tuple[float, ...]:
    """Milliseconds of argmax and top-k for each number of rows of made-up logits."""
    info = target.info
    generator = torch.Generator().manual_seed(0)  # never the global one
    logits = torch.randn(max(rows), info.vocab_size, generator=generator)
    logits = logits.to(device=info.device, dtype=info.dtype)
    samples: list[list[float]] = [[] for _ in rows]
    for _ in range(repeats):
        for line, count in zip(samples, rows, strict=True):
            started = time.perf_counter()
            argmax_rows(logits[:count])
            topk_rows(logits[:count], TOPK)
            line.append(time.perf_counter() - started)
    return tuple(1e3 * statistics.median_low(s) for s in samples)


# -- keeping -------------------------------------------------------------------------------------


def load(target: Target) -> CostTable | None:
    """The kept table for this target; None when there is none, or it is stale or unreadable."""
    try:
        stored = json.loads(_file(target).read_text())
        stored["ms"] = tuple(tuple(line) for line in stored["ms"])
        for name in ("rows", "contexts", "topk_ms"):
            stored[name] = tuple(stored[name])
        table = CostTable(**stored)
        age = time.time() - table.measured_at
    except (OSError, ValueError, KeyError, TypeError, HastenError):
        return None
    fits = table.format == FORMAT and table.key == table_key(target)
    return table if fits and 0 <= age < (BUSY_FOR_S if table.busy else STALE_AFTER_S) else None


def save(target: Target, table: CostTable) -> None:
    """Keep a table for the next session, atomically; a cache that can't be written is no error."""
    scratch: Path | None = None
    try:
        path = _file(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}-{time.time_ns()}.tmp")
        scratch.write_text(json.dumps(asdict(table)))
        scratch.replace(path)
    except (OSError, HastenError) as error:
        logger.info("the measured costs can't be kept: %s", error)
        if scratch is not None:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)


def load_or_measure(target: Target) -> CostTable:
    """The kept table, or one measured now: about two seconds, or half a dozen passes where these
    are slow.

    On a busy machine it is measured twice; if the machine stays busy, the quicker of the two serves
    this session, with a warning, and is kept for ten minutes only. A target's table stays the same
    as long as it lives.
    """
    with _TABLES_LOCK:
        table = _TABLES.get(target)
        if table is None:
            kept = load(target)
            if kept is not None and kept.busy:
                logger.warning(
                    "%s: costs measured while other work kept the machine busy serve until they "
                    "are ten minutes old. `hasten calibrate` measures on a quiet machine",
                    target.info.name,
                )
            table = _TABLES[target] = kept or _measured(target)
    return table


_TABLES: weakref.WeakKeyDictionary[Target, CostTable] = weakref.WeakKeyDictionary()
_TABLES_LOCK = threading.Lock()


def _measured(target: Target) -> CostTable:
    logger.info("%s: measuring what a pass costs here, once", target.info.name)
    started = time.perf_counter()
    table = _quick(target)
    if table.busy and time.perf_counter() - started < 2 * QUICK_SECONDS:
        again = _quick(target)
        table = min((again, table), key=lambda t: (t.busy, -len(t.ms), sum(map(sum, t.ms))))
    if table.busy:
        logger.warning(
            "%s: other work kept the machine busy while costs were measured. They serve this "
            "session; one that starts in ten minutes measures again. Or run `hasten calibrate` "
            "on a quiet machine",
            target.info.name,
        )
        kept = load(target)
        if kept is not None and not kept.busy:  # somebody measured better meanwhile
            return kept
    save(target, table)
    return table


def _quick(target: Target) -> CostTable:
    return measure(
        target, rows=QUICK_ROWS, contexts=QUICK_CONTEXTS, repeats=5, seconds=QUICK_SECONDS
    )


def _file(target: Target) -> Path:
    digest = hashlib.sha256(table_key(target).encode()).hexdigest()[:24]
    return cache_dir() / "cost" / f"{digest}.json"

"""What a pass costs on this machine: a measured table, cached, re-measured when stale.

A table holds the median milliseconds of one target pass by number of rows and context length, for
one
model, dtype, device, thread count and hasten version. It is only ever used for decisions (how many
nodes
pay), never for a reported figure. A table measured on a busy machine says so, is used for the
session and
not kept.
"""

from __future__ import annotations

import json
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hasten._cache import cache_dir
from hasten.environment import measure_load
from hasten.passes import synchronize
from hasten.targets.base import Target
from hasten.types import Rows

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (128, 1024)
STALE_AFTER_S = 30 * 24 * 3600.0
FORMAT = 1


@dataclass(frozen=True, slots=True)
class CostTable:
    """Milliseconds of a pass; ``ms[i][j]`` for ``contexts[i]`` tokens of context and ``rows[j]``
    rows."""

    key: str
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    ms: tuple[tuple[float, ...], ...]
    measured_at: float = 0.0
    busy: bool = False
    format: int = field(default=FORMAT)

    def pass_ms(self, rows: int, context: int) -> float:
        """Milliseconds of a pass of `rows` rows at `context` tokens: linear between what was
        measured,
        by the last slope beyond it."""
        per_context = [_line(self.rows, line, rows) for line in self.ms]
        return max(_line(self.contexts, per_context, context), 1e-6)

    def curve(self, most: int, context: int) -> list[float]:
        """``[pass_ms(1), ..., pass_ms(most)]``, never decreasing: a pass of more rows isn't
        cheaper, it
        was measured with more luck."""
        out: list[float] = []
        for rows in range(1, most + 1):
            out.append(max(self.pass_ms(rows, context), out[-1] if out else 0.0))
        return out


def _line(xs: Sequence[int], ys: Sequence[float], x: int) -> float:
    if len(xs) == 1:
        return ys[0]
    at = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
    slope = (ys[at + 1] - ys[at]) / (xs[at + 1] - xs[at])
    if x < xs[0]:
        return ys[0]
    return ys[at] + slope * (x - xs[at])


def table_key(target: Target) -> str:
    """What a table belongs to: model, dtype, device, threads, torch."""
    info = target.info
    device = info.device.type
    if device == "cuda":
        device = torch.cuda.get_device_name(info.device)
    parts = (
        info.fingerprint or info.name,
        info.engine,
        str(info.dtype).removeprefix("torch."),
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
    progress: Callable[[int, int], None] | None = None,
) -> CostTable:
    """Time passes on arbitrary tokens (timing doesn't depend on them); row counts are interleaved,
    so a
    passing disturbance hits all of them."""
    info = target.info
    contexts = [c for c in contexts if c + max(rows) < info.context_limit] or [
        max(info.context_limit // 2, 1)
    ]
    rows = [r for r in rows if contexts[-1] + r <= info.context_limit]
    rows = rows if target.capabilities.rollback else [1]
    busy = measure_load().busy
    done, total = 0, len(contexts) * repeats
    out = []
    for context in contexts:
        sequence = target.open()
        try:
            target.prefill(sequence, [i % info.vocab_size for i in range(context)])
            samples: dict[int, list[float]] = {r: [] for r in rows}
            for repeat in range(repeats + 1):
                for count in rows:
                    seconds = _one(target, sequence, count)
                    if repeat:  # the first turn warms up
                        samples[count].append(seconds)
                done += bool(repeat)
                if progress is not None:
                    progress(done, total)
            out.append(tuple(1e3 * statistics.median(samples[r]) for r in rows))
        finally:
            target.close(sequence)
    return CostTable(table_key(target), tuple(rows), tuple(contexts), tuple(out), time.time(), busy)


def _one(target: Target, sequence: Any, count: int) -> float:
    tokens = tuple(i % target.info.vocab_size for i in range(count))
    started = time.perf_counter()
    target.forward([Rows(sequence, tokens, tuple(range(-1, count - 1)))])
    synchronize(target)
    seconds = time.perf_counter() - started
    if target.capabilities.rollback:
        target.rollback(sequence)
    else:
        target.commit(sequence, range(count))
    return seconds


def load(target: Target) -> CostTable | None:
    """The cached table for this target; None when there is none, or it is stale or unreadable."""
    try:
        stored = json.loads(_file(target).read_text())
        stored["ms"] = tuple(tuple(line) for line in stored["ms"])
        stored["rows"], stored["contexts"] = tuple(stored["rows"]), tuple(stored["contexts"])
        table = CostTable(**stored)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    fresh = time.time() - table.measured_at < STALE_AFTER_S
    return table if table.format == FORMAT and table.key == table_key(target) and fresh else None


def save(target: Target, table: CostTable) -> None:
    """Keep a table for the next session, atomically; a cache that can't be written is no error."""
    path = _file(target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{time.time_ns()}.tmp")
        scratch.write_text(json.dumps(asdict(table)))
        scratch.replace(path)
    except OSError:
        return


def load_or_measure(target: Target, *, repeats: int = 5) -> CostTable:
    """The cached table, or a fresh one (a few seconds), kept unless the machine was busy."""
    table = load(target)
    if table is None:
        table = measure(target, repeats=repeats)
        if not table.busy:
            save(target, table)
    return table


def _file(target: Target) -> Any:
    import hashlib

    digest = hashlib.sha256(table_key(target).encode()).hexdigest()[:24]
    return cache_dir() / "cost" / f"{digest}.json"

"""Milliseconds per target pass, by rows and context, for both engines: a markdown table.

    python scripts/bench_pass.py --dtypes float32,bfloat16 --json passes.json

All sizes of both engines are timed in turn, `--repeats` times, so that a change of the machine's
speed touches them alike; each figure is the median. A pass includes building its mask and reading
nothing back. Exit status 1 when a fused pass over one row costs over 3% more than one over two.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hasten.environment import command_line, machine, measure_load
from hasten.targets.base import Target
from hasten.targets.load import load_target
from hasten.types import Rows

ENGINES = ("fused", "transformers")
WARMUP = 3
ONE_ROW_TOLERANCE = 1.03


def time_pass(target: Target, sequence: Any, rows: int) -> float:
    """Seconds of one pass over a chain of `rows` rows; the sequence is as before."""
    chain = Rows(sequence, tuple(range(100, 100 + rows)), tuple(range(-1, rows - 1)))
    start = time.perf_counter()
    target.forward([chain])
    if target.info.device.type == "cuda":
        torch.cuda.synchronize(target.info.device)
    seconds = time.perf_counter() - start
    target.rollback(sequence)
    return seconds


def measure(
    targets: dict[str, Target], context: int, rows: Sequence[int], repeats: int
) -> dict[str, dict[int, float]]:
    """Median milliseconds by engine and row count, after a prompt of `context` tokens."""
    sequences = {engine: target.open() for engine, target in targets.items()}
    for engine, target in targets.items():
        target.prefill(sequences[engine], [100 + i % 1000 for i in range(context)])
    times: dict[tuple[str, int], list[float]] = {(e, n): [] for e in targets for n in rows}
    for repeat in range(WARMUP + repeats):
        print(f"\r{context}: {repeat}/{WARMUP + repeats}", end="", file=sys.stderr, flush=True)
        for (engine, count), seconds in times.items():
            taken = time_pass(targets[engine], sequences[engine], count)
            if repeat >= WARMUP:
                seconds.append(taken)
    print(file=sys.stderr)
    for engine, target in targets.items():
        target.close(sequences[engine])
    return {
        engine: {n: 1000 * statistics.median(times[engine, n]) for n in rows} for engine in targets
    }


def numbers(text: str) -> list[int]:
    """``"1,2,4"`` as numbers."""
    return [int(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Milliseconds per target pass.")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--device", help="default: CUDA where there is one")
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--contexts", type=numbers, default=[256, 1024])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path, help="also write environment and figures here")
    return parser.parse_args()


def main() -> int:
    """Prints the table; 1 when one fused row costs more than two."""
    options = arguments()
    load = measure_load()
    if load.busy:
        print(f"Other programs keep {load.others} cores busy: times will be off.", file=sys.stderr)
    print("| dtype | context | engine | " + " | ".join(f"{n} rows" for n in options.rows) + " |")
    print("|---|---|---|" + "---|" * len(options.rows))
    figures: list[dict[str, Any]] = []
    failed = False
    for dtype in options.dtypes.split(","):
        targets = {
            engine: load_target(
                options.model, dtype=dtype, engine=engine, device=options.device
            ).target
            for engine in options.engines.split(",")
        }
        for context in options.contexts:
            medians = measure(targets, context, options.rows, options.repeats)
            for engine, by_rows in medians.items():
                cells = " | ".join(f"{by_rows[n]:.1f}" for n in options.rows)
                print(f"| {dtype} | {context} | {engine} | {cells} |", flush=True)
                figures.append(
                    {"dtype": dtype, "context": context, "engine": engine, "ms": by_rows}
                )
            fused = medians.get("fused", {})
            if {1, 2} <= set(fused) and fused[1] > ONE_ROW_TOLERANCE * fused[2]:
                print(f"one row costs {fused[1] / fused[2]:.3f} of two", file=sys.stderr)
                failed = True
        targets.clear()
        gc.collect()
    if options.json:
        environment = {**machine(), "command": command_line(), "others_busy_cores": load.others}
        report = {"environment": environment, "repeats": options.repeats, "rows": figures}
        options.json.write_text(json.dumps(report, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

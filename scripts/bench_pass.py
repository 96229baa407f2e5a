"""Milliseconds per target pass, by weights, kernels, context and rows: a markdown table.

    python scripts/bench_pass.py --dtypes float32,bfloat16 --json passes.json
    python scripts/bench_pass.py --engines fused --kernels native,torch --quantize none,int8,int4

All targets of a dtype, all their sizes, and all that they are compared with are timed in turn,
`--repeats` times, so that a change of the machine's speed touches them alike; each figure is the
median. A pass includes building its mask and reading nothing back.

Two more lines go with each target on hasten's own kernels:

- *reading*: a sum over as many bytes as its packed products hold, by as many threads. No pass
  that reads every weight once is quicker. Gigabytes a second are 10^9 bytes a second.
- *outside the products*: the share of the pass that isn't spent in its matrix products. These are
  all run once by themselves, at the same number of rows. Each starts its threads and rounds its
  inputs for itself, which a pass does less often: the share is a little more than this says, and
  may fall below zero where a pass is short.

Exit status 1 when a fused pass over one row costs over 3% more than one over two.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hasten.environment import command_line, machine, measure_load
from hasten.errors import HastenError
from hasten.native.library import library
from hasten.targets.base import Target
from hasten.targets.fused import FusedTarget
from hasten.targets.fused_native import NativeDecoder, NativeLinear, _memory
from hasten.targets.load import load_target
from hasten.targets.load_options import KERNELS
from hasten.targets.quantized import QUANTIZE
from hasten.types import Rows

ENGINES = ("fused", "transformers")
NONE = "none"
WARMUP = 3
ONE_ROW_TOLERANCE = 1.03


@dataclass(frozen=True, slots=True)
class Figures:
    """Median milliseconds of one target after one context; the last three of native kernels only.

    passes    by rows
    products  of all matrix products of a pass, by rows
    reading   of `size` bytes, those of the packed products
    """

    passes: dict[int, float]
    products: dict[int, float]
    reading: float = 0.0
    size: int = 0

    @property
    def outside(self) -> dict[int, float]:
        """The share of a pass outside its products, by rows."""
        return {n: 1 - ms / self.passes[n] for n, ms in self.products.items()}

    @property
    def gigabytes_per_s(self) -> float:
        """How fast `size` bytes were read."""
        return self.size / self.reading / 1e6 if self.reading else 0.0


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


class Products:
    """The matrix products of a pass on native kernels, without what is between them."""

    def __init__(self, decoder: NativeDecoder, most: int) -> None:
        blocks = [product for block in decoder._weights for product in block.products]
        self._all: list[NativeLinear] = [*blocks, decoder._head]
        self.size = sum(product.bytes for product in self._all)
        shapes = [product.struct for product in self._all]
        self._x = {x.in_: torch.randn(most, x.in_) for x in shapes}
        self._y = {y.out: torch.empty(most, y.out) for y in shapes}
        self._bytes = _memory(4 * (self.size // 4)).view(torch.float32).fill_(1.0)

    def time(self, rows: int) -> float:
        """Seconds of all products with `rows` rows."""
        threads, multiply = torch.get_num_threads(), library().multiply
        calls = [
            (ctypes.byref(p.struct), self._x[p.struct.in_], self._y[p.struct.out])
            for p in self._all
        ]
        start = time.perf_counter()
        for struct, x, y in calls:
            multiply(struct, x.data_ptr(), rows, y.data_ptr(), threads)
        return time.perf_counter() - start

    def time_reading(self) -> float:
        """Seconds of reading as many bytes."""
        start = time.perf_counter()
        self._bytes.sum()
        return time.perf_counter() - start


def products_of(target: Target, most: int) -> Products | None:
    """A target's products, for up to `most` rows; None where it runs on other kernels."""
    if isinstance(target, FusedTarget) and isinstance(target._decoder, NativeDecoder):
        return Products(target._decoder, most)
    return None


def measure(
    targets: Sequence[Target], context: int, rows: Sequence[int], repeats: int
) -> list[Figures]:
    """Figures of each target after a prompt of `context` tokens."""
    tasks: dict[tuple[int, str, int], Callable[[], float]] = {}
    sizes: list[int] = []
    opened = []
    for at, target in enumerate(targets):
        sequence = target.open()
        opened.append(sequence)
        target.prefill(sequence, [100 + i % 1000 for i in range(context)])
        products = products_of(target, max(rows))
        sizes.append(0 if products is None else products.size)
        for count in rows:
            tasks[at, "pass", count] = partial(time_pass, target, sequence, count)
            if products is not None:
                tasks[at, "products", count] = partial(products.time, count)
        if products is not None:
            tasks[at, "reading", 0] = products.time_reading
    samples: dict[tuple[int, str, int], list[float]] = {key: [] for key in tasks}
    for repeat in range(WARMUP + repeats):
        print(f"\r{context}: {repeat}/{WARMUP + repeats}", end="", file=sys.stderr, flush=True)
        for key, task in tasks.items():
            taken = task()
            if repeat >= WARMUP:
                samples[key].append(taken)
    print(file=sys.stderr)
    for target, sequence in zip(targets, opened, strict=True):
        target.close(sequence)
    ms = {key: 1000 * statistics.median(seconds) for key, seconds in samples.items()}
    return [
        Figures(
            {n: ms[at, "pass", n] for n in rows},
            {n: ms[at, "products", n] for n in rows} if size else {},
            ms.get((at, "reading", 0), 0.0),
            size,
        )
        for at, size in enumerate(sizes)
    ]


def numbers(text: str) -> list[int]:
    """``"1,2,4"`` as numbers."""
    return [int(part) for part in text.split(",")]


def names(*known: str) -> Callable[[str], list[str]]:
    """A reader of names with commas, all of them known."""

    def read(text: str) -> list[str]:
        made = text.split(",")
        for name in made:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return made

    return read


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Milliseconds per target pass.")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--engines", type=names(*ENGINES), default=list(ENGINES))
    parser.add_argument("--kernels", type=names(*KERNELS), default=["auto"], help="of fused")
    parser.add_argument(
        "--quantize",
        type=names(NONE, *QUANTIZE),
        default=[NONE],
        help="of fused, on kernels that can",
    )
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--device", help="default: CUDA where there is one")
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--contexts", type=numbers, default=[256, 1024])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path, help="also write environment and figures here")
    return parser.parse_args()


def load_all(options: argparse.Namespace, dtype: str) -> list[Target]:
    """The targets of a dtype; torch's kernels and transformers have no quantized weights."""
    chosen: list[dict[str, Any]] = []
    if "fused" in options.engines:
        for kernels in options.kernels:
            for quantize in options.quantize:
                if quantize == NONE:
                    chosen.append({"engine": "fused", "kernels": kernels})
                elif kernels != "torch":
                    chosen.append({"engine": "fused", "kernels": kernels, "quantize": quantize})
    if "transformers" in options.engines:
        chosen.append({"engine": "transformers"})
    return [
        load_target(options.model, dtype=dtype, device=options.device, **each).target
        for each in chosen
    ]


def show(target: Target, context: int, figures: Figures) -> None:
    """Print a target's lines of the table."""
    info = target.info

    def line(what: str, cells: Sequence[str]) -> None:
        print(f"| {info.precision} | {what} | {context} | {' | '.join(cells)} |", flush=True)

    line(info.kernels or info.engine, [f"{ms:.2f}" for ms in figures.passes.values()])
    if figures.size:
        read = f"reading {figures.size / 2**20:.0f} MiB, {figures.gigabytes_per_s:.1f} GB/s"
        line(read, [f"{figures.reading:.2f}"] * len(figures.passes))
        line("outside the products", [f"{share:.0%}" for share in figures.outside.values()])


def as_json(target: Target, context: int, figures: Figures) -> dict[str, Any]:
    """A target's figures as plain data; milliseconds but for what is named otherwise."""
    info = target.info
    made: dict[str, Any] = {
        "dtype": str(info.dtype).removeprefix("torch."),
        "quantize": info.quantize,
        "engine": info.engine,
        "kernels": info.kernels,
        "context": context,
        "ms": figures.passes,
    }
    if figures.size:
        made["products_ms"] = figures.products
        made["outside_share"] = figures.outside
        made["reading_ms"] = figures.reading
        made["weight_bytes"] = figures.size
        made["gigabytes_per_s"] = figures.gigabytes_per_s
    return made


def main() -> int:
    """Prints the table; 1 when one fused row costs more than two."""
    options = arguments()
    load = measure_load()
    if load.busy:
        print(f"Other programs keep {load.others} cores busy: times will be off.", file=sys.stderr)
    heads = " | ".join(f"{n} rows" for n in options.rows)
    print(f"| weights | kernels | context | {heads} |")
    print("|---|---|---|" + "---|" * len(options.rows))
    found: list[dict[str, Any]] = []
    failed = False
    for dtype in options.dtypes.split(","):
        try:
            targets = load_all(options, dtype)
        except HastenError as error:
            raise SystemExit(f"error: {error}") from error
        for context in options.contexts:
            measured = measure(targets, context, options.rows, options.repeats)
            for target, figures in zip(targets, measured, strict=True):
                show(target, context, figures)
                found.append(as_json(target, context, figures))
                ms = figures.passes
                if target.info.engine == "fused" and {1, 2} <= set(ms):
                    over = ms[1] / ms[2]
                    if over > ONE_ROW_TOLERANCE:
                        which = f"{target.info.precision}, {target.info.kernels} kernels"
                        print(f"{which}: one row costs {over:.3f} of two", file=sys.stderr)
                        failed = True
        targets.clear()
        gc.collect()
    if options.json:
        environment = {**machine(), "command": command_line(), "others_busy_cores": load.others}
        report = {"environment": environment, "repeats": options.repeats, "rows": found}
        options.json.write_text(json.dumps(report, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

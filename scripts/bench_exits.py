"""Milliseconds of a question to the exit module at exit 0, on hasten's own kernels and on torch's.

    python scripts/bench_exits.py --dtypes bfloat16,float32,gguf

A question is what `auto` asks where copies aren't sure: the rows of a round are fed, and two steps
of a tree are grown. *cold*: each follows a pass of the target, as in a round, which has emptied the
caches; *warm*: it follows another question. Both sides are asked in turn; medians, and in
brackets the quickest, which other programs disturb least.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch

from hasten.builtin.exit_sources import Questions
from hasten.drafters.auto import GROWTH
from hasten.environment import measure_load
from hasten.exits import store
from hasten.exits.bank import ExitBank
from hasten.targets.base import Target
from hasten.targets.fused_native import draft_linear
from hasten.targets.load import load_target

KINDS = ("cold", "warm")


def load(name: str) -> Target:
    """The embedded model in a dtype, or its GGUF file's own weights."""
    options: dict[str, Any] = {"dtype": name}
    if name == "gguf":
        options = {"dtype": "float32", "quantize": "gguf"}
    return load_target(None, **options).target


def banks(target: Target) -> dict[str, ExitBank]:
    """The module at exit 0 with a product of each kind."""
    stored = store.shipped(target.info)
    if stored is None:
        raise SystemExit(f"error: no exit modules are shipped for {target.info.name}")
    with torch.inference_mode():
        native = store.build(target, stored, draft_linear).pick((0,), "exits")
    plain = ExitBank(native.modules, native.head, native.ends)
    plain.native = {}
    return {"native": native, "torch": plain} if native.native else {"torch": plain}


def measure(target: Target, context: int, repeats: int) -> dict[tuple[str, str], list[float]]:
    """Milliseconds by kernels and kind, and of the passes between."""
    found: dict[tuple[str, str], list[float]] = {}
    asked = {name: Questions(target, bank, context, GROWTH) for name, bank in banks(target).items()}
    try:
        for _ in range(repeats):
            for name, questions in asked.items():
                took = questions.run_pass()
                found.setdefault(("pass", "cold"), []).append(took)
                for kind in KINDS:
                    found.setdefault((name, kind), []).append(questions.ask())
    finally:
        for questions in asked.values():
            questions.close()
    return found


def cell(samples: Sequence[float]) -> str:
    """Median and least, without the first ones."""
    kept = samples[len(samples) // 8 :]
    return f"{statistics.median(kept):.2f} ({min(kept):.2f})"


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Milliseconds of a question to an exit module.")
    parser.add_argument("--dtypes", default="bfloat16,float32,gguf")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=64)
    options = parser.parse_args()
    load_now = measure_load()
    if load_now.busy:
        print(f"Other programs keep {load_now.others} cores busy: times are off.", file=sys.stderr)
    print("| weights | kernels of the module | a pass | question, cold | question, warm |")
    print("|---|---|---|---|---|")
    for name in options.dtypes.split(","):
        found = measure(load(name), options.context, options.repeats)
        for kernels in ("native", "torch"):
            if (kernels, "cold") in found:
                cells = [
                    cell(found[key]) for key in (("pass", "cold"), *((kernels, k) for k in KINDS))
                ]
                print(f"| {name} | {kernels} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

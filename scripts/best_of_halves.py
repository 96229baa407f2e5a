"""Is `auto` as good as the best single method? Chosen on half of the prompts, compared on the rest.

    python scripts/best_of_halves.py SPEC_BENCH.json EDITING.json AGENT.json

Takes files of `hasten bench --json`. The prompts of each group are dealt alternately into halves.
On each half the fastest single method is chosen (tokens / second over the half's prompts, `auto`
and peers left out) and compared with `auto` on the other half. So no method is called best on the
prompts that made it so. Groups have too few prompts for halves: there `auto` is compared with the
method that is best on the same prompts, which favours that one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

AUTO, PLAIN = "auto", "ar"
Entry = Mapping[str, Any]


def speed(entries: Iterable[Entry], method: str) -> float:
    """Tokens per second of a method over its entries."""
    mine = [e for e in entries if e["method"] == method]
    return float(sum(e["decode_tokens"] for e in mine) / sum(e["decode_s"] for e in mine))


def best(entries: Sequence[Entry], methods: Iterable[str]) -> str:
    """The fastest of the methods."""
    return max(methods, key=lambda method: speed(entries, method))


def halves(entries: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
    """The entries of every other prompt of each group, and the rest."""
    seen: dict[str, list[tuple[str, int]]] = {}
    out: tuple[list[Entry], list[Entry]] = ([], [])
    for entry in entries:
        prompts = seen.setdefault(entry["category"], [])
        prompt = (entry["row"], entry["turn"])
        if prompt not in prompts:
            prompts.append(prompt)
        out[prompts.index(prompt) % 2].append(entry)
    return out


def compare(entries: Sequence[Entry], methods: Sequence[str]) -> None:
    """Print both comparisons."""
    plain = speed(entries, PLAIN)
    parts = halves(entries)
    for chosen_on, other in (parts, parts[::-1]):
        pick = best(chosen_on, methods)
        base = speed(other, PLAIN)
        auto, single = speed(other, AUTO) / base, speed(other, pick) / base
        print(f"  chosen on one half {pick}: {single:.3f} on the other, auto {auto:.3f}", end="")
        print(f" ({auto / single - 1:+.1%})")
    print(f"  overall: auto {speed(entries, AUTO) / plain:.3f}")
    for group in dict.fromkeys(e["category"] for e in entries):
        mine = [e for e in entries if e["category"] == group]
        pick = best(mine, methods)
        ratio = speed(mine, AUTO) / speed(mine, pick)
        print(f"  {group}: best {pick} {speed(mine, pick) / speed(mine, PLAIN):.3f},", end=" ")
        print(f"auto {speed(mine, AUTO) / speed(mine, PLAIN):.3f} ({ratio - 1:+.1%})")


def main() -> None:
    """Read the files and compare in each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        entries: list[Entry] = json.loads(path.read_text())["prompts"]
        names = dict.fromkeys(e["method"] for e in entries)
        methods = [n for n in names if n not in (AUTO, PLAIN) and not n.startswith("peer:")]
        print(path.name)
        compare(entries, methods)


if __name__ == "__main__":
    main()

"""Memory over many requests, and drafting time on the worst prompts, of some methods.

    python scripts/stress.py --methods racer,recycling,auto --requests 200

Prints, for each method, the process's resident memory after every quarter of the requests (short
answers to the package's `mini` prompts, one after another), then the median and the longest
drafting time of a round on a prompt of one token repeated 4,000 times and on 4,000 random tokens.
Memory that is flat from the second quarter on isn't leaked; drafting time has to stay bounded.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence

import psutil

import hasten
from hasten import methods
from hasten.bench.prompts import load_suite
from hasten.bench.session import first_ids

LONG = 4000


def memory_mb() -> float:
    """Resident memory of this process in MiB."""
    return float(psutil.Process().memory_info().rss) / 2**20


def over_requests(llm: hasten.LLM, method: str, requests: int, new_tokens: int) -> list[float]:
    """Memory after each quarter of the requests."""
    rows = load_suite("mini").rows
    out = []
    for index in range(requests):
        ids = first_ids(llm, rows[index % len(rows)])
        llm.generate(ids, max_new_tokens=new_tokens, method=method)
        if (index + 1) % max(requests // 4, 1) == 0:
            out.append(memory_mb())
    return out


def worst_drafting(llm: hasten.LLM, method: str, prompt: Sequence[int]) -> tuple[float, float]:
    """Median and maximum milliseconds of drafting in a round."""
    stream = llm.stream(list(prompt), max_new_tokens=64, ignore_eos=True, method=method)
    spent = [1e3 * made.times.draft for made in stream.rounds() if made.tree is not None]
    return statistics.median(spent), max(spent)


def main() -> None:
    """Parse options and print a block per method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default="racer,recycling,auto")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    llm = hasten.load(dtype=options.dtype)
    rng = random.Random(0)
    prompts = {
        "one token repeated": [1000] * LONG,
        "random tokens": [rng.randrange(1000, 40_000) for _ in range(LONG)],
    }
    for method in methods.split(options.methods):
        quarters = over_requests(llm, method, options.requests, options.max_new_tokens)
        print(f"{method}: MiB after each quarter of {options.requests} requests:", end=" ")
        print(", ".join(f"{each:.0f}" for each in quarters))
        for name, prompt in prompts.items():
            median, longest = worst_drafting(llm, method, prompt)
            print(f"  {LONG} x {name}: drafting {median:.2f} ms a round, {longest:.2f} at most")


if __name__ == "__main__":
    main()

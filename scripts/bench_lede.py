"""LEDE beside everything it must beat, on one engine in one run.

    python scripts/bench_lede.py --tune TRAINING.jsonl --suites A.jsonl,B.jsonl,C.jsonl --json OUT

First fixed exits and lengths are tried on training prompts (`--tune`, never a measured set), and
the best of them measured with the others: the best with an exit above 0, which is what chains of
the two-action agent compare with, and the best of all. Tables (`--table`, several joined by +):

    main      the best fixed settings, del, myopic, the first agent, lede, and its parts alone
    rules     kangaroo, lite, adaedl, svip, draft-verify, each from the shallowest exit above 0
    agents    every agent of `--agents` (seeds, or trained without a domain)
    switches  lede with one of its switches off at a time, and with the agent's chains

What can't run here (no agent, no calibration) is left out, and said. Speedups are over plain
decoding, prompt by prompt, decode only; intervals are a bootstrap over prompts. `--minutes` bounds
the whole: each suite has its part, and what was measured until then counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hasten
from hasten.api import LLM
from hasten.bench.config import BenchConfig, Progress
from hasten.bench.output import OVERALL, Report
from hasten.bench.runner import run
from hasten.bench.stats import bootstrap_interval, micro_ratio
from hasten.errors import HastenError
from hasten.exits import store

LENGTHS = (1, 2, 3, 4, 6)
PARTS = ("early-exit:tree", "early-exit:lookup", "auto")
RULES = ("kangaroo", "lite", "adaedl", "svip", "draft-verify")
SWITCHES = ("breadth=off", "retrieval=off", "plain=off", "online=off", "guard=off", "walk=on")
TUNING_TOKENS, TUNING_ROWS = 40, 10


def main() -> int:
    """Prints the tables; writes the figures."""
    options = _options()
    llm = hasten.load(options.model, method="ar", dtype=options.dtype)
    started = time.monotonic()
    layers = _layers(llm, options.modules)
    best = _tuned(llm, options, layers)
    methods = _runnable(llm, _methods(options, layers, best))
    suites = options.suites.split(",")
    made: dict[str, Any] = {"tuned": best, "suites": {}}
    for number, suite in enumerate(suites):
        left = 60.0 * options.minutes - (time.monotonic() - started)
        report = _bench(llm, options, methods, suite, left / (len(suites) - number))
        made["suites"][Path(suite).stem] = report.to_json()
        _print(Path(suite).stem, report, options.against)
    _print_means(made["suites"])
    if options.json:
        options.json.write_text(json.dumps(made, indent=1) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="LEDE beside everything it must beat.")
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tune", required=True, help="training prompts for the fixed settings")
    parser.add_argument("--suites", required=True, help="files or names, joined by commas")
    parser.add_argument("--table", default="main", help="main, rules, agents, switches; + joins")
    parser.add_argument("--agents", nargs="*", default=[], help="agents' files; none: the shipped")
    parser.add_argument("--arms", default="", help="file of arms; none: the shipped")
    parser.add_argument("--modules", default="", help="folder of exit modules; none: the shipped")
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=14.0)
    parser.add_argument("--against", default="auto", help="method that differences are taken from")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


# -- what is measured ------------------------------------------------------------------------------


def _layers(llm: LLM, modules: str) -> tuple[int, ...]:
    """Where there are exit modules."""
    stored = store.read(modules) if modules else store.shipped(llm.target.info)
    if stored is None:
        raise SystemExit(f"error: no exit modules for {llm.target.info.name}: name some, --modules")
    return tuple(sorted(config.layer for config in stored.configs))


def _with(method: str, **options: str) -> str:
    """The method with those options that aren't empty."""
    return ",".join([method, *(f"{name}={value}" for name, value in options.items() if value)])


def _tuned(llm: LLM, options: argparse.Namespace, layers: Sequence[int]) -> dict[str, str]:
    """The best fixed settings on training prompts: of all, and of the exits above 0."""
    grid = {
        _with("early-exit", exits=str(layer), length=str(length), modules=options.modules): layer
        for layer in layers
        for length in LENGTHS
    }
    config = BenchConfig(
        methods=tuple(grid),
        suite=options.tune,
        limit=TUNING_ROWS,
        max_new_tokens=TUNING_TOKENS,
        temperature=options.temperature,
        seed=options.seed,
        explain=False,
    )
    report = run(config, _until(60.0 * options.minutes / 5, 1 + len(grid)), llm=llm)
    overall = (row for row in report.rows if row.category == OVERALL)
    speeds = {row.method: row.speedup_micro or 0.0 for row in overall}
    ranked = sorted(grid, key=lambda name: -speeds.get(name, 0.0))
    print(f"fixed settings on {options.tune}, {len(report.prompts) // (len(grid) + 1)} prompts:")
    for name in ranked[:5]:
        print(f"  {name}: {speeds.get(name, 0.0):.2f}x")
    above = [name for name in ranked if grid[name] > 0]
    return {"fixed": ranked[0], **({"fixed above 0": above[0]} if above else {})}


def _methods(options: argparse.Namespace, layers: Sequence[int], best: dict[str, str]) -> list[str]:
    """Method strings of the tables asked for, each once."""
    modules, agents = options.modules, options.agents or [""]
    above = [layer for layer in layers if layer > 0]
    several = "+".join(map(str, above))
    first = str(above[0]) if above else ""
    tables = {
        "main": [
            *best.values(),
            _with("del", exits=several, modules=modules),
            _with("early-exit", rule="myopic", exits=several, modules=modules),
            _with("lede:paper", agent=agents[0], modules=modules),
            _with("lede", arms=options.arms, modules=modules),
            *(_with(part, modules="" if part == "auto" else modules) for part in PARTS),
        ],
        "rules": [
            _with("early-exit", rule=r, exits=several if r == "lite" else first, modules=modules)
            for r in RULES
        ],
        "agents": [
            *best.values(),
            *(_with("lede:paper", agent=agent, modules=modules) for agent in agents),
        ],
        "switches": [
            _with("lede", arms=options.arms, modules=modules),
            *(
                _with(
                    f"lede,{switch}",
                    arms=options.arms,
                    modules=modules,
                    agent=agents[0] if switch == "walk=on" else "",
                )
                for switch in SWITCHES
            ),
        ],
    }
    wanted = options.table.split("+")
    if unknown := [name for name in wanted if name not in tables]:
        raise SystemExit(f"error: --table {unknown}: one of {', '.join(tables)}")
    return list(dict.fromkeys(name for table in wanted for name in tables[table]))


def _runnable(llm: LLM, methods: Sequence[str]) -> list[str]:
    """Those that can run; what can't is said."""
    kept = []
    for method in methods:
        try:
            llm.prepare(method)
            kept.append(method)
        except HastenError as error:
            print(f"left out: {method}: {error}", file=sys.stderr)
    return kept


def _until(seconds: float, contestants: int) -> Any:
    """A progress callback that ends a run as Ctrl-C does, once so much time has passed and so many
    have answered one prompt at least."""
    deadline = time.monotonic() + max(seconds, 1.0)

    def tell(at: Progress) -> None:
        if (
            at.phase == "measure"
            and at.done >= contestants
            and at.method
            and time.monotonic() > deadline
        ):
            raise KeyboardInterrupt

    return tell


def _bench(
    llm: LLM, options: argparse.Namespace, methods: Sequence[str], suite: str, seconds: float
) -> Report:
    config = BenchConfig(
        methods=tuple(methods),
        suite=suite,
        limit=options.limit,
        max_new_tokens=options.tokens,
        temperature=options.temperature,
        seed=options.seed,
        explain=options.dtype == "float32",
    )
    return run(config, _until(seconds, 1 + len(methods)), llm=llm)


# -- tables ----------------------------------------------------------------------------------------

_COLUMNS = (
    "method", "micro (95%)", "macro", "accepted", "drafted", "kept of drafted", "mean exit",
    "identical", "decisions a round", "us each", "share of time",
)  # fmt: skip


def _print(name: str, report: Report, against: str) -> None:
    """A suite's table; with `against` also how much faster than that method each is."""
    busy = " (other work ran meanwhile)" if report.environment.get("busy") else ""
    prompts = max(row.prompts for row in report.rows)
    print(f"\n**{name}**, {prompts} prompts{', cut short' if report.partial else ''}{busy}\n")
    columns = [*_COLUMNS, *([f"over {against} (95%)"] if against else [])]
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in report.rows:
        if row.category != OVERALL:
            continue
        cells = [f"`{row.method}`", *_cells(row)]
        if against:
            cells.append(_over(report, row.method, against))
        print("| " + " | ".join(cells) + " |", flush=True)


def _cells(row: Any) -> list[str]:
    extra = row.extra
    ends = extra.get("speedup_micro_interval")
    interval = f" ({ends[0]:.2f}-{ends[1]:.2f})" if ends else ""
    drafted, kept, exit = _drafts(extra.get("choices") or {})
    decisions = extra.get("decisions") or {}
    return [
        f"{row.speedup_micro or 0:.2f}{interval}",
        f"{row.speedup_macro or 0:.2f}",
        f"{row.mean_accepted_length or 0:.2f}",
        drafted,
        kept,
        exit,
        f"{row.identical}/{row.prompts}",
        f"{decisions['per_round']:.1f}" if decisions else "",
        f"{decisions['us']:.0f}" if decisions else "",
        f"{100 * decisions['share']:.1f}%" if decisions else "",
    ]


def _drafts(choices: dict[str, dict[str, int]]) -> tuple[str, str, str]:
    """Tokens drafted a round that drafted, the share kept, and the mean exit of those from one."""
    drafting = {name: entry for name, entry in choices.items() if entry["drafted"]}
    if not drafting:
        return "", "", ""
    rounds, drafted, kept = (
        sum(entry[key] for entry in drafting.values()) for key in ("rounds", "drafted", "kept")
    )
    exits = [
        (int(part.removeprefix("exit ")), entry["rounds"])
        for name, entry in drafting.items()
        for part in name.split(" + ")
        if part.startswith("exit ")
    ]
    total = sum(count for _, count in exits)
    mean = f"{sum(exit * count for exit, count in exits) / total:.1f}" if total else ""
    return f"{drafted / rounds:.1f}", f"{100 * kept / drafted:.0f}%", mean


def _over(report: Report, method: str, other: str) -> str:
    """Ratio of the speeds on the same prompts, and its interval."""
    own = [each for each in report.prompts if each["method"] == method]
    base = [each for each in report.prompts if each["method"] == other]
    if not base or len(own) != len(base):
        return ""
    import numpy as np

    pairs = np.array(
        [
            (a["decode_tokens"], a["decode_s"], b["decode_tokens"], b["decode_s"])
            for a, b in zip(own, base, strict=True)
        ]
    )
    ratio, ends = micro_ratio(pairs.sum(0)), bootstrap_interval(pairs, range(len(pairs)), 0)
    if ratio is None or ends is None:
        return ""
    return f"{ratio:.3f} ({ends[0]:.3f}-{ends[1]:.3f})"


def _print_means(suites: dict[str, Any]) -> None:
    """The mean of the suites' micro speedups, by method."""
    speeds: dict[str, list[float]] = {}
    for report in suites.values():
        for row in report["rows"]:
            if row["category"] == OVERALL and row["speedup_micro"]:
                speeds.setdefault(row["method"], []).append(row["speedup_micro"])
    print("\n| method | mean of the suites |\n|---|---|")
    for method, values in sorted(speeds.items(), key=lambda item: -sum(item[1])):
        if len(values) == len(suites):
            print(f"| `{method}` | {sum(values) / len(values):.3f} |")


if __name__ == "__main__":
    sys.exit(main())

"""What SMC costs and how near its law comes, on the embedded model: markdown tables.

    python scripts/bench_smc.py --part cost,memory --temperature 0.7 --json smc.json
    python scripts/bench_smc.py --part law,quality,bound,tasks --method smc,length=2

Parts (smc_laws.py, smc_answers.py, and here):

- *draft*: total variation and chi-square of the target's next-token law against the draft's, on
  plain answers, for draft temperatures (``--warm``) and for mixtures with a hot one (``--hot``).
- *law*: total variation between the law of the answer's second token, the first one drafted, and
  the target's, over its likeliest tokens and all others as one; beside it what chance alone gives
  with as many plain answers.
- *quality*: mean log-probability a token under the target, of SMC's answers and of plain ones.
- *tasks*: accuracy on task families with exact answers, sampled, beside plain sampling.
- *bound*: evidence, its relative variance and the bounds that follow, as `hasten.smc.diagnose` has
  them, for one round and for longer answers.
- *cost*: milliseconds of a target pass over n rows and of a drafted token for n lanes; the speedup
  over plain decoding that they predict, and what was measured: tokens a second of plain decoding,
  of lossless speculative sampling (rejection) with the same exit, and of SMC, one after the other
  on each prompt. Decode only; wants an idle machine.
- *memory*: keys and values held for a prompt of 2,000 tokens.

All answers are sampled at ``--temperature``, without other options. Prompts are those of a suite,
the shortest of each of its groups. Standard errors count prompts, not answers. With ``--json`` a
part that the file has already (of the same command line) isn't run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from smc_answers import part_quality, part_tasks
from smc_common import Bench, announced, line, load, table
from smc_laws import part_bound, part_draft, part_law

from hasten.bench.prompts import load_suite
from hasten.bench.stats import bootstrap_interval
from hasten.environment import command_line, machine, measure_load
from hasten.errors import HastenError
from hasten.metrics import Summary
from hasten.smc.proposals import Lane, chain, run_rows

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 40, 72)
"""Of the table of passes; 72 are eight particles with eight drafted tokens."""


# -- cost ------------------------------------------------------------------------------------------


def median_ms(task: Callable[[], float], repeats: int) -> float:
    """Milliseconds of a task that gives its seconds: the median after two to warm up."""
    return 1e3 * statistics.median([task() for _ in range(repeats + 2)][2:])


def pass_ms(bench: Bench, rows: int) -> float:
    """Of a target pass over a chain of so many rows."""
    target = bench.llm.target
    sequence = target.open(bench.prefilled(bench.prompts[0])[0])

    def forward() -> float:
        started = time.perf_counter()
        run_rows(target, [chain(sequence, range(100, 100 + rows))])
        taken = time.perf_counter() - started
        target.rollback(sequence)
        return taken

    made = median_ms(forward, bench.args.repeats)
    target.close(sequence)
    return made


def draft_ms(bench: Bench, lanes: int) -> float:
    """Of one drafted token for so many lanes that share nothing, drawing left out."""
    target, prompt, proposal = bench.llm.target, bench.prompts[0], bench.make()
    base, passed = bench.prefilled(prompt)
    sequences = [target.open(base) for _ in range(lanes)]
    proposal.begin(prompt, passed.hidden, lanes)
    every = [Lane(slot, 100 + slot, each) for slot, each in enumerate(sequences)]

    def draft() -> float:
        started = time.perf_counter()
        proposal.draft(every, 2, lambda logits, of: [200] * len(of))
        taken = time.perf_counter() - started
        for each in sequences:
            target.rollback(each)
        return taken / 2

    made = median_ms(draft, bench.args.repeats)
    proposal.close()
    for each in sequences:
        target.close(each)
    return made


def part_cost(bench: Bench) -> dict[str, Any]:
    """The cost tables, and speeds measured beside each other."""
    args = bench.args
    passes = {rows: pass_ms(bench, rows) for rows in ROWS}
    drafts = {lanes: draft_ms(bench, lanes) for lanes in (1, 2, 4, 8)}
    table("n", *ROWS)
    line("c_T(n) ms", *(f"{ms:.2f}" for ms in passes.values()))
    line("c_D(n) ms", *(f"{drafts[n]:.2f}" if n in drafts else "" for n in ROWS))
    settings = [(p, n, k) for p in args.populations for n in args.particles for k in args.lengths]
    took: dict[str, list[tuple[Summary, float]]] = {}
    numbered = list(enumerate(bench.prompts))
    for seed, prompt in announced(numbered, len(numbered), "cost"):
        for name, summary, rows in _measured(bench, prompt, seed, settings):
            took.setdefault(name, []).append((summary, rows))
    table("method", "tokens a pass", "rows a pass", "draft ms", "pass ms", "other ms", "predicted",
          "measured", "95%", "tokens/s")  # fmt: skip
    found = []
    for name, runs in took.items():
        each = _figures(name, runs, took["plain"])
        if name.startswith("smc"):
            each["predicted"] = _predicted(each, passes, drafts)
        found.append(each)
        _print(each)
    return {"pass_ms": passes, "draft_ms": drafts, "methods": found}


def _measured(
    bench: Bench, prompt: list[int], seed: int, settings: Sequence[tuple[str, int, int]]
) -> list[tuple[str, Summary, float]]:
    """One answer of each method to a prompt, in turn; with the rows of its passes."""
    args, out = bench.args, []
    common: dict[str, Any] = {
        "max_new_tokens": args.tokens,
        "temperature": args.temperature,
        "seed": seed,
        "ignore_eos": True,
    }
    out.append(("plain", bench.llm.generate(prompt, method="ar", **common).metrics, 1.0))
    exits = bench.options.exits or "0"
    for length in args.lengths:
        method = f"early-exit,exits={exits},length={length}"
        result = bench.llm.generate(prompt, method=method, verify="rejection", **common)
        out.append((f"lossless K={length}", result.metrics, length + 1.0))
    for population, n, k in settings:
        info, summary = bench.answer(
            prompt, seed, args.tokens, particles=n, length=k, population=population
        )
        name = f"smc {population} N={n} K={k}"
        out.append((name, summary, info.target_rows / max(info.target_passes, 1)))
    return out


def _figures(
    name: str, runs: Sequence[tuple[Summary, float]], plain: Sequence[tuple[Summary, float]]
) -> dict[str, Any]:
    """Tokens a second after the first token, all answers together; an answer of SMC may come as a
    whole at its end, so its first token isn't counted wherever it came."""
    cells = [
        (mine.new_tokens - 1, mine.decode_s, base.new_tokens - 1, base.decode_s)
        for (mine, _), (base, _) in zip(runs, plain, strict=True)
    ]
    tokens, seconds, base_tokens, base_seconds = (
        sum(column) for column in zip(*cells, strict=True)
    )
    total = Summary()
    for summary, _ in runs:
        total.merge(summary)
    draft, target = total.per_pass_ms("draft"), total.per_pass_ms("target")
    return {
        "name": name,
        "tokens_a_pass": tokens / total.target_passes,
        "rows": statistics.fmean(rows for _, rows in runs),
        "draft_ms": draft,
        "pass_ms": target,
        "other_ms": total.per_pass_ms("decode") - draft - target,
        "speedup": (tokens / seconds) / (base_tokens / base_seconds),
        "interval": bootstrap_interval(np.array(cells), range(len(cells)), 0),
        "tokens_per_s": tokens / seconds,
    }


def _predicted(each: dict[str, Any], passes: dict[int, float], drafts: dict[int, float]) -> float:
    """Of passes and drafts alone: nothing is counted for weighing, drawing and copying."""
    parts = dict(part.split("=") for part in each["name"].split() if "=" in part)
    n, k = int(parts["N"]), int(parts["K"])
    lanes = min(n, each["rows"] / (k + 1))
    draft = float(np.interp(lanes, list(drafts), list(drafts.values())))
    target = float(np.interp(each["rows"], list(passes), list(passes.values())))
    return (k + 1) * passes[1] / (k * draft + target)


def _print(each: dict[str, Any]) -> None:
    low, high = each["interval"] or (float("nan"),) * 2
    predicted = f"{each['predicted']:.2f}x" if "predicted" in each else ""
    figures = [f"{each[key]:.2f}" for key in ("tokens_a_pass", "rows", "draft_ms", "pass_ms",
                                              "other_ms")]  # fmt: skip
    line(each["name"], *figures, predicted, f"{each['speedup']:.2f}x", f"{low:.2f}-{high:.2f}",
         f"{each['tokens_per_s']:.1f}")  # fmt: skip


# -- memory ----------------------------------------------------------------------------------------


def part_memory(bench: Bench) -> dict[int, int]:
    """Keys and values at their most, for one particle and for many."""
    prompt = [100 + i % 1000 for i in range(2000)]
    bench.forget()
    target: Any = bench.llm.target
    table("N", "MiB held", "of it beside one particle's", "times one particle's")
    held: dict[int, int] = {}
    for n in (1, 8):
        run = bench.start(prompt, 0, bench.args.tokens, particles=n)
        held[n] = max(target.bytes_in_use for _ in run.rounds())
        more = (held[n] - held[1]) / 2**20
        line(n, f"{held[n] / 2**20:.1f}", f"{more:.1f}", f"{held[n] / held[1]:.2f}")
    bench.forget()
    return held


# -- the command -----------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Bench], Any]] = {
    "draft": part_draft,
    "law": part_law,
    "quality": part_quality,
    "tasks": part_tasks,
    "bound": part_bound,
    "cost": part_cost,
    "memory": part_memory,
}


def numbers(text: str) -> list[int]:
    """``"1,2,4"`` as numbers."""
    return [int(part) for part in text.split(",")]


def shares(text: str) -> list[float]:
    """``"1,0.7"`` as numbers."""
    return [float(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What SMC costs, and how near its law comes.")
    parser.add_argument("--part", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--method", default="smc,length=2", help="smc and its options")
    parser.add_argument("--suite", default="mini")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--runs", type=int, default=200, help="of law and bound, a prompt")
    parser.add_argument("--answers", type=int, default=4, help="of quality, a prompt")
    parser.add_argument("--problems", type=int, default=240, help="of tasks")
    parser.add_argument("--families", help="of tasks; default: those that qualify")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens an answer")
    parser.add_argument(
        "--bound-tokens", type=numbers, default=[12], help="of bound, beside a round"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--warm", type=shares, default=[0.6], help="draft temperatures, of the "
                        "request's: of draft and quality")  # fmt: skip
    parser.add_argument("--hot", type=shares, default=[0.0], help="of draft: shares of a draft at "
                        "twice the temperature")  # fmt: skip
    parser.add_argument("--particles", type=numbers, default=[1, 4, 8, 16])
    parser.add_argument("--length", type=int, default=2, help="of draft: tokens drafted a round")
    parser.add_argument("--lengths", type=numbers, default=[2, 4, 8], help="of cost")
    parser.add_argument("--populations", type=lambda text: text.split(","), default=["persistent"],
                        help="of cost")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=20, help="of each timed pass")
    parser.add_argument("--json", type=Path, help="write environment and figures here")
    args = parser.parse_args()
    if unknown := set(args.part.split(",")) - set(PARTS):
        parser.error(f"--part: {', '.join(sorted(unknown))}: none of {', '.join(PARTS)}")
    return args


def short_prompts(bench_suite: str, count: int) -> list[str]:
    """First turns, the shortest of each group in turn."""
    groups: dict[str, list[str]] = {}
    for row in load_suite(bench_suite).rows:
        groups.setdefault(row.category, []).append(row.turns[0])
    ranked = [sorted(texts, key=len) for texts in groups.values()]
    longest = max(map(len, ranked))
    return [texts[at] for at in range(longest) for texts in ranked if at < len(texts)][:count]


def known(args: argparse.Namespace) -> tuple[dict[str, str], dict[str, Any]]:
    """The settings of this command line, and the parts its file has of the same."""
    settings = {k: str(v) for k, v in vars(args).items() if k not in ("json", "part")}
    if args.json and args.json.exists():
        held = json.loads(args.json.read_text())
        if held.get("settings") == settings:
            return settings, held["parts"]
    return settings, {}


def main() -> None:
    """Print the parts asked for."""
    args = arguments()
    busy = measure_load()
    if busy.busy:
        print(f"Other programs keep {busy.others} cores busy: times will be off.", file=sys.stderr)
    settings, parts = known(args)
    environment = {**machine(), "command": command_line(), "others_busy_cores": busy.others}
    try:
        llm, options, make = load(args)
        prompts = [llm.tokenize(text) for text in short_prompts(args.suite, args.prompts)]
        bench = Bench(llm, options, make, prompts, args)
        for part in args.part.split(","):
            if part in parts:
                print(f"{part}: in {args.json} already", file=sys.stderr)
                continue
            parts[part] = PARTS[part](bench)
            if args.json:
                held = {"environment": environment, "settings": settings, "parts": parts}
                args.json.write_text(json.dumps(held, indent=1))
    except HastenError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()

"""What SMC costs and how near its law comes, on the embedded model: markdown tables.

    python scripts/bench_smc.py --part cost --dtype bfloat16 --prompts 6 --json smc.json
    python scripts/bench_smc.py --part law,quality,bound,memory --runs 500

Parts:

- *cost*: milliseconds of a target pass over n rows and of a drafted token for N particles, the
  speedup over plain decoding that they predict, and what was measured: tokens a second of plain
  decoding, of lossless speculative sampling (rejection) with the same exit, and of SMC, one after
  the other on each prompt. Decode only.
- *law*: total variation between the law of the answer's second token, the first one drafted, and
  the target's, over its likeliest tokens and all others as one; beside it what chance alone gives
  with as many plain answers.
- *quality*: mean log-probability a token under the target, of SMC's answers and of plain ones.
- *bound*: evidence, its relative variance and the bounds that follow, as `hasten.smc.diagnose` has
  them.
- *memory*: keys and values held for a prompt of 2,000 tokens.

All answers are sampled at `--temperature`, without other options. Prompts are those of a suite.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hasten
from hasten.bench.prompts import load_suite
from hasten.environment import command_line, machine, measure_load
from hasten.errors import HastenError
from hasten.methods import MethodContext
from hasten.metrics import Summary
from hasten.smc.diagnose import HEADER, diagnose, row
from hasten.smc.info import SMCInfo
from hasten.smc.options import MakeProposal, SMCOptions, prepare
from hasten.smc.proposals import Lane, chain, run_rows
from hasten.smc.run import SMCRun
from hasten.types import Rows, SamplingParams

PARTS = ("cost", "law", "quality", "bound", "memory")
LIKELY = 20
"""Tokens told apart in the law part; the others count as one."""
FIRST_TOKENS = 1024
"""First tokens summed over for the second token's law; what they miss is printed."""
CHUNK = 64


@dataclass(slots=True)
class Bench:
    """The model, what drafts for it, the prompts, and the command line."""

    llm: hasten.LLM
    make: MakeProposal
    prompts: list[list[int]]
    args: argparse.Namespace
    found: dict[str, Any]

    def options(self, particles: int, length: int) -> SMCOptions:
        """Options of one setting; the proposal was made with the others' defaults."""
        return SMCOptions(
            particles=particles,
            length=length,
            draft_temperature=self.args.draft_temperature,
            population=self.args.population,
        )

    def start(
        self, prompt: Sequence[int], particles: int, length: int, tokens: int, seed: int
    ) -> SMCRun:
        """A run on its way."""
        params = SamplingParams(
            max_new_tokens=tokens, temperature=self.args.temperature, ignore_eos=True
        )
        options = self.options(particles, length)
        return SMCRun(self.llm.target, prompt, params, options, proposal=self.make(), seed=seed)

    def answer(
        self, prompt: Sequence[int], particles: int, length: int, tokens: int, seed: int
    ) -> tuple[SMCInfo, Summary]:
        """A run to its end."""
        run = self.start(prompt, particles, length, tokens, seed)
        summary = Summary.of(run.rounds())
        assert run.info is not None
        return run.info, summary


def table(*heads: str) -> None:
    """Print a table's head."""
    print("\n| " + " | ".join(heads) + " |\n|" + "---|" * len(heads), flush=True)


def line(*cells: object) -> None:
    """Print a row."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def median_ms(task: Callable[[], float], repeats: int) -> float:
    """Milliseconds of a task that gives its seconds: the median after two to warm up."""
    return 1e3 * statistics.median([task() for _ in range(repeats + 2)][2:])


# -- cost ------------------------------------------------------------------------------------------


def costs(bench: Bench, particles: int, length: int) -> tuple[float, float, float]:
    """Milliseconds of a plain step, of a pass that verifies, and of one drafted token for all."""
    target, prompt = bench.llm.target, bench.prompts[0]
    proposal = bench.make()
    base = target.open()
    passed = target.prefill(base, prompt, taps=proposal.taps)
    sequences = [target.open(base) for _ in range(particles)]
    proposal.begin(prompt, passed.hidden, particles)
    lanes = [Lane(slot, 100 + slot, each) for slot, each in enumerate(sequences)]

    def forward(rows: Sequence[Rows]) -> float:
        started = time.perf_counter()
        run_rows(target, rows)
        taken = time.perf_counter() - started
        for each in rows:
            target.rollback(each.sequence)
        return taken

    def draft() -> float:
        started = time.perf_counter()
        proposal.draft(lanes, length, lambda logits: [200] * len(logits))
        taken = time.perf_counter() - started
        for each in sequences:
            target.rollback(each)
        return taken / length

    plain = [chain(sequences[0], [100])]
    verify = [chain(each, [100 + i for i in range(length + 1)]) for each in sequences]
    repeats = bench.args.repeats
    made = (
        median_ms(lambda: forward(plain), repeats),
        median_ms(lambda: forward(verify), repeats),
        median_ms(draft, repeats),
    )
    proposal.close()
    for each in [*sequences, base]:
        target.close(each)
    return made


def speed(summaries: Sequence[Summary]) -> float:
    """Tokens a second after the first token, all answers together."""
    # An answer of SMC may come as a whole at its end: its first token isn't in the first round.
    tokens = sum(each.new_tokens - 1 for each in summaries)
    return tokens / sum(each.decode_s for each in summaries)


def part_cost(bench: Bench) -> None:
    """The cost table, and speeds measured beside each other."""
    args = bench.args
    settings = [(n, k) for n in args.particles for k in args.lengths]
    took: dict[str, list[Summary]] = {}
    for seed, prompt in enumerate(bench.prompts):
        for name, summary in _measured(bench, prompt, seed, settings):
            took.setdefault(name, []).append(summary)
    plain = speed(took["plain"])
    table("method", "c_T(1) ms", "c_T(N(K+1)) ms", "c_D(N) ms", "predicted", "measured", "tokens/s")
    line("plain", "", "", "", "", "1.00x", f"{plain:.1f}")
    for length in args.lengths:
        rate = speed(took[f"lossless K={length}"])
        line(f"lossless K={length}", "", "", "", "", f"{rate / plain:.2f}x", f"{rate:.1f}")
    rows = []
    for n, k in settings:
        one, verify, draft = costs(bench, n, k)
        predicted = (k + 1) * one / (k * draft + verify)
        rate = speed(took[f"smc N={n} K={k}"])
        cells = [f"{one:.1f}", f"{verify:.1f}", f"{draft:.1f}", f"{predicted:.2f}x"]
        line(f"smc N={n} K={k}", *cells, f"{rate / plain:.2f}x", f"{rate:.1f}")
        rows.append(
            {
                "particles": n,
                "length": k,
                "plain_ms": one,
                "verify_ms": verify,
                "draft_ms": draft,
                "predicted": predicted,
                "speedup": rate / plain,
                "tokens_per_s": rate,
            }
        )
    lossless = {k: speed(took[f"lossless K={k}"]) for k in args.lengths}
    bench.found["cost"] = {"plain": plain, "lossless": lossless, "smc": rows}


def _measured(
    bench: Bench, prompt: list[int], seed: int, settings: Sequence[tuple[int, int]]
) -> list[tuple[str, Summary]]:
    """One answer of each method to a prompt, in turn."""
    args, out = bench.args, []
    common: dict[str, Any] = {
        "max_new_tokens": args.tokens,
        "temperature": args.temperature,
        "seed": seed,
        "ignore_eos": True,
    }
    out.append(("plain", bench.llm.generate(prompt, method="ar", **common).metrics))
    for length in args.lengths:
        method = f"early-exit,exits={args.exit},length={length}"
        result = bench.llm.generate(prompt, method=method, verify="rejection", **common)
        out.append((f"lossless K={length}", result.metrics))
    for n, k in settings:
        out.append((f"smc N={n} K={k}", bench.answer(prompt, n, k, args.tokens, seed)[1]))
    return out


# -- law -------------------------------------------------------------------------------------------


def second_law(bench: Bench, prompt: Sequence[int]) -> tuple[dict[int, float], float]:
    """The target's law of the second token: its likeliest ones, -1 for the others; and the mass of
    first tokens that were left out."""
    target, temperature = bench.llm.target, bench.args.temperature
    sequence = target.open()
    logits = target.prefill(sequence, prompt).logits
    assert logits is not None
    first = torch.softmax(logits[-1].float() / temperature, 0)
    tokens = first.topk(min(FIRST_TOKENS, len(first))).indices.tolist()
    law = torch.zeros_like(first)
    for start in range(0, len(tokens), CHUNK):
        some = tuple(tokens[start : start + CHUNK])
        (passed,) = target.forward([Rows(sequence, some, (-1,) * len(some))])
        assert passed.logits is not None
        after = torch.softmax(passed.logits.float() / temperature, 1)
        law += (first[list(some)].unsqueeze(1) * after).sum(0)
        target.rollback(sequence)
    target.close(sequence)
    mass = float(law.sum())
    likely = law.topk(LIKELY).indices.tolist()
    made = {token: float(law[token]) / mass for token in likely}
    made[-1] = 1 - sum(made.values())
    return made, 1 - mass


def part_law(bench: Bench) -> None:
    """Total variation of the second token's law."""
    args = bench.args
    table("prompt", "N", "TV", "TV of so many plain answers", "first tokens left out", "collapsed")
    rows = []
    for number, prompt in enumerate(bench.prompts):
        exact, missed = second_law(bench, prompt)
        chance = sum(math.sqrt(2 * p * (1 - p) / (math.pi * args.runs)) for p in exact.values()) / 2
        for n in args.law_particles:
            law = dict.fromkeys(exact, 0.0)
            collapsed = 0
            for seed in range(args.runs):
                info, _ = bench.answer(prompt, n, args.length, args.length + 2, seed)
                collapsed += info.collapsed
                for each in info.answers:
                    token = each.tokens[1]
                    law[token if token in exact else -1] += each.weight / args.runs
            far = sum(abs(law[t] - p) for t, p in exact.items()) / 2
            line(number, n, f"{far:.3f}", f"{chance:.3f}", f"{missed:.3f}", collapsed)
            rows.append({"prompt": number, "particles": n, "tv": far, "chance": chance})
    for n in args.law_particles:
        mine = [each["tv"] for each in rows if each["particles"] == n]
        line("mean", n, f"{statistics.fmean(mine):.3f}", "", "", "")
    bench.found["law"] = rows


# -- quality, bound, memory ------------------------------------------------------------------------


def mean_logprob(bench: Bench, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Mean log-probability a token of an answer, at the temperature it was drawn with."""
    target = bench.llm.target
    sequence = target.open()
    text, total = [*prompt, *answer], 0.0
    target.prefill(sequence, prompt[:-1])
    for start in range(len(prompt) - 1, len(text) - 1, CHUNK):
        some = text[start : min(start + CHUNK, len(text) - 1)]
        logits = target.prefill(sequence, some, all_logits=True).logits
        assert logits is not None
        law = torch.log_softmax(logits.float() / bench.args.temperature, 1)
        following = torch.tensor(text[start + 1 : start + 1 + len(some)])
        total += float(law.gather(1, following.to(law.device).unsqueeze(1)).sum())
    target.close(sequence)
    return total / len(answer)


def with_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error, which a single value doesn't have (NaN)."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def part_quality(bench: Bench) -> None:
    """Log-probabilities of answers; differences are paired by prompt."""
    args = bench.args
    plain: list[float] = []
    for number, prompt in enumerate(bench.prompts):
        for seed in range(args.answers):
            result = bench.llm.generate(
                prompt,
                method="ar",
                max_new_tokens=args.tokens,
                temperature=args.temperature,
                seed=1000 * number + seed,
                ignore_eos=True,
            )
            plain.append(mean_logprob(bench, prompt, result.tokens))
    table("answers", "log p a token", "s.e.", "less plain's", "s.e.")
    mean, error = with_error(plain)
    line("plain", f"{mean:.3f}", f"{error:.3f}", "", "")
    rows = [{"particles": 0, "mean": mean, "error": error}]
    for n in args.law_particles:
        mine = []
        for number, prompt in enumerate(bench.prompts):
            for seed in range(args.answers):
                info, _ = bench.answer(
                    prompt, n, args.length, args.tokens, 10**6 + 1000 * number + seed
                )
                mine.append(mean_logprob(bench, prompt, info.answers[info.picked].tokens))
        mean, error = with_error(mine)
        gap, gap_error = with_error([a - b for a, b in zip(mine, plain, strict=True)])
        cells = [f"{value:.3f}" for value in (mean, error, gap, gap_error)]
        line(f"smc N={n} K={args.length}", *cells)
        rows.append(
            {"particles": n, "mean": mean, "error": error, "gap": gap, "gap_error": gap_error}
        )
    bench.found["quality"] = rows


def part_bound(bench: Bench) -> None:
    """The diagnosis of each prompt, at one answer length."""
    args = bench.args
    table("N", *HEADER)
    rows = []
    for n in args.law_particles:
        for number, prompt in enumerate(bench.prompts):

            def start(seed: int, prompt: list[int] = prompt, n: int = n) -> SMCRun:
                return bench.start(prompt, n, args.length, args.tokens, seed)

            found = diagnose(start, args.runs)
            line(n, *row(str(number), found))
            rows.append({"particles": n, "prompt": number, "kl": found.kl_bound})
    bench.found["bound"] = rows


def part_memory(bench: Bench) -> None:
    """Keys and values at their most, for one particle and for many."""
    prompt = [100 + i % 1000 for i in range(2000)]
    target: Any = bench.llm.target
    table("N", "MiB held", "of it beside one particle's")
    held: dict[int, int] = {}
    for n in (1, 8):
        run = bench.start(prompt, n, bench.args.length, bench.args.tokens, 0)
        held[n] = max(target.bytes_in_use for _ in run.rounds())
        line(n, f"{held[n] / 2**20:.1f}", f"{(held[n] - held[1]) / 2**20:.1f}")
    bench.found["memory"] = held


# -- the command -----------------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    """``"1,2,4"`` as numbers."""
    return [int(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What SMC costs, and how near its law comes.")
    parser.add_argument("--part", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--suite", default="mini")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--runs", type=int, default=200, help="of law and bound, a prompt")
    parser.add_argument("--answers", type=int, default=4, help="of quality, a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens an answer")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--draft-temperature", type=float, default=-1.0)
    parser.add_argument("--population", default="persistent")
    parser.add_argument("--vocabulary", default="whole", help="of the exit: whole or reduced")
    parser.add_argument("--exit", type=int, default=0)
    parser.add_argument("--particles", type=numbers, default=[2, 4, 8], help="of cost")
    parser.add_argument("--lengths", type=numbers, default=[2, 4, 8], help="of cost")
    parser.add_argument("--law-particles", type=numbers, default=[1, 4, 8, 16], help="elsewhere")
    parser.add_argument("--length", type=int, default=4, help="tokens drafted a round elsewhere")
    parser.add_argument("--repeats", type=int, default=20, help="of each timed pass")
    parser.add_argument("--json", type=Path, help="also write environment and figures here")
    args = parser.parse_args()
    if unknown := set(args.part.split(",")) - set(PARTS):
        parser.error(f"--part: {', '.join(sorted(unknown))}: none of {', '.join(PARTS)}")
    return args


def prepared(args: argparse.Namespace) -> Bench:
    """Load the model, the exit and the prompts."""
    llm = hasten.load(args.model, method="ar", dtype=args.dtype)
    context = MethodContext(llm.target, llm.tokenizer, llm._load_other)
    options = SMCOptions(exits=str(args.exit), vocabulary=args.vocabulary)
    rows = load_suite(args.suite, args.prompts).rows
    prompts = [llm.tokenize(each.turns[0]) for each in rows]
    return Bench(llm, prepare(options, context), prompts, args, {})


def main() -> None:
    """Print the parts asked for."""
    args = arguments()
    load = measure_load()
    if load.busy:
        print(f"Other programs keep {load.others} cores busy: times will be off.", file=sys.stderr)
    try:
        bench = prepared(args)
        for part in args.part.split(","):
            globals()[f"part_{part}"](bench)
    except HastenError as error:
        raise SystemExit(f"error: {error}") from error
    if args.json:
        environment = {**machine(), "command": command_line(), "others_busy_cores": load.others}
        args.json.write_text(json.dumps({"environment": environment, **bench.found}, indent=1))


if __name__ == "__main__":
    main()

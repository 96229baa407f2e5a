"""Parts of bench_smc.py about answers: their probability under the target, and whether they are
right."""

from __future__ import annotations

from typing import Any

from smc_common import Bench, announced, by_prompt, line, mean_logprob, table
from smc_laws import plain

from hasten.tasks import QUALIFYING, compare, grade, problems
from hasten.tasks.screening import MAX_NEW_TOKENS
from hasten.types import SamplingParams


def part_quality(bench: Bench) -> list[dict[str, Any]]:
    """Log-probabilities of answers beside plain ones', for each N and draft temperature."""
    args = bench.args
    base: list[tuple[int, float]] = []
    numbered = [(n, p, seed) for n, p in enumerate(bench.prompts) for seed in range(args.answers)]
    for number, prompt, seed in numbered:
        answer = plain(bench, prompt, 1000 * number + seed)
        base.append((number, mean_logprob(bench.llm, prompt, answer, args.temperature)))
    table("answers", "draft temperature", "log p a token", "s.e.", "less plain's", "s.e.")
    mean, error = by_prompt(base)
    line("plain", "", f"{mean:.3f}", f"{error:.3f}", "", "")
    rows: list[dict[str, Any]] = [{"particles": 0, "mean": mean, "error": error}]
    units = [(n, warm) for warm in args.warm for n in args.particles]
    for n, warm in announced(units, len(units), "quality"):
        mine = []
        for number, prompt, seed in numbered:
            answer = bench.picked(
                prompt,
                10**6 + 1000 * number + seed,
                args.tokens,
                particles=n,
                draft_temperature=warm * args.temperature,
            )
            mine.append((number, mean_logprob(bench.llm, prompt, answer, args.temperature)))
        mean, error = by_prompt(mine)
        gaps = [(at, a - b) for (at, a), (_, b) in zip(mine, base, strict=True)]
        gap, gap_error = by_prompt(gaps)
        cells = [f"{value:.3f}" for value in (mean, error, gap, gap_error)]
        line(f"N={n} K={bench.options.length}", f"{warm:g} T", *cells)
        rows.append({"particles": n, "warm": warm, "mean": mean, "error": error, "gap": gap,
                     "gap_error": gap_error})  # fmt: skip
    return rows


def part_tasks(bench: Bench) -> list[dict[str, Any]]:
    """Exact answers: sampled plainly and by populations, to the same problems of the test split."""
    args = bench.args
    names = args.families.split(",") if args.families else QUALIFYING
    asked = problems(names, "test", args.problems)
    prompts = [bench.llm.tokenize(problem.prompt) for problem in asked]
    texts = []
    for start in range(0, len(prompts), 16):
        results = bench.llm.generate_many(
            prompts[start : start + 16],
            method="ar",
            params=[
                SamplingParams(
                    max_new_tokens=MAX_NEW_TOKENS, temperature=args.temperature, seed=start + at
                )
                for at in range(len(prompts[start : start + 16]))
            ],
        )
        texts += [result.text for result in results]
    base = grade(asked, texts)
    table("answers", "right", "less plain's", "p")
    line("plain", base, "", "")
    rows: list[dict[str, Any]] = [{"particles": 0, "right": base.right}]
    for n in announced(args.particles, len(args.particles), "tasks"):
        texts = [one_text(bench, prompt, seed, n) for seed, prompt in enumerate(prompts)]
        mine = grade(asked, texts)
        found = compare(mine.right, base.right, clusters=[problem.item for problem in asked])
        spread = [f"{100 * value:+.1f}" for value in (found.difference, found.low, found.high)]
        cell = f"{spread[0]} points ({spread[1]} to {spread[2]})"
        line(f"N={n} K={bench.options.length}", mine, cell, f"{found.p_value:.2g}")
        rows.append({"particles": n, "right": mine.right, "difference": found.difference,
                     "low": found.low, "high": found.high, "p": found.p_value})  # fmt: skip
    return rows


def one_text(bench: Bench, prompt: list[int], seed: int, particles: int) -> str:
    """An answer's text, up to its end."""
    ids = bench.picked(prompt, 10**6 + seed, MAX_NEW_TOKENS, particles=particles, ignore_eos=False)
    bench.forget()
    return str(bench.llm.tokenizer.decode(ids, skip_special_tokens=True))

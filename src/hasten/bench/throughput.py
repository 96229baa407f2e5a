"""Tokens per second of many requests at a time, against plain decoding of as many.

The prompts of a suite are kept coming: `concurrency` of them share passes, and the next one joins
as one ends. All time counts, from the first prompt's start to the last token. Methods are measured
in turns, in an order that is rotated from repeat to repeat.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hasten import environment
from hasten.api import LLM, load
from hasten.bench.config import BenchConfig, Progress, ProgressCallback, no_progress
from hasten.bench.prompts import load_suite
from hasten.bench.session import BASELINE, WARM_UP_TEXT, first_ids, quiet
from hasten.errors import ContextError, OptionError
from hasten.methods import parse
from hasten.metrics import Summary
from hasten.types import SamplingParams
from hasten.worker import Worker


@dataclass(frozen=True, slots=True)
class Throughput:
    """Figures of one method at one concurrency; seconds are the median of the repeats.

    tokens           new tokens of all answers
    tokens_per_s     tokens / seconds, reading the prompts included
    decode_per_pass  tokens per request and pass it took part in; plain decoding is 1.00
    against_plain    tokens per second / plain decoding's at the same concurrency: the median over
                     the repeats of ratios within one, whose runs follow each other, so that a
                     machine that gets slower or faster meanwhile doesn't count
    against_one      the same against the method's own, one request after the other; None when that
                     wasn't measured
    identical        answers equal to plain decoding's of the prompt alone, in every repeat
    """

    concurrency: int
    method: str
    prompts: int
    tokens: int
    seconds: float
    tokens_per_s: float
    decode_per_pass: float
    against_plain: float
    against_one: float | None
    identical: int


@dataclass(frozen=True, slots=True)
class ThroughputReport:
    """Rows, and the conditions they were measured under."""

    environment: dict[str, Any]
    rows: tuple[Throughput, ...]
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """``{"environment": {...}, "rows": [...]}``."""
        return {"environment": self.environment, "rows": [asdict(row) for row in self.rows]}


def check_levels(levels: Sequence[int]) -> tuple[int, ...]:
    """Rising numbers of requests, each once. Raises OptionError."""
    good = levels and all(isinstance(n, int) and 1 <= n <= 256 for n in levels)
    if not good:
        raise OptionError("concurrency", f"must be whole numbers from 1 to 256, got {levels!r}")
    return tuple(sorted(set(levels)))


def run_throughput(
    config: BenchConfig,
    levels: Sequence[int],
    progress: ProgressCallback = no_progress,
    *,
    llm: LLM | None = None,
) -> ThroughputReport:
    """Measure `config.methods` with each number of requests at a time; one seed per prompt.

    Of `config` model, methods, suite, limit, max_new_tokens, repeats, temperature, seed and the
    options of loading count. Raises what `hasten.bench.runner.run` raises.
    """
    levels = check_levels(levels)
    names = list(dict.fromkeys(str(parse(m)) for m in (BASELINE, *config.methods)))
    suite = load_suite(config.suite, config.limit)
    before = environment.measure_load()
    if llm is None:
        llm = load(config.model, method=BASELINE, **config.loading)
    room = llm.target.info.context_limit
    prompts = [ids for row in suite.rows if len(ids := first_ids(llm, row)) < room]
    if not prompts:
        raise ContextError(f"no prompt of suite {suite.name!r} leaves room for an answer")
    runs = _measure(config, llm, prompts, names, levels, progress)
    facts = {
        **environment.machine(),
        "model": llm.target.info.name,
        "precision": llm.target.info.precision,
        "engine": llm.target.info.engine,
        "kernels": llm.target.info.kernels,
        "suite": suite.name,
        "suite_sha256": suite.sha256,
        "limit": config.limit,
        "max_new_tokens": config.max_new_tokens,
        "repeats": config.repeats,
        "temperature": config.temperature,
        "seed": config.seed,
        "busy": before.busy,
        "command": config.command or environment.command_line(),
    }
    warnings = ("other work used the machine before the start: times are blurred",)
    return ThroughputReport(facts, _rows(runs, names, levels), warnings if before.busy else ())


@dataclass(slots=True)
class _Run:
    seconds: float
    answers: list[tuple[int, ...]]
    summary: Summary


def _measure(
    config: BenchConfig,
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    names: Sequence[str],
    levels: Sequence[int],
    progress: ProgressCallback,
) -> dict[tuple[int, str], list[_Run]]:
    for name in names:  # the cost table is made, caches are warm
        llm.generate(
            WARM_UP_TEXT if llm.tokenizer is not None else prompts[0], method=name, max_new_tokens=8
        )
    runs: dict[tuple[int, str], list[_Run]] = {}
    done, total = 0, config.repeats * len(levels) * len(names)
    for repeat in range(config.repeats):
        for at, level in enumerate(levels):
            for step in range(len(names)):
                name = names[(repeat + at + step) % len(names)]
                progress(Progress("measure", done, total, f"{name} x{level}"))
                llm.reset_state(name)
                made = _run(config, llm, prompts, name, level)
                runs.setdefault((level, name), []).append(made)
                done += 1
    progress(Progress("measure", done, total))
    return runs


def _run(
    config: BenchConfig, llm: LLM, prompts: Sequence[Sequence[int]], name: str, level: int
) -> _Run:
    """Answer all prompts, `level` at a time."""
    worker = Worker(llm, most=level, waiting=len(prompts), cache_tokens=0)
    try:
        with quiet():
            started = time.perf_counter()
            tickets = [
                worker.submit(list(ids), method=name, pieces=False, params=_params(config, at))
                for at, ids in enumerate(prompts)
            ]
            results = [ticket.wait() for ticket in tickets]
            seconds = time.perf_counter() - started
    finally:
        worker.close(drain=False)
    summary = Summary()
    for result in results:
        summary.merge(result.metrics)
    return _Run(seconds, [result.tokens for result in results], summary)


def _params(config: BenchConfig, at: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=config.seed + at,
    )


def _rows(
    runs: dict[tuple[int, str], list[_Run]], names: Sequence[str], levels: Sequence[int]
) -> tuple[Throughput, ...]:
    alone = runs[levels[0], BASELINE][0].answers
    out: list[Throughput] = []
    for level in levels:
        for name in names:
            mine = runs[level, name]
            seconds = statistics.median(run.seconds for run in mine)
            tokens = sum(map(len, mine[0].answers))
            plain, one = runs[level, BASELINE], runs.get((1, name))
            out.append(
                Throughput(
                    concurrency=level,
                    method=name,
                    prompts=len(alone),
                    tokens=tokens,
                    seconds=seconds,
                    tokens_per_s=tokens / seconds,
                    decode_per_pass=mine[0].summary.mean_accepted_length,
                    against_plain=_ratio(plain, mine),
                    against_one=None if one is None else _ratio(one, mine),
                    identical=sum(
                        all(run.answers[at] == want for run in mine)
                        for at, want in enumerate(alone)
                    ),
                )
            )
    return tuple(out)


def _ratio(slow: Sequence[_Run], fast: Sequence[_Run]) -> float:
    """Median over the repeats of how much longer the first took."""
    return statistics.median(s.seconds / f.seconds for s, f in zip(slow, fast, strict=True))

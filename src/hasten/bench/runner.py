"""Runs a benchmark and reports it: figures, and the conditions they were measured under."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hasten import environment, methods
from hasten.api import LLM, load
from hasten.bench.config import BenchConfig, Progress, ProgressCallback, no_progress
from hasten.bench.output import Report
from hasten.bench.peers import check_peers
from hasten.bench.prompts import load_suite
from hasten.bench.session import BASELINE, Session, make_contestants
from hasten.bench.states import entries
from hasten.bench.stats import build_prompts, build_rows
from hasten.verify import pick_verifier


def run(
    config: BenchConfig, progress: ProgressCallback = no_progress, *, llm: LLM | None = None
) -> Report:
    """Measure `config.methods` and `config.peers` against plain decoding.

    progress  called with a `Progress` (phase, done, total, method, row) before each answer and at
              the end of each phase
    llm       an LLM loaded already; without it `config.model` is loaded

    Ctrl-C gives what was measured so far (``report.partial``); before the first prompt is complete
    it is raised as usual. Raises OptionError, ModelError, CapabilityError or VocabularyError before
    measuring.
    """
    specs = _specs(config)
    pick_verifier(config.verify, greedy=config.temperature == 0)
    check_peers(config.peers)
    suite = load_suite(config.suite, config.limit)
    before = environment.measure_load()
    progress(Progress("load", 0, 1))
    if llm is None:
        llm = load(config.model, method=BASELINE, **config.loading)
    asked = entries(llm, specs, config.state)
    contestants = make_contestants(config, llm, asked)
    progress(Progress("load", 1, 1))
    session = Session(config, llm, suite, contestants, progress)
    session.warm_up()
    session.learn()
    meter = environment.LoadMeter()
    session.measure()
    during = meter.others()
    differences = session.explain({e.name for e in asked if _is_exact(e.spec, config)})
    rows = build_rows(
        session.items, session.measured, plain=BASELINE, seed=config.seed, differences=differences
    )
    facts = _environment(config, llm, session, before, during)
    return Report(
        facts,
        rows,
        tuple(_warnings(session, before, during)),
        session.partial,
        build_prompts(session.items, session.measured, plain=BASELINE),
    )


def _specs(config: BenchConfig) -> list[methods.MethodSpec]:
    """The methods asked for, plain decoding first, each once."""
    given = [methods.parse(BASELINE), *(methods.parse(m) for m in config.methods)]
    return list(dict.fromkeys(given))


def _is_exact(spec: methods.MethodSpec, config: BenchConfig) -> bool:
    """True when the method's ids must be plain decoding's."""
    drawn_otherwise = config.temperature > 0 and config.verify == "rejection"
    return methods.get(spec.name).lossless == "yes" and not drawn_otherwise


# -- what goes with the figures --------------------------------------------------------------------


def _environment(
    config: BenchConfig,
    llm: LLM,
    session: Session,
    before: environment.Load,
    during: float | None,
) -> dict[str, Any]:
    info = llm.target.info
    rows = dict.fromkeys((item.row, item.row_id) for item in session.items)
    return {
        **environment.machine(),
        "dtype": str(info.dtype).removeprefix("torch."),
        "device": str(info.device),
        "model": info.name,
        "architecture": info.architecture,
        "engine": info.engine,
        "kernels": info.kernels,
        "quantize": info.quantize,
        "kv_dtype": config.kv_dtype and str(config.kv_dtype).removeprefix("torch."),
        "exact": config.exact,
        "fingerprint": info.fingerprint,
        "suite": session.suite.name,
        "suite_sha256": session.suite.sha256,
        "row_ids": [row_id for _, row_id in rows],
        "skipped": list(session.skipped),
        "limit": config.limit,
        "turns": config.turns,
        "max_new_tokens": config.max_new_tokens,
        "repeats": config.repeats,
        "state": config.state,
        "seed": config.seed,
        "temperature": config.temperature,
        "verify": pick_verifier(config.verify, greedy=config.temperature == 0)[0],
        "methods": [contestant.name for contestant in session.contestants],
        "baseline": BASELINE,
        "load_average_before": before.average,
        "other_work_before_cores": before.others,
        "other_work_during_cores": during,
        "busy": before.busy or (during is not None and environment.is_busy(during, before.cores)),
        "command": config.command or environment.command_line(),
    }


def _warnings(session: Session, before: environment.Load, during: float | None) -> Iterator[str]:
    """Sentences for people about what makes the figures less than they could be."""
    if session.partial:
        yield f"interrupted: the figures cover {len(session.items)} prompts"
    if before.busy:
        used = "" if before.others is None else f" ({before.others:.1f} of {before.cores} cores)"
        yield f"other work used the machine before the start{used}: times are blurred"
    if during is not None and environment.is_busy(during, before.cores):
        used = f"{during:.1f} of {before.cores} cores"
        yield f"other work used {used} during the run: times are blurred"
    for row in session.skipped:
        yield f"left out, no room in the context: {row}"

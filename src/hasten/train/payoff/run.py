"""``hasten train payoff``: from rows of the model's own greedy text to a predictor and a report.

Texts are split by prompt, as their rows say: predictors are fitted on split ``modules``, the kind
is chosen on ``policy``, the report is of ``test``. What the history columns hold depends on how
rounds went; they are of rounds under the frequency rule first, and (``dagger``) of rounds under the
predictor itself then, with which it is fitted again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hasten.errors import ModelError, OptionError
from hasten.payoff.features import Classes, digest_of
from hasten.payoff.gate import LEAST_SCORE, TAU
from hasten.payoff.predictor import KINDS, MLP, CacheOptions, Predictor
from hasten.targets.base import TargetInfo
from hasten.train import rows as text_rows
from hasten.train.payoff import evaluate
from hasten.train.payoff.evaluate import Make, Model, Scores, by_payoff, same, scores
from hasten.train.payoff.fit import FitOptions, Progress, Scaled, fit_mlp, fit_ridge
from hasten.train.payoff.traces import (
    Routes,
    Trace,
    always,
    by_score,
    group_of,
    guessed_model,
    never,
    play,
    stacked,
    trace_of,
)

SCORES = (3.0, 4.0, 5.0, 6.0)
"""Thresholds of the frequency rule that are reported."""
BOTH = "best"


@dataclass(frozen=True, slots=True)
class Options:
    """What ``hasten train payoff`` is told.

    cache    options of the cache, which become the predictor's
    kind     ``mlp``, ``ridge``, or ``best``: the one that routes better on the validation texts
    tau      tokens that a routed draft should keep; s0: of the frequency rule
    model_keeps   tokens that the model arm's drafts keep in the mean, where rounds are played
    dagger   times that the history is played again, under the predictor
    texts    of each split at most; 0: all
    """

    cache: CacheOptions = field(default_factory=CacheOptions)
    kind: str = BOTH
    fit: FitOptions = field(default_factory=FitOptions)
    tau: float = TAU
    s0: float = LEAST_SCORE
    model_keeps: float = 1.0
    dagger: int = 0
    texts: int = 0

    def __post_init__(self) -> None:
        if self.kind not in (*KINDS, BOTH):
            known = ", ".join((*KINDS, BOTH))
            raise OptionError("kind", f"unknown kind {self.kind!r}", f"Choose one of {known}")
        for name in ("dagger", "texts"):
            if getattr(self, name) < 0:
                raise OptionError(name, f"must be at least 0, got {getattr(self, name)}")
        if not 0 <= self.model_keeps < float("inf"):
            problem = f"must be at least 0 and finite, got {self.model_keeps}"
            raise OptionError("model_keeps", problem)
        if not 0 < self.tau < float("inf"):
            raise OptionError("tau", f"must be above 0 and finite, got {self.tau}")


def _silent(what: str, done: int, total: int) -> None:
    """Nobody watches."""


# -- texts -----------------------------------------------------------------------------------------


def greedy_rows(data: Sequence[str | Path], limit: int = 0) -> dict[str, list[text_rows.Row]]:
    """Greedy answers by split, each prompt once, in the files' order. Raises OptionError where a
    split has none."""
    found: dict[str, list[text_rows.Row]] = {split: [] for split in text_rows.SPLITS}
    known = text_rows.Known()
    for path in data:
        for row in text_rows.read(path):
            some = found[row.split]
            if row.temperature == 0 and known.add(row.prompt) and (not limit or len(some) < limit):
                some.append(row)
    for split, some in found.items():
        if not some:
            raise OptionError(
                "data",
                f"there is no greedy answer in split {split!r}, and all splits are needed",
                "Make more with `hasten train data --greedy-share 1`, or --collect",
            )
    return found


def traces_of(
    rows: Iterable[text_rows.Row],
    options: CacheOptions,
    table: Classes,
    eos_ids: frozenset[int],
    told: Callable[[], None] = lambda: None,
) -> list[Trace]:
    """The rows replayed; `told` is called after each. Raises OptionError for ids that the model
    hasn't."""
    made = []
    for row in rows:
        if max(*row.prompt, *row.output) >= len(table):
            problem = f"a row of {row.source} has ids beyond this model's {len(table)}"
            raise OptionError("data", problem, "Name rows that this model has made")
        made.append(
            trace_of(row.prompt, row.output, options, table, eos_ids=eos_ids, group=group_of(row))
        )
        told()
    return made


# -- predictors ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Split:
    """Texts of one split, and the model arm that rounds over them meet."""

    traces: list[Trace]
    models: list[Model]

    @classmethod
    def of(cls, name: str, traces: list[Trace], assumed: float) -> Split:
        """The texts of a split, with a model arm that keeps `assumed` tokens in the mean."""
        return cls(traces, [guessed_model(assumed, f"{name}-{n}") for n in range(len(traces))])

    def rows(self, routes: Routes) -> tuple[Any, Any]:
        """All states as features and labels, their history played under `routes`."""
        pairs = zip(self.traces, self.models, strict=True)
        return stacked(self.traces, [play(trace, routes, model) for trace, model in pairs])


def _fitted(
    kind: str, train: Split, val: Split, routes: Routes, options: Options, told: Progress
) -> Predictor:
    """A predictor of this kind, the history of its rows played under `routes`."""
    x, y = train.rows(routes)
    scaled = Scaled.of(x)
    if kind == MLP:
        layers = fit_mlp(scaled(x), y, options.fit, told)
    else:
        x_val, y_val = val.rows(routes)
        layers = fit_ridge(scaled(x), y, scaled(x_val), y_val, told)
    return Predictor(kind, scaled.mean, scaled.scale, layers, options.cache, {})


def _gate_scores(predictor: Predictor, split: Split, tau: float) -> Scores:
    """How well a predictor routes the states in which rounds under it begin."""
    return evaluate.replay(split.traces, same(by_payoff(predictor, tau)), split.models, tau).states


def fit(
    train: Split, val: Split, options: Options, told: Progress = _silent
) -> tuple[Predictor, dict[str, Any]]:
    """The predictor that routes best on the validation texts, and what each kind did there. Raises
    OptionError where the cache had nothing to draft."""
    if not sum(map(len, train.traces)) or not sum(map(len, val.traces)):
        raise OptionError(
            "data", "the cache never had a draft: nothing repeats in these texts", "Name other data"
        )
    found: dict[str, Scores] = {}
    made: dict[str, Predictor] = {}
    for kind in KINDS if options.kind == BOTH else (options.kind,):
        predictor = _fitted(kind, train, val, by_score(options.s0), options, told)
        for _ in range(options.dagger):
            routes = by_payoff(predictor, options.tau)
            predictor = _fitted(kind, train, val, routes, options, told)
        made[kind], found[kind] = predictor, _gate_scores(predictor, val, options.tau)
    chosen = max(made, key=lambda kind: found[kind].surplus)  # of equals the first, the paper's
    return made[chosen], {kind: asdict(each) for kind, each in found.items()}


# -- the whole -------------------------------------------------------------------------------------


def rules(predictor: Predictor | None, tau: float) -> dict[str, Make]:
    """The rules that are compared, by name; ``oracle`` is who knows what will be kept."""
    some = {} if predictor is None else {"payoff": same(by_payoff(predictor, tau))}
    frequency = {f"score>={s0:g}": same(by_score(s0)) for s0 in SCORES}
    ends = {"always": same(always), "never": same(never)}
    return {**some, **frequency, **ends, "oracle": evaluate.best_of}


def run(
    info: TargetInfo,
    table: Classes,
    data: Sequence[str | Path],
    out: str | Path,
    options: Options,
    told: Progress = _silent,
) -> tuple[Predictor, dict[str, Any]]:
    """Replay, fit, report; writes the predictor `out` and ``OUT.json``, and gives both.

    table   kinds of tokens (`hasten.payoff.features.class_table`)

    Raises OptionError or ModelError before anything is written.
    """
    if not info.fingerprint:
        raise ModelError(
            f"{info.name} has no fingerprint, so that no predictor could be held to belong to it. "
            "Load it from a folder, a file or a Hugging Face id"
        )
    for path in data:
        _check_model(Path(path).expanduser(), info)
    rows = greedy_rows(data, options.texts)
    total, done = sum(map(len, rows.values())), 0

    def next_text() -> None:
        nonlocal done
        done += 1
        told("replay", done, total)

    splits = {
        name: Split.of(
            name,
            traces_of(some, options.cache, table, info.eos_ids, next_text),
            options.model_keeps,
        )
        for name, some in rows.items()
    }
    predictor, validation = fit(splits["modules"], splits["policy"], options, told)
    facts = {
        "target": info.fingerprint,
        "tokenizer": digest_of(table),
        "model": info.name,
        "tau": options.tau,
        "texts": {name: len(each.traces) for name, each in splits.items()},
        "states": {name: sum(map(len, each.traces)) for name, each in splits.items()},
        "options": asdict(options),
        "validation": validation,
    }
    made = Predictor(
        predictor.kind,
        predictor.mean,
        predictor.scale,
        predictor.layers,
        predictor.cache,
        facts,
    )
    test = splits["test"]
    report = {
        **facts,
        "kind": made.kind,
        "test": on_test(made, test, options.tau),
        "all_states": everywhere(made, test, options),
    }
    out = Path(out).expanduser()
    out.parent.mkdir(parents=True, exist_ok=True)
    made.save(out)
    report_file(out).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return made, report


def report_file(out: Path) -> Path:
    """Where the report of a predictor is."""
    return out.with_name(f"{out.name}.json")


def on_test(
    predictor: Predictor, test: Split, tau: float
) -> dict[str, Mapping[str, dict[str, Any]]]:
    """Figures of every rule on the test texts, by group and overall."""
    return {
        name: {
            group: asdict(each)
            for group, each in evaluate.by_group(test.traces, make, test.models, tau).items()
        }
        for name, make in rules(predictor, tau).items()
    }


def everywhere(predictor: Predictor, test: Split, options: Options) -> dict[str, dict[str, Any]]:
    """Precision and recall over every state with a draft, as papers count them, and not only those
    that rounds begin in."""
    x, y = test.rows(by_payoff(predictor, options.tau))
    score = np.concatenate([trace.score for trace in test.traces])
    routed = {
        "payoff": predictor.predict(x) >= options.tau,
        f"score>={options.s0:g}": score >= options.s0,
    }
    return {name: asdict(scores(y, some, options.tau)) for name, some in routed.items()}


def _check_model(path: Path, info: TargetInfo) -> None:
    """Rows of a folder say whose they are. Raises ModelError for another model's."""
    if not path.is_dir():
        return
    whose = text_rows.read_meta(path).get("fingerprint")
    if whose and whose != info.fingerprint:
        raise ModelError(
            f"the rows in {path} are of other weights than {info.name}'s: what a draft keeps of "
            "them says nothing here. Name rows that this model has made"
        )


def doubt(states: int, paying: int) -> str:
    """A warning where there is too little to tell; else nothing."""
    if paying >= 20:
        return ""
    return (
        f"only {paying} of {states} test states keep tau tokens: precision and recall of so few "
        "say little"
    )

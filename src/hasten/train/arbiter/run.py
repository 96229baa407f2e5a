"""``hasten train arbiter fit``: from task problems to an arbiter that is used, or says why not.

In order: the oracle's headroom (too little: nothing is trained), stage A on branches of target-only
answers, the same again on answers under what was learned (labels of one policy mislead another),
stage B, the threshold, and whether any of it beats the target alone on validation problems. If not,
the arbiter written says so and keeps nothing: a negative result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hasten import methods
from hasten.arbitration.arbiter import Arbiter
from hasten.arbitration.features import SCALARS
from hasten.arbitration.rollouts import draft_mark
from hasten.builtin.cospec import SPECIALIST, specialist_folder
from hasten.drafters.early_exit import MAX_LENGTH
from hasten.errors import OptionError
from hasten.exits import store
from hasten.tasks import Problem, available, problems
from hasten.train.arbiter import policy
from hasten.train.arbiter.engine import Engine, lucky_for
from hasten.train.arbiter.episodes import Decide, Memory, never
from hasten.train.arbiter.fit import NEVER, Choice, choose, fit, pick
from hasten.train.arbiter.judge import train_judge
from hasten.train.arbiter.labels import Pair, mine, shuffled
from hasten.train.arbiter.nets import KINDS, ArbiterNet, Gate, Scores, check_kind, deciding
from hasten.train.arbiter.oracle import Headroom, headroom
from hasten.train.arbiter.policy import PolicyOptions

if TYPE_CHECKING:
    from hasten.api import LLM

Log = Callable[[dict[str, Any]], None]
HEADROOM_PROBLEMS = 200
SHUFFLED = "shuffled labels"
FILES = {
    "A": "stage_a_first",
    "A, again": "stage_a",
    "A+B": "stage_b_arbiter",
    SHUFFLED: "shuffled",
}
"""Where a stage's arbiter is kept, in the folder ``stages``."""


@dataclass(frozen=True, slots=True)
class Options:
    """What ``hasten train arbiter fit`` is told.

    draft       options of ``cospec`` that name the draft, as ``draft=specialist``
    families    of tasks; problems, validation: how many of each split
    branches    mismatches of a problem tried both ways
    kinds       arbiters tried; the one that predicts other problems' labels best is kept
    length      drafted tokens of a block (K)
    force       train even where the oracle gains too little
    """

    families: tuple[str, ...]
    draft: str = "draft=early-exit"
    problems: int = 500
    validation: int = 240
    branches: int = 2
    kinds: tuple[str, ...] = KINDS
    length: int = 4
    gate: Gate = field(default_factory=Gate)
    stage_b: PolicyOptions = field(default_factory=PolicyOptions)
    seed: int = 0
    force: bool = False

    def __post_init__(self) -> None:
        for name in ("problems", "validation", "branches", "length"):
            if getattr(self, name) < 1:
                raise OptionError(name, f"must be at least 1, got {getattr(self, name)}")
        if self.length > MAX_LENGTH:
            raise OptionError("length", f"must be at most {MAX_LENGTH}, got {self.length}")
        if not self.families:
            raise OptionError("families", "names none")
        for kind in self.kinds:
            check_kind(kind)

    @property
    def method(self) -> str:
        """The method whose draft is arbitrated."""
        return f"cospec:target,{self.draft},length={self.length}"


@dataclass(slots=True)
class Stage:
    """A trained net and what its threshold reaches on validation."""

    name: str
    net: ArbiterNet
    choice: Choice
    pairs: int = 0


@dataclass(slots=True)
class Trained:
    """What came out. `arbiter` is what was written; `stages` were on the way."""

    arbiter: Arbiter
    headroom: Headroom
    stages: list[Stage] = field(default_factory=list)
    control: Stage | None = None
    """A fit to shuffled labels: what a threshold chosen on validation gains by itself."""
    pairs: list[Pair] = field(default_factory=list)
    """Branches of target-only answers."""
    seconds: float = 0.0


def ask(
    families: Sequence[str],
    split: str,
    count: int,
    seed: int,
    without: frozenset[str] = frozenset(),
) -> list[Problem]:
    """So many problems of a split, or as many as there are, from the families in turn; none about
    the items `without`."""
    if not without:
        return problems(families, split, min(count, most(families, split)), seed=seed)
    queues = [
        [p for p in problems([f], split, most([f], split), seed=seed) if p.item not in without]
        for f in dict.fromkeys(families)
    ]
    turns = (each for turn in zip_longest(*queues) for each in turn if each is not None)
    return list(islice(turns, count))


def most(families: Sequence[str], split: str) -> int:
    """How many problems there are."""
    return sum(available(name, split) for name in dict.fromkeys(families))


@dataclass(slots=True)
class _Split:
    """Problems of a split and the memory of their answers."""

    asked: list[Problem]
    memory: Memory

    @property
    def numbers(self) -> range:
        return range(len(self.asked))


def run(
    llm: LLM,
    out: Path,
    options: Options,
    *,
    work: Path | None = None,
    log: Log = lambda row: None,
) -> Trained:
    """Train an arbiter for `llm` and a draft, and write it to the folder `out`.

    Answers are kept in `work` (default ``OUT/answers``): the same command goes on where it was
    stopped, and repeats itself exactly. `log` gets dictionaries with a ``stage``.
    """
    started = time.monotonic()
    work = work or out / "answers"
    about = identity(llm, options.method)
    # A draft knows the answers to what it was trained on: what it does there is no evidence.
    known = studied(llm, options.method)
    train, validation = (
        _split(llm, options, split, count, work, about, known, log)
        for split, count in (("train", options.problems), ("validation", options.validation))
    )
    try:
        found = _train(out, options, train, validation, about, log)
    finally:
        train.memory.close()
        validation.memory.close()
    if found.pairs:
        prompts = [llm.tokenize(each.prompt) for each in train.asked]
        train_judge(llm.target, prompts, found.pairs, out)
    found.seconds = time.monotonic() - started
    write(out, found, options, about)
    return found


def studied(llm: LLM, method: str) -> frozenset[str]:
    """Items of task families that the draft of a ``cospec`` method was trained on: those of a
    specialist (`hasten.train.arbiter.specialist`), none of other drafts."""
    chosen = dict(methods.parse(method).options)
    folder = chosen.get("modules") or ""
    if chosen.get("draft") == SPECIALIST:
        folder = specialist_folder(llm.target.info)
    facts = store.read(folder).facts if folder else {}
    told = facts.get("options", {})
    if "problems" not in told:
        return frozenset()
    return frozenset(
        each.item
        for family in told["families"]
        for each in ask([family], "train", told["problems"], told["seed"])
    )


def identity(llm: LLM, method: str) -> dict[str, Any]:
    """What answers depend on besides problems and decisions."""
    info = llm.target.info
    return {
        "target": info.fingerprint,
        "draft": draft_mark(llm, method),
        "method": method,
        "dtype": str(info.dtype).removeprefix("torch."),
    }


def _split(
    llm: LLM,
    options: Options,
    split: str,
    count: int,
    work: Path,
    about: Mapping[str, Any],
    known: frozenset[str],
    log: Log,
) -> _Split:
    asked = ask(options.families, split, count, options.seed, known)

    def report(made: int) -> None:
        log({"stage": "answers", "split": split, "made": made})

    engine = Engine(llm, asked, options.method, report=report)
    names = [each.id for each in asked]
    return _Split(asked, Memory(engine, names, path=work / f"{split}.jsonl", identity=about))


def _train(
    out: Path,
    options: Options,
    train: _Split,
    validation: _Split,
    about: Mapping[str, Any],
    log: Log,
) -> Trained:
    measured = train.numbers[:HEADROOM_PROBLEMS]
    room = headroom(train.memory, measured, lucky_for(train.asked))
    log({"stage": "headroom", **room.to_json()})
    if not (room.enough or options.force):
        return Trained(_nothing(options, about), room)
    first, pairs = _stage_a(train, validation, options, never, [], log)
    if first is None:
        return Trained(_nothing(options, about), room)
    plain = pairs
    # Once more under what was learned: drafts' tokens change what comes after them.
    rule = deciding(Scores(first.net), first.choice.theta, options.gate)
    second, pairs = _stage_a(train, validation, options, rule, pairs, log)
    assert second is not None
    stages = [first, second]
    control = _control(validation, options, pairs)
    log({"stage": control.name, **control.choice.to_json()})
    best = max(stages, key=_order)
    if options.stage_b.iterations:
        stages.append(_stage_b(out, train, validation, options, best, log))
        best = max(stages, key=_order)
    return Trained(_deploy(best, options, about), room, stages, control, plain)


def _order(stage: Stage) -> tuple[float, float]:
    return stage.choice.accuracy, -stage.choice.passes


def _stage_a(
    train: _Split,
    validation: _Split,
    options: Options,
    decide: Decide,
    earlier: list[Pair],
    log: Log,
) -> tuple[Stage | None, list[Pair]]:
    """Branches under `decide` added to `earlier` ones, a fit, its threshold."""
    seed = options.seed + len(earlier)
    fresh = mine(train.memory, train.numbers, decide, each=options.branches, seed=seed)
    pairs = [*earlier, *fresh]
    name = "A, again" if earlier else "A"
    informative = sum(pair.informative for pair in pairs)
    drafts = sum(pair.informative and pair.draft_right for pair in pairs)
    log({"stage": "branches", "pairs": len(pairs), "informative": informative, "draft": drafts})
    if not any(pair.weight for pair in pairs):
        return None, pairs
    kind, l2 = pick(pairs, options.kinds, seed=options.seed)
    net = fit(pairs, kind=kind, l2=l2, seed=options.seed)
    choice, _ = choose(validation.memory, validation.numbers, net, options.gate)
    log({"stage": name, "kind": kind, "l2": l2, **choice.to_json()})
    return Stage(name, net, choice, len(pairs)), pairs


def _control(validation: _Split, options: Options, pairs: list[Pair]) -> Stage:
    mixed = shuffled(pairs, options.seed)
    kind, l2 = pick(mixed, options.kinds, seed=options.seed)
    net = fit(mixed, kind=kind, l2=l2, seed=options.seed)
    choice = choose(validation.memory, validation.numbers, net, options.gate)[0]
    return Stage(SHUFFLED, net, choice, len(pairs))


def _stage_b(
    out: Path, train: _Split, validation: _Split, options: Options, start: Stage, log: Log
) -> Stage:
    out.mkdir(parents=True, exist_ok=True)
    best = policy.train(
        train.memory,
        start.net,
        options.gate,
        train.numbers,
        validation.memory,
        validation.numbers,
        options.stage_b,
        seed=options.seed,
        log=lambda row: log({"stage": "B", **row}),
        checkpoint=out / "stage_b.pt",
    )
    return Stage("A+B", best.net, best.choice, start.pairs)


# -- what is written -------------------------------------------------------------------------------


def _meta(options: Options, about: Mapping[str, Any]) -> dict[str, Any]:
    return {**about, "length": options.length, "families": options.families, "seed": options.seed}


def _deploy(stage: Stage, options: Options, about: Mapping[str, Any]) -> Arbiter:
    """A stage's net as it decides; one that is no better than the target falls back to it."""
    meta = {**_meta(options, about), "stage": stage.name, "validation": stage.choice.to_json()}
    fallback = not stage.choice.better
    theta = stage.choice.theta
    return stage.net.arbiter(theta, options.gate, fallback=fallback, meta=meta)


def _nothing(options: Options, about: Mapping[str, Any]) -> Arbiter:
    """An arbiter that was never trained, because there is nothing to gain."""
    size = len(SCALARS)
    net = ArbiterNet("linear", torch.zeros(size), torch.ones(size), seed=options.seed)
    meta = {**_meta(options, about), "stage": "none"}
    return net.arbiter(NEVER, options.gate, fallback=True, meta=meta)


def write(out: Path, found: Trained, options: Options, about: Mapping[str, Any]) -> None:
    """The arbiter, those of the stages, and a report of how they came about."""
    out.mkdir(parents=True, exist_ok=True)
    report = {
        "options": {**asdict(options), "method": options.method},
        "headroom": found.headroom.to_json(),
        "stages": [
            {"name": each.name, "kind": each.net.kind, "pairs": each.pairs, **each.choice.to_json()}
            for each in found.stages
        ],
        SHUFFLED: found.control.choice.to_json() if found.control else None,
        "fallback": found.arbiter.fallback,
        "seconds": round(found.seconds),
    }
    found.arbiter.save(out)
    for stage in (*found.stages, *([found.control] if found.control else [])):
        _deploy(stage, options, about).save(out / "stages" / f"{FILES[stage.name]}.json")
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")

"""``hasten train lede collect``: texts, full-information tables, rollouts, costs; goes on where it
was stopped."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.errors import OptionError
from hasten.policies.exit_rules import STEPS
from hasten.policies.exits import ExitCosts
from hasten.policies.lede_agent import LedeAgent
from hasten.train.lede import candidates as exits
from hasten.train.lede import logs, rollouts, tables, texts
from hasten.train.lede.candidates import Candidates
from hasten.train.lede.logs import Doc, Experience, Meta
from hasten.train.lede.texts import TextOptions

if TYPE_CHECKING:
    from hasten.api import LLM
    from hasten.train.rows import Row

Log = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """What to collect.

    exits     layers of the candidates; empty: all modules there are. modules: their folder, or
              those shipped; own: the model's own norm and head
    depths    draft depths of tables; deeper rows count as the last one
    rollouts  exploratory answers through the engine, of `rollout_tokens` tokens at most
    agent     whose choices some rollouts follow
    minutes   stop after so many, between two pieces of work

    Raises OptionError for numbers that make no sense.
    """

    exits: tuple[int, ...] = ()
    modules: str = ""
    own: bool = False
    texts: TextOptions = field(default_factory=TextOptions)
    depths: int = STEPS
    rollouts: int = 200
    rollout_tokens: int = 64
    agent: LedeAgent | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.depths <= STEPS:
            raise OptionError("depths", f"must be 1 to {STEPS}, got {self.depths}")
        if self.rollouts < 0 or self.rollout_tokens < 2:
            raise OptionError("rollouts", "must be at least 0, of at least 2 tokens")
        if self.own and self.modules:
            raise OptionError("modules", "contradicts --head own", "Give one of the two")
        if self.minutes is not None and not self.minutes > 0:
            raise OptionError("minutes", f"must be above 0, got {self.minutes}")


def collect(
    llm: LLM,
    data: Sequence[str | Path],
    out: str | Path,
    options: CollectOptions,
    log: Log = lambda row: None,
) -> Experience:
    """Collect experience into `out`; what is there already isn't made again.

    Raises CapabilityError, ModelError or OptionError before anything has run where the model, the
    exits, the data or the folder won't do.
    """
    out, began = Path(out), time.monotonic()
    found = exits.find(llm.target, options.exits, options.modules or None, own=options.own)
    if options.agent is not None:
        layers, digest = found.layers, found.digest
        options.agent.check(llm.target.info, modules=digest, layers=layers, steps=1)

    def late() -> bool:
        return options.minutes is not None and time.monotonic() - began > 60 * options.minutes

    if (out / logs.META).is_file():
        there = Experience(out)
        logs.begin(out, meta_of(found, options), there.docs)
    else:
        out.mkdir(parents=True, exist_ok=True)
        rows = texts.gather(llm, data, out / "text", options.texts, log)
        docs = documents(found, texts.choose(rows, options.texts))
        there = logs.begin(out, meta_of(found, options), docs)
    _tables(found, there, late, log)
    _rollouts(found, there, options, late, log)
    return there


def meta_of(found: Candidates, options: CollectOptions) -> Meta:
    """What the folder belongs to."""
    info = found.target.info
    return Meta(
        model=info.name,
        fingerprint=info.fingerprint,
        modules=found.digest,
        layers=found.layers,
        kinds=tuple(net.config.kind for net in found.nets),
        depths=tables.depths_of(found, options.depths),
        num_layers=info.num_layers,
        vocabulary=len(found.bank.head.ids),
        dtype=str(info.dtype).removeprefix("torch."),
        eos=tuple(sorted(info.eos_ids)),
        context=info.context_limit,
        seed=options.texts.seed,
    )


def documents(found: Candidates, rows: Sequence[Row]) -> list[Doc]:
    """Documents of rows, those of like length together. Raises OptionError where there are none."""
    ordered = sorted(rows, key=lambda row: len(row.prompt) + len(row.output))
    docs = [
        Doc(
            id=at,
            domain=row.domain,
            split=texts.split_for(row),
            greedy=row.temperature == 0.0,
            prompt=tuple(row.prompt),
            output=tuple(row.output),
            known=len(found.bank.head.local(row.prompt).ids),
        )
        for at, row in enumerate(ordered)
    ]
    if not any(doc.split == "policy" for doc in docs):
        raise OptionError(
            "data",
            "there is no text of the split 'policy'",
            "Make more (`hasten train data`), or name sources of prompts",
        )
    return docs


def _tables(found: Candidates, there: Experience, late: Callable[[], bool], log: Log) -> None:
    for number, part in enumerate(there.parts()):
        path = there.shard(number)
        if not path.is_file() and not late():
            logs.write_tables(path, tables.compute(found, part, there.meta.depths))
        log({"stage": "tables", "done": number + 1, "total": len(there.parts())})


def _rollouts(
    found: Candidates,
    there: Experience,
    options: CollectOptions,
    late: Callable[[], bool],
    log: Log,
) -> None:
    """Rollouts over the documents to learn from, in turn."""
    docs = [doc for doc in there.docs if doc.split == "policy" and doc.greedy]
    random.Random(options.texts.seed).shuffle(docs)
    done = sum(1 for _ in there.rollouts())
    for number in range(done, options.rollouts if docs else 0):
        if late():
            return
        doc = docs[number % len(docs)]
        made = rollouts.explore(
            found.target,
            found.bank,
            doc.id,
            doc.prompt,
            steps=STEPS,
            max_new_tokens=options.rollout_tokens,
            seed=1_000_003 * options.texts.seed + number,
            agent=options.agent,
        )
        logs.add_rollout(there.folder, made)
        log({"stage": "rollouts", "done": number + 1, "total": options.rollouts})


def measure_costs(llm: LLM, found: Candidates, steps: int = STEPS) -> ExitCosts:
    """What operations cost on this machine, now, in plain steps; the probes as `lede` will run them
    (`hasten.builtin.exit_sources.exit_costs`)."""
    from hasten.builtin.exit_sources import exit_costs
    from hasten.policies.cost import load_or_measure

    return exit_costs(llm.target, found.bank, load_or_measure(llm.target), steps)

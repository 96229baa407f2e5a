"""Experience on disk: one folder for a model, its exit modules and a dtype.

meta.json     what it belongs to: `Meta`
docs.jsonl    one document (a prompt and the target's answer) a line: `Doc`
tf-NNNNN.npz  full-information logs of some documents: what every exit says at every row of the
              answer, at every draft depth; `Tables`
rounds.jsonl  one exploratory rollout through the engine a line: `Rollout`
costs.json    what operations cost here, in plain steps (`hasten.policies.exits.ExitCosts`)

Nothing is a time but in ``costs.json``: experience is priced when it is read, for any machine. A
folder is written by one process at a time; what a killed one left behind is gone on with.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hasten.errors import OptionError
from hasten.policies.exits import ExitCosts

SCHEMA = 1
"""Counted up when a reader of the last layout couldn't read the next."""
META, DOCS, ROUNDS, COSTS = "meta.json", "docs.jsonl", "rounds.jsonl", "costs.json"
SHARD = 8
"""Documents in a file of tables."""
TOP = 8
"""Likeliest ids kept for each exit and row."""


@dataclass(frozen=True, slots=True)
class Meta:
    """What a folder of experience belongs to.

    fingerprint  of the target's weights; modules: `hasten.policies.lede_agent.modules_digest`
    depths       draft depths logged, by exit: rows drafted deeper count as the last one
    context      the target's context limit; eos: ids that end an answer
    """

    model: str
    fingerprint: str
    modules: str
    layers: tuple[int, ...]
    kinds: tuple[str, ...]
    depths: tuple[int, ...]
    num_layers: int
    vocabulary: int
    dtype: str
    eos: tuple[int, ...]
    context: int
    seed: int = 0
    schema: int = SCHEMA

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Meta:
        """Raises OptionError for another schema or other data."""
        if data.get("schema") != SCHEMA:
            problem = f"has schema {data.get('schema')}, this is {SCHEMA}"
            raise OptionError("experience", problem, "Collect it again")
        names = {each.name for each in fields(cls)}
        if set(data) != names:
            raise OptionError("experience", f"{META} isn't what `hasten train lede collect` wrote")
        read: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in data.items()
        }
        return cls(**read)


@dataclass(frozen=True, slots=True)
class Doc:
    """A document: ids of the prompt and of the answer, its end included.

    split   ``policy`` (agents learn from it), ``select`` (one is chosen by it) or ``test``
    greedy  whether the answer is the target's greedy one
    known   ids of the draft head that drafts its answer (its prompt adds some)
    """

    id: int
    domain: str
    split: str
    greedy: bool
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    known: int

    @property
    def rows(self) -> int:
        """Rows of the answer that are followed by a token: those a table has."""
        return len(self.output) - 1


@dataclass(frozen=True, slots=True)
class Tables:
    """What the exits say at the rows of some documents' answers, one document after another.

    For each exit, by draft depth: ``(depths, rows)``. Depth d at a row is what the exit says there
    when the last d tokens up to the row's own were drafted, and right. Kinds of modules that see no
    higher layers say the same at all depths; they have two, for `cosine`'s sake.

    best     int32 the likeliest id; p1, p2, entropy (nats) and gap as in `Probe`, float32
    norm     length of the module's output; cosine: with its output at the row before, as the draft
             had it (depth 0: with the output of the exit below at this row; 0 at the lowest)
    alpha    sum of min(p, q) with the target's distribution p, both unwarped
    top_ids, top_p   ``(rows, 8)`` at depth 0, int32 and float16
    said     int32 ``(rows,)``: the target's own likeliest id after the row
    """

    docs: tuple[int, ...]
    said: npt.NDArray[np.int32]
    exits: tuple[Mapping[str, npt.NDArray[Any]], ...]

    NAMES = ("best", "p1", "p2", "entropy", "gap", "norm", "cosine", "alpha", "top_ids", "top_p")


@dataclass(frozen=True, slots=True)
class Step:
    """A decision of a rollout: a probe as numbers, and what was done.

    phase    0 on the walk, 1 in the draft; exit: number of the candidate; drafted: tokens so far
    entropy  of the uniform distribution's; the others as in `lede_features.Seen`
    token    the row's input id; action: 1 where its token was taken; chance: that the behaviour
             takes this action; drew: the token taken (-1: none)
    """

    phase: int
    exit: int
    drafted: int
    p1: float
    p2: float
    entropy: float
    gap: float
    agrees: float
    cosine: float
    growth: float
    token: int
    action: int
    chance: float
    drew: int = -1


@dataclass(frozen=True, slots=True)
class LoggedRound:
    """A rollout's round: `context` tokens before it, the exit left at (-1: none), tokens drafted
    and kept, tokens emitted, and the decisions."""

    context: int
    exit: int
    drafted: int
    accepted: int
    emitted: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Rollout:
    """An answer drafted by a behaviour policy, through the engine."""

    doc: int
    behaviour: Mapping[str, Any]
    rounds: tuple[LoggedRound, ...] = field(default=())

    def to_json(self) -> str:
        """One line."""
        rounds = [
            [r.context, r.exit, r.drafted, r.accepted, r.emitted, [_plain(s) for s in r.steps]]
            for r in self.rounds
        ]
        return json.dumps({"doc": self.doc, "behaviour": dict(self.behaviour), "rounds": rounds})

    @classmethod
    def from_json(cls, line: str) -> Rollout:
        """Raises ValueError, KeyError or TypeError for another line."""
        data = json.loads(line)
        rounds = tuple(
            LoggedRound(context, exit, drafted, accepted, emitted, tuple(Step(*s) for s in steps))
            for context, exit, drafted, accepted, emitted, steps in data["rounds"]
        )
        return cls(data["doc"], data["behaviour"], rounds)


def _plain(step: Step) -> list[float]:
    values = (getattr(step, each.name) for each in fields(step))
    return [round(v, 6) if isinstance(v, float) else v for v in values]


class Experience:
    """A folder of experience, for reading. Raises OptionError where it isn't one."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.meta = Meta.from_json(json.loads((self.folder / META).read_text()))
            self.docs = [_doc(line) for line in (self.folder / DOCS).read_text().splitlines()]
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, OptionError):
                raise
            hint = "Make some with `hasten train lede collect`"
            raise OptionError("experience", f"{folder} holds none ({error})", hint) from None

    def shard(self, number: int) -> Path:
        """File of the documents ``SHARD * number`` and following."""
        return self.folder / f"tf-{number:05d}.npz"

    def parts(self) -> list[list[Doc]]:
        """The documents, file by file."""
        return [self.docs[at : at + SHARD] for at in range(0, len(self.docs), SHARD)]

    def tables(self) -> Iterator[Tables]:
        """The tables that are there, in order."""
        for number, part in enumerate(self.parts()):
            if self.shard(number).is_file():
                yield read_tables(self.shard(number), part, len(self.meta.layers))

    def rollouts(self) -> Iterator[Rollout]:
        """The rollouts that are there; a last line that isn't whole is left out."""
        path = self.folder / ROUNDS
        if path.is_file():
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    yield self._rollout(path, line)

    def _rollout(self, path: Path, line: bytes) -> Rollout:
        try:
            return Rollout.from_json(line.decode())
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError("experience", f"can't read {path} ({error})", "Remove it") from None

    def costs(self, path: str | Path | None = None) -> ExitCosts:
        """What operations cost: from `path`, or as collected."""
        return read_costs(path or self.folder / COSTS)


def begin(folder: str | Path, meta: Meta, docs: Sequence[Doc]) -> Experience:
    """Lay out a folder, or take up the one that is there. Raises OptionError where that is of
    something else."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(doc)) for doc in docs]
    if (folder / META).is_file():
        there = Experience(folder)
        if there.meta != meta or [json.dumps(asdict(doc)) for doc in there.docs] != lines:
            problem = f"{folder} holds experience of another model, exits, options or texts"
            raise OptionError("out", problem, "Name another folder")
        return there
    write_whole(folder / DOCS, "".join(f"{line}\n" for line in lines))
    write_whole(folder / META, json.dumps(asdict(meta), indent=1) + "\n")
    return Experience(folder)


def write_whole(path: Path, text: str) -> None:
    """Write a file: whole, or not at all."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def _doc(line: str) -> Doc:
    data = json.loads(line)
    return Doc(**{**data, "prompt": tuple(data["prompt"]), "output": tuple(data["output"])})


def write_tables(path: Path, tables: Tables) -> None:
    """Write a file of tables: whole, or not at all."""
    arrays: dict[str, Any] = {"docs": np.array(tables.docs), "said": tables.said}
    for e, exit in enumerate(tables.exits):
        arrays |= {f"{name}{e}": exit[name] for name in Tables.NAMES}
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with scratch.open("wb") as file:
        np.savez_compressed(file, **arrays)
    scratch.replace(path)


def read_tables(path: Path, docs: Sequence[Doc], exits: int) -> Tables:
    """Read a file of these documents' tables. Raises OptionError where it isn't one."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            made = Tables(
                tuple(file["docs"].tolist()),
                file["said"],
                tuple({name: file[f"{name}{e}"] for name in Tables.NAMES} for e in range(exits)),
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise OptionError("experience", f"can't read {path} ({error})", "Remove it") from None
    rows = sum(doc.rows for doc in docs)
    if made.docs != tuple(doc.id for doc in docs) or len(made.said) != rows:
        raise OptionError("experience", f"{path} is of other documents", "Remove it")
    return made


def add_rollout(folder: Path, rollout: Rollout) -> None:
    """Append a rollout and see that it is on disk; a line half written before is finished off."""
    path = folder / ROUNDS
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write(rollout.to_json().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def write_costs(path: str | Path, costs: ExitCosts) -> None:
    """As JSON."""
    write_whole(Path(path), json.dumps(asdict(costs), indent=1) + "\n")


def read_costs(path: str | Path) -> ExitCosts:
    """Raises OptionError where the file isn't a cost table."""
    try:
        data = json.loads(Path(path).read_text())
        tables = {
            name: tuple(float(x) for x in data[name]) for name in ("layer", "probe", "verify")
        }
        return ExitCosts(**tables, layers=int(data["layers"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{path} is no cost table ({error})"
        raise OptionError("costs", problem, "Make one with `hasten train lede costs`") from None

"""Problems answered over and over, each time with other decisions at the mismatches.

Everything but the decisions is fixed (greedy models, frozen), so an answer is a function of its
problem and the decisions alone, and a problem's answers form a tree. `Memory` keeps that tree: the
models run only where it hasn't been yet. Rollouts, thresholds and whole rules are tried on what is
remembered, at the cost of the few answers that they don't share with others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from hasten.errors import ModelError, OptionError

KEPT_TOGETHER = 32
"""Answers that are made before they are on disk."""

Decisions = tuple[bool, ...]
"""At the mismatches of an answer, in order: True where the draft's token was kept."""


@dataclass(frozen=True, slots=True)
class Point:
    """A mismatch as a rule meets it.

    scalars        the arbiter's inputs, float32 values (`hasten.arbitration.features`)
    position       the token's place in the answer; block: its place in the draft, from 0
    draft, target  the two tokens
    votes          what other rules would do here, by name: True keeps the draft's token
    """

    scalars: tuple[float, ...]
    position: int
    block: int
    draft: int
    target: int
    votes: Mapping[str, bool] = field(default_factory=dict)


Decide = Callable[[Point, Decisions], bool]
"""Whether to keep the draft's token, from the mismatch and the decisions before it: nothing else,
so that it may be asked again."""


@dataclass(frozen=True, slots=True)
class Episode:
    """An answer to problem number `problem`.

    points    its mismatches, and `decisions`, one for each
    tokens    the answer's ids, and its text; passes: target passes after the prompt's
    """

    problem: int
    points: tuple[Point, ...]
    decisions: Decisions
    correct: bool
    tokens: tuple[int, ...]
    passes: int
    text: str = ""

    @property
    def overrides(self) -> int:
        """Mismatches at which the draft's token was kept."""
        return sum(self.decisions)

    @property
    def saved(self) -> float:
        """Share of the tokens that needed no pass of their own, in [0, 1)."""
        return max(1.0 - self.passes / len(self.tokens), 0.0) if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """A problem to answer: the decisions of `script` first, then `decide`'s."""

    problem: int
    decide: Decide
    script: Decisions = ()


class Runner(Protocol):
    """What answers problems."""

    def run(self, jobs: Sequence[Job]) -> list[Episode]:
        """The jobs' answers, in order."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...


def never(point: Point, before: Decisions) -> bool:
    """Target-only."""
    return False


def always(point: Point, before: Decisions) -> bool:
    """Every draft token."""
    return True


class Memory:
    """A `Runner` that asks another one only for answers it doesn't know.

    names     the problems' ids, by number
    path      where what is known is kept between runs; None: nowhere
    identity  what the answers depend on besides the problem (models, draft, options)
    voters    names of the votes that are kept

    Raises OptionError when the file at `path` holds answers of something else.
    """

    def __init__(
        self,
        runner: Runner,
        names: Sequence[str],
        *,
        path: Path | None = None,
        identity: Mapping[str, Any] | None = None,
        voters: Sequence[str] = (),
    ) -> None:
        self._runner, self._names, self._voters = runner, tuple(names), tuple(voters)
        self._points: dict[tuple[int, Decisions], Point] = {}
        self._ends: dict[tuple[int, Decisions], Episode] = {}
        self._file: IO[str] | None = None
        self.ran = 0
        """Answers that the models made, those read from the file left out."""
        if path is not None:
            about = {**(identity or {}), "voters": list(voters)}
            self._open(path, json.loads(json.dumps(about)))

    def __len__(self) -> int:
        """Problems."""
        return len(self._names)

    def close(self) -> None:
        """Close the file, and the runner."""
        self._runner.close()
        if self._file is not None:
            self._file.close()

    def run(self, jobs: Sequence[Job]) -> list[Episode]:
        """The jobs' answers, in order; a job's `decide` may be asked about a mismatch again."""
        found: list[Episode | None] = [None] * len(jobs)
        open_ = list(range(len(jobs)))
        asked: set[tuple[int, Decisions]] = set()
        while open_:
            ahead: dict[tuple[int, Decisions], Job] = {}
            waiting: list[int] = []
            for at in open_:
                known, decisions = self._walk(jobs[at])
                found[at] = known
                if known is None:
                    waiting.append(at)
                    # Others that stand at the same place wait: they may well go the same way.
                    ahead.setdefault(
                        (jobs[at].problem, decisions),
                        Job(jobs[at].problem, jobs[at].decide, decisions),
                    )
            if not asked.isdisjoint(ahead):
                raise ModelError(
                    "the same decisions led to other mismatches: answers aren't repeatable here. "
                    "Use dtype='float32'"
                )
            asked |= ahead.keys()
            some = list(ahead.values())
            for start in range(0, len(some), KEPT_TOGETHER):
                for episode in self._runner.run(some[start : start + KEPT_TOGETHER]):
                    self._learn(episode)
            open_ = waiting
        return [each for each in found if each is not None]

    def _walk(self, job: Job) -> tuple[Episode | None, Decisions]:
        """The job's answer if it is known; else the decisions up to where nothing is known."""
        decisions: Decisions = ()
        while True:
            end = self._ends.get((job.problem, decisions))
            if end is not None:
                return end, decisions
            point = self._points.get((job.problem, decisions))
            if point is None:
                # Decisions that the script has beyond here are known as well.
                return None, (*decisions, *job.script[len(decisions) :])
            at = len(decisions)
            keep = job.script[at] if at < len(job.script) else job.decide(point, decisions)
            decisions = (*decisions, keep)

    def _learn(self, episode: Episode) -> None:
        fresh = self._add(episode)
        self.ran += 1
        if self._file is not None:
            first = len(episode.points) - fresh
            row = {"problem": self._names[episode.problem], **self._row(episode, first)}
            self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
            self._file.flush()

    def _add(self, episode: Episode) -> int:
        """Remember an answer; how many of its mismatches, the last ones, were new."""
        fresh = 0
        for at, point in enumerate(episode.points):
            key = (episode.problem, episode.decisions[:at])
            if key not in self._points:
                self._points[key] = point
                fresh += 1
        self._ends[episode.problem, episode.decisions] = episode
        return fresh

    def _open(self, path: Path, identity: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            self._read(path, identity)
            self._file = path.open("a", encoding="utf-8")
        else:
            self._file = path.open("w", encoding="utf-8")
            self._file.write(json.dumps(identity) + "\n")
            self._file.flush()

    def _read(self, path: Path, identity: dict[str, Any]) -> None:
        numbers = {name: number for number, name in enumerate(self._names)}
        with path.open("r+", encoding="utf-8") as file:
            if json.loads(file.readline()) != identity:
                raise OptionError(
                    "work",
                    f"{path} holds answers of other models, drafts or options",
                    "Name another folder, or remove the file",
                )
            good = file.tell()
            while line := file.readline():
                try:
                    row = json.loads(line)
                except ValueError:  # half written when the last run was stopped
                    break
                good = file.tell()
                if row["problem"] in numbers:
                    self._add(self._episode(row, numbers[row["problem"]]))
            file.truncate(good)

    def _episode(self, row: Mapping[str, Any], problem: int) -> Episode:
        decisions = tuple(bool(each) for each in row["decisions"])
        new = [self._point(each) for each in row["points"]]
        first = len(decisions) - len(new)
        old = [self._points[problem, decisions[:at]] for at in range(first)]
        return Episode(
            problem,
            (*old, *new),
            decisions,
            bool(row["correct"]),
            tuple(row["tokens"]),
            int(row["passes"]),
            str(row["text"]),
        )

    def _row(self, episode: Episode, first: int) -> dict[str, Any]:
        """An answer for the file, without mismatches before `first`, which it has already."""
        return {
            "decisions": [int(each) for each in episode.decisions],
            "correct": episode.correct,
            "tokens": episode.tokens,
            "passes": episode.passes,
            "text": episode.text,
            "points": [
                (p.scalars, p.position, p.block, p.draft, p.target, self._bits(p))
                for p in episode.points[first:]
            ],
        }

    def _bits(self, point: Point) -> str:
        return "".join("01"[point.votes[name]] for name in self._voters)

    def _point(self, row: Sequence[Any]) -> Point:
        scalars, position, block, draft, target, bits = row
        votes = {name: bit == "1" for name, bit in zip(self._voters, bits, strict=True)}
        return Point(tuple(scalars), position, block, draft, target, votes)

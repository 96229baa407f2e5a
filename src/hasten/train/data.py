"""Training text: a target's own answers to prompts of five domains (``hasten train data``).

Work goes in blocks of some waves. A block's prompts (`prompts`) are sorted by length and answered
in waves of like length (`batched`), in a random order. After each wave its rows are on disk
(`rows`): a run that was stopped goes on from there, and asks no prompt twice.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hasten.errors import CapabilityError, OptionError
from hasten.targets.fused import FusedTarget
from hasten.train import sources
from hasten.train.batched import BatchDecoder, Job
from hasten.train.prompts import Prompts
from hasten.train.rows import Known, Row, Store, read, split_of

if TYPE_CHECKING:
    from hasten.api import LLM

__all__ = ["Options", "Progress", "Row", "make", "read"]

_BLOCK = 10
"""Batches in a block: enough to make waves of like length."""
_WAVE_SLOTS = 430
"""Slots of prompt and answer a row, on average: with the batch it bounds a wave's memory."""
_BATCH_CPU, _BATCH = 128, 512


@dataclass(frozen=True, slots=True)
class Options:
    """What to make.

    sources            as `sources.parse` takes them
    shares             a domain's part of all tokens, relative to the others'; 1 where not named
    tokens             stop when there are so many, those of earlier runs included
    minutes            stop after so many; the wave that runs then is finished
    max_new_tokens     the longest answer
    max_prompt_tokens  longer prompts, template included, are passed over
    greedy_share       of the answers: these take the likeliest token, the others are drawn
    temperature        of those drawn
    batch              prompts answered together, fewer where they are long; None: 128 on a CPU, 512
                       elsewhere
    seed               of the prompts' order and of the draws
    exclude            folders or files of rows whose prompts aren't asked again

    Raises OptionError for a value that makes no sense, and for sources that aren't there.
    """

    sources: Sequence[str] = sources.DEFAULT
    shares: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 2_000_000
    minutes: float | None = None
    max_new_tokens: int = 208
    max_prompt_tokens: int = 620
    greedy_share: float = 0.6
    temperature: float = 0.8
    batch: int | None = None
    seed: int = 0
    exclude: Sequence[str | Path] = ()

    def __post_init__(self) -> None:
        for name in ("tokens", "max_new_tokens", "max_prompt_tokens", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(name, f"must be at least 1, got {value}")
        if self.minutes is not None and not self.minutes > 0:
            raise OptionError("minutes", f"must be above 0, got {self.minutes}")
        if not 0 <= self.greedy_share <= 1:
            raise OptionError("greedy_share", f"must be from 0 to 1, got {self.greedy_share}")
        if not 0.01 <= self.temperature <= 100:
            problem = f"must be from 0.01 to 100, got {self.temperature}"
            raise OptionError("temperature", problem, "Greedy answers are greedy_share's matter")
        self._check_sources()

    def _check_sources(self) -> None:
        if not self.sources:
            raise OptionError("source", "names nothing", f"Domains: {', '.join(sources.DOMAINS)}")
        domains = [sources.parse(text).domain for text in self.sources]
        for name, share in self.shares.items():
            if name not in domains:
                hint = f"Domains with a source: {', '.join(dict.fromkeys(domains))}"
                raise OptionError("domain_share", f"{name!r} has no source here", hint)
            if not 0 < share < float("inf"):
                raise OptionError("domain_share", f"of {name} must be above 0, got {share}")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    tokens, rows  on disk, by domain, those of earlier runs included
    made          tokens that this run has put there
    running       tokens of answers that the present wave has ended, not on disk yet
    seconds       since the run began
    note          a line worth showing: a source has ended
    """

    tokens: Mapping[str, int]
    rows: Mapping[str, int]
    made: int = 0
    running: int = 0
    seconds: float = 0.0
    note: str = ""

    @property
    def total(self) -> int:
        """Tokens on disk."""
        return sum(self.tokens.values())

    @property
    def speed(self) -> float:
        """Tokens a second in this run."""
        return (self.made + self.running) / self.seconds if self.seconds else 0.0


def make(
    llm: LLM,
    folder: str | Path,
    options: Options | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Answer prompts until there are enough tokens, the time is over or the sources have ended;
    the rows go to `folder`, laid out as `hasten.train.rows` says.

    `report` is called after each answer and each wave. An exception or Ctrl-C loses the wave that
    runs and nothing else. Raises OptionError (a source, a folder of another model) and
    CapabilityError (a model that isn't fused) before anything runs.
    """
    options = options or Options()
    target = llm.target
    if not isinstance(target, FusedTarget):
        raise CapabilityError(
            f"{target.info.name} can't make training text: it runs in transformers, and only "
            "hasten's own decoder answers in large batches"
        )
    room = target.info.context_limit - options.max_new_tokens
    if room < 1:
        problem = f"{options.max_new_tokens} fill the context of {target.info.context_limit}"
        raise OptionError("max_new_tokens", problem, "Ask for fewer")
    known = Known()
    for path in options.exclude:
        for row in read(path):
            known.add(row.prompt)
    prompts = Prompts(
        llm,
        options.sources,
        options.shares,
        seed=options.seed,
        longest=min(options.max_prompt_tokens, room),
        typical=options.max_new_tokens / 2,
        known=known,
    )
    identity = {
        "model": target.info.name,
        "fingerprint": target.info.fingerprint,
        "dtype": str(target.info.dtype).removeprefix("torch."),
    }
    with Store(Path(folder).expanduser(), identity, known) as store:
        return _Run(target, options, prompts, store, report).go()


class _Run:
    """One call of `make`, its folder open."""

    def __init__(
        self,
        target: FusedTarget,
        options: Options,
        prompts: Prompts,
        store: Store,
        report: Callable[[Progress], None],
    ) -> None:
        self._options, self._prompts, self._store, self._report = options, prompts, store, report
        on_cpu = target.info.device.type == "cpu"
        self._batch = options.batch or (_BATCH_CPU if on_cpu else _BATCH)
        self._began, self._before = time.monotonic(), store.tokens.total()
        # Turns sampled in an earlier run would come again, so chance goes on with the rows there.
        self._rng = random.Random(f"{options.seed}-{store.rows.total()}")
        self._decoder = BatchDecoder(
            target,
            rows=self._batch,
            stop_ids=target.info.eos_ids,
            seed=self._rng.getrandbits(63),
        )

    def go(self) -> Progress:
        """Block after block until it is enough."""
        if not self._enough():
            noted = asdict(self._options)
            noted.update(batch=self._batch, exclude=[str(path) for path in noted["exclude"]])
            self._store.begin({"seed": noted.pop("seed"), "options": noted})
        while self._prompts.open and not self._enough():
            for wave in self._waves(self._block()):
                self._answer(wave)
                if self._enough():
                    break
        return self._progress()

    def _enough(self) -> bool:
        spent, limit = time.monotonic() - self._began, self._options.minutes
        late = limit is not None and spent >= 60 * limit
        return late or self._store.tokens.total() >= self._options.tokens

    def _progress(self, running: int = 0, note: str = "") -> Progress:
        store = self._store
        made, spent = store.tokens.total() - self._before, time.monotonic() - self._began
        return Progress(dict(store.tokens), dict(store.rows), made, running, spent, note)

    def _block(self) -> list[Job]:
        """Prompts for some waves, fewer when little is missing; user turns are sampled here."""
        store, length = self._store, self._options.max_new_tokens
        missing = self._options.tokens - store.tokens.total()
        jobs, asked = [], []
        for question in self._prompts.take(store.tokens, store.rows, missing, _BLOCK * self._batch):
            greedy = self._rng.random() < self._options.greedy_share
            heat = 0.0 if greedy else self._options.temperature
            if question.ids is not None:
                tag = (question.domain, question.source)
                jobs.append(Job(question.ids, length, heat, tag))
            elif self._prompts.turns is not None:
                asked.append(self._prompts.turns.job((question, heat)))
        for turn in self._decoder.run(asked):
            question, heat = turn.tag
            ids = self._prompts.turns.prompt(turn) if self._prompts.turns else None
            if ids is not None:
                jobs.append(Job(ids, length, heat, (question.domain, question.source)))
        for note in self._prompts.notes():
            self._report(self._progress(note=note))
        return jobs

    def _waves(self, jobs: list[Job]) -> list[list[Job]]:
        """Prompts of like length together, in a random order, so that a stop favours no length."""
        jobs = sorted(jobs, key=lambda job: -len(job.prompt))
        waves, most = [], self._batch * _WAVE_SLOTS
        while jobs:
            fitting = most // (len(jobs[0].prompt) + self._options.max_new_tokens)
            count = max(min(fitting, self._batch), 1)
            waves.append(jobs[:count])
            jobs = jobs[count:]
        self._rng.shuffle(waves)
        return waves

    def _answer(self, wave: list[Job]) -> None:
        """Answer a wave and keep its rows, all of them or, when stopped, none: the first to end
        are the short ones."""
        running, rows = 0, []
        for job in self._decoder.run(wave):
            domain, source = job.tag
            split = split_of(job.prompt)
            rows.append(Row(domain, source, split, job.temperature, job.prompt, job.output))
            running += len(job.output)
            self._report(self._progress(running))
        self._store.add(rows)
        self._report(self._progress())

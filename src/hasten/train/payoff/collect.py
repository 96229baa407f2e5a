"""``hasten train payoff --collect``: the model's greedy answers to prompts that make it copy.

They are rows like those of `hasten train data`, in a folder that is added to. A second turn has the
model's own first answer in its prompt; both are in the split of the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from hasten.errors import CapabilityError, HastenError, OptionError
from hasten.targets.fused import FusedTarget
from hasten.train.batched import BatchDecoder, Job
from hasten.train.payoff.prompts import DOMAINS, Task, tasks
from hasten.train.rows import Known, Row, Store, split_of

if TYPE_CHECKING:
    from hasten.api import LLM


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """What to collect.

    answers            until the folder holds so many
    minutes            or so long; the wave that runs then is finished
    max_new_tokens     the longest answer
    max_prompt_tokens  longer prompts, template included, are passed over
    collect_batch      answered together
    """

    answers: int = 600
    minutes: float | None = None
    max_new_tokens: int = 320
    max_prompt_tokens: int = 900
    collect_batch: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("answers", "max_new_tokens", "max_prompt_tokens", "collect_batch"):
            if getattr(self, name) < 1:
                raise OptionError(name, f"must be at least 1, got {getattr(self, name)}")
        if self.minutes is not None and not self.minutes > 0:
            raise OptionError("minutes", f"must be above 0, got {self.minutes}")


@dataclass(slots=True)
class _Talk:
    """A task under way: the prompts that were answered, and their answers."""

    task: Task
    split: str
    messages: list[dict[str, str]] = field(default_factory=list)


def collect(
    llm: LLM,
    folder: str | Path,
    options: CollectOptions | None = None,
    told: Callable[[str, int, int], None] = lambda what, done, total: None,
    *,
    root: Path | None = None,
) -> int:
    """Answer tasks until there are enough; gives how many answers are in the folder then.

    `told` is called after each wave; `root` is searched for texts instead of the installed
    packages. What is finished stays when this is stopped, and the same call goes on. Raises
    OptionError (a folder of another model) and CapabilityError before anything runs.
    """
    options = options or CollectOptions()
    target = llm.target
    if not isinstance(target, FusedTarget):
        raise CapabilityError(
            f"{target.info.name} can't collect answers: it runs in transformers, and only hasten's "
            "own decoder answers in large batches"
        )
    room = target.info.context_limit - options.max_new_tokens
    if room < 1:
        problem = f"{options.max_new_tokens} fill the context of {target.info.context_limit}"
        raise OptionError("max_new_tokens", problem, "Ask for fewer")
    identity = {
        "model": target.info.name,
        "fingerprint": target.info.fingerprint,
        "dtype": str(target.info.dtype).removeprefix("torch."),
    }
    known = Known()
    with Store(Path(folder).expanduser(), identity, known) as store:
        if store.rows.total() < options.answers:
            store.begin({"seed": options.seed, "options": {"collect": asdict(options)}})
        run = _Run(llm, target, options, store, known, min(options.max_prompt_tokens, room))
        run.go(told, root)
        return store.rows.total()


class _Run:
    """One call of `collect`, its folder open."""

    def __init__(
        self,
        llm: LLM,
        target: FusedTarget,
        options: CollectOptions,
        store: Store,
        known: Known,
        longest: int,
    ) -> None:
        self._llm, self._options, self._store, self._known = llm, options, store, known
        self._longest = longest
        self._decoder = BatchDecoder(
            target, rows=options.collect_batch, stop_ids=target.info.eos_ids
        )
        self._began = time.monotonic()

    def go(self, told: Callable[[str, int, int], None], root: Path | None) -> None:
        """Wave after wave."""
        listed = tasks(self._options.seed, root)
        while not self._enough():
            missing = self._options.answers - self._store.rows.total()
            jobs = list(islice(self._jobs(listed), min(self._options.collect_batch, missing)))
            if not jobs:
                return
            while jobs:
                jobs = self._answer(jobs)
                told("collect", self._store.rows.total(), self._options.answers)

    def _enough(self) -> bool:
        limit = self._options.minutes
        late = limit is not None and time.monotonic() - self._began >= 60 * limit
        return late or self._store.rows.total() >= self._options.answers

    def _jobs(self, listed: Iterator[Task]) -> Iterator[Job]:
        """First turns that fit and are new."""
        for task in listed:
            talk = _Talk(task, "")
            job = self._job(talk)
            if job is not None:
                talk.split = split_of(job.prompt)
                yield job

    def _job(self, talk: _Talk) -> Job | None:
        """The talk's next turn; None where it is too long, or known, or no text to the model."""
        turn = talk.task.turns[len(talk.messages) // 2]
        messages = [*talk.messages, {"role": "user", "content": turn}]
        try:
            ids = self._llm.tokenize(messages if len(messages) > 1 else turn)
        except HastenError:
            return None
        if len(ids) > self._longest or not self._known.add(ids):
            return None
        talk.messages = messages
        return Job(ids, self._options.max_new_tokens, 0.0, talk)

    def _answer(self, jobs: list[Job]) -> list[Job]:
        """Answer a wave and keep its rows; the turns that follow."""
        rows, more = [], []
        for job in self._decoder.run(jobs):
            talk: _Talk = job.tag
            task = talk.task
            domain, source = DOMAINS.get(task.kind, "chat"), f"{task.kind}/{task.source}"
            rows.append(Row(domain, source, talk.split, 0.0, job.prompt, job.output))
            if len(talk.messages) // 2 + 1 < len(task.turns):
                answer = self._llm.tokenizer.decode(job.output, skip_special_tokens=True)
                talk.messages.append({"role": "assistant", "content": answer})
                if (next_turn := self._job(talk)) is not None:
                    more.append(next_turn)
        self._store.add(rows)
        return more

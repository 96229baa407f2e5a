"""Which documents experience is collected on: rows that are there, and new greedy answers for the
domains that lack them.

Modules learn from the split ``modules``, so nothing of it is taken. Of the split ``policy`` a
quarter of the prompts, by a checksum, is set apart to select agents by.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.errors import OptionError
from hasten.targets.fused import FusedTarget
from hasten.train import sources
from hasten.train.batched import BatchDecoder, Job
from hasten.train.prompts import Prompts
from hasten.train.rows import Known, Row, Store, read, split_of

if TYPE_CHECKING:
    from hasten.api import LLM

SPLITS = ("policy", "select", "test")
DEFAULT_SOURCES = ("chat=self", "code", "summarisation", "translation")
_BATCH = 64

Log = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Which documents.

    docs            for each domain, to learn from; as many to report on; a third to select by
    domains         those wanted; sources: of new prompts, as ``hasten train data`` takes them
    max_new_tokens  of new answers; longest: prompts of more tokens are passed over
    drawn           take answers that were drawn, too (their tables say alpha)
    """

    docs: int = 40
    domains: tuple[str, ...] = tuple(sources.DOMAINS)
    sources: tuple[str, ...] = DEFAULT_SOURCES
    max_new_tokens: int = 160
    longest: int = 480
    drawn: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.docs < 1:
            raise OptionError("docs", f"must be at least 1, got {self.docs}")
        if unknown := set(self.domains) - set(sources.DOMAINS):
            hint = f"Domains: {', '.join(sources.DOMAINS)}"
            raise OptionError("domains", f"no such domain: {', '.join(sorted(unknown))}", hint)

    def wanted(self, split: str) -> int:
        """Documents of a domain in a split."""
        return max(self.docs // 3, 1) if split == "select" else self.docs


def split_for(row: Row) -> str:
    """The split of a row here; ``modules`` is none of ours."""
    if row.split != "policy":
        return row.split
    quarter = zlib.crc32(b"select" + repr(list(row.prompt)).encode()) % 4
    return "select" if quarter == 0 else "policy"


def choose(rows: Sequence[Row], options: TextOptions) -> list[Row]:
    """The documents among `rows`: no prompt twice, as many as wanted of each domain and split, in
    an order that the seed gives."""
    shuffled = list(rows)
    random.Random(options.seed).shuffle(shuffled)
    found: Counter[tuple[str, str]] = Counter()
    chosen, known = [], Known()
    for row in shuffled:
        place = row.domain, split_for(row)
        usable = (row.temperature == 0.0 or options.drawn) and len(row.output) > 3
        if row.domain not in options.domains or place[1] not in SPLITS or not usable:
            continue
        fits = len(row.prompt) <= options.longest and found[place] < options.wanted(place[1])
        if fits and known.add(row.prompt):
            found[place] += 1
            chosen.append(row)
    return chosen


def lacking(rows: Sequence[Row], options: TextOptions) -> Counter[tuple[str, str]]:
    """How many documents are missing, by domain and split."""
    there = Counter((row.domain, split_for(row)) for row in choose(rows, options))
    wanted = {(d, s): options.wanted(s) for d in options.domains for s in SPLITS}
    missing = {place: count - there[place] for place, count in wanted.items()}
    return Counter({place: count for place, count in missing.items() if count > 0})


def gather(
    llm: LLM, data: Sequence[str | Path], folder: Path, options: TextOptions, log: Log
) -> list[Row]:
    """Rows of `data`, and new ones, kept in `folder`, where a domain has too few.

    Prompts that are anywhere in `data` aren't asked again. Sources that end early leave their
    domain short; that is logged. Raises OptionError for what can't be read.
    """
    rows = [row for path in data for row in read(path)]
    known = Known()
    for row in rows:
        known.add(row.prompt)
    target = llm.target
    assert isinstance(target, FusedTarget)
    identity = {
        "model": target.info.name,
        "fingerprint": target.info.fingerprint,
        "dtype": str(target.info.dtype).removeprefix("torch."),
    }
    with Store(folder, identity, known) as store:
        rows += list(read(folder)) if (folder / "meta.json").is_file() else []
        for domain in options.domains:
            missing = {s: n for (d, s), n in lacking(rows, options).items() if d == domain}
            listed = [text for text in options.sources if sources.parse(text).domain == domain]
            if missing and listed:
                if not (folder / "meta.json").is_file():
                    store.begin({"seed": options.seed, "options": {"purpose": "lede"}})
                rows += _fill(llm, target, listed, missing, known, store, options, log)
            left = sum(n for (d, _), n in lacking(rows, options).items() if d == domain)
            if left:
                log({"stage": "texts", "note": f"{domain} has {left} documents too few"})
    return rows


def _fill(
    llm: LLM,
    target: FusedTarget,
    listed: Sequence[str],
    missing: dict[str, int],
    known: Known,
    store: Store,
    options: TextOptions,
    log: Log,
) -> list[Row]:
    """Greedy answers to new prompts of a domain, until no split lacks any."""
    prompts = Prompts(
        llm,
        listed,
        {},
        seed=options.seed,
        longest=min(options.longest, target.info.context_limit - options.max_new_tokens),
        typical=options.max_new_tokens / 2,
        known=known,
    )
    decoder = BatchDecoder(target, rows=_BATCH, stop_ids=target.info.eos_ids, seed=options.seed)
    made: list[Row] = []
    waiting: list[Job] = []
    while any(missing.values()) and prompts.open:
        for job in _asked(prompts, decoder):
            row = _row(job)
            if missing.get(split_for(row), 0) > 0:
                missing[split_for(row)] -= 1
                waiting.append(Job(job.prompt, options.max_new_tokens, 0.0, job.tag))
        full = len(waiting) >= _BATCH or not any(missing.values()) or not prompts.open
        if waiting and full:
            new = [_row(job) for job in decoder.run(waiting)]
            store.add(new)
            made += new
            waiting = []
            log({"stage": "texts", "domain": made[0].domain, "done": len(made)})
    return made


def _asked(prompts: Prompts, decoder: BatchDecoder) -> list[Job]:
    """Some new prompts; user turns are sampled first."""
    jobs, turns = [], []
    for question in prompts.take({}, {}, float("inf"), 4 * _BATCH):
        tag = question.domain, question.source
        if question.ids is not None:
            jobs.append(Job(question.ids, 1, 0.0, tag))
        elif prompts.turns is not None:
            turns.append(prompts.turns.job(tag))
    for turn in decoder.run(turns):
        ids = prompts.turns.prompt(turn) if prompts.turns else None
        if ids is not None:
            jobs.append(Job(ids, 1, 0.0, turn.tag))
    return jobs


def _row(job: Job) -> Row:
    domain, source = job.tag
    return Row(domain, source, split_of(job.prompt), 0.0, job.prompt, job.output)

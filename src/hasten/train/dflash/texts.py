"""Texts to learn from and to measure on, and a round's answers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hasten.api import LLM
from hasten.errors import OptionError
from hasten.methods import configure
from hasten.targets.fused import FusedTarget
from hasten.train import rows
from hasten.train.batched import BatchDecoder, Job
from hasten.train.dflash.files import replacing
from hasten.train.dflash.options import Rounds
from hasten.train.features import Text

TOGETHER = 16
"""Prompts that the deployed system answers at a time."""
BATCH = 64
"""Prompts that the target alone answers at a time."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts by use; no prompt is in two.

    modules  the drafter learns from
    policy   the length head is fitted on (greedy answers)
    test     is measured on (greedy answers)
    asked    prompts for rounds, those whose answers aren't in `modules` first; with the greedy
             answer where a row had one
    """

    modules: list[Text]
    policy: list[Text]
    test: list[Text]
    asked: list[Text] = field(default_factory=list)


def read_corpus(
    data: Sequence[str | Path],
    round_data: Sequence[str | Path],
    *,
    share: float,
    test: int,
    seed: int,
    limit: int,
) -> Corpus:
    """Rows of files or folders by their split, shuffled by the seed, none longer than `limit`.

    share   part of the split ``modules`` to learn from; test: texts measured on at most
    Prompts of rounds come from the split ``modules``, too. Raises OptionError for splits without
    text.
    """
    found = list(_read(data, limit))
    modules = _shuffled([text for text, _ in found if text.split == "modules"], seed)
    policy, held_out = (_greedy(found, split, seed) for split in ("policy", "test"))
    modules = modules[: max(1, round(share * len(modules)))]
    for name, split, texts in (("text", "modules", modules), ("greedy answer", "test", held_out)):
        if not texts:
            problem = f"there is no {name} of the split {split!r}"
            raise OptionError("data", problem, "Make more: `hasten train data`")
    asked: dict[tuple[int, ...], Text] = {}
    for text, greedy in found if not round_data else _read(round_data, limit):
        if text.split == "modules" and (greedy or text.prompt not in asked):
            bare = Text(text.prompt, (), text.domain, text.split)
            asked[text.prompt] = text if greedy else bare
    known = {text.prompt for text in modules}
    order = _shuffled(list(asked.values()), seed)
    order.sort(key=lambda text: text.prompt in known)
    return Corpus(modules, policy, held_out[:test], order)


def measured_texts(
    data: Sequence[str | Path], split: str, *, count: int, seed: int, limit: int
) -> list[Text]:
    """The greedy answers of a split in the order of `read_corpus`, `count` at most; the others may
    be empty. Raises OptionError when there is none."""
    texts = _greedy(list(_read(data, limit)), split, seed)
    if not texts:
        problem = f"there is no greedy answer of the split {split!r}"
        raise OptionError("split", problem, "Take another, or other data")
    return texts[:count]


def _greedy(found: Sequence[tuple[Text, bool]], split: str, seed: int) -> list[Text]:
    return _shuffled([text for text, greedy in found if greedy and text.split == split], seed)


def _read(data: Sequence[str | Path], limit: int) -> Iterator[tuple[Text, bool]]:
    """Texts with an anchor in them, and whether the answer is greedy."""
    for path in data:
        for row in rows.read(path):
            if len(row.output) >= 2 and len(row.prompt) + len(row.output) <= limit:
                text = Text(tuple(row.prompt), tuple(row.output), row.domain, row.split)
                yield text, row.temperature == 0.0


def _shuffled(texts: list[Text], seed: int) -> list[Text]:
    random.Random(seed).shuffle(texts)
    return texts


def round_texts(
    llm: LLM, asked: Sequence[Text], number: int, rounds: Rounds, drafter: Path, kept: Path
) -> list[Text]:
    """The texts of round `number`: its prompts answered greedily, the answers kept in the file
    `kept`, from which a run that is repeated takes them.

    drafter  the folder of the drafter that is deployed
    Raises OptionError when there are no prompts, or (writer ``rows``) none with an answer.
    """
    if kept.is_file():
        lines = kept.read_text().splitlines()
        return [_text(json.loads(line)) for line in lines]
    texts = [text for text in asked if text.output] if rounds.writer == "rows" else list(asked)
    if not texts:
        problem = "has no prompt of the split modules"
        problem += " with a greedy answer" if rounds.writer == "rows" else ""
        raise OptionError("round_data", problem, "Make more: `hasten train data`")
    first = number * rounds.prompts
    chosen = [texts[i % len(texts)] for i in range(first, first + min(rounds.prompts, len(texts)))]
    if rounds.writer == "deployed":
        chosen = _deployed(llm, chosen, rounds, drafter)
    elif rounds.writer == "batched":
        chosen = _batched(llm, chosen, rounds)
    chosen = [text for text in chosen if len(text.output) >= 2]
    with replacing(kept) as scratch:
        scratch.write_text("".join(json.dumps(asdict(text)) + "\n" for text in chosen))
    return chosen


def _text(made: Mapping[str, Any]) -> Text:
    return Text(tuple(made["prompt"]), tuple(made["output"]), made["domain"], made["split"])


def _deployed(llm: LLM, texts: Sequence[Text], rounds: Rounds, drafter: Path) -> list[Text]:
    """Answered as in serving: by the target with the drafter, some prompts at a time."""
    serving = LLM(llm._loaded, method=configure("dflash", model=str(drafter)))
    out: list[Text] = []
    for at in range(0, len(texts), TOGETHER):
        part = texts[at : at + TOGETHER]
        results = serving.generate_many(
            [list(text.prompt) for text in part], max_new_tokens=rounds.max_new_tokens
        )
        out += [_answered(text, made.tokens) for text, made in zip(part, results, strict=True)]
    return out


def _batched(llm: LLM, texts: Sequence[Text], rounds: Rounds) -> list[Text]:
    """Answered by the target alone, many prompts at a time."""
    target = llm.target
    assert isinstance(target, FusedTarget)
    decoder = BatchDecoder(target, rows=BATCH, stop_ids=target.info.eos_ids)
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i].prompt))
    jobs = [Job(texts[i].prompt, rounds.max_new_tokens, tag=i) for i in order]
    done = {job.tag: job.output for job in decoder.run(jobs)}
    return [_answered(text, done[i]) for i, text in enumerate(texts)]


def _answered(text: Text, output: Sequence[int]) -> Text:
    return Text(text.prompt, tuple(output), text.domain, text.split)

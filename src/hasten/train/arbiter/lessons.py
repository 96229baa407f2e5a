"""What the constructed specialist learns from: right answers, and text of the target's own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from hasten.errors import OptionError
from hasten.exits.config import ExitConfig
from hasten.targets.fused import FusedTarget
from hasten.tasks import Problem, available, problems
from hasten.train import rows as text_rows
from hasten.train.arbiter.windowed import Window
from hasten.train.exits import Teacher
from hasten.train.features import Features, Text

if TYPE_CHECKING:
    from hasten.api import LLM

OWN = "own text"
"""The domain of texts that the target made."""
LONGEST = 14
"""Rows of an answer that are learned from."""
OWN_ROWS, OWN_PROMPT, OWN_LENGTH = 12, 120, 48
"""Of a text of the target's own: rows that are learned from, longest prompt, tokens of the answer
that are kept."""


@dataclass(frozen=True, slots=True)
class Study:
    """A text to learn from; `starts` are the places of its answers' first tokens. An answer goes on
    up to an end-of-sequence id."""

    text: Text
    starts: tuple[int, ...]


def gold_studies(
    llm: LLM, families: Sequence[str], split: str, count: int, *, seed: int = 0
) -> list[Study]:
    """Problems of each family, up to `count`, with their right answers."""
    found = []
    for family in families:
        most = min(count, available(family, split))
        some = problems([family], split, most, seed=seed)
        found += [gold_study(llm, each, examples=split == "train") for each in some]
    return found


def gold_study(llm: LLM, problem: Problem, *, examples: bool) -> Study:
    """A problem's prompt as it is asked, its right answer, and the end. With `examples` the answers
    in the prompt are learned from as well: they are items of the training split."""
    answer = llm.tokenizer(problem.answer, add_special_tokens=False)["input_ids"]
    turns = problem.prompt
    prompt = llm.tokenize(turns)
    end = turn_end(llm)
    text = Text(tuple(prompt), (*answer, end), problem.family, problem.split)
    asked = range(1, len(turns), 2) if examples else ()
    # What comes before an example's answer is its prompt, word for word.
    starts = [len(llm.tokenize(turns[:at])) for at in asked]
    return Study(text, (*starts, len(prompt)))


def turn_end(llm: LLM) -> int:
    """The id that ends an answer in the chat template. Raises OptionError where there is none."""
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids = llm.tokenize([*asked, {"role": "user", "content": "c"}])
    for token in ids[len(llm.tokenize(asked[:1])) :]:
        if token in llm.target.info.eos_ids:
            return token
    raise OptionError("model", "its chat template ends answers with no end-of-sequence id")


def own_studies(paths: Sequence[str | Path], count: int, *, seed: int = 0) -> list[Study]:
    """Greedy answers of the split ``modules`` that `hasten train data` has kept, to short prompts,
    their beginnings."""
    found = [
        Study(
            Text(tuple(row.prompt), tuple(row.output[:OWN_LENGTH]), OWN, "train"),
            (len(row.prompt),),
        )
        for path in paths
        for row in text_rows.read(path, split="modules")
        if row.temperature == 0.0 and len(row.prompt) <= OWN_PROMPT
    ]
    random.Random(seed).shuffle(found)
    return found[:count]


@dataclass(slots=True)
class Lesson:
    """Some texts, padded. `tokens` holds the ids that follow the window's rows ``(texts, count)``
    and `next` their places in the draft vocabulary, -1 where there are none; `final` the target's
    last states there; `own` says which texts are its own."""

    window: Window
    tokens: torch.Tensor
    next: torch.Tensor
    final: torch.Tensor
    own: torch.Tensor
    texts: list[int]


class Lessons:
    """Batches of `studies`, whose texts' states are in `features`."""

    def __init__(
        self,
        studies: Sequence[Study],
        features: Features,
        target: FusedTarget,
        config: ExitConfig,
        teacher: Teacher,
    ) -> None:
        self.studies, self._features = list(studies), features
        self._config, self._teacher = config, teacher
        self._embeddings = target.torch_decoder.embeddings
        self._last, self._ends = target.info.num_layers, target.info.eos_ids

    def texts(self, split: str, *, own: bool | None = None) -> list[int]:
        """Numbers of a split's texts; `own`: only those of the target's own, or only the others."""
        kept = [at for at, study in enumerate(self.studies) if study.text.split == split]
        return [at for at in kept if own is None or (self.domain(at) == OWN) == own]

    def domain(self, text: int) -> str:
        """A text's family, or `OWN`."""
        return self.studies[text].text.domain

    def in_order(self, texts: Sequence[int]) -> list[int]:
        """Those of like length together."""
        return sorted(texts, key=lambda at: len(self.studies[at].text))

    def load(self, group: Sequence[int], source: random.Random | None = None) -> Lesson:
        """A batch of these texts; with `source` some rows of the target's own, else the first."""
        longest = max(len(self.studies[at].text) for at in group)
        runs = [self._runs(at, source) for at in group]
        count = max(sum(last - first for first, last in some) for some in runs)
        rows, places, tokens = (torch.full((len(group), count), -1) for _ in range(3))
        for row, (at, some) in enumerate(zip(group, runs, strict=True)):
            ids = torch.tensor([*self.studies[at].text.prompt, *self.studies[at].text.output])
            picked = torch.cat([torch.arange(first, last) for first, last in some])
            rows[row, : len(picked)] = picked - 1
            places[row, : len(picked)] = torch.cat([torch.arange(b - a) for a, b in some])
            tokens[row, : len(picked)] = ids[picked]
        following = self._teacher.place[tokens.clamp_min(0)].masked_fill(tokens < 0, -1)
        rows = rows.clamp_min(0)
        deep = [self._layer(layer, group, longest) for layer in self._config.deep]
        window = Window(self._states(group, longest), deep, rows, places)
        final = window.of(self._layer(self._last, group, longest))
        own = torch.tensor([self.domain(at) == OWN for at in group])
        return Lesson(window, tokens, following, final, own, list(group))

    def _runs(self, text: int, source: random.Random | None) -> list[tuple[int, int]]:
        """First token and end of each part that is learned from."""
        study = self.studies[text]
        ids = (*study.text.prompt, *study.text.output)
        if self.domain(text) == OWN:
            start, span = study.starts[0], min(OWN_ROWS, len(study.text.output))
            room = len(ids) - start - span
            start += source.randint(0, room) if source is not None else 0
            return [(start, start + span)]
        return [(start, self._end(ids, start)) for start in study.starts]

    def _end(self, ids: Sequence[int], start: int) -> int:
        """After the first end-of-sequence id, or where the answer gets too long."""
        for at in range(start, min(start + LONGEST, len(ids))):
            if ids[at] in self._ends:
                return at + 1
        return min(start + LONGEST, len(ids))

    def _states(self, group: Sequence[int], longest: int) -> torch.Tensor:
        if self._config.layer:
            return self._layer(self._config.layer, group, longest)
        ids = torch.zeros(len(group), longest, dtype=torch.int64)
        for row, at in enumerate(group):
            own = self._features.ids(at)
            ids[row, : len(own)] = own
        return F.embedding(ids, self._embeddings).float()

    def _layer(self, layer: int, group: Sequence[int], longest: int) -> torch.Tensor:
        out = torch.zeros(len(group), longest, self._config.hidden)
        for row, at in enumerate(group):
            states = self._features.states(layer, at)
            out[row, : len(states)] = states.float()
        return out

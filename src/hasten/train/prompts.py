"""Which prompt is next: domains by their shares, none twice, and user turns from the model itself.

A user turn is sampled by giving the model its template up to where the user's words begin: what it
goes on with, if it ends that by itself, is a prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hasten.errors import HastenError, OptionError
from hasten.train import sources
from hasten.train.batched import Job
from hasten.train.rows import Known

if TYPE_CHECKING:
    from hasten.api import LLM

_TURN_TOKENS, _TURN_LEAST, _TURN_HEAT = 80, 4, 0.9
"""Of sampled user turns: the longest, the shortest (both exclusive) and the temperature."""
_TURN_TRIES = 200
"""A model that ends none of so many user turns in a row makes none."""
_MARKS = ("Xylem", "7", "what", "é")
"""Contents that begin and end differently: what a template has around all of them is its own."""
_PRIOR = 4
"""Answers of middling length that each domain is taken to have given already."""


@dataclass(frozen=True, slots=True)
class Question:
    """The next thing to ask: ids of a prompt, or None where a user turn is to be sampled."""

    domain: str
    source: str
    ids: list[int] | None


class Prompts:
    """Prompts of all sources, as ids.

    listed   sources, as `sources.parse` takes them
    shares   a domain's part of all tokens, relative to the others'; 1 where not named
    longest  prompts of more ids are passed over
    typical  tokens of an answer, as long as nothing is known of a domain
    known    prompts that aren't asked again; gets those given

    Raises OptionError for sources that can't be read or are no use with this model.
    """

    def __init__(
        self,
        llm: LLM,
        listed: Sequence[str],
        shares: Mapping[str, float],
        *,
        seed: int,
        longest: int,
        typical: float,
        known: Known,
    ) -> None:
        self._llm, self._longest, self._typical, self._known = llm, longest, typical, known
        parsed = [sources.parse(text) for text in dict.fromkeys(listed)]
        self.open: dict[str, list[sources.Source]] = {}
        for source in parsed:
            self.open.setdefault(source.domain, []).append(source)
        self._shares = {name: shares.get(name, 1.0) for name in self.open}
        self._texts = {source: sources.prompts(source, seed) for source in parsed if not source.own}
        self._own = next((source for source in parsed if source.own), None)
        self.turns = UserTurns(llm, longest, known) if self._own else None
        self._taken: Counter[str] = Counter()
        self._notes: list[str] = []

    def take(
        self, tokens: Mapping[str, int], rows: Mapping[str, int], missing: float, most: int
    ) -> Iterator[Question]:
        """Up to `most` questions whose answers should have `missing` tokens.

        Each is of the domain that is furthest behind its share, by the `tokens` and `rows` that
        domains have and what their answers to the questions given will be.
        """
        self._retire_turns()
        expected = {domain: float(tokens.get(domain, 0)) for domain in self.open}
        while self.open and missing > 0 and most > 0:
            domain = min(self.open, key=lambda name: expected[name] / self._shares[name])
            question = self._next(domain)
            if question is None:
                continue
            yield question
            had = tokens.get(domain, 0) + _PRIOR * self._typical
            answer = had / (rows.get(domain, 0) + _PRIOR)
            expected[domain] += answer
            missing -= answer
            most -= 1

    def _next(self, domain: str) -> Question | None:
        """From the domain's sources in turn; None when that one has just ended."""
        listed = self.open[domain]
        source = listed[self._taken[domain] % len(listed)]
        self._taken[domain] += 1
        if source.own:
            return Question(domain, sources.SELF, None)
        for prompt in self._texts[source]:
            try:
                ids = self._llm.tokenize(prompt.text)
            except HastenError:  # not text to this tokenizer, or to its template
                continue
            if len(ids) <= self._longest and self._known.add(ids):
                return Question(domain, prompt.source, ids)
        self._close(source, "has no more prompts")
        return None

    def _retire_turns(self) -> None:
        if self._own and self.turns and self.turns.failed_in_a_row >= _TURN_TRIES:
            self._close(self._own, "is of no use: this model doesn't end user turns by itself")
            self._own = None

    def _close(self, source: sources.Source, why: str) -> None:
        self.open[source.domain].remove(source)
        if not self.open[source.domain]:
            del self.open[source.domain]
        self._notes.append(f"{source} {why}")

    def notes(self) -> list[str]:
        """What has happened to sources since the last call."""
        notes, self._notes = self._notes, []
        return notes


class UserTurns:
    """User turns sampled from a model with a chat template; else OptionError."""

    def __init__(self, llm: LLM, longest: int, known: Known) -> None:
        self._before, self._after = _around_user(llm)
        self._special = frozenset(llm.tokenizer.all_special_ids)
        self._eos, self._longest, self._known = llm.target.info.eos_ids, longest, known
        self.failed_in_a_row = 0

    def job(self, tag: object) -> Job:
        """To be answered first."""
        return Job(self._before, _TURN_TOKENS, _TURN_HEAT, tag)

    def prompt(self, job: Job) -> list[int] | None:
        """The prompt that an answered job has made; None when it is no good, or known."""
        turn, end = job.output[:-1], job.output[-1]
        ids = [*self._before, *turn, *self._after]
        ended = end in self._eos and _TURN_LEAST < len(job.output) < _TURN_TOKENS
        if not ended or len(ids) > self._longest or self._special.intersection(turn):
            self.failed_in_a_row += 1
            return None
        self.failed_in_a_row = 0
        return ids if self._known.add(ids) else None


def _around_user(llm: LLM) -> tuple[list[int], list[int]]:
    """What the chat template puts before and after a user's words. Raises OptionError without."""
    if not getattr(llm.tokenizer, "chat_template", None):
        raise OptionError("source", "chat=self needs a model with a chat template")
    made = [llm.tokenize(mark) for mark in _MARKS]
    before = _common(made)
    after = _common([ids[::-1] for ids in made])[::-1]
    if not before or not after or len(before) + len(after) >= min(map(len, made)):
        raise OptionError("source", "chat=self can't find the user's place in the chat template")
    return before, after


def _common(rows: Sequence[list[int]]) -> list[int]:
    """What all begin with."""
    length = 0
    for tokens in zip(*rows, strict=False):
        if len(set(tokens)) > 1:
            break
        length += 1
    return rows[0][:length]

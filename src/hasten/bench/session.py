"""Measuring: contestants answer prompt after prompt, and what they said is kept.

Every prompt is answered by every contestant before the next prompt, in an order that is rotated
from prompt to prompt, so that drift of the machine's speed meets all of them alike. Whole rounds
over the suite are repeated, not single answers. While an answer is timed the garbage collector is
off.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from hasten.api import LLM
from hasten.bench.adversarial import random_ids
from hasten.bench.config import WARM, BenchConfig, Progress, ProgressCallback
from hasten.bench.explain import find_differences
from hasten.bench.peers import Peer, PeerContext, make_peers
from hasten.bench.prompts import Suite, SuiteRow
from hasten.bench.states import Entry, forget, own_state
from hasten.bench.stats import Answer, Difference, Item, Measured
from hasten.choices import choice
from hasten.errors import ContextError, OptionError
from hasten.types import Round, SamplingParams

BASELINE = "ar"
"""Plain decoding: always measured, and what speedups are relative to."""

WARM_UP_TEXT = "Name the four seasons and say one thing about each of them."
WARM_UP_TOKENS = 24


def first_ids(llm: LLM, row: SuiteRow) -> list[int]:
    """A row's first prompt in token ids, its noise included.

    Without a tokenizer a row with noise is its noise alone; others raise OptionError.
    """
    info, tokenizer = llm.target.info, llm.tokenizer
    noise: list[int] = []
    if row.random_tokens:
        special = set(getattr(tokenizer, "all_special_ids", ())) | info.eos_ids
        size = info.vocab_size if tokenizer is None else min(info.vocab_size, len(tokenizer))
        noise = random_ids(row, size, special)
        if tokenizer is None:
            return noise
    return noise + llm.tokenize(row.turns[0])


# -- contestants -----------------------------------------------------------------------------------


class Contestant(Protocol):
    """Something that answers prompts: a method, or a peer."""

    name: str

    def run(self, ids: Sequence[int], params: SamplingParams) -> Answer:
        """Answer the prompt, timed."""
        ...


class _MethodContestant:
    """A method of the LLM under test; a cold one forgets before it answers."""

    def __init__(self, llm: LLM, entry: Entry, verify: str | None) -> None:
        self.name = entry.name
        self._llm, self._cold, self._verify = own_state(llm, entry), entry.state == "cold", verify
        self._spec = self._llm.prepare(entry.spec)

    def run(self, ids: Sequence[int], params: SamplingParams) -> Answer:
        """Drive the rounds; the clock is the wall's, so everything the loop does counts."""
        if self._cold:
            forget(self._llm, self._spec)
        rounds: list[Round] = []
        started = first = last = time.perf_counter()
        with self._llm.stream(
            list(ids), method=self._spec, params=params, verify=self._verify
        ) as stream:
            for made in stream.rounds():
                last = time.perf_counter()
                if made.tree is None:
                    first = last
                rounds.append(made)
            result = stream.result
            drafter = getattr(stream._request.decoding, "drafter", None)
        return Answer(
            tokens=result.tokens,
            decode_tokens=result.metrics.pass_tokens,
            decode_s=last - first,
            ttft_s=first - started,
            passes=result.metrics.target_passes,
            summary=result.metrics,
            choices=tuple(choice(made) for made in rounds if made.tree is not None),
            decided=getattr(drafter, "decided", 0),
            deciding_s=getattr(drafter, "deciding_s", 0.0),
        )


class _PeerContestant:
    """A peer; it knows no sampling."""

    def __init__(self, peer: Peer) -> None:
        self.name = peer.name
        self._peer = peer

    def run(self, ids: Sequence[int], params: SamplingParams) -> Answer:
        """Pass the prompt on."""
        return self._peer.run(ids, params.max_new_tokens)


def make_contestants(config: BenchConfig, llm: LLM, entries: Sequence[Entry]) -> list[Contestant]:
    """Everything that is measured, loaded and checked, plain decoding first."""
    made: list[Contestant] = [_MethodContestant(llm, entry, config.verify) for entry in entries]
    context = PeerContext(llm.target.info, llm._loaded.source)
    for peer in make_peers(config.peers, context):
        peer.prepare()
        made.append(_PeerContestant(peer))
    return made


# -- measuring -------------------------------------------------------------------------------------


@contextmanager
def quiet() -> Iterator[None]:
    """Garbage is collected before and not during what is timed."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(slots=True)
class Session:
    """The state of a run: items and their answers, by contestant and repeat, as they come."""

    config: BenchConfig
    llm: LLM
    suite: Suite
    contestants: Sequence[Contestant]
    progress: ProgressCallback
    items: list[Item] = field(default_factory=list)
    answers: list[dict[str, list[Answer]]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    partial: bool = False
    done: int = 0

    def __post_init__(self) -> None:
        asks_again = self.config.turns == "all" and any(len(r.turns) > 1 for r in self.suite.rows)
        if asks_again and not getattr(self.llm.tokenizer, "chat_template", None):
            raise OptionError(
                "turns", "'all' needs a chat template, and the tokenizer has none", "Use 'first'"
            )

    @property
    def total(self) -> int:
        """Answers to come in all, at most."""
        return self._prompts * len(self.contestants) * self.config.repeats

    @property
    def _prompts(self) -> int:
        """Prompts of the suite, at most."""
        every = self.config.turns == "all"
        return sum(len(r.turns) or 1 if every else 1 for r in self.suite.rows)

    def warm_up(self) -> None:
        """Let every contestant answer something short, untimed."""
        if self.llm.tokenizer is not None:
            ids = self.llm.tokenize(WARM_UP_TEXT)
        else:
            ids = first_ids(self.llm, SuiteRow("warm-up", "", (), 16))
        room = self.llm.target.info.context_limit - len(ids)
        tokens = min(WARM_UP_TOKENS, self.config.max_new_tokens, room)
        for at, contestant in enumerate(self.contestants):
            self.progress(Progress("warm-up", at, len(self.contestants), contestant.name))
            if tokens > 0:
                contestant.run(ids, self._params(0, tokens))
        self.progress(Progress("warm-up", len(self.contestants), len(self.contestants)))

    def learn(self) -> None:
        """Let the warm contestants answer the whole suite, unmeasured."""
        warm = [c for c in self.contestants if c.name.endswith(WARM)]
        plain = next(c for c in self.contestants if c.name == BASELINE)
        total, asked = self._prompts * len(warm), 0

        def answer(item: Item) -> Sequence[int]:
            nonlocal asked
            params = self._params(asked, self._room(item))
            for at, contestant in enumerate(warm):
                done = asked * len(warm) + at
                self.progress(Progress("learn", done, total, contestant.name, item.row_id))
                contestant.run(item.ids, params)
            asked += 1
            follows = self.config.turns == "all" and item.turn < len(
                self.suite.rows[item.row].turns
            )
            return plain.run(item.ids, params).tokens if follows else ()

        if warm:
            for row in range(len(self.suite.rows)):
                self._ask(row, answer)
            self.progress(Progress("learn", total, total))

    def measure(self) -> None:
        """Fill `items` and `answers`; after Ctrl-C what is there is trimmed to whole prompts."""
        try:
            for row in range(len(self.suite.rows)):
                self._first_time(row)
            for repeat in range(1, self.config.repeats):
                for at in range(len(self.items)):
                    self._answer(at, repeat)
        except KeyboardInterrupt:
            self._trim()
            if not self.items:
                raise
            self.partial = True
        if not self.items:
            raise ContextError(
                f"no prompt of suite {self.suite.name!r} leaves room for an answer in the context "
                f"of {self.llm.target.info.context_limit} tokens: {self.skipped[0]}"
            )
        self.progress(Progress("measure", self.done, self.done))

    def _first_time(self, place: int) -> None:
        """All turns of a row, measured."""

        def answer(item: Item) -> Sequence[int]:
            self.items.append(item)
            self.answers.append({})
            self._answer(len(self.items) - 1, 0)
            return self.answers[-1][BASELINE][0].tokens

        self.skipped.extend(self._ask(place, answer))

    def _ask(self, place: int, answer: Callable[[Item], Sequence[int]]) -> list[str]:
        """Ask all turns of a row; gives what had no room.

        Later turns follow plain decoding's answers, which `answer` returns, so that every
        contestant answers the same prompts.
        """
        row = self.suite.rows[place]
        messages: list[dict[str, str]] = []
        turns = row.turns if self.config.turns == "all" else row.turns[:1]
        for turn, text in enumerate(turns, 1):
            messages.append({"role": "user", "content": text})
            ids = self.llm.tokenize(messages) if turn > 1 else first_ids(self.llm, row)
            limit = self.llm.target.info.context_limit
            if not 0 < len(ids) < limit:
                return [f"{row.category} {row.id} turn {turn}: {len(ids)} tokens"]
            said = answer(Item(place, row.id, row.category, turn, tuple(ids)))
            if turn < len(turns):
                text = self.llm.tokenizer.decode(list(said), skip_special_tokens=True)
                messages.append({"role": "assistant", "content": text})
        return []

    def _answer(self, at: int, repeat: int) -> None:
        """One answer of each contestant to item `at`."""
        item, params, count = self.items[at], self.params(at), len(self.contestants)
        with quiet():
            for step in range(count):
                contestant = self.contestants[(at + repeat + step) % count]
                self.progress(
                    Progress("measure", self.done, self.total, contestant.name, item.row_id)
                )
                answer = contestant.run(item.ids, params)
                self.answers[at].setdefault(contestant.name, []).append(answer)
                self.done += 1

    def params(self, at: int) -> SamplingParams:
        """Sampling options of item `at`; no longer than the context allows, peers included."""
        return self._params(at, self._room(self.items[at]))

    def _room(self, item: Item) -> int:
        room = self.llm.target.info.context_limit - len(item.ids)
        return min(self.config.max_new_tokens, room)

    def _params(self, at: int, tokens: int) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=tokens,
            temperature=self.config.temperature,
            seed=self.config.seed + at,
        )

    def _trim(self) -> None:
        """Keep the prompts that every contestant has answered, with as many repeats of each."""
        names = [contestant.name for contestant in self.contestants]
        kept = []
        for item, answers in zip(self.items, self.answers, strict=True):
            whole = min(len(answers.get(name, ())) for name in names)
            if whole:
                kept.append((item, {name: answers[name][:whole] for name in names}))
        self.items, self.answers = [k[0] for k in kept], [k[1] for k in kept]

    @property
    def measured(self) -> Measured:
        """Contestant -> item -> repeats."""
        return {c.name: [a[c.name] for a in self.answers] for c in self.contestants}

    def explain(self, exact: set[str]) -> list[Difference]:
        """What is known of the answers that differ; `exact` names the methods that may not.

        After Ctrl-C, here or before, they are counted and listed without being re-scored.
        """
        looks = self.config.explain and not self.partial
        try:
            return self._differences(exact, self.config.max_explained if looks else 0)
        except KeyboardInterrupt:
            self.partial = True
            return self._differences(exact, 0)

    def _differences(self, exact: set[str], limit: int) -> list[Difference]:
        return find_differences(
            self.llm,
            self.items,
            self.measured,
            [self.params(at) for at in range(len(self.items))],
            plain=BASELINE,
            exact=exact,
            limit=limit,
            on_step=lambda done, total: self.progress(Progress("explain", done, total)),
        )

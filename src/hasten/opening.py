"""The beginning of a request: its prompt is run, part by part."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hasten.drafters.base import Drafter
from hasten.judge import PassJudge
from hasten.policies.base import Policy
from hasten.readback import NOTHING, Readback, join
from hasten.sampling import Sampler
from hasten.targets.base import Target
from hasten.types import Draft, Pass, Round, RowSignals, Signals, Times

PREFILL_CHUNK = 256
"""Prompt rows run at a time, so that no (prompt x vocab) tensor is ever held, and that others who
share the target don't wait for a long prompt."""


LATE_BYTES = 1 << 20
"""A prompt's states are kept for a drafter that is told late up to this size (some 150 rows of the
embedded model): more would fill memory with what may never be asked for."""


@dataclass(slots=True)
class Clock:
    """Seconds of the round being made."""

    started: float = 0.0
    draft: float = 0.0
    target: float = 0.0
    draft_model: float = 0.0
    prompt: float = 0.0
    """Of the parts of a prompt run so far."""
    shared: float = 0.0
    """Wall time since `started` that other requests of a batch used; it isn't this round's."""


class Opening:
    """What a request does with its prompt, up to round 0; the rest is `hasten.decoding.Decoding`'s.

    The attributes belong to the request and are set there.
    """

    target: Target
    drafter: Drafter
    policy: Policy
    sampler: Sampler
    ids: list[int]
    prompt_len: int
    _sequence: Any
    _owned: bool
    _index: int
    _idle: bool
    _root: int
    """Place of the first round's root, which the drafter is told of as the first token."""
    _read: Readback
    _prompt_needs: Signals
    _prompt_signals: list[RowSignals]
    _opening: RowSignals | None
    """The prompt's signals, until the drafter has been told of it."""
    _unseen: list[Round]
    _clock: Clock

    def lend(self, sequence: Any, signals: RowSignals | None = None) -> None:
        """Use `sequence`, which holds the prompt's first tokens (or none), instead of a fresh one.
        It stays the caller's: at the end it is left open, holding all tokens but the last
        emitted. `signals` are those of what it holds, where `read` gave some."""
        self._sequence, self._owned = sequence, False
        self._prompt_signals = [] if signals is None else [signals]

    def start(self) -> Round:
        """Run the prompt and emit the first token."""
        while (made := self.prefill()) is None:
            pass
        return made

    def prefill(self, others: int = 0) -> Round | None:
        """Run the next part of the prompt; after the last one round 0, with the first token.
        `others` requests run beside it."""
        clock = self._clock
        clock.started = time.perf_counter() - clock.prompt
        rest = self._unread()
        step = self._prompt_step(len(rest))
        if step < len(rest):
            self._prompt_signals.append(self.read(self._sequence, rest[:step])[1])
            clock.prompt = time.perf_counter() - clock.started
            return None
        if self._root < self.prompt_len:
            return self._open(rest)
        if self._remaining() <= 1:  # nothing will be drafted: the last row is enough
            passed, signals = self._last_row(rest)
        else:
            passed, last = self.read(self._sequence, rest)
            signals = join([*self._prompt_signals, last])
        self._prompt_signals.clear()
        self._opening = signals
        self._idle = others > 0 and self.drafter.needs.late and _size(signals) <= LATE_BYTES
        logits = passed.logits
        assert logits is not None
        best = self._read.argmax(passed, NOTHING)
        token = PassJudge(self.sampler, self.ids, logits, best).choose(0, ())
        return self._close_round(None, (), (token,), logits, NOTHING)

    def _open(self, rest: Sequence[int]) -> Round:
        """Round 0 without a token: the prompt's last one is the root that the first is drafted
        from, and the drafter takes it for the first token of an answer."""
        if rest:  # else somebody has run it all
            self._prompt_signals.append(self.read(self._sequence, rest)[1])
        self._opening = join(self._prompt_signals) if self._prompt_signals else NOTHING
        self._prompt_signals.clear()
        self._unseen.append(Round(0, (self.ids[self._root],)))
        self._catch_up()
        self._index = 1
        made = Round(0, (), times=self._times())
        self.policy.learn(made)
        return made

    def _unread(self) -> list[int]:
        """What the sequence doesn't hold yet of the prompt up to the first root: the last token at
        least, unless that one is the root and the drafter knows what it wants to."""
        if self._sequence is None:
            self._sequence = self.target.open()
        told = bool(self._prompt_signals) or not self.drafter.needs.prompt
        least = 0 if self._root < self.prompt_len and told else 1
        held = min(self._sequence.length, self._root - least)
        if held < self._sequence.length:
            self.target.truncate(self._sequence, held)
        return self.ids[held : self._root]

    def _prompt_step(self, rows: int) -> int:
        """How many of so many prompt rows to run now."""
        whole = self.target.info.whole_prompt
        # Another target chooses its own steps, unless top-k of all rows is read back.
        wanted = self.drafter.needs.prompt or self.target.capabilities.packed
        return rows if whole or not wanted or self._remaining() <= 1 else PREFILL_CHUNK

    def _last_row(self, tokens: Sequence[int]) -> tuple[Pass, RowSignals]:
        """Run `tokens` as plain decoding does; the last row's logits and signals."""
        needs, prefill = self.drafter.needs, partial(self.target.prefill, self._sequence)
        if not needs.prompt:
            return self._timed(lambda: prefill(tokens)), NOTHING
        passed = self._timed(lambda: prefill(tokens, taps=needs.hidden))
        last = Pass(passed.logits, {layer: rows[-1:] for layer, rows in passed.hidden.items()})
        return last, self._read.rows(last, self._prompt_needs)

    def read(self, sequence: Any, tokens: Sequence[int]) -> tuple[Pass, RowSignals]:
        """Run part of a prompt into `sequence`: the last row's logits, and the signals that the
        drafter wants of the prompt's rows (all of them None where it wants none)."""
        needs, prefill = self._prompt_needs, partial(self.target.prefill, sequence)
        if not needs.prompt:
            return self._timed(lambda: prefill(tokens)), NOTHING
        parts: list[RowSignals] = []
        step = len(tokens) if self.target.info.whole_prompt else PREFILL_CHUNK
        for at in range(0, len(tokens), step):
            run = partial(prefill, tokens[at : at + step], taps=needs.hidden)
            passed = self._timed(partial(run, all_logits=needs.topk > 0))
            parts.append(self._read.rows(passed, needs))
        assert passed.logits is not None
        return Pass(passed.logits[-1:]), join(parts)

    # -- the request's own -----------------------------------------------------------------------

    @abstractmethod
    def _remaining(self) -> int: ...

    @abstractmethod
    def _timed(self, run: Callable[[], Pass]) -> Pass: ...

    @abstractmethod
    def _times(self) -> Times: ...

    @abstractmethod
    def _catch_up(self) -> None: ...

    @abstractmethod
    def _close_round(
        self,
        draft: Draft | None,
        nodes: tuple[int, ...],
        tokens: tuple[int, ...],
        logits: torch.Tensor,
        signals: RowSignals,
    ) -> Round: ...


def _size(signals: RowSignals) -> int:
    """Bytes of the hidden states."""
    return sum(rows.nbytes for rows in signals.hidden.values())

"""What drafts for a population: any model with a law q over next tokens.

A proposal hands logits to `choose`, which turns them into q, draws a token for each particle and
remembers log q; so all proposals sample alike, and none can forget what it sampled from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hasten.errors import CapabilityError
from hasten.targets.base import Target
from hasten.types import Pass, Rows

Choose = Callable[[torch.Tensor, Sequence[int]], list[int]]
"""Logits ``(rows, ids)`` of next tokens, and for each lane the row that is its own -> the tokens
drawn, one a lane. Lanes that share a row have drafted the same."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A particle to draft for: its slot, its last id (which no model has run yet), and its sequence
    in the target. Particles that share a sequence have the same text."""

    slot: int
    root: int
    sequence: Any


class Proposal(Protocol):
    """One request's proposal; its state is held by slot.

    Per request: ``begin``; per round ``draft``, then ``observe`` for the lanes that go on,
    ``retire`` for those that don't, and ``fork``; ``close`` at the end, also after an error.

    full_support  its logits cover every id of the target; else q is mixed with the uniform law
    taps          target layers whose outputs it wants of the prompt's and of verified rows
    """

    name: str
    full_support: bool
    taps: tuple[int, ...]

    def room(self, length: int) -> int:
        """How many tokens it can draft after a text of `length` tokens; 0 stops drafting only."""
        ...

    def begin(self, prompt: Sequence[int], hidden: Mapping[int, torch.Tensor], count: int) -> None:
        """Start `count` particles after `prompt`; `hidden` are its last rows' taps."""
        ...

    def draft(self, lanes: Sequence[Lane], length: int, choose: Choose) -> int:
        """Call `choose` `length` times, for all lanes each time. Gives the number of the target's
        layers that root and draft have run in the lanes' sequences: 0, or they are resumed."""
        ...

    def observe(
        self, lanes: Sequence[Lane], kept: int, hidden: Sequence[Mapping[int, torch.Tensor]]
    ) -> None:
        """Of root and draft the first `kept` rows were kept, the same number for all lanes (those
        drafted for, or some of them); `hidden` are the taps above where they were resumed, each
        ``(length + 1, hidden_size)``."""
        ...

    def retire(self, slots: Sequence[int]) -> None:
        """These particles draft no more: free what they hold."""
        ...

    def fork(self, copies: Mapping[int, int]) -> None:
        """Overwrite slots (keys) with copies of others (values). No value is a key."""
        ...

    def close(self) -> None:
        """Free everything. Harmless when done before."""
        ...


def run_rows(
    target: Target,
    rows: Sequence[Rows],
    layers: tuple[int, int] | None = None,
    taps: Sequence[int] = (),
) -> list[Pass]:
    """One pass over the rows of several sequences, or one each where the target doesn't pack."""
    if target.capabilities.packed:
        return target.forward(rows, layers=layers, taps=taps)
    return [target.forward([each], layers=layers, taps=taps)[0] for each in rows]


def chain(sequence: Any, tokens: Sequence[int], above: int = -1) -> Rows:
    """Rows one below the other, the first below pending row `above` (-1: the last committed)."""
    return Rows(sequence, tuple(tokens), tuple(range(above, above + len(tokens))))


def require_particles(target: Target, part: str) -> None:
    """Raise CapabilityError unless the target can hold a population; `part` says what for."""
    for name, why in (
        ("fork", "its sequences can't be forked, and every particle is a fork of the prompt"),
        ("rollback", "it takes one row at a time, and drafts are verified together"),
    ):
        if not getattr(target.capabilities, name):
            raise CapabilityError(
                f"{target.info.name} can't be SMC's {part}: {why} (see `hasten info`). Use "
                "method 'ar', plain decoding"
            )


class ModelProposal:
    """A model drafts token by token, with a cache of its own for each particle.

    model       shared between requests; any target of the same vocabulary. Under the name ``self``
                it is the target itself, for tests and controls: it costs more than plain decoding
    vocab_size  the target's

    Raises CapabilityError when the model can't fork.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, model: Target, *, vocab_size: int, name: str = "draft-model") -> None:
        require_particles(model, "draft model")
        self.name, self._model = name, model
        self._known = model.info.vocab_size
        self.full_support = self._known >= vocab_size
        self._sequences: dict[int, Any] = {}
        self._late: dict[int, list[int]] = {}
        """Kept ids that the model hasn't run, the root left out."""
        self._drafts: dict[int, list[int]] = {}
        self._roots = 0
        """Pending rows up to the root, the same number for all lanes."""

    def room(self, length: int) -> int:
        """Up to the model's own context."""
        return self._model.info.context_limit - length

    def begin(self, prompt: Sequence[int], hidden: Mapping[int, torch.Tensor], count: int) -> None:
        """Run the prompt once; particles share it."""
        base = self._model.open()
        try:
            self._model.prefill(base, self._readable(prompt))
            for slot in range(count):
                self._sequences[slot] = self._model.open(base)
                self._late[slot] = []
        finally:
            self._model.close(base)

    def _readable(self, ids: Sequence[int]) -> list[int]:
        """Ids that the model hasn't become its first one: q may be any law."""
        return [i if i < self._known else 0 for i in ids]

    def draft(self, lanes: Sequence[Lane], length: int, choose: Choose) -> int:
        """One pass a token; a token kept from the last round runs beside the root."""
        fed = {lane.slot: self._readable([*self._late[lane.slot], lane.root]) for lane in lanes}
        self._roots = len(fed[lanes[0].slot])
        self._drafts = {lane.slot: [] for lane in lanes}
        above = -1
        for step in range(length):
            rows = [chain(self._sequences[slot], ids, above) for slot, ids in fed.items()]
            passes = run_rows(self._model, rows)
            tokens = choose(torch.stack([_last(each) for each in passes]), range(len(lanes)))
            above = self._roots + step - 1
            for slot, token in zip(fed, tokens, strict=True):
                self._drafts[slot].append(token)
                fed[slot] = self._readable([token])
        return 0

    def observe(
        self, lanes: Sequence[Lane], kept: int, hidden: Sequence[Mapping[int, torch.Tensor]]
    ) -> None:
        """Commit what was kept of what has run."""
        for lane in lanes:
            drafted = self._drafts[lane.slot]
            ran = min(kept - 1, len(drafted) - 1)  # the last drafted token hasn't
            self._model.commit(self._sequences[lane.slot], range(self._roots + ran))
            self._late[lane.slot] = drafted[ran : kept - 1]

    def retire(self, slots: Sequence[int]) -> None:
        """Close their sequences."""
        for slot in slots:
            if slot in self._sequences:
                self._model.close(self._sequences.pop(slot))
                del self._late[slot]

    def fork(self, copies: Mapping[int, int]) -> None:
        """Fork the sources' sequences; a source that has ended has none."""
        self.retire(list(copies))
        for to, source in copies.items():
            if source in self._sequences:
                self._sequences[to] = self._model.open(self._sequences[source])
                self._late[to] = list(self._late[source])

    def close(self) -> None:
        """Close every sequence."""
        self.retire(list(self._sequences))


def _last(passed: Pass) -> torch.Tensor:
    assert passed.logits is not None
    return passed.logits[-1]

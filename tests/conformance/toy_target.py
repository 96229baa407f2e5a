"""A toy target that checks everything the loop does to it.

Its next-token logits are a pure function of the whole prefix (a hash of it picks rows of random
tables), so one wrong token in a sequence changes every later row. It keeps the books a real target
keeps (committed tokens, pending rows with parents and layer frontiers, forks) and asserts what the
`Target` contract promises: paths are committed, every row passes every layer once, positions stay
inside the context, nothing is used after it was closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hasten.sampling import Sampler
from hasten.targets.base import Capabilities, Ends, TargetInfo
from hasten.types import Pass, Rows, SamplingParams

_MASK = (1 << 64) - 1
_TABLE = 1024


def _mix(key: int, token: int) -> int:
    z = (key * 0x9E3779B97F4A7C15 + token + 1) & _MASK
    z = (z ^ (z >> 31)) * 0xBF58476D1CE4E5B9 & _MASK
    return z ^ (z >> 29)


@dataclass(slots=True, eq=False)
class ToyRow:
    """A pending row: `key` hashes its whole prefix, itself included."""

    token: int
    parent: int
    depth: int
    key: int
    frontier: int = 0


@dataclass(slots=True, eq=False)
class ToySequence:
    """Committed tokens with the hash after each, and pending rows."""

    tokens: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    rows: list[ToyRow] = field(default_factory=list)
    closed: bool = False

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def pending(self) -> int:
        return len(self.rows)


class ToyTarget:
    """See the module. `scale` sharpens the distributions, `bigram` is the share of the logits that
    depends on the last token only (it makes answers repeat themselves)."""

    def __init__(
        self,
        *,
        vocab: int = 24,
        layers: int = 4,
        seed: int = 0,
        scale: float = 2.0,
        bigram: float = 0.5,
        tree: bool = True,
        rollback: bool = True,
        packed: bool = False,
        layer_ranges: bool = True,
        context_limit: int = 512,
        eos_ids: Sequence[int] = (1,),
    ) -> None:
        gen = torch.Generator().manual_seed(seed)
        self._noise = torch.randn(_TABLE, vocab, generator=gen) * scale * (1 - bigram)
        self._bigram = torch.randn(vocab, vocab, generator=gen) * scale * bigram
        self._junk = torch.randn(_TABLE, vocab, generator=gen) * scale
        self._embedding = torch.randn(vocab, vocab, generator=gen)
        self.info = TargetInfo(
            name=f"toy-{seed}",
            architecture="toy",
            vocab_size=vocab,
            eos_ids=frozenset(eos_ids),
            context_limit=context_limit,
            num_layers=layers,
            hidden_size=vocab,
            dtype=torch.float32,
            device=torch.device("cpu"),
            fingerprint=f"toy-{seed}",
            engine="toy",
        )
        self.capabilities = Capabilities(
            tree=tree, rollback=rollback, layer_ranges=layer_ranges and rollback, packed=packed
        )
        self.live: list[ToySequence] = []
        self.passes = 0
        self.prefilled = 0
        self.taps: set[int] = set()
        self.before_pass: Callable[[int], None] | None = None

    # -- the function ------------------------------------------------------------------------------

    def _logits(self, key: int, token: int) -> torch.Tensor:
        near, far = self._noise[key % _TABLE], self._noise[(key >> 20) % _TABLE]
        return near + 0.7 * far + self._bigram[token]

    def _hidden(self, key: int, token: int, layer: int) -> torch.Tensor:
        """Near the logits at the last layer, junk of the path below, the embedding at layer 0."""
        if layer == 0:
            return self._embedding[token]
        share = layer / self.info.num_layers
        return (
            share * self._logits(key, token) + (1 - share) * self._junk[_mix(key, layer) % _TABLE]
        )

    def logits_after(self, ids: Sequence[int]) -> torch.Tensor:
        """The logits ``(vocab,)`` after `ids`, without any cache."""
        key = 0
        for token in ids:
            key = _mix(key, token)
        return self._logits(key, ids[-1])

    def hidden_after(self, ids: Sequence[int], layer: int) -> torch.Tensor:
        """The output of `layer` ``(hidden,)`` at the last of `ids`, without any cache."""
        key = 0
        for token in ids:
            key = _mix(key, token)
        return self._hidden(key, ids[-1], layer)

    def plain(self, prompt: Sequence[int], params: SamplingParams, seed: int = 0) -> list[int]:
        """The answer by ids and length alone, without cache, loop or drafts (no stop strings)."""
        sampler = Sampler(params, self.info.vocab_size, self.info.eos_ids, len(prompt), seed)
        final = set(params.stop_token_ids) | (set() if params.ignore_eos else self.info.eos_ids)
        ids = list(prompt)
        most = min(params.max_new_tokens, self.info.context_limit - len(prompt))
        while len(ids) - len(prompt) < most:
            ids.append(sampler.choose(ids, self.logits_after(ids)))
            if ids[-1] in final:
                break
        return ids[len(prompt) :]

    # -- sequences ---------------------------------------------------------------------------------

    def open(self, parent: Any = None, length: int | None = None) -> ToySequence:
        sequence = ToySequence()
        if parent is not None:
            self._check(parent)
            assert parent.pending == 0, "a fork of a sequence with pending rows"
            length = parent.length if length is None else length
            assert 0 <= length <= parent.length
            sequence.tokens, sequence.keys = parent.tokens[:length], parent.keys[:length]
        self.live.append(sequence)
        return sequence

    def close(self, sequence: ToySequence) -> None:
        if not sequence.closed:
            self.live.remove(sequence)
        sequence.closed = True

    def truncate(self, sequence: ToySequence, length: int) -> None:
        self._check(sequence)
        assert 0 <= length <= sequence.length
        if not self.capabilities.rollback:
            assert length == sequence.length, "this cache can't be cut"
            assert not sequence.rows, "this cache can't be cut"
        sequence.rows.clear()
        del sequence.tokens[length:], sequence.keys[length:]

    def rollback(self, sequence: ToySequence) -> None:
        self._check(sequence)
        assert self.capabilities.rollback or not sequence.rows, "this cache can't be rolled back"
        sequence.rows.clear()

    def _check(self, sequence: ToySequence) -> None:
        assert not sequence.closed, "a closed sequence was used"
        assert sequence in self.live, "a sequence of another target"

    # -- passes ------------------------------------------------------------------------------------

    def prefill(
        self,
        sequence: ToySequence,
        tokens: Sequence[int],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Pass:
        self._check(sequence)
        self._tick(taps)
        assert len(tokens) > 0, "an empty prefill"
        assert not sequence.rows, "a prefill over pending rows"
        assert sequence.length + len(tokens) <= self.info.context_limit, "past the context"
        start = sequence.length
        for token in tokens:
            assert 0 <= token < self.info.vocab_size
            sequence.keys.append(_mix(sequence.keys[-1] if sequence.keys else 0, token))
            sequence.tokens.append(token)
        self.prefilled += len(tokens)
        pairs = list(zip(sequence.keys[start:], tokens, strict=True))
        wanted = pairs if all_logits else pairs[-1:]
        return Pass(torch.stack([self._logits(k, t) for k, t in wanted]), self._tapped(pairs, taps))

    def forward(
        self,
        batch: Sequence[Rows],
        *,
        layers: tuple[int, int] | None = None,
        taps: Sequence[int] = (),
    ) -> list[Pass]:
        self._tick(taps)
        assert len(batch) > 0, "an empty batch"
        assert len(batch) == 1 or self.capabilities.packed, "sequences can't be packed here"
        assert len({id(r.sequence) for r in batch}) == len(batch), "a sequence twice in a batch"
        low, high = (0, self.info.num_layers) if layers is None else layers
        assert 0 <= low < high <= self.info.num_layers
        assert layers is None or self.capabilities.layer_ranges, "no layer ranges here"
        assert all(low < t <= high or t == low == 0 for t in taps), f"taps {taps} of {(low, high)}"
        return [self._forward(rows, low, high, taps) for rows in batch]

    def _forward(self, batch: Rows, low: int, high: int, taps: Sequence[int]) -> Pass:
        sequence: ToySequence = batch.sequence
        self._check(sequence)
        assert len(batch.tokens) == len(batch.parents) > 0
        rows = self._append(sequence, batch) if low == 0 else self._standing(sequence, batch, low)
        for row in rows:
            assert row.frontier == low, "a row passes each layer once"
            row.frontier = high
            if row.parent >= 0:
                assert sequence.rows[row.parent].frontier >= high, "a row ran ahead of its parent"
        pairs = [(row.key, row.token) for row in rows]
        whole = high == self.info.num_layers
        logits = torch.stack([self._logits(*pair) for pair in pairs]) if whole else None
        return Pass(logits, self._tapped(pairs, taps))

    def _append(self, sequence: ToySequence, batch: Rows) -> list[ToyRow]:
        first = len(sequence.rows)
        for token, parent in zip(batch.tokens, batch.parents, strict=True):
            assert type(token) is int, "ids are ints"
            assert 0 <= token < self.info.vocab_size
            at = len(sequence.rows)
            assert -1 <= parent < at, "a parent comes before its child"
            assert self.capabilities.tree or parent == at - 1, "no branches here"
            assert self.capabilities.rollback or at == 0, "one row at a time here"
            depth = sequence.rows[parent].depth + 1 if parent >= 0 else 0
            key = sequence.rows[parent].key if parent >= 0 else (sequence.keys or [0])[-1]
            assert sequence.length + depth < self.info.context_limit, "past the context"
            sequence.rows.append(ToyRow(token, parent, depth, _mix(key, token)))
        return sequence.rows[first:]

    def _standing(self, sequence: ToySequence, batch: Rows, low: int) -> list[ToyRow]:
        rows = [row for row in sequence.rows if row.frontier == low]
        assert [r.token for r in rows] == list(batch.tokens), "resumed rows: other tokens"
        assert [r.parent for r in rows] == list(batch.parents), "resumed rows: other parents"
        return rows

    def _tapped(
        self, pairs: Sequence[tuple[int, int]], taps: Sequence[int]
    ) -> dict[int, torch.Tensor]:
        return {i: torch.stack([self._hidden(k, t, i) for k, t in pairs]) for i in taps}

    def _tick(self, taps: Sequence[int]) -> None:
        self.passes += 1
        self.taps.update(taps)
        if self.before_pass is not None:
            self.before_pass(self.passes)

    def commit(self, sequence: ToySequence, rows: Sequence[int]) -> None:
        self._check(sequence)
        parent = -1
        for index in rows:
            row = sequence.rows[index]
            assert row.parent == parent, "what is committed isn't a path from the root"
            assert row.frontier == self.info.num_layers, "a committed row skipped layers"
            parent = index
        if not self.capabilities.rollback:
            assert len(rows) == len(sequence.rows), "this cache can't drop rows"
        for index in rows:
            sequence.tokens.append(sequence.rows[index].token)
            sequence.keys.append(sequence.rows[index].key)
        sequence.rows.clear()

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._embedding[list(tokens)]

    def ends(self) -> Ends:
        """Hidden states are logits, near those of the top: the head changes nothing."""
        size = self.info.vocab_size
        return Ends(self._embedding, torch.eye(size), torch.ones(size), 1e-6)


class ToyTokenizer:
    """Id i is one letter (several ids share none); ids past the letters are digits and signs."""

    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    all_special_ids: tuple[int, ...] = (1,)
    chat_template = None

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        hidden = self.all_special_ids if skip_special_tokens else ()
        return "".join(self.letters[t] for t in token_ids if t not in hidden)

    def get_vocab(self) -> dict[str, int]:
        return {letter: i for i, letter in enumerate(self.letters)}

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [self.letters.index(c) for c in text]}

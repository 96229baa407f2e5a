"""One request's drafter cache: a row for every committed pair, and branches that leave no trace.

Pair i is the target's feature of position i and the token at i + 1. A drafter that drafts behind P
committed tokens and a pending one needs pairs 0 .. P - 1, no more and no less: of *every* round,
whoever drafted it. Pairs wait as they come and are run together, in one pass, when a draft is
wanted (or when many wait). What is drafted stands behind them for the time of a branch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from hasten.dflash.net import DraftCache
from hasten.eagle3.bank import Eagle3Bank
from hasten.errors import CacheStateError

MOST_WAITING = 64
"""Pairs wait for the next draft; so many are run without one."""
CHUNK = 512
"""Pairs of a pass at most: a long prompt's mask would fill the memory."""


class Pairs:
    """The pairs of a request.

    last  what the network gave for the last pair that was run ``(1, 1, H)``: the first draft token
          is read from it; None: none was
    """

    def __init__(self, bank: Eagle3Bank) -> None:
        self._bank = bank
        self._cache = DraftCache()
        self._features: list[torch.Tensor] = []
        self._tokens: list[int] = []
        self._open = False
        self.last: torch.Tensor | None = None

    @property
    def start(self) -> int:
        """Position of the first pair: rows of an earlier turn that weren't run again have none."""
        return self._cache.start

    @property
    def held(self) -> int:
        """Pairs in the cache."""
        return self._cache.length

    @property
    def waiting(self) -> int:
        """Pairs that wait."""
        return len(self._tokens)

    def begin(self, prompt: Sequence[int], features: torch.Tensor) -> None:
        """The features ``(n, K * hidden)`` of the prompt's last rows; n may be 0. All pairs but the
        last, whose token isn't known yet, are run now: the first draft mustn't pay for them."""
        count = len(features)
        self._cache = DraftCache(start=len(prompt) - count)
        self._features, self._open = ([features] if count else []), count > 0
        self._tokens = list(prompt[len(prompt) - count + 1 :]) if count else []
        self.last = None
        self.catch_up()

    def first(self, tokens: Sequence[int]) -> None:
        """The answer's first token, which the prompt's last feature goes with."""
        if self._open and tokens:
            self._tokens.append(tokens[0])
            self._open = False

    def follow(self, features: torch.Tensor, tokens: Sequence[int]) -> None:
        """A round's kept rows: features ``(m, K * hidden)``, and the m tokens that follow them."""
        if len(features) != len(tokens):
            raise CacheStateError(
                f"{len(features)} rows were kept and {len(tokens)} tokens follow them: report this"
            )
        self._features.append(features)
        self._tokens += tokens
        if self.waiting >= MOST_WAITING:
            self.catch_up()

    def check(self, committed: int) -> None:
        """Raise CacheStateError unless there is a pair for each of `committed` tokens."""
        if self.start + self.held + self.waiting != committed:
            raise CacheStateError(
                f"the drafter's cache holds {self.held} pairs from {self.start} on and "
                f"{self.waiting} wait, where {committed} tokens stand before the pending one: "
                "report this"
            )

    def catch_up(self) -> None:
        """Run the pairs that wait, in one pass (long prompts: in a few)."""
        count = self.waiting
        if not count:
            return
        features = self._features[0] if len(self._features) == 1 else torch.cat(self._features)
        tokens, self._tokens = self._tokens, []
        # A copy: the last row mustn't keep a prompt's features alive.
        self._features = [features[count:].clone()] if len(features) > count else []
        for at in range(0, count, CHUNK):
            end = min(at + CHUNK, count)
            state = self._bank.net.fuse(features[at:end].to(self._bank.dtype)).unsqueeze(0)
            first, rows = self.start + self.held, end - at
            places = torch.arange(first, first + rows, device=state.device)
            own = torch.ones(rows, rows, dtype=torch.bool, device=state.device).tril()
            out = self._run(tokens[at:end], state, places, places, own if rows > 1 else None)
            self.last = out[:, -1:]

    @contextmanager
    def branch(self) -> Iterator[Branch]:
        """What is drafted behind the pairs; none of it stays, also after an error."""
        held = self._cache.length
        try:
            yield Branch(self)
        finally:
            self._cache.length = held

    def _run(
        self,
        tokens: Sequence[int],
        state: torch.Tensor,
        positions: torch.Tensor,
        places: torch.Tensor,
        own: torch.Tensor | None,
    ) -> torch.Tensor:
        """A pass over rows behind the cache, which keeps them.

        positions  int64 ``(rows,)``: theirs; places ``(r,)``: those of the cache's last rows and of
                   these
        own        bool ``(rows, r)``: what each sees of them; None: all. All see what stands before
        """
        bank, rows = self._bank, len(tokens)
        embeds = bank.embed(tokens).to(bank.dtype).unsqueeze(0)
        before = self.held + rows - len(places)
        mask, near = None, None
        if own is not None:
            mask = torch.cat([own.new_ones(rows, before), own], 1).unsqueeze(0)
        window = bank.config.sliding_window
        if window is not None:
            first = torch.arange(self.start, self.start + before, device=places.device)
            near = torch.cat([first, places]) > positions.unsqueeze(1) - window
            near = near.unsqueeze(0) if mask is None else near & mask
        out: torch.Tensor = bank.net(embeds, state, positions.unsqueeze(0), self._cache, mask, near)
        return out


class Branch:
    """Rows drafted behind a request's pairs, level by level."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs, self._next = pairs, pairs.start + pairs.held
        self._places: list[int] = []

    def step(
        self, tokens: Sequence[int], state: torch.Tensor, above: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run a level: k rows, all at the next position. What the network gives for them, ``(1, k,
        H)``.

        tokens  drafted
        state   ``(1, k, H)``: what the network gave for the row before each
        above   bool ``(k, r)``: which of the branch's r earlier rows are a row's ancestors; None:
                a chain, whose rows all are
        """
        rows, device, own = len(tokens), state.device, above
        if above is not None:
            own = torch.cat([above, torch.eye(rows, dtype=torch.bool, device=device)], 1)
        self._places += [self._next] * rows
        self._next += 1
        places = torch.tensor(self._places, device=device)
        return self._pairs._run(tokens, state, places[-rows:], places, own)

"""Speculative decoding with a small draft model (Leviathan et al. 2023; Chen et al. 2023).

The draft model is any target hasten can load. Its vocabulary must mean the same ids as the target's
(padding rows at the end are fine); this is checked where it is loaded (`hasten.methods`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from hasten.drafters.base import BaseDrafter, DraftContext, ModelRunner
from hasten.errors import ModelError, OptionError
from hasten.selection import argmax_rows
from hasten.types import Budget, Draft, DraftLaw, DraftTree, Round, Rows, RowSignals


class DraftModel(BaseDrafter):
    """A chain from the draft model: its argmax, or drawn from its own distribution.

    model        the draft model, shared between requests; each request has its own sequence in it
    num_tokens   longest draft
    vocab_size   ids at or above this (the target's vocabulary) are never drafted
    draw         draw from q (needed for `rejection` to accept more than `match`); else take the
                 argmax. A greedy request always takes the argmax.
    threshold    stop drafting when the draft model's own probability of its token falls below this
    laws         tell what the model says at each node (`Draft.laws`), its last state too
    """

    name = "draft-model"

    def __init__(
        self,
        model: ModelRunner,
        *,
        vocab_size: int,
        num_tokens: int = 4,
        draw: bool = True,
        threshold: float = 0.0,
        laws: bool = False,
    ) -> None:
        if num_tokens < 1:
            raise OptionError("draft-model.num_tokens", f"must be at least 1, got {num_tokens}")
        if not 0 <= threshold < 1:
            raise OptionError("draft-model.threshold", f"must be in [0, 1), got {threshold}")
        self.model, self.num_tokens, self.vocab_size = model, num_tokens, vocab_size
        self.draw, self.threshold, self.laws = draw, threshold, laws
        self._taps: dict[str, Any] = {"taps": (model.info.num_layers,)} if laws else {}
        self._sequence: Any = None
        self._ids: list[int] = []

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Open a sequence; the prompt is run at the first proposal, when it is known to be
        needed."""
        self.end()
        self._ids = list(prompt)
        self._sequence = self.model.open()

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """At most `num_tokens` tokens; none once the draft model's context is full or an id isn't
        in it."""
        ids = self._ids
        root = DraftTree.chain(ids[-1])
        room = self.model.info.context_limit - len(ids)
        count = min(self.num_tokens, budget.nodes - 1, budget.depth, room)
        if count < 1 or max(ids[self._sequence.length :]) >= self.model.info.vocab_size:
            return Draft(root)
        started = time.perf_counter()
        passed = self._catch_up()
        ctx.model_seconds += time.perf_counter() - started
        draft: list[int] = []
        q: dict[int, torch.Tensor] = {}
        laws: dict[int, DraftLaw] = {}
        while True:
            started = time.perf_counter()
            logits = passed.logits[-1]
            token, probs = self._next(ctx, [*ids, *draft], logits)
            ctx.model_seconds += time.perf_counter() - started
            if token is None:
                break
            if probs is not None:
                q[len(draft)] = probs
            if self.laws:
                state = passed.hidden[self.model.info.num_layers][-1]
                laws[len(draft)] = DraftLaw(logits, self._wide, state)
            draft.append(token)
            if len(draft) == count:
                break
            started = time.perf_counter()
            row = len(draft) - 1
            rows = Rows(self._sequence, (token,), (row - 1,))
            (passed,) = self.model.forward([rows], **self._taps)
            ctx.model_seconds += time.perf_counter() - started
        return Draft(DraftTree.chain(ids[-1], draft), q=q, laws=laws)

    def _catch_up(self) -> Any:
        """Run what the draft model hasn't seen: the pass whose last row is the pending root."""
        self.model.rollback(self._sequence)
        missing = self._ids[self._sequence.length :]
        return self.model.prefill(self._sequence, missing, **self._taps)

    def _wide(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of all the target's ids; the draft model may know fewer, or have more rows."""
        known = min(logits.shape[0], self.vocab_size)
        wide = torch.full((self.vocab_size,), -torch.inf, device=logits.device)
        wide[:known] = logits[:known]
        return wide

    def _next(
        self, ctx: DraftContext, prefix: list[int], logits: torch.Tensor
    ) -> tuple[int | None, torch.Tensor | None]:
        """The next draft token and, where it was drawn, the q it was drawn from; (None, None) to
        stop."""
        known = min(logits.shape[0], self.vocab_size)
        if not (self.draw and not ctx.greedy):
            token = argmax_rows(logits[None, :known])[0]
            if token < 0:  # NaN: a broken draft model only stops drafting
                return None, None
            if self.threshold and float(logits[:known].float().softmax(-1)[token]) < self.threshold:
                return None, None
            return token, None
        try:
            probs = ctx.warp(prefix, self._wide(logits))
        except (OptionError, ModelError):  # the options leave nothing that this model knows
            return None, None
        # The stop is decided from q alone, before the draw: deciding after it would bias the
        # answer.
        if float(probs.max()) < self.threshold:
            return None, None
        return ctx.sample(probs, len(prefix), 1)[0], probs

    def observe(self, round: Round) -> None:
        """Keep the draft model's cache on the accepted path; what it already ran isn't run
        again."""
        accepted = len(round.accepted) - 1
        if round.tree is not None and self._sequence.pending:
            keep = min(accepted, self._sequence.pending)
            self.model.commit(self._sequence, range(keep))
        self._ids.extend(round.emitted)

    def end(self) -> None:
        """Close the sequence."""
        if self._sequence is not None:
            self.model.close(self._sequence)
            self._sequence = None

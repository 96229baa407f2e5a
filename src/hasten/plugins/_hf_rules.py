"""What `generate` prepared, for one row of a batch: logits processors and stopping criteria.

Both see what they see in plain `generate`: ids with the row's padding, on the device of the ids.
Whatever may tell rows apart is asked with as many rows as the batch has, of which one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from transformers.generation import logits_process, stopping_criteria

from hasten.errors import OptionError
from hasten.stopping import Cut, Stopper
from hasten.types import FinishReason, SamplingParams

_BY_ROW = (
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
)
"""transformers' own processors that hold something for each row."""

_ROWLESS_CRITERIA = (
    stopping_criteria.MaxTimeCriteria,
    stopping_criteria.StopStringCriteria,
)


class Row:
    """A row's place in its batch.

    index    of `rows`
    returns  answers to each prompt (``num_return_sequences``)
    padded   its ids as `generate` has them, ``(length,)`` int64, of which the first `pads` are
             padding
    """

    def __init__(
        self, index: int, rows: int, returns: int, padded: torch.Tensor, pads: int
    ) -> None:
        self.index, self.rows, self.returns = index, rows, returns
        self.padded, self.pads = padded, pads
        self.prompt: list[int] = padded[pads:].tolist()


class RowScores:
    """A row's logits processors as one function ``(ids (1, n), scores (1, vocab)) -> scores``.

    `ids` are without padding. After one of `final` ids in the answer the scores are given back as
    they are: plain `generate` never asks about what would follow, and the answer is cut there.
    """

    def __init__(self, row: Row, processors: Iterable[Any], final: Iterable[int]) -> None:
        self._row = row
        self._device = row.padded.device
        self._padding = row.padded[None, : row.pads]
        self._steps = [(p, *_for_row(p, row)) for p in processors]
        self._final = torch.tensor(sorted(final), dtype=torch.int64, device=self._device)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The processed scores, on the device they came on."""
        home, ids = scores.device, ids.to(self._device)
        if torch.isin(ids[:, len(self._row.prompt) :], self._final).any():
            return scores
        if self._row.pads:
            ids = torch.cat([self._padding, ids], 1)
        scores = scores.to(self._device)
        for given, processor, wide in self._steps:
            scores = self._one(given, processor, wide, ids, scores)
        return scores.to(home)

    def _one(
        self, given: Any, processor: Any, wide: bool, ids: torch.Tensor, scores: torch.Tensor
    ) -> torch.Tensor:
        count = self._row.rows if wide else 1
        shape = (count, scores.shape[1])
        if count > 1:
            ids, scores = ids.expand(count, -1), scores.expand(count, -1).clone()
        out = processor(ids, scores)
        if not isinstance(out, torch.Tensor) or out.shape != shape:
            got = tuple(out.shape) if isinstance(out, torch.Tensor) else repr(out)
            raise OptionError(
                "logits_processor", f"{_name(given)} gave {got}, not scores of shape {shape}"
            )
        return out[self._row.index : self._row.index + 1] if count > 1 else out


def _for_row(processor: Any, row: Row) -> tuple[Any, bool]:
    """What to call for this row, and whether it wants all of the batch's rows."""
    kind = type(processor)
    if kind is logits_process.PrefixConstrainedLogitsProcessor:
        # The user's function is told which prompt it is, and must not hear of others.
        allowed = partial(_allowed, processor._prefix_allowed_tokens_fn, row.index // row.returns)
        return kind(allowed, 1), False
    own = kind.__module__ == logits_process.__name__
    return processor, row.rows > 1 and not (own and kind not in _BY_ROW)


def _allowed(function: Callable[..., Any], prompt: int, _row: int, sentence: Any) -> Any:
    return function(prompt, sentence)


Scores = Callable[[], Sequence[torch.Tensor]]
"""Gives the processed scores of the row's tokens so far, each ``(vocab,)``."""


class RowStopper(Stopper):
    """Ends a row where plain `generate` would: after each token every criterion is asked once.

    remaining  most tokens that may come
    final      end-of-sequence ids
    criteria   the others; they are asked in the order and with the ids of plain `generate`
    """

    def __init__(
        self,
        row: Row,
        remaining: int,
        final: frozenset[int],
        criteria: Sequence[Any],
        scores: Scores | None,
    ) -> None:
        params = SamplingParams(max_new_tokens=remaining, ignore_eos=True)
        super().__init__(params, frozenset(), 0, remaining, None)
        self._row, self._stops, self._criteria, self._scores = row, final, criteria, scores
        length = row.padded.shape[0]
        room = row.padded.new_zeros(1, length + remaining if criteria else 0)
        room[0, :length] = row.padded[: room.shape[1]]
        self._ids, self._start, self._length = room, length, length

    def _by_id(self, tokens: Sequence[int]) -> Cut:
        """The cut by ids, criteria and length."""
        for index, token in enumerate(tokens[: self.remaining]):
            reason: int | str | None = token if token in self._stops else None
            if self._criteria:
                stopped = self._ask(token)
                reason = stopped if reason is None else reason
            if reason is not None:
                return Cut(index + 1, FinishReason.STOP, reason)
        if len(tokens) >= self.remaining:
            return Cut(self.remaining, FinishReason.LENGTH)
        return Cut(len(tokens))

    def _ask(self, token: int) -> str | None:
        """Ask every criterion after `token`; the name of the first that stops."""
        self._ids[0, self._length] = token
        self._length += 1
        ids = self._ids[:, : self._length]
        answers = [self._answer(criterion, ids) for criterion in self._criteria]
        stopped = (c for c, yes in zip(self._criteria, answers, strict=True) if yes)
        return next(map(_name, stopped), None)

    def _answer(self, criterion: Any, ids: torch.Tensor) -> bool:
        rows = 1 if type(criterion) in _ROWLESS_CRITERIA else self._row.rows
        scores = None
        if self._scores is not None:
            emitted = self._length - self._start
            scores = tuple(s.expand(rows, -1) for s in self._scores()[:emitted])
        answer = torch.as_tensor(criterion(ids.expand(rows, -1), scores))
        if rows == 1:
            return bool(answer.any())
        if answer.shape != (rows,):
            raise OptionError(
                "stopping_criteria",
                f"{_name(criterion)} answers for a batch as a whole, and rows run one by one",
                "Let it give a bool for each row, or give the prompts one at a time",
            )
        return bool(answer[self._row.index])


def _name(thing: Any) -> str:
    return getattr(thing, "__name__", type(thing).__name__)

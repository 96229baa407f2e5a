"""Decoding many prompts at once, for making training text: throughput, not latency.

A wave of prompts starts together and goes on in step (`hasten.targets.fused_batch`); prompts of
like length make the best waves. In 16 bits a near tie may fall otherwise than in plain decoding:
good for training text, and never used to answer.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from hasten.errors import ModelError, OptionError
from hasten.selection import argmax_rows
from hasten.targets.base import check_prompt
from hasten.targets.fused import FusedTarget
from hasten.targets.fused_batch import FusedBatch

_COMPACT = 0.8
"""Rows that have ended are dropped when fewer than this share are left."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
"""Options of glibc's `mallopt`, by their numbers in its ``malloc.h``."""


@dataclass(slots=True)
class Job:
    """A prompt of ids to answer; `output` is filled as tokens come.

    A temperature of 0 takes the likeliest token. `tag` is the caller's.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    tag: Any = None
    output: list[int] = field(default_factory=list)


class BatchDecoder:
    """Answers jobs in waves of up to `rows`.

    target    a fused target, on any device
    stop_ids  ids that end an answer (kept in it)
    seed      of the draws: the same jobs in the same waves get the same answers
    """

    def __init__(
        self, target: FusedTarget, *, rows: int, stop_ids: Iterable[int], seed: int = 0
    ) -> None:
        if rows < 1:
            raise OptionError("batch", f"must be at least 1, got {rows}")
        self.target, self.rows, self.stop_ids = target, rows, frozenset(stop_ids)
        self._batch = FusedBatch(target)
        self._generator = torch.Generator(device=target.info.device).manual_seed(seed)

    def run(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """Yields the jobs as their answers end, in whatever order that is.

        An answer ends at a stop id, at its length or where the context is full. Raises ContextError
        for a prompt that is empty, holds foreign ids or leaves no room, OptionError for a job that
        asks for nothing, before anything of its wave has run; ModelError where a model gives NaN.
        """
        queue = iter(jobs)
        while wave := list(islice(queue, self.rows)):
            for job in wave:
                self._check(job)
            yield from self._wave(sorted(wave, key=lambda job: -len(job.prompt)))

    def _check(self, job: Job) -> None:
        check_prompt(self.target, job.prompt)
        if job.max_new_tokens < 1:
            raise OptionError("max_new_tokens", f"must be at least 1, got {job.max_new_tokens}")
        if not 0 <= job.temperature < float("inf"):
            raise OptionError("temperature", f"must be at least 0, got {job.temperature}")

    def _wave(self, wave: list[Job]) -> Iterator[Job]:
        """All of `wave` start together; a row that has ended is dropped now and then."""
        room = max(self._limit(job) for job in wave)
        logits = self._batch.start([job.prompt for job in wave], room)
        live = list(range(len(wave)))
        while True:
            tokens = self._choose(logits, wave, live)
            for row, token in zip(live, tokens[live].tolist(), strict=True):
                wave[row].output.append(token)
            ended = [row for row in live if self._ended(wave[row])]
            live = [row for row in live if not self._ended(wave[row])]
            yield from (wave[row] for row in ended)
            if not live:
                return
            if len(live) < _COMPACT * len(wave):
                self._batch.keep(live)
                tokens = tokens[live]
                wave = [wave[row] for row in live]
                live = list(range(len(wave)))
            logits = self._batch.step(tokens)

    def _limit(self, job: Job) -> int:
        return min(job.max_new_tokens, self.target.info.context_limit - len(job.prompt))

    def _ended(self, job: Job) -> bool:
        return len(job.output) >= self._limit(job) or job.output[-1] in self.stop_ids

    def _choose(
        self, logits: torch.Tensor, jobs: Sequence[Job], live: Sequence[int]
    ) -> torch.Tensor:
        """The argmax of each row, or for a live one a draw at its job's temperature; int64."""
        ids = argmax_rows(logits)
        drawn = [row for row in live if jobs[row].temperature > 0]
        if drawn:
            heat = [jobs[row].temperature for row in drawn]
            for row, token in zip(drawn, self._draw(logits, drawn, heat), strict=True):
                ids[row] = token
        broken = sum(ids[row] < 0 for row in live)
        if broken:
            raise ModelError(
                f"the logits of {broken} of {len(live)} answers hold NaN or infinity: the model is "
                "broken in this precision; try dtype='float32'"
            )
        return torch.tensor(ids, dtype=torch.int64, device=logits.device).clamp_(min=0)

    def _draw(self, logits: torch.Tensor, rows: Sequence[int], heat: Sequence[float]) -> list[int]:
        """A token of each of these rows at its temperature; -1 where there is no distribution."""
        with torch.inference_mode():
            scores = logits[list(rows)].float()
            scores.sub_(scores.amax(-1, keepdim=True))
            scores.div_(torch.tensor(heat, device=logits.device).unsqueeze(1)).exp_()
            total = scores.cumsum_(-1)
            noise = torch.rand(len(rows), 1, generator=self._generator, device=logits.device)
            found = torch.searchsorted(total, noise * total[:, -1:], right=True)
            found.clamp_(max=logits.shape[1] - 1)
            drawn: list[int] = found.masked_fill_(total[:, -1:].isnan(), -1).squeeze(1).tolist()
            return drawn


def keep_freed_memory() -> bool:
    """Let this process keep memory that it frees, for its next need; whether that was possible.

    With glibc's malloc as it is, large tensors go back to the system when freed, and getting them
    again costs half of the time of a wave. For commands: it changes the whole process for good, and
    does nothing under another allocator.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # a C library of another kind
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    options = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 1 << 28))
    taken = [mallopt(option, value) == 1 for option, value in options]
    return all(taken)

"""What the parts of bench_smc.py share: the model, runs of SMC, tables, standard errors."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

import hasten
from hasten import methods
from hasten.metrics import Summary
from hasten.smc.info import SMCInfo
from hasten.smc.options import MakeProposal, SMCOptions, prepare
from hasten.smc.run import SMCRun
from hasten.types import Pass, SamplingParams

CHUNK = 64
T = TypeVar("T")


@dataclass(slots=True)
class Bench:
    """The model, what drafts for it, the prompts, and the command line.

    options  those of ``--method``; parts change particles and length
    """

    llm: hasten.LLM
    options: SMCOptions
    make: MakeProposal
    prompts: list[list[int]]
    args: argparse.Namespace
    _held: dict[tuple[int, ...], tuple[Any, Pass]] = field(default_factory=dict)

    def prefilled(self, prompt: Sequence[int]) -> tuple[Any, Pass]:
        """The prompt's sequence and pass, which many answers share."""
        key = tuple(prompt)
        if key not in self._held:
            sequence = self.llm.target.open()
            passed = self.llm.target.prefill(sequence, prompt, taps=self.make().taps)
            self._held[key] = sequence, passed
        return self._held[key]

    def forget(self) -> None:
        """Close what `prefilled` holds."""
        for sequence, _ in self._held.values():
            self.llm.target.close(sequence)
        self._held.clear()

    def start(
        self,
        prompt: Sequence[int],
        seed: int,
        tokens: int,
        *,
        ignore_eos: bool = True,
        **changes: Any,
    ) -> SMCRun:
        """A run on its way, its prompt run already; `changes` are options."""
        params = SamplingParams(
            max_new_tokens=tokens, temperature=self.args.temperature, ignore_eos=ignore_eos
        )
        options = replace(self.options, **changes)
        run = SMCRun(self.llm.target, prompt, params, options, proposal=self.make(), seed=seed)
        run.lend(*self.prefilled(prompt))
        return run

    def answer(
        self, prompt: Sequence[int], seed: int, tokens: int, **changes: Any
    ) -> tuple[SMCInfo, Summary]:
        """A run to its end."""
        run = self.start(prompt, seed, tokens, **changes)
        summary = Summary.of(run.rounds())
        assert run.info is not None
        return run.info, summary

    def picked(self, prompt: Sequence[int], seed: int, tokens: int, **changes: Any) -> list[int]:
        """The ids of an answer."""
        info, _ = self.answer(prompt, seed, tokens, **changes)
        return list(info.answers[info.picked].tokens)


def load(args: argparse.Namespace) -> tuple[hasten.LLM, SMCOptions, MakeProposal]:
    """The model, and ``--method`` with what drafts for it."""
    llm = hasten.load(args.model, method="ar", dtype=args.dtype)
    spec = methods.parse(args.method)
    options = SMCOptions(**dict(spec.options))
    context = methods.MethodContext(llm.target, llm.tokenizer, llm._load_other)
    return llm, options, prepare(options, context)


def table(*heads: object) -> None:
    """Print a table's head."""
    print("\n| " + " | ".join(map(str, heads)) + " |\n|" + "---|" * len(heads), flush=True)


def line(*cells: object) -> None:
    """Print a row."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def announced(units: Iterable[T], count: int, what: str) -> Iterator[T]:
    """The same; after the first of `count`, standard error hears how long all will take."""
    started = time.monotonic()
    for at, unit in enumerate(units):
        yield unit
        if at == 0 and count > 1:
            minutes = (time.monotonic() - started) * (count - 1) / 60
            print(f"{what}: about {minutes:.1f} minutes more", file=sys.stderr, flush=True)


def with_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error, which a single value doesn't have (NaN)."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def by_prompt(values: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Mean and standard error of ``(prompt, value)``: answers to one prompt resemble each other, so
    prompts are what is counted."""
    groups: dict[int, list[float]] = {}
    for prompt, value in values:
        groups.setdefault(prompt, []).append(value)
    return with_error([statistics.fmean(group) for group in groups.values()])


def mean_logprob(
    llm: hasten.LLM, prompt: Sequence[int], answer: Sequence[int], temperature: float
) -> float:
    """Mean log-probability a token of an answer, at the temperature it was drawn with."""
    sequence = llm.target.open()
    text, total = [*prompt, *answer], 0.0
    llm.target.prefill(sequence, prompt[:-1])
    for start in range(len(prompt) - 1, len(text) - 1, CHUNK):
        some = text[start : min(start + CHUNK, len(text) - 1)]
        logits = llm.target.prefill(sequence, some, all_logits=True).logits
        assert logits is not None
        law = torch.log_softmax(logits.float() / temperature, 1)
        following = torch.tensor(text[start + 1 : start + 1 + len(some)])
        total += float(law.gather(1, following.to(law.device).unsqueeze(1)).sum())
    llm.target.close(sequence)
    return total / len(answer)

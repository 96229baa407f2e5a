"""The loop from Python, with a rule for each request and every decision recorded.

For training and evaluation. Requests of one call share passes, and where prompts are equal the run
of the prompt too, so answering a problem under many rules, or many times, belongs in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hasten import methods
from hasten.api import LLM, Prompt
from hasten.arbitration import features
from hasten.arbitration.mismatch import Mismatch
from hasten.arbitration.rules import Choice, Rule, Scripted
from hasten.errors import OptionError
from hasten.types import Result, SamplingParams

METHOD = "cospec:target"


@dataclass(frozen=True, slots=True)
class MismatchRecord:
    """A decision. `place` is j, the drafted token's place in its block, from 1; `number` counts the
    request's mismatches from 0; `position` is an index into the answer; `kept` is the choice (True:
    the draft's token), `logp` its log-probability, `forced` says that a script made it.

    scalars float32 ``(18,)`` and hidden float16 ``(size,)`` are `hasten.arbitration.features`, None
    where they weren't asked for.
    """

    problem: str
    position: int
    place: int
    number: int
    drafted: int
    target: int
    scalars: npt.NDArray[np.float32] | None
    hidden: npt.NDArray[np.float16] | None
    kept: bool
    logp: float
    forced: bool


@dataclass(frozen=True, slots=True)
class Rollout:
    """An answer, and the decisions in it that a rule was asked for (the gate's own aren't there).

    target_passes  passes of the target after the prompt's; drafted: tokens drafted
    correct, reward  for whoever grades it
    """

    problem: str
    tokens: tuple[int, ...]
    text: str
    records: tuple[MismatchRecord, ...]
    target_passes: int
    drafted: int
    seed: int
    result: Result
    correct: bool | None = None
    reward: float | None = None


class Recorder(Rule):
    """Another rule, whose choices are noted. One request's own."""

    def __init__(
        self, rule: Rule, problem: str = "", *, scalars: bool = True, hidden: bool = False
    ) -> None:
        self._rule, self._problem = rule, problem
        self._scalars, self._hidden = scalars, hidden
        self.needs_hidden, self.emits = rule.needs_hidden or hidden, rule.emits
        self.records: list[MismatchRecord] = []

    def keep(self, m: Mismatch) -> bool:
        """The other rule's word."""
        return self.choose(m).kept

    def law(self, m: Mismatch) -> torch.Tensor:
        """The other rule's."""
        return self._rule.law(m)

    def choose(self, m: Mismatch) -> Choice:
        """The other rule's word, noted."""
        choice = self._rule.choose(m)
        made = MismatchRecord(
            problem=self._problem,
            position=m.position,
            place=m.place,
            number=m.number,
            drafted=m.drafted,
            target=m.target,
            scalars=features.scalars(m) if self._scalars else None,
            hidden=features.hidden(m) if self._hidden else None,
            kept=choice.kept,
            logp=choice.logp,
            forced=choice.forced,
        )
        self.records.append(made)
        return choice


def draft_mark(llm: LLM, method: str | methods.MethodSpec = METHOD) -> str:
    """What identifies the draft of a ``cospec`` method on this model: `Arbiter.meta`'s draft."""
    maker = llm._prepared[llm.prepare(method)]
    if not isinstance(maker, methods.ArbitratedMaker):
        raise OptionError("method", f"{method} doesn't arbitrate", "Give a cospec method")
    return maker.draft


def rollouts(
    llm: LLM,
    prompts: Sequence[Prompt],
    rules: Sequence[Rule],
    *,
    method: str | methods.MethodSpec = METHOD,
    problems: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    scalars: bool = True,
    hidden: bool = False,
    template: bool = True,
    system: str | None = None,
    **params: Any,
) -> list[Rollout]:
    """Answer each prompt under its rule; one rollout each, in order.

    method    gives the draft, its length, bonus, gate and consecutive; its own rule isn't asked
    problems  names for the records, seeds: for what is drawn; default: the index, and 0
    scalars, hidden  what is kept of each mismatch
    params    fields of `SamplingParams`: ``max_new_tokens``, ``stop``, ``temperature``, ...
    """
    count = len(prompts)
    names = [str(i) for i in range(count)] if problems is None else list(problems)
    chosen = [0] * count if seeds is None else list(seeds)
    for name, given in (("rules", rules), ("problems", names), ("seeds", chosen)):
        if len(given) != count:
            raise OptionError(name, f"{len(given)} given for {count} prompts", "Give one for each")
    spec = llm.prepare(method)
    recorders = [
        Recorder(rule, name, scalars=scalars, hidden=hidden)
        for rule, name in zip(rules, names, strict=True)
    ]
    requests = [
        llm._request(
            prompt,
            method=spec,
            params=SamplingParams(**{**params, "seed": seed}),
            template=template,
            system=system,
            rule=recorder,
        )
        for prompt, seed, recorder in zip(prompts, chosen, recorders, strict=True)
    ]
    llm._answer(requests)
    return [
        _rollout(name, request.result(), recorder.records)
        for name, request, recorder in zip(names, requests, recorders, strict=True)
    ]


def _rollout(name: str, result: Result, records: Sequence[MismatchRecord]) -> Rollout:
    """What was decided past the end of the answer, in the block that it ended in, isn't part."""
    metrics = result.metrics
    return Rollout(
        problem=name,
        tokens=result.tokens,
        text=result.text,
        records=tuple(r for r in records if r.position < len(result.tokens)),
        target_passes=metrics.target_passes,
        drafted=metrics.drafted,
        seed=result.seed,
        result=result,
    )


# -- the oracle: evaluation only -------------------------------------------------------------------

Decisions = tuple[bool, ...]
MOST = 4


@dataclass(frozen=True, slots=True)
class Oracle:
    """What a problem's first mismatches could have become.

    leaves  its answers under every combination of decisions; the first one is the target's own
    solved  one of them is correct
    """

    leaves: tuple[Rollout, ...]
    solved: bool

    @property
    def tried(self) -> int:
        """Answers looked at: each is another chance to be right by luck."""
        return len(self.leaves)


def oracle(
    llm: LLM,
    prompts: Sequence[Prompt],
    correct: Callable[[int, str], bool],
    *,
    most: int = MOST,
    **options: Any,
) -> list[Oracle]:
    """Try every combination of decisions at each prompt's first `most` mismatches; after those the
    target's token is taken. An upper bound of what arbitration can gain, lucky guesses included.

    `correct` grades the text of the prompt with this index; `options` are those of `rollouts`.
    Greedy requests only: there an answer is a function of its decisions.
    """
    found: list[list[Rollout]] = [[] for _ in prompts]
    jobs: list[tuple[int, Decisions]] = [(index, ()) for index in range(len(prompts))]
    while jobs:
        made = rollouts(
            llm,
            [prompts[index] for index, _ in jobs],
            [Scripted(_script(decided)) for _, decided in jobs],
            **{"scalars": False, **options},
        )
        after: list[tuple[int, Decisions]] = []
        for (index, decided), rollout in zip(jobs, made, strict=True):
            found[index].append(rollout)
            for place in (r.number for r in rollout.records):
                if len(decided) <= place < most:
                    after.append((index, (*decided, *[False] * (place - len(decided)), True)))
        jobs = after
    return [
        Oracle(tuple(leaves), any(correct(index, leaf.text) for leaf in leaves))
        for index, leaves in enumerate(found)
    ]


def _script(decided: Decisions) -> Mapping[int, bool]:
    return dict(enumerate(decided))

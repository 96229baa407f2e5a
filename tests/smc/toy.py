"""The small world of the statistical tests: three ids, answers of six tokens, every law known.

Laws are dense: a pure function of the whole prefix. The end-of-sequence id has little mass, so that
nearly every answer sees all rounds; with much of it some faults can't be seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from hasten.sampling import Sampler
from hasten.smc.info import SMCInfo
from hasten.smc.options import SMCOptions
from hasten.smc.proposals import ModelProposal, Proposal
from hasten.smc.run import SMCRun
from hasten.types import SamplingParams
from tests.conformance.toy_target import ToyTarget, ToyTokenizer

EOS = 2
LETTERS = "ab."
PROMPT = (0, 1)
HORIZON = 6
PARAMS = SamplingParams(max_new_tokens=HORIZON, temperature=1.0)
Law = Mapping[tuple[int, ...], float]


class Table(ToyTarget):
    """Next-token laws over a few ids, in float64; `mass` is about what the last id gets."""

    def __init__(
        self,
        seed: int,
        *,
        vocab: int = 3,
        mass: float = 0.06,
        scale: float = 1.0,
        packed: bool = True,
        base: Table | None = None,
        share: float = 0.0,
        **changes: Any,
    ) -> None:
        changes = {"layers": 2, "eos_ids": (vocab - 1,), **changes}
        super().__init__(vocab=vocab, seed=seed, scale=scale, bigram=0.3, packed=packed, **changes)
        self._base, self._share = base, share
        self._known: dict[tuple[int, int], torch.Tensor] = {}
        self._tilt = torch.zeros(vocab, dtype=torch.float64)
        if mass:
            self._tilt[vocab - 1] = math.log(mass * (vocab - 1) / (1 - mass)) - scale**2 / 2

    def _logits(self, key: int, token: int) -> torch.Tensor:
        if (key, token) not in self._known:
            own = super()._logits(key, token).double() + self._tilt
            if self._base is not None:
                own = self._share * own + (1 - self._share) * self._base._logits(key, token)
            self._known[key, token] = own
        return self._known[key, token]


class Letters(ToyTokenizer):
    """The three ids as text."""

    letters = LETTERS
    all_special_ids = (EOS,)


TARGET = Table(1)
GOOD = Table(2, base=TARGET, share=0.4)
HARD = Table(3, base=TARGET, share=0.9)
EAGER = Table(2, base=TARGET, share=0.4, mass=0.6)
"""Drafts the answer's end too often."""


def next_law(model: Table, prefix: Sequence[int]) -> torch.Tensor:
    return torch.softmax(model.logits_after(prefix), 0)


@cache
def answers(alpha: float = 1.0) -> Law:
    """Every answer and its probability to the power alpha (not normalised)."""
    return answers_under(PARAMS, alpha)


@cache
def answers_of(model: Table) -> Law:
    """The same of another model."""
    return answers_under(PARAMS, 1.0, model)


def answers_under(params: SamplingParams, alpha: float = 1.0, model: Table | None = None) -> Law:
    """The same under other options; a stop string must be two letters."""
    model = model or TARGET
    sampler = Sampler(params, 3, frozenset({EOS}), len(PROMPT), 0)
    out: dict[tuple[int, ...], float] = {}

    def walk(answer: tuple[int, ...], mass: float) -> None:
        stopped = "".join(LETTERS[token] for token in answer[-2:]) in params.stop
        if len(answer) == HORIZON or stopped or (answer and answer[-1] == EOS):
            out[answer] = mass
            return
        prefix = [*PROMPT, *answer]
        law = sampler.probs(prefix, model.logits_after(prefix))
        if sampler.prefix_free and not params.top_k and not params.logit_bias:  # in float64
            law = torch.softmax(model.logits_after(prefix) / params.temperature, 0)
        for token, p in enumerate(law.tolist()):
            if p > 0:
                walk((*answer, token), mass * p**alpha)

    walk((), 1.0)
    return out


def options(**changes: Any) -> SMCOptions:
    # First tokens of their own show more of what weights do to them.
    first = {"first_token": "per_particle"}
    return SMCOptions(**{"draft": "self", "particles": 4, "length": 2, **first, **changes})


MakeProposal = Callable[[], Proposal]


def drafted_by(model: Table) -> MakeProposal:
    return lambda: ModelProposal(model, vocab_size=TARGET.info.vocab_size)


def run(
    seed: int,
    *,
    draft: Table | MakeProposal = GOOD,
    params: SamplingParams = PARAMS,
    target: Table = TARGET,
    make: type[SMCRun] = SMCRun,
    **changes: Any,
) -> SMCInfo:
    """One answer's population."""
    proposal = drafted_by(draft)() if isinstance(draft, Table) else draft()
    made = make(
        target,
        PROMPT,
        params,
        options(**changes),
        proposal=proposal,
        seed=seed,
        tokenizer=Letters(),
    )
    for _ in made.rounds():
        pass
    assert made.info is not None
    return made.info


def runs(count: int, *, first: int = 0, **changes: Any) -> Iterator[SMCInfo]:
    return (run(seed, **changes) for seed in range(first, first + count))


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error; of values that are all alike as if one more were off by 1."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        numbers = torch.tensor(values, dtype=torch.float64)
        error = float(numbers.std()) / math.sqrt(len(values))
        return cls(float(numbers.mean()), error or 1 / len(values))

    def off(self, truth: float) -> float:
        """How many standard errors the mean lies from `truth`."""
        return abs(self.mean - truth) / self.error


TESTS: dict[str, Callable[[tuple[int, ...]], float]] = {
    "first is 0": lambda a: float(a[0] == 0),
    "second is 0": lambda a: float(len(a) > 1 and a[1] == 0),
    "fourth is 0": lambda a: float(len(a) > 3 and a[3] == 0),
    "last pair equal": lambda a: float(len(a) == HORIZON and a[-1] == a[-2]),
    "length": lambda a: float(len(a)),
    "zeros": lambda a: float(sum(t == 0 for t in a)),
    "likelihood": lambda a: math.log(answers().get(a, 1e-9)),
    "ratio": lambda a: math.log(answers().get(a, 1.0) / answers_of(HARD).get(a, 1.0)),
    "changes": lambda a: float(sum(x != y for x, y in itertools.pairwise(a))),
}
"""Functions of an answer whose means tell laws apart."""


def worst(infos: Sequence[SMCInfo], exact: Law | None = None) -> tuple[float, str]:
    """The largest distance, in standard errors, of what is unbiased for any N from its truth: the
    evidence; evidence times a test function, of the weighted population and of the pick.

    `exact` is the law, normalised or not; default: the target's.
    """
    exact = answers() if exact is None else exact
    evidence = [math.exp(info.log_evidence) for info in infos]
    found = [(Estimate.of(evidence).off(sum(exact.values())), "evidence")]
    for name, test in TESTS.items():
        truth = sum(mass * test(answer) for answer, mass in exact.items())
        weighted, picked = [], []
        for z, info in zip(evidence, infos, strict=True):
            weighted.append(z * sum(a.weight * test(a.tokens) for a in info.answers if a.weight))
            picked.append(z * test(info.answers[info.picked].tokens))
        found.append((Estimate.of(weighted).off(truth), f"weighted {name}"))
        found.append((Estimate.of(picked).off(truth), f"picked {name}"))
    return max(found)


def law_of(infos: Sequence[SMCInfo], length: int) -> dict[tuple[int, ...], float]:
    """The mean weighted law of the first `length` tokens."""
    out: dict[tuple[int, ...], float] = {}
    for info in infos:
        for answer in info.answers:  # those without weight may be cut off
            head = answer.tokens[:length]
            out[head] = out.get(head, 0.0) + answer.weight / len(infos)
    return out


def marginal(length: int, exact: Law) -> dict[tuple[int, ...], float]:
    """The exact law of the first `length` tokens."""
    total = sum(exact.values())
    out: dict[tuple[int, ...], float] = {}
    for answer, mass in exact.items():
        out[answer[:length]] = out.get(answer[:length], 0.0) + mass / total
    return out


def distance(one: Law, other: Law) -> float:
    """Total variation."""
    return sum(abs(one.get(k, 0.0) - other.get(k, 0.0)) for k in one.keys() | other.keys()) / 2

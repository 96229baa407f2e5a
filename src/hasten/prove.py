"""The losslessness check behind ``hasten verify``: a method's answers against plain decoding's.

Two rules are checked on the same prompts: ``greedy``, and ``sampled`` (verifier ``match``, where
each token is the target's own draw keyed by seed and position). Under both a lossless method gives
plain decoding's ids, token for token. In float32 any difference is a fault. In lower precision a
pass over several rows may round otherwise than a pass over one; the first difference of an answer
is then re-scored, by a plain pass in the same precision and by float32, and is excused only

- greedy: when the two tokens' logits lie within 4 units in the last place (`hasten.divergence`);
- sampled: when a rounding error in every logit turns the draw of that position into either of the
  two tokens: at most 2 units (so 4 between any two, the greedy bound) added to the logits of the
  same precision, which differ in the order of summing only; at most 4 added to float32's, which
  differ by all the rounding of the lower precision.

Everything after an answer's first difference has another prefix, so it is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hasten import methods
from hasten.api import LLM, Prompt
from hasten.divergence import Divergence, explain_divergence, last_logits, ulp_at
from hasten.errors import ContextError
from hasten.sampling import Sampler
from hasten.targets.base import Target
from hasten.types import Result, SamplingParams

RULES = ("greedy", "sampled")

DRAW_ULPS, DRAW_ULPS_FLOAT32 = 2.0, 4.0
"""Largest error per logit that excuses a draw, in the same precision and from float32."""

_STEP = 0.25
"""Errors per logit are tried in steps of this many ulps."""

_RUNS = (1, 16, 256, 4096)
"""Sizes of the runs of ids that err together: a draw may race runs of ids before single ids."""


@dataclass(frozen=True, slots=True)
class DrawDivergence:
    """The first difference between two sampled answers to one prompt with one seed.

    position       index into the answers
    plain, other   the tokens at it; -1: that answer had ended
    probs          (p(plain), p(other)) by a plain pass of the target itself, options applied
    probs_float32  the same by the float32 reference; None without one
    shift          error in every logit, in ulps, that makes both tokens possible draws of this
                   position by the plain pass; infinite when none up to 4 does
    shift_float32  the same by the float32 reference; None without one
    ulp            one unit in the last place of the target's precision at its top logit
    """

    position: int
    plain: int
    other: int
    top_logit: float
    probs: tuple[float, float]
    probs_float32: tuple[float, float] | None
    shift: float
    shift_float32: float | None
    ulp: float

    @property
    def near_tie(self) -> bool:
        """True when rounding within the bound explains the difference by both measures."""
        return (
            self.shift <= DRAW_ULPS
            and self.shift_float32 is not None
            and self.shift_float32 <= DRAW_ULPS_FLOAT32
        )

    def describe(self) -> str:
        """One line for people."""

        def measure(where: str, probs: tuple[float, float], shift: float) -> str:
            known = math.isfinite(shift)
            needs = f"{shift:.2f} ulp" if known else f"more than {DRAW_ULPS_FLOAT32:g} ulp"
            return f"p {probs[0]:.4f} and {probs[1]:.4f}, error needed {needs} {where}"

        wide = "not re-scored in float32 (no reference)"
        if self.probs_float32 is not None and self.shift_float32 is not None:
            wide = measure("in float32", self.probs_float32, self.shift_float32)
        verdict = "rounding" if self.near_tie else "NOT rounding: a fault, please report it"
        return (
            f"token {self.position}: plain drew {self.plain}, other {self.other}; "
            f"{measure('here', self.probs, self.shift)}; {wide} "
            f"(1 ulp = {self.ulp:g} at top logit {self.top_logit:.2f}): {verdict}"
        )


@dataclass(frozen=True, slots=True)
class Check:
    """One prompt under one rule; `tokens` is the length of plain decoding's answer."""

    prompt: int
    rule: str
    tokens: int
    difference: Divergence | DrawDivergence | None

    @property
    def identical(self) -> bool:
        """True when both answers are the same ids."""
        return self.difference is None


@dataclass(slots=True)
class Proof:
    """What `prove` found. `skipped` holds (prompt, why) of prompts that can't be answered."""

    method: str
    exact: bool
    """True for a float32 target: there no difference is excused."""
    checks: list[Check] = field(default_factory=list)
    skipped: list[tuple[int, str]] = field(default_factory=list)

    def count(self, rule: str) -> tuple[int, int]:
        """(identical, all) answers under a rule."""
        own = [check for check in self.checks if check.rule == rule]
        return sum(check.identical for check in own), len(own)

    @property
    def faults(self) -> list[Check]:
        """Checks whose difference has no excuse."""
        return [
            c
            for c in self.checks
            if c.difference is not None and (self.exact or not c.difference.near_tie)
        ]

    @property
    def ok(self) -> bool:
        """True when something was compared and no difference is a fault."""
        return bool(self.checks) and not self.faults


def prove(
    llm: LLM,
    prompts: Iterable[Prompt],
    method: str | methods.MethodSpec | None = None,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    seed: int = 0,
    reference: Callable[[], Target] | None = None,
    on_check: Callable[[Check], None] | None = None,
) -> Proof:
    """Compare a method's answers with plain decoding's, greedy and sampled.

    llm          its target runs both; method: default the LLM's own
    temperature  of the sampled rule; prompt i draws with seed + i
    reference    gives the same model in float32 (called at most once, and only when an answer
                 differs); without it a lower-precision target's differences count as faults
    on_check     called after each prompt and rule

    Raises OptionError for bad options, and CapabilityError when the target can't carry the method.
    Prompts that are empty or leave no room in the context are skipped, and listed.
    """
    spec = llm.prepare(llm.method if method is None else method)
    explainer = Explainer(llm, reference)
    proof = Proof(str(spec), llm.target.info.dtype == torch.float32)
    for index, prompt in enumerate(prompts):
        greedy = SamplingParams(max_new_tokens=max_new_tokens)
        sampled = replace(greedy, temperature=temperature, seed=seed + index)
        for rule, params in zip(RULES, (greedy, sampled), strict=True):
            verify = "match" if rule == "sampled" else "greedy"
            try:
                plain = llm.generate(prompt, method="ar", params=params, verify=verify)
            except ContextError as error:
                proof.skipped.append((index, str(error)))
                break
            other = llm.generate(plain.prompt_tokens, method=spec, params=params, verify=verify)
            check = Check(index, rule, len(plain.tokens), explainer.explain(params, plain, other))
            proof.checks.append(check)
            if on_check is not None:
                on_check(check)
    return proof


class Explainer:
    """Explains differences; loads the float32 reference when the first one needs it."""

    def __init__(self, llm: LLM, reference: Callable[[], Target] | None) -> None:
        self.target = llm.target
        self._make = reference
        self._reference: Target | None = None
        if llm.target.info.dtype == torch.float32:
            self._reference = llm.target

    def explain(
        self, params: SamplingParams, plain: Result, other: Result
    ) -> Divergence | DrawDivergence | None:
        """The first difference, re-scored; None when there is none."""
        if plain.tokens == other.tokens:
            return None
        if self._reference is None and self._make is not None:
            self._reference = self._make()
        if params.is_greedy:
            return explain_divergence(
                self.target,
                plain.prompt_tokens,
                plain.tokens,
                other.tokens,
                reference=self._reference,
            )
        return explain_draw(
            self.target,
            plain.prompt_tokens,
            plain.tokens,
            other.tokens,
            params,
            plain.seed,
            reference=self._reference,
        )


def explain_draw(
    target: Target,
    prompt: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    params: SamplingParams,
    seed: int,
    *,
    reference: Target | None = None,
) -> DrawDivergence | None:
    """Where and why two sampled answers to `prompt` (all ids) part; None when they are identical.

    `params` and `seed` are those both were drawn with. `reference` is the same model in float32;
    without it the difference can't be excused.
    """
    length = max(len(plain), len(other))
    at = next((i for i in range(length) if _get(plain, i) != _get(other, i)), None)
    if at is None:
        return None
    pair = (_get(plain, at), _get(other, at))
    prefix = [*prompt, *plain[:at]]
    sampler = Sampler(params, target.info.vocab_size, target.info.eos_ids, len(prompt), seed)
    own = last_logits(target, prefix)
    top = float(own.max())
    ulp = ulp_at(top, target.info.dtype)
    probs, shift = _measure(sampler, prefix, own, pair, ulp)
    wide: Any = (None, None)
    if reference is not None:
        wide = _measure(sampler, prefix, last_logits(reference, prefix), pair, ulp)
    return DrawDivergence(at, *pair, top, probs, wide[0], shift, wide[1], ulp)


def _measure(
    sampler: Sampler, prefix: Sequence[int], logits: torch.Tensor, pair: tuple[int, int], ulp: float
) -> tuple[tuple[float, float], float]:
    """Both tokens' probabilities, and the shift (ulps) that makes each of them a possible draw."""
    row = sampler.probs(prefix, logits)
    probs = tuple(float(row[t]) if t >= 0 else 0.0 for t in pair)
    shift = max(_shift_to(sampler, prefix, logits, token, ulp) for token in pair)
    return (probs[0], probs[1]), shift


def _shift_to(
    sampler: Sampler, prefix: Sequence[int], logits: torch.Tensor, token: int, ulp: float
) -> float:
    """The smallest error per logit (ulps) with which the sampler draws `token`, else infinity."""
    if token < 0:
        return math.inf
    if sampler.choose(prefix, logits) == token:
        return 0.0
    for step in range(1, round(DRAW_ULPS_FLOAT32 / _STEP) + 1):
        shift = step * _STEP
        if any(sampler.choose(prefix, row) == token for row in _nudged(logits, token, shift * ulp)):
            return shift
    return math.inf


def _nudged(logits: torch.Tensor, token: int, error: float) -> Iterator[torch.Tensor]:
    """Rows `error` off `logits` everywhere, in favour of `token` and of the run of ids it is in."""
    for size in _RUNS:
        start = token - token % size
        row = logits - error
        row[start : start + size] += 2 * error
        yield row


def _get(ids: Sequence[int], index: int) -> int:
    return ids[index] if index < len(ids) else -1

"""What can be said of a method that arbitrates: its loop is lossless under the rule ``target``, and
its own rule overrode so much. Behind ``hasten verify --method cospec``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from hasten.api import LLM, Prompt
from hasten.arbitration.rules import Target
from hasten.errors import ContextError
from hasten.metrics import Summary
from hasten.prove import Check, Explainer, Proof
from hasten.targets.base import Target as Model
from hasten.types import SamplingParams


@dataclass(slots=True)
class Examination:
    """Greedy answers beside plain decoding's.

    proof    under the rule ``target``, which decides nothing for the draft
    answers  under the method's own rule; `differ` of them aren't plain decoding's
    totals   the figures of these
    """

    proof: Proof
    answers: int = 0
    differ: int = 0
    totals: Summary = field(default_factory=Summary)


def examine(
    llm: LLM,
    prompts: Iterable[Prompt],
    *,
    max_new_tokens: int = 64,
    seed: int = 0,
    reference: Callable[[], Model] | None = None,
    on_prompt: Callable[[], object] | None = None,
) -> Examination:
    """Answer each prompt three times, greedily: plainly, under the rule ``target``, and under the
    own rule of the LLM's method; prompt i with seed + i, for rules that draw. `reference`: see
    `hasten.prove.prove`. Prompts that leave no room are skipped, and listed."""
    spec = llm.prepare(llm.method)
    explainer = Explainer(llm, reference)
    found = Examination(Proof(str(spec), llm.target.info.dtype == torch.float32))
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_new_tokens=max_new_tokens, seed=seed + index)
        try:
            plain = llm.generate(prompt, method="ar", params=params)
        except ContextError as error:
            found.proof.skipped.append((index, str(error)))
            continue
        ids = plain.prompt_tokens
        same = llm.generate(ids, method=spec, params=params, rule=Target())
        difference = explainer.explain(params, plain, same)
        found.proof.checks.append(Check(index, "greedy", len(plain.tokens), difference))
        own = llm.generate(ids, method=spec, params=params)
        found.answers += 1
        found.differ += own.tokens != plain.tokens
        found.totals.merge(own.metrics)
        if on_prompt is not None:
            on_prompt()
    return found

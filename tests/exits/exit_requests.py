"""Requests drafted by early exits over the tiny target, and what every one of them is held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from hasten.decode import decode
from hasten.decoding import Decoding
from hasten.drafters.ar import Plain
from hasten.drafters.base import Drafter
from hasten.drafters.early_exit import EarlyExit
from hasten.exits.bank import ExitBank
from hasten.policies import exit_adaptive, exit_rules
from hasten.policies.base import FixedPolicy
from hasten.policies.exit_calibration import Calibration
from hasten.policies.exits import ExitPolicy
from hasten.targets.fused import FusedTarget
from hasten.types import Round, SamplingParams
from hasten.verify import VERIFIERS
from tests.exits import exit_models as tiny
from tests.exits.exit_models import LAYERS, VOCAB
from tests.policies.exit_cases import costs

GREEDY = SamplingParams(max_new_tokens=16)
SAMPLED = SamplingParams(max_new_tokens=16, temperature=0.7, top_p=0.95)
EVEN = range(0, VOCAB, 2)
CANDIDATES = (("deep", 0), ("adapter", 2), ("lens", 4))
AT = (0, 2, 4)
CHANCES = Calibration.constant([0.5, 0.6, 0.7])

POLICIES: dict[str, Callable[[], ExitPolicy]] = {
    "static": lambda: exit_rules.Static(1, 3),
    "an exit that isn't there": lambda: exit_rules.Static(3, 3),
    "thresholds": lambda: exit_rules.Thresholds([0.5, 0.2, 0.1], stop=0.2),
    "kangaroo": lambda: exit_rules.Kangaroo(1, 0.3, keep=True),
    "adaedl": lambda: exit_rules.AdaEDL(2, 0.1),
    "svip": lambda: exit_rules.SVIP(2, 0.6),
    "draft-verify": lambda: exit_rules.DraftVerify(2, 0.2),
    "del by confidence": lambda: exit_adaptive.DEL(costs(AT, LAYERS), AT, steps=4),
    "del by length": lambda: exit_adaptive.DEL(costs(AT, LAYERS), AT, steps=4, ending="length"),
    "myopic": lambda: exit_adaptive.Myopic(costs(AT, LAYERS), AT, CHANCES, steps=6),
    "random": lambda: exit_rules.Random(3, 0.6),
    "adversarial": lambda: exit_rules.Adversarial(2.0),
    "eager": lambda: exit_rules.Random(3, 1.0),
    "reluctant": lambda: exit_rules.Random(3, 0.0),
}


def prompt_of(seed: int, length: int = 9) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (length,), generator=generator).tolist()


def rounds_of(
    over: FusedTarget,
    prompt: Sequence[int],
    params: SamplingParams,
    drafter: Drafter,
    *,
    nodes: int = 13,
    verifier: str | None = None,
    seed: int = 0,
    sequence: Any = None,
) -> list[Round]:
    """A request's rounds; the target's books are checked, and no row has run a layer twice."""
    name = verifier or ("greedy" if params.is_greedy else "match")
    asked = Decoding(
        over,
        prompt,
        params,
        drafter=drafter,
        policy=FixedPolicy(nodes),
        verifier=VERIFIERS[name],
        seed=seed,
    )
    if sequence is not None:
        asked.lend(sequence)
    rounds: list[Round] = []
    loop = decode([asked])
    before = over.layer_rows
    for _, made in loop:
        ran, before = over.layer_rows - before, over.layer_rows
        if made.tree is not None:
            assert made.layer_rows == ran == len(made.tree) * over.info.num_layers
        rounds.append(made)
    over.check()
    return rounds


def tokens_of(rounds: Sequence[Round]) -> list[int]:
    return [token for made in rounds for token in made.emitted]


def kept(rounds: Sequence[Round]) -> int:
    """Drafted tokens that were kept."""
    return sum(max(len(made.accepted) - 1, 0) for made in rounds)


def plain(
    over: FusedTarget, prompt: Sequence[int], params: SamplingParams, seed: int = 0
) -> list[Round]:
    """Plain decoding's rounds."""
    return rounds_of(over, prompt, params, Plain(), nodes=1, seed=seed)


@cache
def bank(kinds: tiny.Kinds = CANDIDATES, ids: Sequence[int] | None = EVEN) -> ExitBank:
    return tiny.bank(kinds, ids)


@cache
def answer(case: int, greedy: bool = True) -> list[int]:
    params = GREEDY if greedy else SAMPLED
    return tokens_of(plain(tiny.target(), prompt_of(case), params, seed=case))


def drafter(policy: ExitPolicy, kinds: tiny.Kinds = CANDIDATES, **options: Any) -> EarlyExit:
    return EarlyExit(bank(kinds), policy, **options)


def run(made: EarlyExit, case: int = 0, params: SamplingParams = GREEDY, **how: Any) -> list[Round]:
    """The rounds; the answer is plain decoding's."""
    rounds = rounds_of(tiny.target(), prompt_of(case), params, made, seed=case, **how)
    assert tokens_of(rounds) == (answer(case) if params.is_greedy else answer(case, False))
    return rounds

"""Sampled answers of early exits have the target's distribution, whatever decides where to exit.

Measured as in tests/conformance/test_distribution.py: chi-square over the next three tokens of a
tiny vocabulary, against the exact joint distribution. A drafter that looks at what it has drawn
must fail the same test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.conformance.harness import request
from tests.conformance.test_distribution import BIASED, CUT, FAIR, FLAT, IDS, VOCAB, exact
from tests.conformance.test_distribution import p_value as chance_of
from tests.conformance.toy_target import ToyTarget

from hasten.decode import decode
from hasten.drafters.base import DraftContext
from hasten.drafters.early_exit import EarlyExit
from hasten.exits.bank import own_head_bank
from hasten.policies import exit_rules
from hasten.policies.exits import ExitPolicy
from hasten.targets.fused_weights import make_linear
from hasten.types import Budget, Draft, DraftTree, SamplingParams

RUNS = 400
TARGET = ToyTarget(vocab=VOCAB, scale=1.0, seed=5, eos_ids=())
ALL = own_head_bank(TARGET, (1, 3), None, make_linear)
SOME = own_head_bank(TARGET, (1, 3), (0, 2, 5), make_linear)
"""Knows half of the ids, and those of the prompt."""

POLICIES: dict[str, Callable[[int], ExitPolicy]] = {
    "random": lambda seed: exit_rules.Random(seed, 0.7),
    "adversarial": lambda seed: exit_rules.Adversarial(1.2),
    "threshold": lambda seed: exit_rules.Thresholds([0.4, 0.3], stop=0.35),
    "threshold that follows acceptance": lambda seed: exit_rules.DraftVerify(
        1, 0.4, step=1.0, keep=True
    ),
}

Make = Callable[[int], EarlyExit]


def joint(
    make: Make, params: SamplingParams, verifier: str = "rejection", runs: int = RUNS
) -> tuple[Counter[tuple[int, ...]], int]:
    """The first three tokens of `runs` answers, and how many drafted tokens were kept in them.

    A fourth token is asked for, so that after the first one a draft may have two.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    kept = 0
    params = replace(params, max_new_tokens=4)
    for seed in range(runs):
        asked = request(TARGET, IDS, params, make(seed), nodes=4, verifier=verifier, seed=seed)
        tokens: list[int] = []
        for _, made in decode([asked]):
            tokens.extend(made.emitted)
            kept += max(len(made.accepted) - 1, 0)
            if len(tokens) >= 3:
                break
        counts[tuple(tokens[:3])] += 1
    return counts, kept


@pytest.mark.parametrize("policy", POLICIES)
def test_rejection_keeps_the_targets_distribution(policy: str) -> None:
    counts, kept = joint(lambda seed: EarlyExit(ALL, POLICIES[policy](seed)), CUT)
    assert chance_of(counts, exact(CUT, IDS, 3)) > FAIR
    assert kept > RUNS / 10, "nearly nothing is drafted and kept: this shows little"


def test_a_head_that_knows_few_ids_keeps_it_too() -> None:
    counts, _ = joint(lambda seed: EarlyExit(SOME, POLICIES["adversarial"](seed)), FLAT)
    assert chance_of(counts, exact(FLAT, IDS, 3)) > FAIR


def test_match_keeps_the_targets_distribution() -> None:
    counts, _ = joint(lambda seed: EarlyExit(ALL, POLICIES["adversarial"](seed)), FLAT, "match")
    assert chance_of(counts, exact(FLAT, IDS, 3)) > FAIR


class Looking(EarlyExit):
    """Draws a token, looks how likely it was, and takes an unlikely one back."""

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        draft = super().propose(ctx, budget)
        if len(draft.tree) == 2 and draft.q[0][draft.tree.tokens[1]] < 0.3:
            return Draft(DraftTree.chain(ctx.ids[-1]), frontiers=draft.frontiers)
        return draft


def test_taking_back_a_token_after_a_look_at_it_fails_the_same_test() -> None:
    def looking(seed: int) -> EarlyExit:
        return Looking(ALL, exit_rules.Static(0, 1), length=1)

    def honest(seed: int) -> EarlyExit:
        return EarlyExit(ALL, exit_rules.Static(0, 1), length=1)

    mass = exact(FLAT, IDS, 3)
    assert chance_of(joint(looking, FLAT, runs=700)[0], mass) < BIASED
    assert chance_of(joint(honest, FLAT)[0], mass) > FAIR

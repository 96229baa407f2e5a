"""How likely each exit's tokens are kept: rounds of random decisions on training prompts, counted.

Decisions by a coin (leave or go on) cover all exits and lengths alike; the answers are the target's
own whatever the coin says. What comes out is the calibration of the myopic rule
(`hasten.policies.exit_calibration`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hasten.decode import decode
from hasten.decoding import Decoding
from hasten.drafters.early_exit import EarlyExit
from hasten.exits.bank import ExitBank
from hasten.policies.base import FixedPolicy
from hasten.policies.exit_calibration import Calibration, labelled
from hasten.policies.exit_rules import Random
from hasten.policies.exits import Outcome
from hasten.stopping import Stopper
from hasten.targets.base import Target
from hasten.types import SamplingParams
from hasten.verify import walk

Sample = tuple[int, tuple[float, ...], bool]
"""Exit, features, whether the token was kept."""


class Recorder(Random):
    """A coin that keeps the samples of every round."""

    __slots__ = ("samples",)

    def __init__(self, seed: int, chance: float, samples: list[Sample]) -> None:
        super().__init__(seed, chance)
        self.samples = samples

    def learn(self, outcome: Outcome) -> None:
        """Note what was kept."""
        self.samples += labelled(outcome)


def collect(
    target: Target,
    bank: ExitBank,
    prompts: Sequence[Sequence[int]],
    *,
    length: int = 4,
    max_new_tokens: int = 64,
    chance: float = 0.5,
    seed: int = 0,
) -> list[Sample]:
    """Samples of greedy answers to `prompts` (ids) with random exits and lengths up to `length`."""
    samples: list[Sample] = []
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
    info = target.info
    for number, prompt in enumerate(prompts):
        policy = Recorder(seed + number, chance, samples)
        request = Decoding(
            target,
            prompt,
            params,
            drafter=EarlyExit(bank, policy, length=length, eos_ids=info.eos_ids),
            policy=FixedPolicy(nodes=length + 1),
            verifier=walk,
            seed=0,
            stopper=Stopper(params, info.eos_ids, len(prompt), info.context_limit, None),
        )
        for _ in decode([request]):
            pass
    return samples


def fit(samples: Sequence[Sample], exits: int) -> Calibration:
    """The calibration of `exits` candidates. Raises OptionError where one has no samples."""
    parts = []
    for number in range(exits):
        own = [(x, kept) for exit, x, kept in samples if exit == number]
        features = np.array([x for x, _ in own], dtype=np.float64).reshape(len(own), -1)
        parts.append((features, np.array([kept for _, kept in own], dtype=np.float64)))
    return Calibration.fit(parts)

"""Agents and files of arms made by hand, for the tests of LEDE's live side."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.policies.exit_cases import costs

from hasten.exits import store
from hasten.policies import lede_arms
from hasten.policies.lede_agent import AgentFacts, LedeAgent, modules_digest
from hasten.policies.lede_arms import ARMS, ArmCosts, ArmFile
from hasten.policies.lede_features import FEATURES, FeatureFacts, Floats, Prior
from hasten.targets.base import TargetInfo

STEPS = 12


def facts(at: Sequence[int] = (2, 4), layers: int = 6, prior: Prior | None = None) -> FeatureFacts:
    """Of candidates at these layers."""
    table = costs(at, layers)
    return FeatureFacts(
        tuple(at), table, (0.5,) * len(at), 1.0, prior or Prior.flat((0.5,) * len(at))
    )


class Ruled:
    """An agent that follows a rule over the features, and keeps what it saw."""

    def __init__(self, rule: Callable[[Floats], bool]) -> None:
        self.rule = rule
        self.seen: list[Floats] = []

    def q_values(self, features: Floats) -> tuple[float, float]:
        self.seen.append(features.copy())
        return (0.0, 1.0) if self.rule(features) else (1.0, 0.0)


def feature(name: str) -> int:
    return FEATURES.index(name)


def eager() -> Ruled:
    return Ruled(lambda x: True)


def reluctant() -> Ruled:
    return Ruled(lambda x: False)


def tossing(seed: int, chance: float = 0.7) -> Ruled:
    coin = random.Random(seed)
    return Ruled(lambda x: coin.random() < chance)


def adversarial(entropy: float = 0.5) -> Ruled:
    """Takes what is least likely to be kept."""
    return Ruled(lambda x: x[feature("entropy")] > entropy)


def agent_file(
    path: Path,
    info: TargetInfo,
    layers: Sequence[int],
    *,
    stored: Any = None,
    seed: int | None = None,
    steps: int = STEPS,
    **changes: Any,
) -> Path:
    """An agent that always leaves; with a `seed`, one of random weights."""
    made = AgentFacts(
        **{
            "fingerprint": info.fingerprint,
            "modules": modules_digest(stored, layers),
            "layers": tuple(layers),
            "num_layers": info.num_layers,
            "steps": steps,
            "costs": costs(layers, info.num_layers),
            **changes,
        }
    )
    weights = np.zeros((2, len(FEATURES)), np.float32)
    if seed is not None:
        weights = np.random.default_rng(seed).normal(size=weights.shape).astype(np.float32)
    means = (0.5,) * len(layers)
    bias = np.array([0.0, 0.3], np.float32)
    LedeAgent(made, (weights,), (bias,), Prior.flat(means), means, 1.0).save(path)
    return path


def arms(
    favourite: str | None = None,
    *,
    seed: int | None = None,
    names: Sequence[str] | None = None,
    rho: float = 1.2,
    **facts: Any,
) -> ArmFile:
    """What arms do by hand: the favourite keeps three tokens, all others none; with a `seed` it is
    random, and depends on the features."""
    known = tuple(names or (arm.name for arm in ARMS))
    width = len(lede_arms.FEATURES)
    weight = np.zeros((width, 3 * len(known)), np.float32)
    bias = np.zeros((len(known), 3), np.float32)
    bias[:, 1] = [name != "plain" for name in known]
    if seed is not None:
        dice = np.random.default_rng(seed)
        weight = 2 * dice.normal(size=weight.shape).astype(np.float32)
    if favourite is not None:
        bias[known.index(favourite), 0] = 3.0
    layer = (weight, bias.reshape(-1))
    zeros = np.zeros(width, np.float32)
    return ArmFile(known, zeros, zeros + 1, (layer,), rho, facts)


def save_files(folder: Path, info: TargetInfo) -> None:
    """An agent of the exits at 1 and 2 and a file of arms, both random, for modules there."""
    stored = store.read(folder)
    agent_file(folder / "lede.npz", info, (1, 2), stored=stored, seed=3)
    made = arms(seed=3, target=info.fingerprint, exits=modules_digest(stored, (0,)))
    made.save(folder / "lede_arms.npz")


CHEAP = ArmCosts((0.0, *(1.0 + 0.01 * n for n in range(64))), 0.05, 0.03)
"""Rows cost next to nothing, questions a little."""

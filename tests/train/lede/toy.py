"""A world whose best policy is known: twelve layers, rows of two kinds, chances of their own.

Rows are sure or unsure, at random and for themselves; an exit is right at a row with the chance of
its kind, and a row's p1 tells its kind. Off-prefix rows look like any others. The best policy,
which knows all that an agent can know, comes from dynamic programming over how many rows of each
kind were drafted from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from hasten.policies.exits import ExitCosts
from hasten.policies.lede_features import FeatureFacts, Prior
from hasten.train.lede.plans import dinkelbach
from hasten.train.lede.world import CHANNELS, OffPrefix, World

LAYERS, AT = 12, (2, 4)
KINDS = 2


@dataclass(frozen=True, slots=True)
class Toy:
    """chances[e][kind] that exit e is right; share: of sure rows (kind 0); shown[e][kind]: p1."""

    chances: tuple[tuple[float, float], ...] = ((0.9, 0.25), (0.97, 0.55))
    shown: tuple[tuple[float, float], ...] = ((0.85, 0.3), (0.9, 0.5))
    share: float = 0.6
    steps: int = 6
    probe: float = 0.04
    row: float = 0.03

    @property
    def costs(self) -> ExitCosts:
        """A layer of one row costs a twelfth."""
        verify = (0.0, *(1.0 + self.row * n for n in range(self.steps + 3)))
        return ExitCosts(tuple(at / LAYERS for at in AT), (self.probe,) * len(AT), verify, LAYERS)

    @property
    def facts(self) -> FeatureFacts:
        """Without priors worth mentioning."""
        half = (0.5,) * len(AT)
        return FeatureFacts(AT, self.costs, half, 2.0, Prior.flat(half), self.steps)

    def world(self, docs: int, rows: int, seed: int = 0) -> World:
        """Some documents; the first half is split ``policy``, the others ``test``."""
        rng = np.random.default_rng(seed)
        count = docs * rows
        kind = (rng.random(count) >= self.share).astype(np.int64)
        exits = len(AT)
        chance, shown = np.array(self.chances), np.array(self.shown)
        hit = rng.random((exits, self.steps, count)) < chance[:, None, kind]
        # a row's word doesn't depend on the depth it is drafted at
        hit = np.repeat(hit[:, :1], self.steps, 1)
        stack = np.repeat(_stack(shown[:, kind])[:, None], self.steps, 1)
        stray = (rng.random(4096) >= self.share).astype(np.int64)
        exit = rng.integers(0, exits, len(stray))
        off = OffPrefix.of(
            exits,
            exit,
            rng.integers(1, self.steps, len(stray)),
            rng.random(len(stray)).astype(np.float32),
            _stack(shown[exit, stray][None])[0],
            np.zeros(len(stray), dtype=np.int64),
            np.zeros(len(stray), dtype=np.bool_),
        )
        return World(
            at=AT,
            num_layers=LAYERS,
            domains=("toy",) * docs,
            splits=("policy",) * (docs // 2) + ("test",) * (docs - docs // 2),
            offsets=np.arange(0, count + 1, rows, dtype=np.int64),
            context=np.full(docs, 20, dtype=np.int64),
            open=np.ones(docs, dtype=np.bool_),
            token=np.zeros(count, dtype=np.int64),
            stack=stack,
            hit=hit,
            ends=np.zeros_like(hit),
            alpha=np.repeat(chance[:, None, kind], self.steps, 1).astype(np.float32),
            agrees=np.full((exits, count), 0.5, dtype=np.float32),
            off=off,
            known=np.full(docs, 100, dtype=np.int64),
            steps=self.steps,
        )

    def best(self) -> float:
        """Tokens per plain step's time of the best policy."""

        def solve(rho: float) -> tuple[float, float, None]:
            gain, cost = _solve(self, rho)
            return gain, cost, None

        rho, _ = dinkelbach(solve, 1.0)
        return rho


def _stack(p1: np.ndarray) -> np.ndarray:
    """Channels of rows with these p1, all else alike."""
    stack = np.zeros((*p1.shape, len(CHANNELS)), dtype=np.float32)
    stack[..., 0], stack[..., 1], stack[..., 2] = p1, 0.5 * (1.0 - p1), 1.0 - p1
    return stack


Pair = tuple[float, float]
"""Expected tokens and time."""


def _solve(toy: Toy, rho: float) -> Pair:
    """Expected tokens and time of a round under the best policy at this price."""
    costs, at = toy.costs, AT
    weight = (toy.share, 1.0 - toy.share)

    def worth(pair: Pair) -> float:
        return pair[0] - rho * pair[1]

    def mean(pairs: Sequence[Pair]) -> Pair:
        return (
            sum(w * p[0] for w, p in zip(weight, pairs, strict=True)),
            sum(w * p[1] for w, p in zip(weight, pairs, strict=True)),
        )

    @cache
    def draft(exit: int, sure: int, unsure: int, kind: int) -> Pair:
        """From a decision in the draft: so many rows drafted from, the next one of this kind."""
        drafted = sure + unsure
        stop = (0.0, costs.resume(exit, at[exit], drafted + 1))
        return max(stop, take(exit, sure, unsure, kind), key=worth)

    @cache
    def take(exit: int, sure: int, unsure: int, kind: int) -> Pair:
        """A token is taken from this row: what comes of it, the tokens before not counted."""
        c = toy.chances[exit]
        reach = c[0] ** sure * c[1] ** unsure * c[kind]
        sure, unsure = sure + (kind == 0), unsure + (kind == 1)
        cost = costs.layer[exit]
        if sure + unsure == toy.steps:
            return reach, cost + costs.resume(exit, at[exit], toy.steps + 1)
        then = mean([draft(exit, sure, unsure, k) for k in range(KINDS)])
        return reach + then[0], cost + costs.probe[exit] + then[1]

    @cache
    def walk(exit: int, kind: int) -> Pair:
        """From a decision on the walk; the row is of one kind for all exits."""
        if exit == len(at) - 1:
            on: Pair = (0.0, costs.resume(exit, at[exit], 1))
        else:
            up = costs.layer[exit + 1] - costs.layer[exit] + costs.probe[exit + 1]
            tokens, time = walk(exit + 1, kind)
            on = tokens, time + up
        return max(on, take(exit, 0, 0, kind), key=worth)

    tokens, time = mean([walk(0, k) for k in range(KINDS)])
    return 1.0 + tokens, costs.layer[0] + costs.probe[0] + time

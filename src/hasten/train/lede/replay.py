"""Scoring policies on experience: `hasten.policies.exits.ExitPolicy` objects and agents.

An `ExitPolicy` sees probes and outcomes as the engine would show them, one request at a time (the
tensors of a probe aside: it has its numbers). An agent is played in many lanes at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from hasten.policies.exits import DRAFT, SELECT, ExitPolicy, Outcome, Probe
from hasten.policies.lede_agent import LedeAgent
from hasten.policies.lede_features import Bools, FeatureFacts, Floats, Ints
from hasten.train.lede.simulate import Score, Simulator, play
from hasten.train.lede.world import P1, World


@dataclass(slots=True)
class SeenProbe:
    """A `Probe` without its tensors: `logits` has their number only."""

    phase: str
    layer: int
    exit: int
    drafted: int
    context: int
    p1: float
    p2: float
    entropy: float
    gap: float
    logits: range = field(default_factory=lambda: range(2))


def score_policy(
    world: World, docs: Ints, facts: FeatureFacts, make: Callable[[], ExitPolicy], *, seed: int = 0
) -> Score:
    """What a policy comes to, each document a request of its own."""
    score, rng = Score.empty(docs), np.random.default_rng(seed)
    for slot, doc in enumerate(docs.tolist()):
        _Request(world, int(doc), facts, make(), rng).answer(score, slot)
    return score


class _Request:
    """One document under one policy."""

    def __init__(
        self,
        world: World,
        doc: int,
        facts: FeatureFacts,
        policy: ExitPolicy,
        rng: np.random.Generator,
    ) -> None:
        self._world, self._facts, self._policy, self._rng = world, facts, policy, rng
        self._row, self._end = int(world.offsets[doc]), int(world.offsets[doc + 1])
        self._closed, self._context = bool(world.open[doc]), int(world.context[doc])
        self._ids = range(int(world.known[doc]))
        self._log_ids = float(np.log(max(len(self._ids), 2)))

    def answer(self, score: Score, slot: int) -> None:
        """Round after round."""
        while self._row < self._end:
            exit, drafted, accepted, time = self._round()
            left = self._end - self._row
            emitted = min(accepted + 1, left)
            score.tokens[slot] += emitted
            score.time[slot] += time
            score.rounds[slot] += 1
            score.drafted[slot] += drafted
            score.accepted[slot] += accepted
            score.drafts[slot] += exit >= 0
            score.layers[slot] += self._world.at[exit] if exit >= 0 else 0
            self._row += emitted
            self._context += emitted

    def _round(self) -> tuple[int, int, int, float]:
        """The exit drafted from (-1: none), tokens drafted and kept, and time."""
        left, costs = self._end - self._row, self._facts.costs
        room = min(self._facts.steps, left - 1) if self._closed else self._facts.steps
        if room < 1:
            return -1, 0, 0, costs.verify[1]
        probes: list[SeenProbe] = []
        for exit, layer in enumerate(self._world.at):
            if not self._policy.wants(SELECT, exit, 0):
                continue
            probe = self._probe(SELECT, exit, 0, self._row, None)
            probes.append(probe)
            if self._policy.leave(cast(Probe, probe)):
                drafted, accepted = self._draft(exit, room, probes)
                rows = drafted + 1
                time = rows * costs.layer[exit] + costs.resume(exit, layer, rows)
                return exit, drafted, accepted, self._learn(exit, drafted, accepted, probes) + time
        return -1, 0, 0, self._learn(-1, 0, 0, probes) + costs.verify[1]

    def _draft(self, exit: int, room: int, probes: list[SeenProbe]) -> tuple[int, int]:
        world, drafted, kept, true = self._world, 0, 0, True
        off = 0
        while True:
            depth = min(drafted, world.hit.shape[1] - 1)
            row = min(self._row + drafted, len(world.token) - 1)
            ends = world.ends[exit, depth, row] if true else world.off.ends[off]
            before, true = probes[-1].p1, bool(true and world.hit[exit, depth, row])
            drafted, kept = drafted + 1, kept + true
            if drafted >= room or ends or not self._policy.wants(DRAFT, exit, drafted):
                return drafted, kept
            if not true:
                place = np.array([exit]), np.array([drafted]), np.array([before], dtype=np.float32)
                off = int(world.off.draw(self._rng, *place)[0])
            probe = self._probe(DRAFT, exit, drafted, self._row + drafted, None if true else off)
            probes.append(probe)
            if not self._policy.leave(cast(Probe, probe)):
                return drafted, kept

    def _probe(self, phase: str, exit: int, drafted: int, row: int, off: int | None) -> SeenProbe:
        world = self._world
        depth = min(drafted, world.stack.shape[1] - 1)
        seen = world.stack[exit, depth, row] if off is None else world.off.stack[off]
        p1, p2, entropy, gap = (float(x) for x in seen[:4])
        nats = entropy * self._log_ids
        layer, ids = world.at[exit], self._ids
        return SeenProbe(phase, layer, exit, drafted, self._context, p1, p2, nats, gap, ids)

    def _learn(self, exit: int, drafted: int, accepted: int, probes: list[SeenProbe]) -> float:
        """Tell the policy; what its probes and shadows cost."""
        costs, layer = self._facts.costs, self._world.at[exit] if exit >= 0 else None
        shadows = self._shadows(accepted) if self._policy.shadow else ()
        seen = tuple(cast(Probe, probe) for probe in probes)
        self._policy.learn(Outcome(layer, drafted, accepted, seen, shadows))
        extra = sum(costs.probe) if self._policy.shadow else 0.0
        return extra + sum(costs.probe[probe.exit] for probe in probes)

    def _shadows(self, accepted: int) -> tuple[tuple[list[int], list[int], list[float]], ...]:
        """Every exit's word on the rows kept: 1 stands for the token that followed."""
        rows = slice(self._row, min(self._row + accepted + 1, self._end))
        count = rows.stop - rows.start
        return tuple(
            (
                self._world.hit[e, 0, rows].astype(int).tolist(),
                [1] * count,
                self._world.stack[e, 0, rows, P1].tolist(),
            )
            for e in range(len(self._world.at))
        )


def score_agent(
    world: World,
    docs: Ints,
    facts: FeatureFacts,
    agent: LedeAgent,
    *,
    seed: int = 0,
    fixed: int = 0,
) -> Score:
    """What an agent comes to; `fixed` as in `Simulator`."""

    def decide(simulator: Simulator, features: Floats) -> Bools:
        go_on, take = agent.q_batch(features)
        taken: Bools = np.greater(take, go_on)
        return taken

    return play(world, docs, facts, decide, seed=seed, fixed=fixed)

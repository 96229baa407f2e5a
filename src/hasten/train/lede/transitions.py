"""From decisions to what a Q-network learns from: n-step transitions, with gains and costs apart.

A return of several steps is cut before the first later step that wasn't greedy (Watkins), and never
crosses the end of a round, so no transition spans two rounds, documents or splits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hasten.policies.lede_agent import LedeAgent
from hasten.policies.lede_features import (
    FEATURES,
    Bools,
    FeatureFacts,
    Floats,
    Ints,
    Running,
    Seen,
    context_feature,
)
from hasten.train.lede.logs import LoggedRound, Rollout
from hasten.train.lede.simulate import Moved

REWARDS = ("throughput", "match", "ratio")
"""throughput  tokens less the price of their time (Dinkelbach's; the default)
match       1 for a right token, -1 for a wrong one, less the layers climbed: the usual proxy
ratio       a round's tokens over its time, at its end: the mean of ratios, not the ratio of means
"""


@dataclass(frozen=True, slots=True)
class Transitions:
    """``n`` of them: features before and after ``(n, 20)`` as they are, the action taken, tokens
    gained and time spent in between, and whether the round ended."""

    before: Floats
    action: Ints
    gain: Floats
    cost: Floats
    after: Floats
    done: Bools

    def __len__(self) -> int:
        return len(self.action)


@dataclass(slots=True)
class Trace:
    """Decisions of some lanes, step by step: ``(steps, lanes)``, features ``(steps, lanes, 20)``.

    greedy: the action was the network's own choice.
    """

    features: Floats
    action: Ints
    gain: Floats
    cost: Floats
    done: Bools
    greedy: Bools
    live: Bools

    @classmethod
    def empty(cls, steps: int, lanes: int) -> Trace:
        """To be filled."""
        size = (steps, lanes)
        return cls(
            np.zeros((*size, len(FEATURES)), dtype=np.float32),
            np.zeros(size, dtype=np.int64),
            np.zeros(size, dtype=np.float32),
            np.zeros(size, dtype=np.float32),
            np.zeros(size, dtype=np.bool_),
            np.zeros(size, dtype=np.bool_),
            np.ones(size, dtype=np.bool_),
        )


def priced(moved: Moved, reward: str) -> tuple[Floats, Floats]:
    """Gain and cost of a step under one of `REWARDS`."""
    if reward == "throughput":
        return moved.gain, moved.cost
    nothing = np.zeros_like(moved.cost)
    if reward == "ratio":
        return np.where(moved.done, moved.gain / np.maximum(moved.round_cost, 1e-6), 0.0), nothing
    hits = np.where(moved.right, np.float32(1.0), np.float32(-1.0))
    return np.where(moved.took, hits, -moved.layers), nothing


def n_step(trace: Trace, steps: int) -> Transitions:
    """The transitions of a trace. Where its end cuts a round short, the last decisions are left
    out."""
    length = len(trace.action)
    first = length - steps
    gain, cost = trace.gain.copy(), trace.cost.copy()
    going = ~trace.done
    after = np.tile(np.arange(1, length + 1)[:, None], (1, trace.action.shape[1]))
    done = trace.done.copy()
    for k in range(1, steps):
        rows = length - k
        on = going[:rows] & trace.greedy[k:]
        gain[:rows] += np.where(on, trace.gain[k:], 0.0)
        cost[:rows] += np.where(on, trace.cost[k:], 0.0)
        after[:rows] = np.where(on, np.arange(rows)[:, None] + k + 1, after[:rows])
        done[:rows] = np.where(on, trace.done[k:], done[:rows])
        going[:rows] = on & ~trace.done[k:]
        going[rows:] = False
    kept = trace.live[:first]
    step, lane = np.nonzero(kept)
    return Transitions(
        trace.features[step, lane],
        trace.action[step, lane],
        gain[step, lane],
        cost[step, lane],
        trace.features[np.minimum(after[step, lane], length - 1), lane],
        done[step, lane],
    )


def join(parts: Sequence[Transitions]) -> Transitions:
    """All of them."""
    names = Transitions.__slots__
    return Transitions(*(np.concatenate([getattr(part, n) for part in parts]) for n in names))


# -- rollouts --------------------------------------------------------------------------------------


def _at_most(made: LoggedRound, steps: int) -> LoggedRound:
    """The round, had its draft ended after so many tokens."""
    drafted, accepted = min(made.drafted, steps), min(made.accepted, steps)
    emitted = min(made.emitted, accepted + 1)
    return replace(made, drafted=drafted, accepted=accepted, emitted=emitted)


def among(rollouts: Iterable[Rollout], some: slice, steps: int) -> Iterator[Rollout]:
    """Rollouts as they would have been with some of the exits, and drafts of at most `steps`: walks
    begin at the lowest exit, rounds drafted elsewhere are left out, longer drafts end sooner."""
    for rollout in rollouts:
        rounds = []
        for made in rollout.rounds:
            last = made.steps[-1].exit if made.steps else -1
            inside = [s for s in made.steps if some.start <= s.exit < some.stop]
            if not inside or not some.start <= last < some.stop:
                continue
            if made.exit < 0 and last != some.stop - 1:
                continue
            kept = [replace(s, exit=s.exit - some.start) for s in inside if s.drafted < steps]
            if some.start:
                kept[0] = replace(kept[0], agrees=0.5, cosine=0.0, growth=0.0)
            exit = made.exit - some.start if made.exit >= 0 else -1
            rounds.append(_at_most(replace(made, exit=exit, steps=tuple(kept)), steps))
        yield replace(rollout, rounds=tuple(rounds))


def from_rollouts(
    rollouts: Iterable[Rollout], facts: FeatureFacts, agent: LedeAgent | None, steps: int
) -> Transitions | None:
    """Transitions of logged rollouts at these costs: features are computed anew, round after round,
    so that running means are those of the rounds. None without rollouts.

    agent  whose choices count as greedy; None: nothing is, and returns are of one step
    """
    parts = []
    for rollout in rollouts:
        running = Running(facts, 1)
        for made in rollout.rounds:
            if made.steps:
                parts.append(_round(made, running, facts, agent, steps))
            running.learn(made.exit, made.drafted, made.accepted)
    return join(parts) if parts else None


def _round(
    made: LoggedRound, running: Running, facts: FeatureFacts, agent: LedeAgent | None, steps: int
) -> Transitions:
    count = len(made.steps)
    trace = Trace.empty(count + steps, 1)
    running.begin()
    for at, step in enumerate(made.steps):
        seen = Seen(
            phase=float(step.phase),
            exit=step.exit,
            drafted=step.drafted,
            p1=step.p1,
            p2=step.p2,
            entropy=step.entropy,
            gap=step.gap,
            agrees=step.agrees,
            cosine=step.cosine,
            growth=step.growth,
            token=step.token,
            context=context_feature(made.context),
        )
        running.encode(trace.features[at, 0], seen)
        if step.action:
            running.took(step.p1)
        trace.action[at, 0] = step.action
        trace.cost[at, 0] = _cost(made, at, facts)
        trace.greedy[at, 0] = agent is not None and (
            agent.leaves(trace.features[at, 0]) == bool(step.action)
        )
    trace.gain[count - 1, 0], trace.done[count - 1, 0] = made.emitted, True
    trace.live[count:] = False
    return n_step(trace, steps)


def _cost(made: LoggedRound, at: int, facts: FeatureFacts) -> float:
    """Time from a round's decision to the next, or to its end."""
    step, costs = made.steps[at], facts.costs
    last = at == len(made.steps) - 1
    cost = 0.0
    if step.action:
        cost += costs.layer[step.exit]
    if not last:
        then = made.steps[at + 1].exit
        cost += costs.probe[then]
        if not step.action:
            cost += costs.layer[then] - costs.layer[step.exit]
    else:
        cost += costs.resume(step.exit, facts.at[step.exit], made.drafted + 1)
    return cost

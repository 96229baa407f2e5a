"""``hasten train lede replay``: what policies come to on documents that none of them has seen.

Whatever has something to tune (fixed settings, thresholds) is tuned on the documents that agents
learn from, by the same costs. All figures are by the cost table; the machine has the last word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hasten.policies import exit_rules
from hasten.policies.exit_adaptive import DEL, Myopic
from hasten.policies.exits import ExitCosts, ExitPolicy
from hasten.policies.lede_agent import LedeAgent
from hasten.policies.lede_features import FeatureFacts, Ints
from hasten.train.lede import plans
from hasten.train.lede.chances import calibrate, chances
from hasten.train.lede.replay import score_agent, score_policy
from hasten.train.lede.simulate import Score
from hasten.train.lede.world import World, part_of

Make = Callable[[], ExitPolicy]
HEADROOM = 0.05
"""Below it there is nothing for learning to gain."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Documents to tune on, documents to report on, and costs."""

    world: World
    train: Ints
    test: Ints
    facts: FeatureFacts

    def policy(self, make: Make) -> Score:
        """A policy on the documents reported on."""
        return score_policy(self.world, self.test, self.facts, make)

    def tuned(self, options: Iterator[tuple[str, Make]]) -> tuple[str, Score]:
        """The best of some settings on the training documents, on those reported on."""
        name, make = max(
            options, key=lambda each: score_policy(self.world, self.train, self.facts, each[1]).rho
        )
        return name, self.policy(make)


def headroom(bench: Bench) -> dict[str, Score]:
    """Fixed settings and oracles: how much there is to gain at all.

    fixed          tuned on the training documents
    fixed-oracle   tuned on the documents reported on
    foresight      knows how likely every row to come is right, by a model fitted on these documents
    clairvoyant    knows whether it is
    """
    world, costs = bench.world, bench.facts.costs
    best = plans.best_fixed(plans.grid(world, bench.train, costs))
    scores = plans.grid(world, bench.test, costs)
    likely = chances(world, bench.test, bench.test)
    e, d = best
    name = f"fixed exit {world.at[e]}, {d}" if d else "plain decoding"
    return {
        name: scores[best],
        "fixed-oracle": scores[plans.best_fixed(scores)],
        "foresight": plans.foresight(world, bench.test, costs, likely),
        "clairvoyant": plans.clairvoyant(world, bench.test, costs),
    }


def rules(bench: Bench) -> Iterator[tuple[str, Score]]:
    """Policies without an agent, tuned where they have something to tune."""
    world, facts = bench.world, bench.facts
    exits, steps = len(world.at), facts.steps
    yield bench.tuned(_thresholds(exits, steps))
    for name, kind, values in STOPPING:
        yield bench.tuned(
            (f"{name} exit {world.at[e]}, {value}", partial(kind, e, value, min(steps, MOST)))
            for e in range(exits)
            for value in values
        )
    yield "del", bench.policy(partial(DEL, facts.costs, world.at, steps=steps))
    fitted = calibrate(world, bench.train)
    yield bench.tuned(
        (
            f"myopic, ahead {ahead}",
            partial(Myopic, facts.costs, world.at, fitted, steps=steps, ahead=ahead),
        )
        for ahead in (1, 2)
    )


def _svip(exit: int, threshold: float, steps: int) -> ExitPolicy:
    return exit_rules.SVIP(exit, threshold, steps=steps)


STOPPING: tuple[tuple[str, Callable[[int, float, int], ExitPolicy], tuple[float, ...]], ...] = (
    ("kangaroo", exit_rules.Kangaroo, (0.3, 0.45, 0.6, 0.75)),
    ("svip", _svip, (0.2, 0.3, 0.45, 0.6)),
    ("adaedl", exit_rules.AdaEDL, (0.3, 0.5, 0.7)),
    ("draft-verify", exit_rules.DraftVerify, (0.4, 0.6, 0.8)),
)
"""Rules that draft from one exit, and the thresholds tried."""
MOST = 6
"""Tokens that they draft at most."""


def _thresholds(exits: int, steps: int) -> Iterator[tuple[str, Make]]:
    for first in (0.2, 0.4, 0.6, 0.8):
        for last in (0.0, 0.3, 0.6):
            for stop in (0.2, 0.4, 0.6):
                name = f"p1 {first}-{last}, stop {stop}"

                def make(a: float = first, b: float = last, s: float = stop) -> ExitPolicy:
                    return exit_rules.Thresholds.sloped(a, b, exits, s, steps)

                yield name, make


def agents(bench: Bench, named: Mapping[str, LedeAgent]) -> Iterator[tuple[str, Score]]:
    """Agents, with their own means and priors and these costs. One that learned with some of the
    exits is played with those, one of a fixed length with that. Raises OptionError for others."""
    for agent_name, agent in named.items():
        known = agent.facts
        world = replace(bench.world.among(known.layers), steps=known.steps)
        facts = agent.feature_facts(costs_among(bench.facts.costs, bench.world.at, known.layers))
        fixed = int(known.notes.get("fixed", 0))
        yield agent_name, score_agent(world, bench.test, facts, agent, fixed=fixed)


def costs_among(costs: ExitCosts, at: Sequence[int], layers: Sequence[int]) -> ExitCosts:
    """The costs of some of the candidates `at`. Raises OptionError as `part_of` does."""
    some = part_of(at, layers)
    return replace(costs, layer=costs.layer[some], probe=costs.probe[some])


def row(name: str, score: Score, world: World) -> dict[str, Any]:
    """A line of a table: tokens per plain step's time with its interval, and what was drafted."""
    low, high = score.spread()
    rounds = max(score.rounds.sum(), 1.0)
    by_domain = {
        domain: score.pick(world.docs(None, [domain])).rho
        for domain in sorted({world.domains[i] for i in score.docs.tolist()})
    }
    return {
        "policy": name,
        "rho": score.rho,
        "low": low,
        "high": high,
        "tokens_per_round": float(score.tokens.sum() / rounds),
        "drafting": float(score.drafts.sum() / rounds),
        "length": score.length,
        "exit": score.exit,
        "acceptance": score.acceptance,
        "domains": by_domain,
    }


def gap_closed(score: float, fixed: float, oracle: float) -> float:
    """The part of the way from the best fixed setting to an oracle that a policy goes."""
    return (score - fixed) / max(oracle - fixed, 1e-9)


def retention(out: float, inside: float, fixed: float) -> float:
    """What an agent that never saw a domain keeps of the gain, over the fixed setting, of one that
    did."""
    return (out - fixed) / max(inside - fixed, 1e-9)

"""Exploratory rollouts through the real engine: what exits say after a draft has gone wrong.

Behaviours, one a rollout: 40% a fixed exit and length, 30% random thresholds, 30% an agent's own
choices (a coin, as long as there is none); each decision is turned round with chance `FLIP`. The
answers are the target's whatever is drafted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hasten.decode import decode
from hasten.decoding import Decoding
from hasten.drafters.base import DraftContext
from hasten.drafters.early_exit import EarlyExit
from hasten.exits.bank import ExitBank
from hasten.policies.base import FixedPolicy
from hasten.policies.exits import SELECT, ExitCosts, Outcome, Probe
from hasten.policies.lede_agent import LedeAgent
from hasten.policies.lede_features import FeatureFacts, LiveFeatures, Prior
from hasten.stopping import Stopper
from hasten.targets.base import Target
from hasten.train.lede.logs import LoggedRound, Rollout, Step
from hasten.types import Budget, Draft, Round, SamplingParams
from hasten.verify import walk

FLIP = 0.1

Chance = Callable[[Probe], float]
"""How likely a behaviour takes a row's token."""


class Explorer:
    """An exit policy that follows a behaviour and keeps what it sees.

    Every candidate is probed on the walk, and every row that may be.
    """

    shadow = False

    def __init__(
        self, live: LiveFeatures, behaviour: Chance, steps: int, coin: random.Random
    ) -> None:
        self._live, self._behaviour, self._steps, self._coin = live, behaviour, steps, coin
        self.rounds: list[LoggedRound] = []
        self._made: list[Step] = []

    def wants(self, phase: str, exit: int, drafted: int) -> bool:
        """All of them."""
        return drafted < self._steps

    def leave(self, probe: Probe) -> bool:
        """By the behaviour, or turned round."""
        self._live.features(probe)
        chance = FLIP + (1.0 - 2.0 * FLIP) * self._behaviour(probe)
        take = self._coin.random() < chance
        seen = self._live.seen
        self._made.append(
            Step(
                phase=int(seen.phase),
                exit=probe.exit,
                drafted=probe.drafted,
                p1=probe.p1,
                p2=probe.p2,
                entropy=float(seen.entropy),
                gap=probe.gap,
                agrees=float(seen.agrees),
                cosine=float(seen.cosine),
                growth=float(seen.growth),
                token=int(seen.token),
                action=int(take),
                chance=chance if take else 1.0 - chance,
            )
        )
        if take:
            self._live.took()
        return take

    def root(self, token: int) -> None:
        """A round begins."""
        self._live.root(token)
        self._made = []

    def drew(self, token: int) -> None:
        """The token of the row decided on last."""
        self._live.drew(token)
        self._made[-1] = replace(self._made[-1], drew=token)

    def learn(self, outcome: Outcome) -> None:
        """Keep the round."""
        self._live.learn(outcome)
        probes = outcome.probes
        context = probes[0].context if probes else 0
        exit = probes[-1].exit if outcome.layer is not None else -1
        made = (context, exit, outcome.drafted, outcome.accepted, 0, tuple(self._made))
        self.rounds.append(LoggedRound(*made))


class _Told(EarlyExit):
    """Tells its policy of the tokens that rows start from."""

    policy: Explorer

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """As usual."""
        self.policy.root(ctx.ids[-1])
        return super().propose(ctx, budget)

    def _token(self, ctx: DraftContext, prefix: list[int], probe: Probe) -> Any:
        token, q = super()._token(ctx, prefix, probe)
        if token is not None:
            self.policy.drew(token)
        return token, q


def explore(
    target: Target,
    bank: ExitBank,
    doc: int,
    prompt: tuple[int, ...],
    *,
    steps: int,
    max_new_tokens: int,
    seed: int,
    agent: LedeAgent | None = None,
) -> Rollout:
    """A greedy answer to `prompt` under a behaviour drawn from `seed`."""
    rng = random.Random(seed)
    live = LiveFeatures(plain_facts(bank, target.info.num_layers, steps))
    named, chance = behaviour(rng, len(bank.layers), steps, live, agent)
    policy = Explorer(live, chance, steps, rng)
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
    info = target.info
    request = Decoding(
        target,
        prompt,
        params,
        drafter=_Told(bank, policy, length=steps, eos_ids=info.eos_ids),
        policy=FixedPolicy(nodes=steps + 1),
        verifier=walk,
        seed=0,
        stopper=Stopper(params, info.eos_ids, len(prompt), info.context_limit, None),
    )
    rounds: list[Round] = [made for _, made in decode([request])]
    return Rollout(doc, named, tuple(_emitted(policy.rounds, rounds)))


def _emitted(logged: list[LoggedRound], rounds: list[Round]) -> list[LoggedRound]:
    """The rounds that were decided on, with the tokens that each emitted; the prefill and rounds
    without room for a draft ask no policy."""
    context, by_context = 0, {}
    for made in rounds:
        by_context[context] = len(made.emitted)
        context += len(made.emitted)
    first = min((each.context for each in logged if each.steps), default=0)
    return [
        replace(each, emitted=by_context[each.context - first + 1]) for each in logged if each.steps
    ]


def plain_facts(bank: ExitBank, num_layers: int, steps: int) -> FeatureFacts:
    """For features of rollouts: what depends on costs and means is computed again when they are
    read."""
    exits = len(bank.layers)
    layer = tuple(at / num_layers for at in bank.layers)
    costs = ExitCosts(layer, (0.05,) * exits, (0.0, *(1.0,) * (steps + 2)), num_layers)
    half = (0.5,) * exits
    return FeatureFacts(bank.layers, costs, half, 1.0, Prior.flat(half), steps)


def behaviour(
    rng: random.Random, exits: int, steps: int, live: LiveFeatures, agent: LedeAgent | None
) -> tuple[Mapping[str, Any], Chance]:
    """A behaviour, named, and how likely it takes a row's token."""
    draw = rng.random()
    if draw < 0.4:
        exit, length = rng.randrange(exits), rng.randint(1, steps)

        def fixed(probe: Probe) -> float:
            return float(probe.exit == exit if probe.phase == SELECT else probe.drafted < length)

        return {"kind": "fixed", "exit": exit, "length": length}, fixed
    if draw < 0.7:
        select, stop = [rng.random() for _ in range(exits)], rng.random()

        def sure(probe: Probe) -> float:
            return float(probe.p1 >= (select[probe.exit] if probe.phase == SELECT else stop))

        return {"kind": "thresholds", "select": select, "stop": stop}, sure
    if agent is None:
        return {"kind": "coin"}, lambda probe: 0.5
    own = agent
    return {"kind": "agent"}, lambda probe: float(own.leaves(live.out))

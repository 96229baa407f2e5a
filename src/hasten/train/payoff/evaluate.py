"""What a gate is worth on text it hasn't seen: precision and recall, and rounds by replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hasten.payoff.features import features
from hasten.payoff.predictor import Predictor
from hasten.train.payoff.traces import Played, Routes, Trace, play

Mask = npt.NDArray[np.bool_]


def by_payoff(predictor: Predictor, tau: float) -> Routes:
    """The paper's rule."""

    def routes(trace: Trace, state: int, history: Sequence[float]) -> bool:
        return float(predictor.predict(features(trace.x[state], history))) >= tau

    return routes


@dataclass(frozen=True, slots=True)
class Scores:
    """How well states were told apart: those routed to the cache against those that pay, whose
    draft keeps tau tokens or more.

    states     with a draft of the cache; paying, routed: of them
    precision  share of the routed that pay; recall: share of the paying that are routed. 0 where
               there is nothing to divide by
    surplus    tokens kept beyond tau, a routed state, summed over them and divided by `states`:
               what routing gains where tau tokens are what the model arm's round is worth
    """

    states: int
    paying: int
    routed: int
    precision: float
    recall: float
    surplus: float


def scores(kept: npt.NDArray[np.number], routed: Mask, tau: float) -> Scores:
    """From the tokens kept ``(n,)`` and the choices ``(n,)``."""
    paying = kept >= tau
    both, chosen, all_paying = int((paying & routed).sum()), int(routed.sum()), int(paying.sum())
    gained = float((kept[routed] - tau).sum()) / max(len(kept), 1)
    return Scores(
        len(kept), all_paying, chosen, both / max(chosen, 1), both / max(all_paying, 1), gained
    )


@dataclass(frozen=True, slots=True)
class Replay:
    """Rounds of some texts under a rule.

    states   `scores` of the states in which a round began
    rounds, cached   in all, and of the cache
    tokens_per_round  the target's own token included
    """

    states: Scores
    rounds: int
    cached: int
    tokens_per_round: float


Model = Callable[[int], int]
"""Tokens that the model arm's draft would have kept, by place in the answer."""
Make = Callable[[Trace, Model], Routes]
"""A rule for one text."""


def same(routes: Routes) -> Make:
    """A rule that is the same for all texts."""
    return lambda trace, model: routes


def replay(traces: Sequence[Trace], make: Make, models: Sequence[Model], tau: float) -> Replay:
    """Play every text."""
    pairs = zip(traces, models, strict=True)
    return summed(traces, [play(trace, make(trace, model), model) for trace, model in pairs], tau)


def summed(traces: Sequence[Trace], played: Sequence[Played], tau: float) -> Replay:
    """Figures of rounds that were played."""
    kept = np.concatenate([t.kept[p.starts] for t, p in zip(traces, played, strict=True)])
    routed = np.concatenate([p.routed[p.starts] for p in played])
    rounds, cached = sum(p.rounds for p in played), sum(p.cached for p in played)
    tokens = sum(max(t.tokens - 1, 0) for t in traces)
    return Replay(scores(kept, routed, tau), rounds, cached, tokens / max(rounds, 1))


def best_of(trace: Trace, model: Model) -> Routes:
    """Who knows what will be kept: the cache where it keeps more than the model arm."""

    def routes(_: Trace, state: int, history: Sequence[float]) -> bool:
        return bool(trace.kept[state] > model(int(trace.at[state])))

    return routes


def by_group(
    traces: Sequence[Trace], make: Make, models: Sequence[Model], tau: float
) -> dict[str, Replay]:
    """A rule's figures by the texts' groups, and of all (``"overall"``)."""
    groups: dict[str, list[int]] = {}
    for number, trace in enumerate(traces):
        groups.setdefault(trace.group, []).append(number)
    groups = {**dict(sorted(groups.items())), "overall": list(range(len(traces)))}
    return {
        name: replay([traces[n] for n in some], make, [models[n] for n in some], tau)
        for name, some in groups.items()
    }

"""``hasten train lede fit``: an agent from experience, at a price of time that it earns itself.

The price (rho: tokens that a plain step's time is worth) starts at what the best fixed setting
earns; after each part of the training it is what the agent earns, if that is more: Dinkelbach's
method, with learning for its inner solution. Of all agents on the way the one is kept that earns
most on documents set apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hasten.errors import OptionError
from hasten.policies.exits import ExitCosts
from hasten.policies.lede_agent import AgentFacts, LedeAgent
from hasten.policies.lede_features import FeatureFacts, Ints
from hasten.train.lede import plans
from hasten.train.lede.learn import Learner, LearnOptions
from hasten.train.lede.logs import Meta, Rollout
from hasten.train.lede.replay import score_agent
from hasten.train.lede.simulate import Score
from hasten.train.lede.world import World

Log = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class Fitted:
    """An agent and how it came about: `rows` are the curve, `score` what it earned where it was
    selected, `fixed` the best fixed setting (exit, length) on what it learned from."""

    agent: LedeAgent
    score: Score
    fixed: tuple[int, int]
    rows: list[dict[str, Any]] = field(default_factory=list)


def facts_for(world: World, docs: Ints, costs: ExitCosts) -> FeatureFacts:
    """What features need, with means of `docs`: each exit's acceptance at its own best length, and
    tokens accepted at the best setting."""
    scores = plans.grid(world, docs, costs)
    best = plans.best_fixed(scores)
    rates = tuple(
        max((scores[e, d] for d in range(1, world.steps + 1)), key=lambda s: s.rho).acceptance
        for e in range(len(world.at))
    )
    length = scores[best].accepted.sum() / max(scores[best].drafts.sum(), 1.0)
    return FeatureFacts(world.at, costs, rates, float(length), world.prior(docs), world.steps)


def fit(
    world: World,
    docs: Ints,
    select: Ints,
    costs: ExitCosts,
    options: LearnOptions,
    *,
    rollouts: Sequence[Rollout] = (),
    meta: Meta | None = None,
    notes: Mapping[str, Any] | None = None,
    log: Log = lambda row: None,
) -> Fitted:
    """Learn from `docs`, select on `select`; drafts are at most ``world.steps`` long. Raises
    OptionError where either is empty."""
    for name, some in (("learn from", docs), ("select by", select)):
        if not len(some):
            raise OptionError("domains", f"leave no documents to {name}", "Collect more")
    facts = facts_for(world, docs, costs)
    scores = plans.grid(world, docs, costs)
    fixed = plans.best_fixed(scores)
    rho = scores[fixed].rho
    learner = Learner(world, docs, facts, options, list(rollouts))
    belongs = _belongs(meta, facts)
    rows: list[dict[str, Any]] = []
    best: tuple[Score, LedeAgent] | None = None
    for price in range(options.prices):
        for done in range(0, options.updates, options.check):
            loss = learner.learn(rho, min(options.check, options.updates - done))
            agent = learner.agent(replace(belongs, rho=rho))
            score = score_agent(world, select, facts, agent, fixed=options.fixed)
            if best is None or score.rho > best[0].rho:
                best = score, agent
            rows.append({"price": price, "updates": learner.updates, "rho": rho, "loss": loss,
                         **figures(score)})  # fmt: skip
            log({"stage": "fit", "total": options.prices * options.updates, **rows[-1]})
        assert best is not None
        rho = max(rho, score_agent(world, docs, facts, best[1], fixed=options.fixed).rho)
    assert best is not None
    score, agent = best
    about = {
        "learned_from": len(docs),
        "selected_rho": score.rho,
        "best_fixed": [world.at[fixed[0]], fixed[1]],
        "best_fixed_rho": scores[fixed].rho,
        "seed": options.seed,
        "reward": options.reward,
        "fixed": options.fixed,
        **(notes or {}),
    }
    agent = replace(agent, facts=replace(agent.facts, rho=rho, notes=about))
    return Fitted(agent, score, fixed, rows)


def _belongs(meta: Meta | None, facts: FeatureFacts) -> AgentFacts:
    costs = facts.costs
    if meta is None:  # a world of no model
        return AgentFacts("", "", facts.at, costs.layers, facts.steps, costs)
    digests = dict(zip(meta.layers, meta.modules.split("+"), strict=True))
    modules = "+".join(digests[layer] for layer in facts.at)
    return AgentFacts(meta.fingerprint, modules, facts.at, meta.num_layers, facts.steps, costs)


def figures(score: Score) -> dict[str, float]:
    """What a curve shows of a score."""
    return {
        "selected": score.rho,
        "acceptance": score.acceptance,
        "length": score.length,
        "exit": score.exit,
        "drafting": float(score.drafts.sum() / max(score.rounds.sum(), 1.0)),
    }


def write_curve(folder: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """``curve.jsonl``, and ``curve.png`` where matplotlib is installed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "curve.jsonl").write_text("".join(json.dumps(dict(row)) + "\n" for row in rows))
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return
    shown = (
        ("selected", "tokens per plain step's time"),
        ("acceptance", "share of drafts kept"),
        ("length", "tokens drafted"),
        ("exit", "mean exit layer"),
    )
    figure = Figure(figsize=(9.0, 6.0), layout="constrained")
    FigureCanvasAgg(figure)
    at = np.array([row["updates"] for row in rows])
    for number, (name, title) in enumerate(shown, start=1):
        axes = figure.add_subplot(2, 2, number)
        axes.plot(at, [row[name] for row in rows], marker=".")
        if name == "selected":
            axes.plot(at, [row["rho"] for row in rows], linestyle=":")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("updates", fontsize=9)
    figure.savefig(folder / "curve.png", dpi=110)

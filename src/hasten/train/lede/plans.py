"""What plans made beforehand come to: fixed settings, and oracles that see more than a policy may.

A plan says for every row of the text which exit drafts from there, and how many tokens. A plan pays
no probe that only serves to decide: on the walk its exit alone is probed, and no row ends a draft.

`clairvoyant` knows what every exit would say: no policy can do better. `foresight` doesn't: it
knows, for all rows to come, how *likely* each exit is right, but not whether it is. It is
an oracle without hindsight of the drawn tokens, and still sees further than a policy, which has the
rows up to the one it decides on and pays for looking.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hasten.policies.exits import ExitCosts
from hasten.policies.lede_features import Bools, Floats, Ints
from hasten.train.lede.simulate import Score
from hasten.train.lede.world import World

Doubles = npt.NDArray[np.float64]
Best = TypeVar("Best")


def dinkelbach(
    solve: Callable[[float], tuple[float, float, Best]],
    rho: float = 1.0,
    *,
    rounds: int = 20,
    tolerance: float = 1e-6,
) -> tuple[float, Best]:
    """The highest ratio of gain to cost, and what has it.

    `solve` gives, for a price rho, the gain and the cost of whatever has the most
    gain - rho · cost, and that. (W. Dinkelbach, 1967.) Rho never falls: where solutions are found
    by learning, a worse one doesn't lower the price.
    """
    gain, cost, best = solve(rho)
    for _ in range(rounds):
        ratio = gain / cost
        if ratio <= rho + tolerance:
            break
        rho = ratio
        gain, cost, best = solve(rho)
    return max(rho, gain / cost), best


@dataclass(frozen=True, slots=True)
class Plan:
    """For every row of a world ``(P,)``: the exit to draft from (-1: a plain step), and how many
    tokens."""

    exit: Ints
    length: Ints

    @classmethod
    def fixed(cls, world: World, exit: int, length: int) -> Plan:
        """The same everywhere."""
        rows = len(world.token)
        return cls(np.full(rows, exit if length else -1), np.full(rows, length))


def runs(world: World) -> Ints:
    """For each exit and row how many drafted tokens in a row would be right, ``(exits, P)``."""
    last = np.repeat(world.offsets[1:], np.diff(world.offsets))
    rows, found = np.arange(len(world.token)), np.zeros(world.agrees.shape, dtype=np.int64)
    right: Bools = np.ones(world.agrees.shape, dtype=np.bool_)
    for depth in range(world.steps):
        at = rows + depth
        logged = min(depth, world.hit.shape[1] - 1)
        right = right & (at < last) & world.hit[:, logged, np.minimum(at, len(rows) - 1)]
        found += right
    return found


def round_costs(costs: ExitCosts, at: tuple[int, ...], steps: int) -> Doubles:
    """Of a planned round by exit and tokens drafted, ``(exits, steps + 1)``; 0 tokens: a plain
    step."""
    table = np.full((len(at), steps + 1), costs.verify[1])
    for e, layer in enumerate(at):
        for d in range(1, steps + 1):
            rows = d + 1
            table[e, d] = rows * costs.layer[e] + d * costs.probe[e] + costs.resume(e, layer, rows)
    return table


def follow(
    world: World, docs: Ints, plan: Plan, costs: ExitCosts, found: Ints | None = None
) -> Score:
    """What the plan comes to; `found` is `runs`, where it is known."""
    found = runs(world) if found is None else found
    prices, score = round_costs(costs, world.at, world.steps), Score.empty(docs)
    for slot, doc in enumerate(docs.tolist()):
        row, end = int(world.offsets[doc]), int(world.offsets[doc + 1])
        closed = bool(world.open[doc])
        while row < end:
            left = end - row
            exit, length = int(plan.exit[row]), int(plan.length[row])
            length = min(length, left - 1 if closed else world.steps, world.steps)
            kept = 0
            if exit >= 0 and length > 0:
                run = int(found[exit, row])
                length = min(length, _stop(world, exit, row, run, left))
                kept = min(run, length)
            else:
                exit, length = 0, 0
            emitted = min(kept + 1, left)
            score.tokens[slot] += emitted
            score.time[slot] += prices[exit, length]
            score.rounds[slot] += 1
            score.drafted[slot] += length
            score.accepted[slot] += kept
            score.drafts[slot] += length > 0
            score.layers[slot] += world.at[exit] if length else 0
            row += emitted
    return score


def _stop(world: World, exit: int, row: int, run: int, left: int) -> int:
    """Tokens after which a draft ends by itself: at an end of sequence, right or wrong."""
    if run >= left:
        return left
    depth = min(run, world.ends.shape[1] - 1)
    return run + 1 if run < world.steps and world.ends[exit, depth, row + run] else world.steps


def grid(world: World, docs: Ints, costs: ExitCosts) -> dict[tuple[int, int], Score]:
    """Every fixed setting: by exit and length; (0, 0) is plain decoding."""
    found = runs(world)
    settings = [(e, d) for e in range(len(world.at)) for d in range(1, world.steps + 1)]
    return {
        (e, d): follow(world, docs, Plan.fixed(world, e, d), costs, found)
        for e, d in ((0, 0), *settings)
    }


def best_fixed(scores: dict[tuple[int, int], Score], docs: Ints | None = None) -> tuple[int, int]:
    """Of a grid the setting with the highest rho, on some of its documents."""

    def rho(setting: tuple[int, int]) -> float:
        score = scores[setting]
        return (score if docs is None else score.pick(docs)).rho

    return max(scores, key=rho)


# -- oracles ---------------------------------------------------------------------------------------


def clairvoyant(world: World, docs: Ints, costs: ExitCosts, steps: int = 0) -> Score:
    """The best that can be done with these exits where all that they will say is known, with drafts
    of at most `steps` tokens."""
    found = runs(world)
    depth = np.arange(1, world.steps + 1)
    sure = (found[:, :, None] >= depth).astype(np.float32)  # (exits, P, steps): chance of reaching
    return _oracle(world, docs, costs, sure, found, steps or world.steps)


def foresight(world: World, docs: Ints, costs: ExitCosts, chances: Floats, steps: int = 0) -> Score:
    """The same where only `chances` ``(exits, depths, P)`` are known: how likely each exit is right
    at a row and draft depth, if the draft was right so far."""
    reach = np.ones(world.agrees.shape, dtype=np.float32)
    rows, parts = np.arange(len(world.token)), []
    last = np.repeat(world.offsets[1:], np.diff(world.offsets))
    for depth in range(world.steps):
        at, logged = rows + depth, min(depth, chances.shape[1] - 1)
        inside = at < last
        reach = reach * chances[:, logged, np.minimum(at, len(rows) - 1)] * inside
        parts.append(reach)
    return _oracle(world, docs, costs, np.stack(parts, -1), runs(world), steps or world.steps)


def _oracle(
    world: World, docs: Ints, costs: ExitCosts, reach: Floats, found: Ints, steps: int
) -> Score:
    """Plans by dynamic programming backwards over each text, at the price that the plans make
    true."""
    prices = round_costs(costs, world.at, world.steps)

    def solve(rho: float) -> tuple[float, float, Score]:
        plan = Plan.fixed(world, 0, 0)
        for doc in docs.tolist():
            _plan_doc(world, doc, plan, reach, rho * prices, steps)
        score = follow(world, docs, plan, costs, found)
        return float(score.tokens.sum()), float(score.time.sum()), score

    _, best = dinkelbach(solve, 1.0 / costs.verify[1], tolerance=1e-4)
    return best


def _plan_doc(
    world: World, doc: int, plan: Plan, reach: Floats, priced: Doubles, steps: int
) -> None:
    """Fill in the plan of a document's rows: the most tokens, less the price of their time."""
    first, end = int(world.offsets[doc]), int(world.offsets[doc + 1])
    closed = bool(world.open[doc])
    values = np.zeros(end - first + world.steps + 2)
    count = np.arange(1, world.steps + 2)
    for row in range(end - 1, first - 1, -1):
        left = end - row
        gains = np.minimum(count, left) + values[row - first + count]
        most = min(steps, left - 1 if closed else left)
        plain = gains[0] - priced[0, 0]
        best, where = plain, (-1, 0)
        if most > 0:
            expected = gains[0] + np.cumsum(reach[:, row, :most] * np.diff(gains)[:most], -1)
            worth = expected - priced[:, 1 : most + 1]
            at = int(worth.argmax())
            if worth.flat[at] > best:
                best, where = float(worth.flat[at]), (at // most, at % most + 1)
        plan.exit[row], plan.length[row] = where
        values[row - first] = best

"""Exit policies that weigh measured costs: DEL, and the calibrated myopic rule.

Both count a round as the engine runs it. With e the exit at layer l and d tokens drafted, d + 1
rows run up to l, one by one (the last one too: verification needs it there), and verification
resumes with d + 1 rows at l:

    (d + 1) layer[e] + probes · probe[e] + resume(e, l, d + 1)

Exits on the way at which nobody looks, and a last row whose probe can't change anything, cost no
probe (`wants` says which).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np

from hasten.policies.exit_calibration import Calibration, features
from hasten.policies.exit_rules import STEPS, FixedExit, need, need_count, need_share
from hasten.policies.exits import SELECT, ExitCosts, Outcome, Probe

PRICE_MOVES = 0.02
"""Values are computed anew where rho has moved by more."""

ENDINGS = ("confidence", "length", "both")


def check_costs(costs: ExitCosts, at: Sequence[int], steps: int) -> None:
    """Raise OptionError unless the costs fit the candidates' layers `at` and drafts of `steps`."""
    need_count("steps", steps, 1)
    rising = bool(at) and all(a < b for a, b in pairwise(at))
    inside = rising and at[0] >= 0 and at[-1] < costs.layers
    need("exits", inside, f"rising layers below {costs.layers}", tuple(at))
    sizes = (len(costs.layer), len(costs.probe))
    need("costs", sizes == (len(at),) * 2, f"of {len(at)} exits", sizes)
    known = len(costs.verify) - 2
    need(
        "steps", steps <= known, f"at most {known}, as passes of more rows weren't measured", steps
    )


def round_cost(outcome: Outcome, costs: ExitCosts, at: Sequence[int]) -> float:
    """What the round cost by the table, in plain steps: its probes, layers and verification, not
    its shadows."""
    probes = sum(costs.probe[probe.exit] for probe in outcome.probes)
    if outcome.layer is None:
        return probes + costs.verify[1]
    e, rows = at.index(outcome.layer), outcome.drafted + 1
    return probes + rows * costs.layer[e] + costs.resume(e, outcome.layer, rows)


# -- DEL -------------------------------------------------------------------------------------------


def best_plan(
    chances: Sequence[float | None],
    costs: ExitCosts,
    at: Sequence[int],
    steps: int,
    *,
    last_probe: bool = True,
    every_round: float = 0.0,
) -> tuple[int, int]:
    """The exit and the length with the most tokens per cost; length 0 is a plain step.

    chances      for each exit the chance that a token is kept given those before; None: not known,
                 not considered
    last_probe   a draft that ends before `steps` pays the probe that ends it
    every_round  what any round costs on top

    With a the chance, tokens are ``1 + a + ... + a^d``: DEL's numerator, (1 - a^(d+1)) / (1 - a).
    Its denominator, d · l + L layers, is here the cost table. The shallowest and shortest of equals
    is taken.
    """
    best, best_rate = (0, 0), 1.0 / (costs.verify[1] + every_round)
    for e, chance in enumerate(chances):
        if chance is None:
            continue
        tokens, reach = 1.0, 1.0
        for length in range(1, steps + 1):
            reach *= chance
            tokens += reach
            rows, probes = length + 1, length + (last_probe and length < steps)
            cost = rows * costs.layer[e] + probes * costs.probe[e]
            rate = tokens / (cost + costs.resume(e, at[e], rows) + every_round)
            if rate > best_rate:
                best, best_rate = (e, length), rate
    return best


class DEL(FixedExit):
    """Each round's exit is the one with the most expected tokens per cost, by how often each exit's
    first choice was the target's lately; a draft ends where it is less sure than halfway between
    the mean p1 of matched and of mismatched tokens.

    costs   of this machine and these exits
    at      layers the candidate exits have run
    decay   what is left of the evidence a round later
    steps   most tokens of a draft
    ending  what ends a draft: ``confidence`` (the authors' DEL: the planned length only serves to
            choose the exit), ``length`` (their variant without it) or ``both`` (ours)
    keep    draft the first unsure token still, as the authors do

    Where no exit is worth it, rounds are plain steps; their shadows show when to return. Before
    any evidence one token is drafted at the shallowest exit. Shadows count as a probe of every exit
    in every round. Raises OptionError for an option out of range.
    """

    __slots__ = ("_counts", "_most", "_p1", "at", "costs", "decay", "ending")
    shadow: bool = True
    source = (
        "DEL (arXiv 2504.05598): evidence up to the first mismatch, decay 0.95 a round, TPL, "
        "threshold and the two endings read in a public fork of its code (limit 18 there, unsure "
        "token kept, no plain steps, statistics from the last 32 prompt tokens too); costs by "
        "table instead of layers are ours"
    )

    def __init__(
        self,
        costs: ExitCosts,
        at: Sequence[int],
        *,
        decay: float = 0.95,
        steps: int = STEPS,
        ending: str = "confidence",
        keep: bool = False,
    ) -> None:
        check_costs(costs, at, steps)
        need("decay", 0.0 < decay <= 1.0, "in (0, 1]", decay)
        need("ending", ending in ENDINGS, f"one of {', '.join(ENDINGS)}", ending)
        super().__init__(exit=0, steps=1, keep=keep)
        self.costs, self.at, self.decay, self.ending = costs, tuple(at), decay, ending
        self._most = steps
        self._counts = [[0.0, 0.0] for _ in at]
        """For each exit the decayed counts of matched and of mismatched tokens."""
        self._p1 = [[0.0, 0.0] for _ in at]
        """Their decayed sums of p1."""

    def chance(self, exit: int) -> float | None:
        """The share of the exit's guesses that were the target's; None without evidence."""
        matched, missed = self._counts[exit]
        return matched / (matched + missed) if matched + missed > 0.0 else None

    def threshold(self, exit: int) -> float:
        """Halfway between the mean p1 of matched and of missed tokens; 0 until both are known."""
        counts, sums = self._counts[exit], self._p1[exit]
        if min(counts) <= 0.0:
            return 0.0
        return 0.5 * (sums[0] / counts[0] + sums[1] / counts[1])

    def unsure(self, probe: Probe) -> bool:
        """p1 below the exit's threshold, where confidence ends drafts."""
        return self.ending != "length" and probe.p1 < self.threshold(probe.exit)

    def learn(self, outcome: Outcome) -> None:
        """Count the shadows, and choose the next round's exit and length."""
        if not outcome.shadows:
            return
        for e, (guesses, truths, p1) in enumerate(outcome.shadows):
            counts, sums = self._counts[e], self._p1[e]
            for values in (counts, sums):
                values[0] *= self.decay
                values[1] *= self.decay
            for guess, truth, sure in zip(guesses, truths, p1, strict=True):
                missed = guess != truth
                counts[missed] += 1.0
                sums[missed] += sure
        self.exit, length = best_plan(
            [self.chance(e) for e in range(len(self.at))],
            self.costs,
            self.at,
            self._most,
            last_probe=self.ending == "confidence" and not self.keep,
            every_round=sum(self.costs.probe),
        )
        self.steps = self._most if length and self.ending == "confidence" else length


# -- the calibrated myopic rule --------------------------------------------------------------------


class Myopic:
    """Drafts one more token where its chance of being kept is worth more than it costs.

    In `DRAFT`, with j tokens drafted and a_k the chances of the calibration:

        a_1 ... a_(j+1)  >  rho (layer + probe + resume(j + 2 rows) - resume(j + 1 rows))

    In `SELECT`, leaving is worth ``1 - rho · (rest of a plain step)`` and the best of drafting 1 to
    `steps` tokens, the first with this row's chance and later ones with the exit's mean. It is
    compared with going on: the better of a plain step from here and of probing a deeper exit, whose
    chances are taken from the calibration's table (as if they said nothing about each other).

    rho is the price of a plain step's time in tokens: realised tokens over table costs (each a
    running mean), never below 1.

    rate   weight of the newest round in the running means
    ahead  how many tokens ahead `DRAFT` looks: 1 is the marginal rule. More lets it cross a row
           count that is dear by itself
    """

    __slots__ = (
        "_first", "_least", "_lengths", "_more", "_next", "_onward", "_priced", "_reach", "_time",
        "_tokens", "_walk",
        "ahead", "at", "calibration", "costs", "rate", "rho", "steps",
    )  # fmt: skip
    shadow: bool = False
    source: ClassVar[str] = (
        "ours; that a threshold on the chance of rejection is optimal at a fixed exit is "
        "SpecDec++'s (arXiv 2405.19715, second-hand), the price of time Dinkelbach's method"
    )

    def __init__(
        self,
        costs: ExitCosts,
        at: Sequence[int],
        calibration: Calibration,
        *,
        steps: int = STEPS,
        rate: float = 0.05,
        ahead: int = 1,
    ) -> None:
        check_costs(costs, at, steps)
        fits = len(calibration.weights) == len(at)
        need("calibration", fits, f"of {len(at)} exits", len(calibration.weights), "Fit it again")
        need_share("rate", rate)
        need_count("ahead", ahead, 1)
        self.costs, self.at, self.calibration = costs, tuple(at), calibration
        self.steps, self.rate, self.ahead = steps, rate, ahead
        self.rho = self._tokens = self._time = 1.0
        self._reach, self._least = 1.0, 0.0
        self._walk = -1
        """The exit probed last on this round's walk; -1: none."""
        self._more = [[self._marginal(e, j) for j in range(steps)] for e in range(len(at))]
        """Cost of the token after j drafted ones, by exit and j."""
        self._first = [np.array(first)[:, None] for first in calibration.first]
        self._lengths = [
            (np.cumsum(later ** np.arange(steps)), np.cumsum(more))
            for later, more in zip(calibration.later, self._more, strict=True)
        ]
        """For each exit, by length: tokens kept if the first is, and what they cost."""
        self._price()

    # -- values, in tokens -----------------------------------------------------------------------

    def _marginal(self, exit: int, drafted: int) -> float:
        """Its row up to the exit, its probe unless it is the last, and one row more to verify."""
        costs, layer, rows = self.costs, self.at[exit], drafted + 2
        wider = costs.resume(exit, layer, rows) - costs.resume(exit, layer, rows - 1)
        probe = costs.probe[exit] if drafted + 1 < self.steps else 0.0
        return costs.layer[exit] + probe + wider

    def _gain(self, exit: int, drafted: int, reach: float, ahead: int) -> float:
        """The most that 1 to `ahead` tokens more are worth beyond their cost, where `reach` is the
        chance that the next is kept and all before it."""
        best, gain, later = -math.inf, 0.0, self.calibration.later[exit]
        for more in self._more[exit][drafted : drafted + ahead]:
            gain += reach - self.rho * more
            reach *= later
            best = max(best, gain)
        return best

    def _plain(self, exit: int) -> float:
        """A plain step's token less the price of its rest; exit -1 is its beginning."""
        rest = self.costs.verify[1] if exit < 0 else self.costs.resume(exit, self.at[exit], 1)
        return 1.0 - self.rho * rest

    def _price(self) -> None:
        """Recompute, at this rho, what going on from each exit is worth, and which exit to probe
        next (none: a plain step). The last entries are those of the round's start."""
        exits, costs, rho = len(self.at), self.costs, self.rho
        self._onward, self._next, self._priced = [0.0] * (exits + 1), [exits] * (exits + 1), rho
        probed = [0.0] * exits
        for here in range(exits - 1, -2, -1):  # index -1: the start
            best, chosen = self._plain(here), exits
            below = costs.layer[here] if here >= 0 else 0.0
            for e in range(here + 1, exits):
                value = probed[e] - rho * (costs.layer[e] - below + costs.probe[e])
                if value > best:
                    best, chosen = value, e
            self._onward[here], self._next[here] = best, chosen
            if here >= 0:
                each, cost = self._lengths[here]
                gains = np.max(self._first[here] * each - rho * cost, axis=1)
                probed[here] = float(np.maximum(self._plain(here) + gains, best).mean())

    # -- deciding --------------------------------------------------------------------------------

    def wants(self, phase: str, exit: int, drafted: int) -> bool:
        """False: `leave` would say False, or the exit isn't the one worth probing next."""
        return exit == self._next[self._walk] if phase == SELECT else drafted < self.steps

    def leave(self, probe: Probe) -> bool:
        """By the chance that this row's token is kept."""
        exit, first = probe.exit, probe.phase == SELECT
        x = features(probe, 0.0 if first else self._least)
        reach = self.calibration.chance(exit, x) * (1.0 if first else self._reach)
        if first:
            worth = self._plain(exit) + self._gain(exit, 0, reach, self.steps)
            go = worth > self._onward[exit]
            self._walk = -1 if go or self._next[exit] == len(self.at) else exit
        else:
            go = self._gain(exit, probe.drafted, reach, self.ahead) > 0.0
        if go:
            self._reach = reach
            self._least = x[0] if first else min(self._least, x[0])
        return go

    def learn(self, outcome: Outcome) -> None:
        """Follow the price of time."""
        time = round_cost(outcome, self.costs, self.at)
        self._tokens += self.rate * (outcome.accepted + 1 - self._tokens)
        self._time += self.rate * (time - self._time)
        self.rho = max(self._tokens / self._time, 1.0)
        self._walk = -1
        if abs(self.rho - self._priced) > PRICE_MOVES:
            self._price()

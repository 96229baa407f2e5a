"""What LEDE's agent looks at before each decision: twenty numbers, from a probe and running means.

The paper names confidence and uncertainty of the token (second-hand); this list is ours. The same
lines serve a live request (one lane, floats) and the simulator of `hasten.train.lede` (many lanes,
arrays), so that running means are what rounds make of them in both. Nothing here depends on the
token drawn from the row decided on: a probe's distribution, its input token and the past only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from hasten.errors import OptionError
from hasten.policies.exit_adaptive import check_costs
from hasten.policies.exit_rules import STEPS
from hasten.policies.exits import SELECT, ExitCosts, Outcome, Probe

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Number = float | Floats
"""A number of one lane, or an array ``(n,)`` of as many lanes."""
Index = int | Ints
Lanes = Bools | Ints | slice
"""Some of the lanes."""
_ALL = slice(None)

VERSION = 1
"""Counted up when a feature changes its meaning: agents of another version are refused."""

FEATURES = (
    "phase", "layer", "drafted", "p1", "margin", "entropy", "gap", "agrees", "cosine", "growth",
    "joint", "least", "rate", "length", "last", "missed", "prior", "context", "below", "wider",
)  # fmt: skip
"""Names, in the order of a feature vector.

phase    0 on the walk, 1 in the draft
layer    layers below the exit, of all; drafted: tokens drafted, of the longest draft
p1       largest probability; margin: less the second; entropy: of the uniform distribution's;
gap      (z1 - z2) / 10 up to 1
agrees   whether the likeliest id is that of the walk's probe before (0.5: there is none)
cosine   of the module's output with that of the round's probe before; growth: log of the ratio of
         their lengths, within 2 (0 both: there is none)
joint    log of the product of the drafted rows' p1, from -8, over 8; least: the smallest (1: none)
rate     running mean of accepted / drafted at this exit; length: of tokens accepted, of the longest
last     accepted / drafted of the round before (0.5: it drafted nothing)
missed   1 where that draft's first token was refused
prior    how often the exit was right after this input id, off line
context  log2(1 + tokens so far) / 16
below    plain steps that the layers below the exit take, one row; wider: one row more to verify
"""

MINIMAL = ("phase", "layer", "drafted", "p1", "entropy")
"""What the paper is said to look at, with where the decision stands."""

RATE = 0.1
"""Weight of the newest round in running means."""


@dataclass(frozen=True, slots=True)
class Prior:
    """How often an exit was right after an input id, off line.

    ids     int64 ``(n,)``; values: float32 ``(n, exits)``
    mean    float32 ``(exits,)``: for all other ids
    """

    ids: Ints
    values: Floats
    mean: Floats
    _dense: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        size = int(self.ids.max()) + 1 if len(self.ids) else 0
        dense = np.tile(self.mean.astype(np.float32), (size + 1, 1))
        dense[self.ids] = self.values
        object.__setattr__(self, "_dense", dense)

    @classmethod
    def flat(cls, mean: Sequence[float]) -> Prior:
        """The same for all ids."""
        none = np.zeros(0, dtype=np.int64)
        values = np.zeros((0, len(mean)), dtype=np.float32)
        return cls(none, values, np.array(mean, dtype=np.float32))

    def at(self, token: Index, exit: Index) -> Number:
        """For input ids; -1: not known."""
        last = len(self._dense) - 1
        # Both an unknown id and one beyond the table find the last row, the mean.
        row = np.minimum(token, last) if isinstance(token, np.ndarray) else min(token, last)
        found: Number = self._dense[row, exit]
        return found


@dataclass(frozen=True, slots=True)
class FeatureFacts:
    """What features need to know beside probes and rounds.

    at       layers of the candidate exits; costs: of their operations, in plain steps
    rates    running means of accepted / drafted at a request's start, by exit; length: of tokens
             accepted
    steps    longest draft

    Raises OptionError where the costs don't fit the exits and `steps`.
    """

    at: tuple[int, ...]
    costs: ExitCosts
    rates: tuple[float, ...]
    length: float
    prior: Prior
    steps: int = STEPS
    depth: Floats = field(init=False, repr=False, compare=False)
    below: Floats = field(init=False, repr=False, compare=False)
    wider: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_costs(self.costs, self.at, self.steps)
        sizes = (len(self.rates), len(self.prior.mean))
        if sizes != (len(self.at),) * 2:
            raise OptionError("lede.agent", f"has means of {sizes} exits for those at {self.at}")
        costs, steps = self.costs, self.steps
        rows = [
            [costs.resume(e, layer, j + 2) - costs.resume(e, layer, j + 1) for j in range(steps)]
            for e, layer in enumerate(self.at)
        ]
        depth = [layer / costs.layers for layer in self.at]
        object.__setattr__(self, "depth", np.array(depth, dtype=np.float32))
        object.__setattr__(self, "below", np.array(costs.layer, dtype=np.float32))
        object.__setattr__(self, "wider", np.array(rows, dtype=np.float32))


class Running:
    """What lasts from round to round, in `lanes` requests at a time: running means, and the last
    outcome; and, within a round, what was drafted so far."""

    __slots__ = ("_lane", "facts", "joint", "last", "least", "length", "missed", "rate")

    def __init__(self, facts: FeatureFacts, lanes: int) -> None:
        self.facts = facts
        self._lane: Index = 0 if lanes == 1 else np.arange(lanes)
        self.rate = np.repeat(np.array(facts.rates, dtype=np.float32)[:, None], lanes, 1)
        self.length = np.full(lanes, facts.length, dtype=np.float32)
        self.last = np.full(lanes, 0.5, dtype=np.float32)
        self.missed = np.zeros(lanes, dtype=np.float32)
        self.joint = np.zeros(lanes, dtype=np.float32)
        self.least = np.ones(lanes, dtype=np.float32)

    def restart(self, lanes: Bools | Ints) -> None:
        """These lanes begin a new request."""
        self.rate[:, lanes] = np.array(self.facts.rates, dtype=np.float32)[:, None]
        self.length[lanes], self.last[lanes], self.missed[lanes] = self.facts.length, 0.5, 0.0
        self.begin(lanes)

    def begin(self, lanes: Lanes = _ALL) -> None:
        """A round begins."""
        self.joint[lanes], self.least[lanes] = 0.0, 1.0

    def took(self, p1: Number, lanes: Lanes = _ALL) -> None:
        """A token was taken from a row with this largest probability (`lanes`: in these)."""
        self.joint[lanes] += np.log(np.maximum(p1, 1e-30))
        self.least[lanes] = np.minimum(self.least[lanes], p1)

    def learn(self, exit: Index, drafted: Index, accepted: Index, lanes: Lanes = _ALL) -> None:
        """A round has ended: by exit, -1 for a plain step; given for `lanes` alone."""
        drew = np.atleast_1d(np.greater(drafted, 0))
        share = np.atleast_1d(accepted / np.maximum(drafted, 1)).astype(np.float32)
        for e in range(len(self.rate)):
            here = RATE * (np.atleast_1d(np.equal(exit, e)) & drew)
            self.rate[e, lanes] += here * (share - self.rate[e, lanes])
        kept = np.atleast_1d(accepted).astype(np.float32)
        self.length[lanes] += RATE * drew * (kept - self.length[lanes])
        self.last[lanes] = np.where(drew, share, 0.5)
        self.missed[lanes] = drew & (kept == 0)

    def encode(self, out: Floats, seen: Seen) -> None:
        """Write the features of a decision to `out`, ``(20,)`` for one lane, else ``(20, n)``."""
        facts, lane, exit = self.facts, self._lane, seen.exit
        out[0] = seen.phase
        out[1] = facts.depth[exit]
        out[2] = seen.drafted / facts.steps
        out[3] = seen.p1
        out[4] = seen.p1 - seen.p2
        out[5] = seen.entropy
        out[6] = np.minimum(0.1 * seen.gap, 1.0)
        out[7] = seen.agrees
        out[8] = seen.cosine
        out[9] = np.minimum(np.maximum(seen.growth, -2.0), 2.0)
        out[10] = np.maximum(self.joint[lane], -8.0) * 0.125
        out[11] = self.least[lane]
        out[12] = self.rate[exit, lane]
        out[13] = self.length[lane] / facts.steps
        out[14] = self.last[lane]
        out[15] = self.missed[lane]
        out[16] = facts.prior.at(seen.token, exit)
        out[17] = seen.context
        out[18] = facts.below[exit]
        out[19] = facts.wider[exit, seen.drafted]


@dataclass(slots=True)
class Seen:
    """A probe as numbers, one for each lane: see `FEATURES`; `token` is the row's input id (-1: not
    known)."""

    phase: Number
    exit: Index
    drafted: Index
    p1: Number
    p2: Number
    entropy: Number
    gap: Number
    agrees: Number
    cosine: Number
    growth: Number
    token: Index
    context: Number


def context_feature(tokens: int) -> float:
    """Of so many tokens, the pending one included."""
    return math.log2(1 + tokens) / 16.0


def likeness(
    output: Floats, length: float, before: Floats | None, before_length: float
) -> tuple[float, float]:
    """Cosine and growth of a module's output ``(hidden,)`` against that of the probe before, given
    their lengths; (0, 0) without one."""
    if before is None:
        return 0.0, 0.0
    product = max(length * before_length, 1e-12)
    growth = math.log(max(length, 1e-6) / max(before_length, 1e-6))
    return float(output @ before) / product, growth


class LiveFeatures:
    """One request's features: tell it of each round, in this order.

    ``root(token)``, then for each probe ``features(probe)``, and after a token is taken from it
    ``took()`` and, once the token is known, ``drew(token)``; at the end ``learn(outcome)``.
    A probe that its policy leaves out is left out here too. `out` and `seen` are what `features`
    gave last, and from what.
    """

    __slots__ = ("_before", "_best", "_length", "_token", "out", "running", "seen")
    seen: Seen
    _before: Floats | None

    def __init__(self, facts: FeatureFacts) -> None:
        self.running = Running(facts, 1)
        self.out = np.zeros(len(FEATURES), dtype=np.float32)
        self.root(-1)

    def root(self, token: int) -> None:
        """A round begins at this pending token."""
        self.running.begin()
        self._token, self._before, self._length = token, None, 0.0
        self._best = -1

    def features(self, probe: Probe) -> Floats:
        """Float32 ``(20,)``: valid until the next call."""
        hidden: Floats = probe.hidden.detach().to("cpu", torch.float32).numpy()
        length = math.sqrt(float(hidden @ hidden))
        cosine, growth = likeness(hidden, length, self._before, self._length)
        self._before, self._length = hidden, length
        walking = probe.phase == SELECT
        self.seen = Seen(
            phase=0.0 if walking else 1.0,
            exit=probe.exit,
            drafted=probe.drafted,
            p1=probe.p1,
            p2=probe.p2,
            entropy=probe.entropy / math.log(max(len(probe.logits), 2)),
            gap=probe.gap,
            agrees=self._agrees(probe) if walking else 0.5,
            cosine=cosine,
            growth=growth,
            token=self._token,
            context=context_feature(probe.context),
        )
        self.running.encode(self.out, self.seen)
        return self.out

    def _agrees(self, probe: Probe) -> float:
        if len(self.running.facts.at) == 1:
            return 0.5
        before, self._best = self._best, int(probe.logits.argmax())
        return 0.5 if before < 0 else float(before == self._best)

    def took(self) -> None:
        """The policy has said that a token is taken from the row of the last `features`."""
        self.running.took(self.seen.p1)

    def drew(self, token: int) -> None:
        """That token, the input of the next row."""
        self._token = token

    def learn(self, outcome: Outcome) -> None:
        """The round has ended."""
        at = self.running.facts.at
        exit = -1 if outcome.layer is None else at.index(outcome.layer)
        self.running.learn(exit, outcome.drafted, outcome.accepted)

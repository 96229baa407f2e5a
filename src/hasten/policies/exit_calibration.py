"""How likely an exit's token is kept, from its distribution: features, samples, a logistic model.

Rule, features and form are ours (docs/methods/early-exit.md); fitted off line, kept as JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from hasten.errors import OptionError
from hasten.policies.exit_rules import need
from hasten.policies.exits import Outcome, Probe

Floats = npt.NDArray[np.float64]

FEATURES = ("log_p1", "gap", "entropy", "depth", "least")
FLOOR = -8.0
"""Log probabilities are cut here."""


def features(probe: Probe, least: float = 0.0) -> tuple[float, ...]:
    """What the chance of a row's token is predicted from, by `FEATURES`: log p1, (z1 - z2) / 10 up
    to 1, entropy over that of the uniform distribution, log(1 + tokens drafted before), and
    `least`: the smallest log p1 among those (0 without any)."""
    return (
        max(math.log(max(probe.p1, 1e-30)), FLOOR),
        min(0.1 * probe.gap, 1.0),
        probe.entropy / math.log(len(probe.logits)),
        math.log1p(probe.drafted),
        least,
    )


def labelled(outcome: Outcome) -> list[tuple[int, tuple[float, ...], bool]]:
    """The round's calibration samples: exit, features, and whether the row's token was kept, for
    each drafted token whose predecessors were all kept (what follows a miss says nothing)."""
    samples: list[tuple[int, tuple[float, ...], bool]] = []
    least = 0.0
    for probe in outcome.probes:
        left = probe.layer == outcome.layer and probe.drafted < outcome.drafted
        if left and probe.drafted <= outcome.accepted:
            x = features(probe, least)
            samples.append((probe.exit, x, probe.drafted < outcome.accepted))
            least = min(least, x[0])
    return samples


def fit_logistic(x: Floats, y: Floats, ridge: float = 1.0) -> Floats:
    """Weights ``(k + 1,)``, intercept first, of a logistic model of `y` (``(n,)``, in [0, 1]) from
    `x` (``(n, k)``), by Newton steps. `ridge` acts on standardised weights, not the intercept."""
    mean, scale = x.mean(0), x.std(0)
    scale = np.where(scale > 1e-9, scale, 1.0)
    design = np.column_stack([np.ones(len(x)), (x - mean) / scale])
    penalty = np.full(design.shape[1], ridge)
    penalty[0] = 1e-6  # keeps the intercept finite where all or none were kept

    def loss(w: Floats) -> float:
        z = design @ w
        return float(np.logaddexp(0.0, z).sum() - y @ z + 0.5 * penalty @ (w * w))

    w = np.zeros(design.shape[1])
    now = loss(w)
    for _ in range(50):
        p = 1.0 / (1.0 + np.exp(-np.clip(design @ w, -30.0, 30.0)))
        slope = design.T @ (p - y) + penalty * w
        curve = (design * (p * (1.0 - p))[:, None]).T @ design + np.diag(penalty)
        step = np.linalg.solve(curve, slope)
        size = 1.0
        while loss(w - size * step) > now and size > 1e-4:
            size *= 0.5
        w = w - size * step
        before, now = now, loss(w)
        if before - now < 1e-10 * (1.0 + abs(now)):
            break
    raw = w[1:] / scale
    return np.concatenate([[w[0] - raw @ mean], raw])


@dataclass(frozen=True, slots=True)
class Calibration:
    """How likely an exit's tokens are kept: data, fitted off line, kept as JSON.

    weights  for each exit the logistic model of `FEATURES`, intercept first
    first    for each exit the chances of a round's first token over the calibration text: means of
             equally large groups, rising
    later    for each exit the mean chance of a later token, those before it being kept
    """

    weights: tuple[tuple[float, ...], ...]
    first: tuple[tuple[float, ...], ...]
    later: tuple[float, ...]
    features: tuple[str, ...] = FEATURES

    def __post_init__(self) -> None:
        exits = len(self.weights)
        whole = exits > 0 and len(self.first) == len(self.later) == exits and all(self.first)
        sizes = (exits, len(self.first), len(self.later))
        need("calibration", whole, "weights, first and later chances for each exit", sizes)
        known = self.features == FEATURES
        need("calibration", known, f"of the features {FEATURES}", self.features, "Fit it again")
        sized = all(len(w) == len(FEATURES) + 1 for w in self.weights)
        need("calibration", sized, f"{len(FEATURES) + 1} weights an exit", self.weights)
        numbers = (*chain(*self.weights, *self.first), *self.later)
        need("calibration", all(map(math.isfinite, numbers)), "finite numbers", "others")

    def chance(self, exit: int, x: Sequence[float]) -> float:
        """The chance that a row's token is kept, given that those before it are."""
        w = self.weights[exit]
        z = w[0] + sum(a * b for a, b in zip(w[1:], x, strict=True))
        return 1.0 / (1.0 + math.exp(-min(max(z, -30.0), 30.0)))

    @classmethod
    def fit(
        cls, samples: Sequence[tuple[Floats, Floats]], ridge: float = 1.0, groups: int = 8
    ) -> Calibration:
        """From ``(features, accepted)`` of each exit, float ``(n, 5)`` and ``(n,)``; `accepted` may
        be the chance itself. Raises OptionError where an exit has no samples."""
        depth = FEATURES.index("depth")
        weights, first, later = [], [], []
        for e, (x, y) in enumerate(samples):
            need("calibration", len(x) > 0, f"samples of exit {e}", len(x), "Collect more rounds")
            w = fit_logistic(x, y, ridge)
            weights.append(tuple(w.tolist()))
            opening = x[:, depth] == 0.0
            start = x[opening] if opening.any() else x
            chances = np.sort(1.0 / (1.0 + np.exp(-np.clip(w[0] + start @ w[1:], -30.0, 30.0))))
            parts = np.array_split(chances, min(groups, len(chances)))
            first.append(tuple(float(part.mean()) for part in parts))
            later.append(float(y[~opening].mean() if not opening.all() else y.mean()))
        return cls(tuple(weights), tuple(first), tuple(later))

    @classmethod
    def constant(cls, chances: Sequence[float]) -> Calibration:
        """The same chance for all tokens of an exit, whatever its distribution."""
        for chance in chances:
            need("calibration", 0.0 < chance < 1.0, "chances in (0, 1)", chance)
        zeros = (0.0,) * len(FEATURES)
        weights = tuple((math.log(c / (1.0 - c)), *zeros) for c in chances)
        return cls(weights, tuple((c,) for c in chances), tuple(chances))

    def to_json(self) -> str:
        """As JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """From `to_json`'s text; raises OptionError where that is of another form."""
        try:
            data = json.loads(text)
            weights = tuple(tuple(float(v) for v in w) for w in data["weights"])
            first = tuple(tuple(float(v) for v in f) for f in data["first"])
            later, names = tuple(float(v) for v in data["later"]), tuple(data["features"])
        except (KeyError, TypeError, ValueError) as error:
            problem = "isn't what Calibration.to_json wrote"
            raise OptionError("early-exit.calibration", problem, "Fit it again") from error
        return cls(weights, first, later, names)

"""How likely each exit is right at a row: for the myopic rule, and for the oracle that knows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hasten.policies.exit_calibration import FLOOR, Calibration, fit_logistic
from hasten.policies.exit_calibration import Floats as Doubles
from hasten.policies.lede_features import Floats, Ints
from hasten.train.lede.world import CHANNELS, World

_CLIP = 30.0


def calibrate(world: World, docs: Ints) -> Calibration:
    """The myopic rule's chances, counted on `docs`: at every row and at every depth that a right
    draft from any row reaches."""
    samples = []
    for e in range(len(world.at)):
        parts = []
        for depth, at, least in _reached(world, docs, e):
            logged = min(depth, world.stack.shape[1] - 1)
            p1, _, entropy, gap = world.stack[e, logged, at, :4].T.astype(np.float64)
            depths = np.full(len(at), np.log1p(depth))
            features = [_log(p1), np.minimum(0.1 * gap, 1.0), entropy, depths, least]
            parts.append((np.column_stack(features), world.hit[e, logged, at].astype(np.float64)))
        x, y = (np.concatenate(each) for each in zip(*parts, strict=True))
        samples.append((x, y))
    return Calibration.fit(samples)


def chances(world: World, docs: Ints, fitted_on: Ints) -> Floats:
    """How likely each exit is right, for all rows and depths ``(exits, depths, P)``, from all that
    a probe shows: a quadratic logistic model for each exit, fitted on the documents `fitted_on`.
    Rows outside `docs` are 0."""
    prior = world.prior(fitted_on)
    rows = world.rows(docs)
    found = np.zeros(world.hit.shape, dtype=np.float32)
    for e in range(len(world.at)):
        parts = []
        for depth, at, _ in _reached(world, fitted_on, e):
            logged = min(depth, world.hit.shape[1] - 1)
            x = _design(world, e, logged, at, prior.at(world.token[at], e))
            parts.append((x, world.hit[e, logged, at].astype(np.float64)))
        x, y = (np.concatenate(each) for each in zip(*parts, strict=True))
        weights = fit_logistic(x, y, ridge=2.0)
        for depth in range(world.hit.shape[1]):
            x = _design(world, e, depth, rows, prior.at(world.token[rows], e))
            z = np.clip(weights[0] + x @ weights[1:], -_CLIP, _CLIP)
            found[e, depth, rows] = 1.0 / (1.0 + np.exp(-z))
    return found


def _reached(world: World, docs: Ints, exit: int) -> Iterator[tuple[int, Ints, Doubles]]:
    """By draft depth the rows that a right draft from any row of `docs` reaches, with the smallest
    log p1 drafted from on the way."""
    here = world.rows(docs)
    last = np.repeat(world.offsets[1:], np.diff(world.offsets))
    least = np.zeros(len(here), dtype=np.float64)
    for depth in range(world.steps):
        if not len(here):
            return
        logged, at = min(depth, world.stack.shape[1] - 1), here + depth
        yield depth, at, least
        on = world.hit[exit, logged, at] & (at + 1 < last[here])
        least = np.minimum(least, _log(world.stack[exit, logged, at, 0]))[on]
        here = here[on]


def _log(p1: npt.NDArray[Any]) -> npt.NDArray[Any]:
    logs: npt.NDArray[Any] = np.maximum(np.log(np.maximum(p1, 1e-30)), FLOOR)
    return logs


def _design(world: World, exit: int, depth: int, at: Ints, prior: Floats | float) -> Doubles:
    """Features of rows, their squares and products, ``(rows, k)``."""
    shown = dict(zip(CHANNELS, world.stack[exit, depth, at].T.astype(np.float64), strict=True))
    x = np.column_stack(
        [
            _log(shown["p1"]) / 4.0,
            shown["p2"],
            shown["entropy"],
            np.minimum(0.1 * shown["gap"], 1.0),
            shown["cosine"],
            np.clip(shown["growth"], -2.0, 2.0),
            np.broadcast_to(prior, at.shape),
            np.full(len(at), np.log1p(depth)),
            world.agrees[exit, at] if depth == 0 else np.full(len(at), 0.5),
        ]
    )
    left, right = np.triu_indices(x.shape[1])
    made: Doubles = np.concatenate([x, x[:, left] * x[:, right]], 1)
    return made

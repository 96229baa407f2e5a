"""What arms do, learned from logged rounds, and scored on documents held out.

A network is fitted to counts (tokens, rows, steps of the module), by document; then arms are scored
on documents it hasn't seen, each round's start as it was logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hasten.errors import OptionError
from hasten.policies.lede_arms import FEATURES, WALK, ArmCosts, ArmFile, Floats


@dataclass(slots=True)
class Logged:
    """Rounds as they were logged.

    x          float32 ``(n, features)``
    did        float32 ``(n, arms, 3)``: tokens kept, rows verified beside the root, steps of the
               module; NaN where it isn't known
    behaviour  int64 ``(n,)``: the arm that ran; chance: float32 ``(n,)``: with which probability
    document   int64 ``(n,)``; domains: of each document
    """

    x: Floats
    did: Floats
    behaviour: npt.NDArray[np.int64]
    chance: Floats
    document: npt.NDArray[np.int64]
    domains: tuple[str, ...]
    arms: tuple[str, ...]

    def save(self, path: str | Path) -> None:
        """As ``.npz``, names as here."""
        values: dict[str, Any] = {
            "x": self.x,
            "did": self.did,
            "behaviour": self.behaviour,
            "chance": self.chance,
            "document": self.document,
            "domains": np.array(self.domains),
            "arms": np.array(self.arms),
            "features": np.array(FEATURES),
        }
        np.savez_compressed(path, **values)


# -- fitting ---------------------------------------------------------------------------------------


def fit(
    logged: Logged,
    costs: ArmCosts,
    facts: dict[str, Any],
    *,
    hidden: int = 48,
    epochs: int = 400,
    seed: int = 0,
) -> ArmFile:
    """The network that says best what arms did; a sixth of the documents say when to stop, another
    is held out. Raises OptionError for less than six documents."""
    test, stop = _held_out(logged), _stopping(logged)
    train = ~(test | stop)
    if not (train.any() and test.any() and stop.any()):
        problem = "six are needed at least: to learn from, to stop by, to report on"
        raise OptionError("documents", problem, "Collect more")
    mean = logged.x[train].mean(0)
    scale = np.maximum(logged.x[train].std(0), 1e-3)
    x = torch.from_numpy((logged.x - mean) / scale)
    beyond = _beyond(logged.did, logged.arms).reshape(len(logged.did), -1)
    known, wanted = torch.from_numpy(np.isfinite(beyond)), torch.from_numpy(np.nan_to_num(beyond))
    counts = known[train].sum(0).clamp_min(1)
    middle = wanted[train].sum(0) / counts
    spread = (((wanted - middle)[train] ** 2 * known[train]).sum(0) / counts).sqrt().clamp_min(0.1)
    net = _net(x.shape[1], hidden, middle, seed)
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-2)

    def loss(rows: npt.NDArray[np.bool_]) -> torch.Tensor:
        gap = (net(x[rows]) - wanted[rows]) / spread
        mean: torch.Tensor = (gap * gap * known[rows]).sum() / known[rows].sum()
        return mean

    best, best_loss, patience = _layers(net), float("inf"), 0
    for _ in range(epochs):
        optimiser.zero_grad()
        now = loss(train)
        now.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        with torch.no_grad():
            at = float(loss(stop))
        if at < best_loss - 1e-5:
            best, best_loss, patience = _layers(net), at, 0
        elif (patience := patience + 1) > PATIENCE:
            break
    layers = _whole(best, logged.arms)
    made = ArmFile(logged.arms, mean, scale, layers, 1.0, facts)
    rho = best_price(logged, made, costs, stop)
    return ArmFile(logged.arms, mean, scale, layers, rho, {**facts, "loss": best_loss})


PATIENCE = 40
"""Times through the rows without gain on the documents to stop by."""


def _reference(name: str, arms: Sequence[str]) -> int | None:
    """The arm that `name` is learned beyond: copies vary much, and what is to be decided is what a
    question adds to them."""
    first = ""
    if name.startswith("copy+"):
        first = "copy"
    elif name.startswith(("tree-", "chain-")):
        first = "tree-1"
    return arms.index(first) if first in arms and first != name else None


def _beyond(did: Floats, arms: Sequence[str]) -> Floats:
    """What arms did, less what their references did."""
    out: Floats = did.copy()
    for at, name in enumerate(arms):
        reference = _reference(name, arms)
        if reference is not None:
            out[:, at] -= did[:, reference]
    return out


def _whole(
    layers: tuple[tuple[Floats, Floats], ...], arms: Sequence[str]
) -> tuple[tuple[Floats, Floats], ...]:
    """The network of `_beyond`'s numbers as one of what arms do: the last layer is linear."""
    weight, bias = (each.reshape(*each.shape[:-1], len(arms), 3).copy() for each in layers[-1])
    for at, name in enumerate(arms):
        reference = _reference(name, arms)
        if reference is not None:
            weight[:, at] += weight[:, reference]
            bias[at] += bias[reference]
    return (*layers[:-1], (weight.reshape(len(weight), -1), bias.reshape(-1)))


def _stopping(logged: Logged) -> npt.NDArray[np.bool_]:
    """Rows of another sixth of the documents, by which fitting stops."""
    stop: npt.NDArray[np.bool_] = logged.document % 6 == 4
    return stop


def _held_out(logged: Logged) -> npt.NDArray[np.bool_]:
    """Rows of every sixth document."""
    test: npt.NDArray[np.bool_] = logged.document % 6 == 5
    return test


def _net(width: int, hidden: int, start: torch.Tensor, seed: int) -> torch.nn.Sequential:
    """Two layers; its outputs begin at the means. The global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        net = torch.nn.Sequential(
            torch.nn.Linear(width, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, len(start))
        )
    last = net[-1]
    assert isinstance(last, torch.nn.Linear)
    with torch.no_grad():
        last.bias.copy_(start)
        last.weight.mul_(0.1)
    return net


def _layers(net: torch.nn.Sequential) -> tuple[tuple[Floats, Floats], ...]:
    return tuple(
        (each.weight.detach().numpy().T.copy(), each.bias.detach().numpy().copy())
        for each in net
        if isinstance(each, torch.nn.Linear)
    )


# -- scoring ---------------------------------------------------------------------------------------


def times(did: Floats, arms: Sequence[str], costs: ArmCosts) -> npt.NDArray[np.float64]:
    """Plain steps ``(n, arms)`` of what arms did."""
    out = np.empty(did.shape[:2])
    for at, name in enumerate(arms):
        _, rows, steps = did[:, at].T.astype(np.float64)
        if name == WALK.name:
            out[:, at] = rows
            continue
        verify = np.interp(1.0 + rows, np.arange(len(costs.verify)), costs.verify)
        asked = costs.question + costs.step * (steps - 1.0)
        out[:, at] = verify + np.where(steps > 0, asked, 0.0)
    return out


def best_price(
    logged: Logged, file: ArmFile, costs: ArmCosts, rows: npt.NDArray[np.bool_]
) -> float:
    """Tokens per plain step's time at which the choice by `file` earns just that price
    (Dinkelbach's iteration)."""
    said = file.predict(logged.x[rows]).astype(np.float64)
    did = logged.did[rows]
    spent = times(did, logged.arms, costs)
    promised = times(said.astype(np.float32), logged.arms, costs)
    rho = 1.0
    for _ in range(20):
        value = said[..., 0] - rho * promised
        value[~np.isfinite(spent)] = -np.inf
        choice = value.argmax(1)
        each = np.arange(len(choice))
        earned = float((1.0 + did[each, choice, 0]).sum() / spent[each, choice].sum())
        if abs(earned - rho) < 1e-4:
            break
        rho = earned
    return max(rho, 1.0)


def scores(logged: Logged, file: ArmFile, costs: ArmCosts) -> dict[str, float]:
    """Tokens per plain step's time over held-out documents, by arm, of the choice by `file`
    (``"chosen"``), and of the choice of who knows what will be kept (``"clairvoyant"``)."""
    rows = _held_out(logged)
    did = logged.did[rows]
    spent = times(did, logged.arms, costs)
    tokens = 1.0 + did[..., 0].astype(np.float64)
    found: dict[str, float] = {}
    for at, name in enumerate(logged.arms):
        ok = np.isfinite(spent[:, at])
        if ok.any():
            found[name] = float(tokens[ok, at].sum() / spent[ok, at].sum())
    found["chosen"] = best_price(logged, file, costs, rows)
    rho = 1.0
    for _ in range(20):
        value = np.where(np.isfinite(spent), tokens - rho * spent, -np.inf)
        choice, each = value.argmax(1), np.arange(len(value))
        rho = float(tokens[each, choice].sum() / spent[each, choice].sum())
    found["clairvoyant"] = rho
    return found

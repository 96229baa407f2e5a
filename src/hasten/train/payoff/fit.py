"""Fitting predictors: the paper's MLP, and a ridge regression that may do as well on little text.

The MLP is as published (two layers of 256, ReLU, squared error on the tokens kept, Adam at 1e-3, 20
times through the rows); the optimiser's kind and the missing weight decay are our reconstruction.
The published batch of 65,536 is for more rows than a small model's text has: smaller sets get more,
smaller batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hasten.errors import OptionError
from hasten.payoff.features import Floats
from hasten.payoff.predictor import MLP, RIDGE, Layers, with_products

BATCH = 65_536
STEPS = 64
"""Batches that an epoch has at least, where there are rows for them."""
LEAST_BATCH = 32
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
"""Of the ridge, times the number of rows."""


@dataclass(frozen=True, slots=True)
class FitOptions:
    """Of the MLP, the paper's by default. `batch` 0: 65,536, or what gives 64 steps an epoch."""

    epochs: int = 20
    batch: int = 0
    lr: float = 1e-3
    hidden: int = 256
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("epochs", "hidden"):
            if getattr(self, name) < 1:
                raise OptionError(name, f"must be at least 1, got {getattr(self, name)}")
        if self.batch < 0:
            raise OptionError("batch", f"must be at least 1 (or 0 for ours), got {self.batch}")
        if not 0 < self.lr < float("inf"):
            raise OptionError("lr", f"must be above 0, got {self.lr}")


@dataclass(frozen=True, slots=True)
class Scaled:
    """Features as a fit sees them: less `mean`, over `scale` (of the rows trained on)."""

    mean: Floats
    scale: Floats

    @classmethod
    def of(cls, x: Floats) -> Scaled:
        """Columns that never change are left as they are."""
        spread = x.std(0)
        scale = np.where(spread > 1e-6, spread, 1.0).astype(np.float32)
        return cls(x.mean(0).astype(np.float32), scale)

    def __call__(self, x: Floats) -> Floats:
        """Rows scaled alike."""
        out: Floats = (x - self.mean) / self.scale
        return out


Progress = Callable[[str, int, int], None]
"""``(what, done, total)``."""


def _silent(what: str, done: int, total: int) -> None:
    """Nobody watches."""


def fit_mlp(z: Floats, y: Floats, options: FitOptions, progress: Progress = _silent) -> Layers:
    """The network's layers, from scaled rows ``(n, F)`` and labels ``(n,)``. The same rows and seed
    give the same ones; the global generator is left as it was."""
    rows, labels = torch.from_numpy(z), torch.from_numpy(y)
    generator = torch.Generator().manual_seed(options.seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(options.seed)
        net = torch.nn.Sequential(
            torch.nn.Linear(z.shape[1], options.hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(options.hidden, options.hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(options.hidden, 1),
        )
    optimiser = torch.optim.Adam(net.parameters(), lr=options.lr)
    batch = options.batch or min(BATCH, max(LEAST_BATCH, len(rows) // STEPS))
    for epoch in range(options.epochs):
        order = torch.randperm(len(rows), generator=generator)
        for at in range(0, len(rows), batch):
            part = order[at : at + batch]
            optimiser.zero_grad()
            loss = torch.nn.functional.mse_loss(net(rows[part])[:, 0], labels[part])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        progress(MLP, epoch + 1, options.epochs)
    return tuple(
        (each.weight.detach().numpy().T.copy(), each.bias.detach().numpy().copy())
        for each in net
        if isinstance(each, torch.nn.Linear)
    )


def fit_ridge(
    z: Floats, y: Floats, z_val: Floats, y_val: Floats, progress: Progress = _silent
) -> Layers:
    """A linear layer over columns and their products in pairs; of `PENALTIES` the one with the
    least squared error on the validation rows."""
    gram, moment, mean = _moments(z, y)
    wide = with_products(z_val)
    best: tuple[float, npt.NDArray[Any]] | None = None
    for number, penalty in enumerate(PENALTIES):
        system = gram + penalty * len(z) * np.eye(len(gram))
        weight = np.linalg.solve(system, moment)
        error = float(np.square(wide @ weight + mean - y_val).mean())
        if best is None or error < best[0]:
            best = (error, weight)
        progress(RIDGE, number + 1, len(PENALTIES))
    assert best is not None
    bias = np.array([mean], np.float32)
    return ((best[1].astype(np.float32)[:, None], bias),)


def _moments(
    z: Floats, y: Floats
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], float]:
    """Products of the wide columns with each other and with the labels, which are centred; a part
    of the rows at a time, so that the wide ones are never all there."""
    mean = float(y.mean())
    gram: npt.NDArray[np.float64] | None = None
    moment: npt.NDArray[np.float64] | None = None
    for at in range(0, len(z), 8192):
        wide = with_products(z[at : at + 8192]).astype(np.float64)
        part, pull = wide.T @ wide, wide.T @ (y[at : at + 8192] - mean)
        gram = part if gram is None else gram + part
        moment = pull if moment is None else moment + pull
    assert gram is not None
    assert moment is not None
    return gram, moment, mean

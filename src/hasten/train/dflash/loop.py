"""Optimiser steps that can be stopped: after a restart the weights are those of an unbroken run.

What a step sees (texts, anchors) is a function of the seed and of the run's *place*: stage, epoch,
batch. A checkpoint holds the place, the weights, the optimiser and the loss curve. Where minutes
bound a stage the learning rate follows the clock, and only then weights vary from run to run.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from hasten.dflash.net import DFlashNet
from hasten.errors import OptionError
from hasten.train.dflash.feed import Batch, Feed, Log
from hasten.train.dflash.files import replacing
from hasten.train.dflash.objectives import Step
from hasten.train.dflash.options import Options

CHECKPOINT = "training.pt"
CURVE = "curve.json"
EVERY_S = 120.0
"""Between checkpoints."""
NOTE_EVERY = 10
"""Steps between points of the loss curve."""


@dataclass(slots=True)
class Place:
    """Where a run stands: in which stage, and in it the round, epoch and batch that come next, the
    steps done, and the seconds they took."""

    stage: str = ""
    round: int = 0
    epoch: int = 0
    batch: int = 0
    step: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """When a stage is over: after so many steps, or minutes. Rates fall from 1 to `end` along a
    cosine, after a `warmup` share of the way; with end = 1 they stay."""

    steps: int
    minutes: float = math.inf
    warmup: float = 0.0
    end: float = 1.0

    def progress(self, place: Place) -> float:
        """How far a stage is, by the limit that is nearer; over at 1."""
        by_steps = place.step / self.steps if self.steps else 1.0
        return max(by_steps, place.seconds / 60.0 / self.minutes)

    def rate(self, place: Place) -> float:
        """The factor of the learning rate."""
        progress = min(self.progress(place), 1.0)
        if progress < self.warmup:
            return max(progress / self.warmup, 0.02)
        rest = (progress - self.warmup) / (1.0 - self.warmup)
        return self.end + (1.0 - self.end) * 0.5 * (1.0 + math.cos(math.pi * rest))


@dataclass(slots=True)
class Curve:
    """The loss curve: a point every few steps, of means since the last."""

    points: list[dict[str, Any]] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    """Since the last point."""
    count: int = 0

    def add(self, place: Place, step: Step, rate: float) -> dict[str, Any] | None:
        """One step; the point that it completes."""
        facts = {"loss": float(step.loss.detach()), "slots": float(step.slots), **step.facts}
        for name, value in facts.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.count += 1
        if place.step % NOTE_EVERY:
            return None
        means = {name: round(value / self.count, 6) for name, value in self.sums.items()}
        point = {"stage": place.stage, "round": place.round, "step": place.step}
        point |= {"minutes": round(place.seconds / 60, 3), "lr": rate, **means}
        self.points.append(point)
        self.sums, self.count = {}, 0
        return point

    def cut(self) -> None:
        """Leave out the steps since the last point: the next ones are another stage's."""
        self.sums, self.count = {}, 0


class Trainer:
    """The network, its optimiser, and where the run stands.

    folder  gets the checkpoint and the curve
    digest  of all that a continued run must have in common with the one it continues
    device  where steps run; facts: what stages want to keep with the checkpoint

    Raises OptionError when the folder holds another run's checkpoint.
    """

    def __init__(
        self,
        net: DFlashNet,
        folder: Path,
        digest: str,
        options: Options,
        *,
        device: torch.device,
        log: Log = lambda row: None,
        every_s: float = EVERY_S,
    ) -> None:
        self.net, self.place, self.curve = net, Place(), Curve()
        self.facts: dict[str, Any] = {}
        self._folder, self._digest, self._options = folder, digest, options
        self._device, self._log, self._every_s = device, log, every_s
        self._saved = time.monotonic()
        self._parts: list[list[nn.Parameter]] = []
        self._bounds = Bounds(0)
        self._optimizer: torch.optim.AdamW | None = None
        self._scheduler: LambdaLR | None = None
        self._rate = 0.0
        self._held: dict[str, Any] = {}
        self._restore()

    def begin(
        self, stage: str, parts: Sequence[tuple[Iterable[nn.Parameter], float]], bounds: Bounds
    ) -> None:
        """Start a stage, or go on with it: AdamW over `parts`, each with its learning rate and a
        gradient norm of its own to clip. Matrices decay, vectors don't."""
        if self.place.stage != stage:
            self.place, self._held = Place(stage), {}
            self.curve.cut()
        self._parts, groups = [list(parameters) for parameters, _ in parts], []
        for own, (_, lr) in zip(self._parts, parts, strict=True):
            matrices, vectors = [p for p in own if p.dim() > 1], [p for p in own if p.dim() < 2]
            decay = self._options.weight_decay
            groups.append({"params": matrices, "weight_decay": decay, "lr": lr})
            groups.append({"params": vectors, "weight_decay": 0.0, "lr": lr})
        self._bounds = bounds
        self._optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
        self._scheduler = LambdaLR(self._optimizer, lambda _: bounds.rate(self.place))
        if self._held:
            self._optimizer.load_state_dict(self._held["optimizer"])
            self._scheduler.load_state_dict(self._held["scheduler"])
            self._held = {}

    def over(self) -> bool:
        """Whether the stage is."""
        return self._bounds.progress(self.place) >= 1.0

    def run(
        self, feed: Feed, objective: Callable[[Batch, int], Step], *, epochs: int | None = None
    ) -> None:
        """Steps over the feed's texts, from the run's place on, until `epochs` are over (None: as
        many as it takes) or the stage is. Ctrl-C in a step keeps those before it."""
        place = self.place
        started, before = time.monotonic(), place.seconds
        for group in self._groups(feed, epochs):
            if self.over():
                return
            try:
                step = self._learn(feed, group, objective)
            except KeyboardInterrupt:
                self.save()  # nothing of this step is in the weights yet
                raise
            self._apply()
            place.seconds = before + time.monotonic() - started
            point = self.curve.add(place, step, self._rate)
            if point is not None:
                self._log(point)
            if time.monotonic() - self._saved > self._every_s:
                self.save()

    def _groups(self, feed: Feed, epochs: int | None) -> Iterator[list[int]]:
        """The batches that are left: the place says which comes next, whenever it is saved."""
        place = self.place
        while epochs is None or place.epoch < epochs:
            groups = feed.groups(place.epoch)
            while place.batch < len(groups):
                yield groups[place.batch]
            place.epoch, place.batch = place.epoch + 1, 0

    def _learn(
        self, feed: Feed, group: Sequence[int], objective: Callable[[Batch, int], Step]
    ) -> Step:
        """The loss of a group of texts and its gradients; no weight changes."""
        assert self._optimizer is not None
        place = self.place
        key = (self._options.seed, place.stage, place.round, place.epoch, place.batch)
        with torch.autocast(
            self._device.type, dtype=torch.bfloat16, enabled=self._options.autocast
        ):
            step = objective(feed.load(group), zlib.crc32(repr(key).encode()))
        self._optimizer.zero_grad(set_to_none=True)
        step.loss.backward()  # type: ignore[no-untyped-call]
        return step

    def _apply(self) -> None:
        """Change the weights by their gradients, and count the step."""
        assert self._optimizer is not None
        assert self._scheduler is not None
        for part in self._parts:
            torch.nn.utils.clip_grad_norm_(part, self._options.grad_clip)
        self._rate = self._optimizer.param_groups[0]["lr"]
        self._optimizer.step()
        self.place.step += 1
        self.place.batch += 1
        self._scheduler.step()

    # -- stopping and going on -------------------------------------------------------------------

    def save(self) -> None:
        """Write the checkpoint and the curve; each is whole or not there. Raises OptionError where
        that fails."""
        assert self._optimizer is not None
        assert self._scheduler is not None
        self._saved = time.monotonic()
        state = {
            "digest": self._digest,
            "place": asdict(self.place),
            "net": self.net.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scheduler": self._scheduler.state_dict(),
            "curve": asdict(self.curve),
            "facts": json.dumps(self.facts),
        }
        with replacing(self._folder / CHECKPOINT) as scratch, scratch.open("wb") as file:
            torch.save(state, file)
        self.write_curve()

    def write_curve(self) -> None:
        """Write the loss curve alone, a JSON list of points, into a folder that may be new."""
        with replacing(self._folder / CURVE) as scratch:
            scratch.write_text(json.dumps(self.curve.points, indent=0) + "\n")

    def _restore(self) -> None:
        path = self._folder / CHECKPOINT
        if not path.is_file():
            return
        try:
            state = torch.load(path, map_location=self._device, weights_only=True)
            same = state["digest"] == self._digest
        except _UNREADABLE as error:
            raise _unreadable(path, error) from None
        if not same:
            raise OptionError(
                "out",
                f"{self._folder} holds a run with other options, data or model",
                f"Name another folder, or remove {CHECKPOINT} there to begin anew",
            )
        try:
            self.net.load_state_dict(state["net"])
            self.place, self.curve = Place(**state["place"]), Curve(**state["curve"])
            self.facts = json.loads(state["facts"])
            self._held = {name: state[name] for name in ("optimizer", "scheduler")}
        except _UNREADABLE as error:
            raise _unreadable(path, error) from None


_UNREADABLE = (
    OSError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, EOFError,
    UnpicklingError,
)  # fmt: skip
"""What a checkpoint that is cut off, damaged or something else may raise."""


def _unreadable(path: Path, error: Exception) -> OptionError:
    return OptionError("out", f"{path} can't be read ({error})", "Remove it to begin anew")

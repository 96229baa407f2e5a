"""The learned arbiter: a small function of a mismatch, and its file.

A file belongs to one target and one draft, which its description names; an arbiter of others is
refused. Deciding needs no autograd; `standardise` and `forward` are what training differentiates.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hasten.arbitration.features import SCALARS
from hasten.errors import ModelError

FORMAT = 1
KINDS = ("linear", "mlp")
NAME = "arbiter"
"""Of the files in a folder."""
STD_FLOOR = 1e-3
WIDTH, PROJECTED = 32, 16
"""Hidden units of the MLP; numbers that hidden states are projected to."""

Weights = Mapping[str, torch.Tensor]


def standardise(scalars: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Scalars ``(n, 18)`` with mean 0 and deviation 1 on the training set."""
    return (scalars - mean) / std


def inputs(
    scalars: torch.Tensor,
    mean: torch.Tensor,
    std: torch.Tensor,
    hidden: torch.Tensor | None = None,
    project: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `forward` takes, ``(n, 18)`` or ``(n, 34)``: scalars standardised, and hidden states
    ``(n, size)`` projected by ``(16, size)``."""
    made = standardise(scalars, mean, std)
    if project is None:
        return made
    if hidden is None:
        raise ModelError("this arbiter looks at hidden states, and none were given")
    return torch.cat([made, hidden.to(project.dtype) @ project.T], 1)


def forward(weights: Weights, kind: str, x: torch.Tensor) -> torch.Tensor:
    """The logit of keeping the draft's token, ``(n,)``; `x` is what `inputs` gives."""
    if kind == "linear":
        return x @ weights["w"] + weights["b"]
    return F.gelu(x @ weights["w1"].T + weights["b1"]) @ weights["w2"] + weights["b2"]


@dataclass(frozen=True, eq=False)
class Arbiter:
    """An arbiter as it decides. Raises ModelError for tensors that don't fit `kind`.

    kind         ``"linear"``: w ``(D,)``, b ``()``; ``"mlp"``: w1 ``(32, D)``, b1 ``(32,)``, w2
                 ``(32,)``, b2 ``()``; D is 18, or 34 with project ``(16, size of hidden)``; float32
    mean, std    of the scalars on the training set, ``(18,)``; std is at least 1e-3
    theta        the draft's token is kept where the chance is at least this
    gate         the draft's token must have so much of the target's law; 0: none
    consecutive  overrides in a row at most; 0: no limit
    fallback     on validation it was no better than the target alone: it keeps nothing
    meta         what it was trained for and on: ``target`` and ``draft`` (fingerprints), ``length``
                 (K), and what people want to know
    """

    kind: str
    weights: Weights
    mean: torch.Tensor
    std: torch.Tensor
    theta: float = 0.5
    gate: float = 1e-3
    consecutive: int = 8
    fallback: bool = False
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        weights = {name: _plain(value) for name, value in self.weights.items()}
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "mean", _plain(self.mean))
        object.__setattr__(self, "std", _plain(self.std).clamp_min(STD_FLOOR))
        if problem := self._problem():
            raise ModelError(f"not an arbiter that can be used: {problem}")

    def _problem(self) -> str:
        if self.kind not in KINDS:
            return f"unknown kind {self.kind!r}, one of {', '.join(KINDS)}"
        project = self.weights.get("project")
        width = len(SCALARS) + (0 if project is None else PROJECTED)
        shapes: dict[str, tuple[int, ...]] = {"w": (width,), "b": ()}
        if self.kind == "mlp":
            shapes = {"w1": (WIDTH, width), "b1": (WIDTH,), "w2": (WIDTH,), "b2": ()}
        if project is not None:
            shapes["project"] = (PROJECTED, project.shape[-1] if project.dim() == 2 else -1)
        found = {name: tuple(value.shape) for name, value in self.weights.items()}
        if found != shapes:
            return f"tensors {found}, wanted {shapes}"
        if self.mean.shape != self.std.shape or self.mean.shape != (len(SCALARS),):
            return f"mean and std need {len(SCALARS)} numbers each"
        numbers = (*self.weights.values(), self.mean, self.std)
        if not all(bool(torch.isfinite(value).all()) for value in numbers):
            return "it holds numbers that aren't finite"
        return "" if self._limits_ok() else "theta, gate or consecutive is out of range"

    def _limits_ok(self) -> bool:
        chances = math.isfinite(self.theta) and self.theta >= 0 and 0 <= self.gate < 1
        return chances and self.consecutive >= 0

    @property
    def needs_hidden(self) -> bool:
        """Whether it looks at hidden states."""
        return "project" in self.weights

    @torch.no_grad()
    def logits(self, scalars: Any, hidden: Any = None) -> torch.Tensor:
        """Float32 ``(n,)`` for scalars ``(n, 18)`` and hidden states ``(n, size)``."""
        states = None if hidden is None else torch.as_tensor(hidden, dtype=torch.float32)
        rows = torch.as_tensor(scalars, dtype=torch.float32)
        x = inputs(rows, self.mean, self.std, states, self.weights.get("project"))
        return forward(self.weights, self.kind, x)

    def chance(self, scalars: Any, hidden: Any = None) -> torch.Tensor:
        """The chance that the draft's token is the one to keep, ``(n,)``."""
        return torch.sigmoid(self.logits(scalars, hidden))

    # -- files -----------------------------------------------------------------------------------

    def save(self, place: str | Path) -> Path:
        """Write two files: NAME.safetensors and NAME.json, where `place` names one of them, or
        ``arbiter.*`` in the folder `place`. Each is whole or not there. Gives the description's
        path. Raises ModelError without the marks of target and draft."""
        for name in ("target", "draft"):
            if not self.meta.get(name):
                raise ModelError(f"an arbiter's meta must name its {name}'s fingerprint")
        description, tensors = _paths(Path(place))
        description.parent.mkdir(parents=True, exist_ok=True)
        values = {**{f"weights.{k}": v for k, v in self.weights.items()}}
        values |= {"mean": self.mean, "std": self.std}
        scratch = description.parent / f".{os.getpid()}.tmp"
        save_file({name: value.contiguous() for name, value in values.items()}, scratch)
        scratch.replace(tensors)
        scratch.write_text(json.dumps(self._description(), indent=1) + "\n")
        scratch.replace(description)
        return description

    def _description(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "kind": self.kind,
            "theta": self.theta,
            "gate": self.gate,
            "consecutive": self.consecutive,
            "fallback": self.fallback,
            "meta": dict(self.meta),
        }

    @classmethod
    def load(cls, place: str | Path) -> Arbiter:
        """Read one: a folder, or either file. Raises ModelError, which names it."""
        description, tensors = _paths(Path(place))
        try:
            said = json.loads(description.read_text())
            if said["format"] != FORMAT:
                raise ModelError(f"format {said['format']}, this version reads {FORMAT}")
            with safe_open(tensors, framework="pt") as file:
                raw = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            mean, std = raw.pop("mean"), raw.pop("std")
            weights = {name.removeprefix("weights."): value for name, value in raw.items()}
            return cls(
                str(said["kind"]),
                weights,
                mean,
                std,
                float(said["theta"]),
                float(said["gate"]),
                _whole(said, "consecutive", 0),
                _switch(said, "fallback"),
                _meta(said),
            )
        except _UNREADABLE as error:
            raise ModelError(
                f"{place} holds no arbiter that can be read ({error}). It should be what `hasten "
                f"train arbiter` writes: {description.name} and {tensors.name}"
            ) from None


_UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError,
    ModelError,
)  # fmt: skip
"""What a file that is missing, cut off or of another kind may raise."""


def _whole(said: Mapping[str, Any], name: str, least: int) -> int:
    value = said[name]
    if type(value) is not int or value < least:
        raise ModelError(f"{name} must be a whole number, at least {least}, got {value!r}")
    return value


def _switch(said: Mapping[str, Any], name: str) -> bool:
    value = said[name]
    if not isinstance(value, bool):  # bool("false") would be True
        raise ModelError(f"{name} must be true or false, got {value!r}")
    return value


def _meta(said: Mapping[str, Any]) -> dict[str, Any]:
    meta = dict(said["meta"])
    if "length" in meta:
        _whole(meta, "length", 1)
    return meta


def _plain(value: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(value).detach().to("cpu", torch.float32)


def _paths(place: Path) -> tuple[Path, Path]:
    """The description's and the tensors' paths."""
    place = place.expanduser()  # no shell does it after `cospec,arbiter=`
    stem = place.with_suffix("") if place.suffix in (".json", ".safetensors") else place / NAME
    return stem.with_name(stem.name + ".json"), stem.with_name(stem.name + ".safetensors")


def check_belongs(
    arbiter: Arbiter, *, target: str, draft: str, where: str, model: str = "this model"
) -> None:
    """Raise ModelError when it was trained for another model, or for another draft."""
    hint = "Name its own (arbiter=FILE), train one with `hasten train arbiter`, or choose a rule"
    if not target or arbiter.meta.get("target") != target:
        raise ModelError(
            f"the arbiter in {where} was trained for other weights than {model}'s. {hint}"
        )
    if arbiter.meta.get("draft") != draft:
        raise ModelError(
            f"the arbiter in {where} was trained for another draft than the one asked for "
            f"({arbiter.meta.get('draft')}, not {draft}). {hint}"
        )


def shipped(target: str, draft: str) -> Arbiter | None:
    """The arbiter that came with the package for this model and draft; None: there is none."""
    root = files("hasten") / "assets"
    if not target or not root.is_dir():
        return None
    with as_file(root) as folder:
        for path in sorted(folder.glob("*/arbiter/**/*.json")):
            if not _paths(path)[1].is_file():  # a table, or a curve, beside them
                continue
            meta = json.loads(path.read_text()).get("meta", {})
            if (meta.get("target"), meta.get("draft")) == (target, draft):
                return Arbiter.load(path)
    return None

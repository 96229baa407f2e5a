"""LEDE's agent: a small network over the features of a decision, in numpy, and its file.

Trained off line (`hasten.train.lede`), folded to plain products: the noise is off, the two streams
are one layer, features are standardised by the first. The file says which weights, exit modules,
layers, features and draft length it belongs to; anything else is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hasten.errors import ModelError
from hasten.policies.exits import ExitCosts
from hasten.policies.lede_features import FEATURES, VERSION, FeatureFacts, Floats, Prior

if TYPE_CHECKING:
    from hasten.exits.store import Stored
    from hasten.targets.base import TargetInfo

FORMAT = 1
CONTINUE, EXIT = 0, 1
"""The two actions: go on (deeper, or to verification), and take this row's token."""
SHIPPED = "lede.npz"
"""Name of an agent's file in the package's assets."""
_AGAIN = "Train one for these (`hasten train lede fit`), or name the file that belongs to them"


def modules_digest(stored: Stored | None, layers: Sequence[int]) -> str:
    """What tells the exit modules at `layers` (and their draft vocabulary) from others, exit by
    exit, joined by ``+``; None: exits with the model's own head."""
    if stored is None:
        return "+".join(f"own-{layer}" for layer in layers)
    return "+".join(_digest(stored, layer) for layer in layers)


def _digest(stored: Stored, layer: int) -> str:
    digest = hashlib.sha256(np.array(stored.ids, dtype=np.int64).tobytes())
    config = next(each for each in stored.configs if each.layer == layer)
    digest.update(json.dumps(config.to_json(), sort_keys=True).encode())
    for name in sorted(config.shapes()):
        digest.update(_pattern(stored.tensors[f"{layer}.{name}"].float().numpy()))
    return digest.hexdigest()[:16]


def _pattern(tensor: Floats) -> bytes:
    """Of a matrix the 8-bit integers that it is stored as: they survive being read and written
    again with other modules, which may change scales in their last bit."""
    if tensor.ndim == 2:
        largest = np.maximum(np.abs(tensor).max(1, keepdims=True), 1e-12)
        pattern: bytes = np.rint(tensor * (127.0 / largest)).astype(np.int8).tobytes()
        return pattern
    return np.ascontiguousarray(tensor).tobytes()


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What an agent belongs to, and how it was made.

    fingerprint  of the target's weights; modules: `modules_digest`
    layers       of the candidate exits; num_layers: of the target; steps: the longest draft
    features     names of those it looks at; version: of their meaning
    costs        those it was trained with, in plain steps
    rho          tokens a plain step's time was worth at the end of training
    notes        for people to read
    """

    fingerprint: str
    modules: str
    layers: tuple[int, ...]
    num_layers: int
    steps: int
    costs: ExitCosts
    rho: float = 1.0
    features: tuple[str, ...] = FEATURES
    version: int = VERSION
    notes: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """As JSON text."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> AgentFacts:
        """Raises ValueError, KeyError or TypeError for other text."""
        data = json.loads(text)
        if data.pop("format") != FORMAT:
            raise ValueError("it was made by another version of hasten")
        costs = data.pop("costs")
        names = ("layer", "probe", "verify")
        tables = {name: tuple(float(x) for x in costs[name]) for name in names}
        data["costs"] = ExitCosts(**tables, layers=int(costs["layers"]))
        data["layers"], data["features"] = tuple(data["layers"]), tuple(data["features"])
        return cls(**data)


@dataclass(frozen=True, slots=True)
class LedeAgent:
    """The agent: products of a plain network with ReLU between them.

    weights  float32 ``(out, in)`` each; the first takes all of `FEATURES` as they are (columns of
             those not looked at are 0), the last gives the two values
    biases   float32 ``(out,)``
    rates, length  running means at a request's start (`FeatureFacts`)

    Values are tokens, less what the round's time is worth. Raises ModelError for weights that don't
    fit each other or hold NaN.
    """

    facts: AgentFacts
    weights: tuple[Floats, ...]
    biases: tuple[Floats, ...]
    prior: Prior
    rates: tuple[float, ...]
    length: float

    def __post_init__(self) -> None:
        sizes = [w.shape for w in self.weights]
        ins = [size[1] for size in sizes] == [len(FEATURES), *(size[0] for size in sizes[:-1])]
        outs = [b.shape for b in self.biases] == [size[:1] for size in sizes]
        if not sizes or not ins or not outs or sizes[-1][0] != 2:
            raise ModelError(f"an agent's weights don't fit each other: {sizes}")
        numbers = (*self.weights, *self.biases, self.prior.values, self.prior.mean)
        if not all(np.isfinite(each).all() for each in numbers):
            raise ModelError("an agent's weights hold NaN or infinity: its training failed")

    # -- deciding --------------------------------------------------------------------------------

    def q_values(self, features: Floats) -> tuple[float, float]:
        """Values of going on and of taking the row's token, from float32 ``(20,)``."""
        x = features
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = weight.dot(x)
            x += bias
            np.maximum(x, 0.0, out=x)
        go_on, take = self.weights[-1].dot(x) + self.biases[-1]
        return float(go_on), float(take)

    def q_batch(self, features: Floats) -> Floats:
        """The same for float32 ``(20, n)``: ``(2, n)``."""
        x = features
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = weight @ x
            x += bias[:, None]
            np.maximum(x, 0.0, out=x)
        values: Floats = self.weights[-1] @ x + self.biases[-1][:, None]
        return values

    def leaves(self, features: Floats) -> bool:
        """Whether the row's token should be taken."""
        go_on, take = self.q_values(features)
        return take > go_on

    def feature_facts(self, costs: ExitCosts | None = None) -> FeatureFacts:
        """For features: with `costs` of this machine, or those of training."""
        facts = self.facts
        own = costs or facts.costs
        return FeatureFacts(facts.layers, own, self.rates, self.length, self.prior, facts.steps)

    # -- what it belongs to ----------------------------------------------------------------------

    def check(
        self,
        info: TargetInfo,
        *,
        modules: str,
        layers: Sequence[int],
        steps: int,
        costs: ExitCosts | None = None,
        where: str = "the agent",
    ) -> None:
        """Raise ModelError, which says what differs, unless it was trained for this target, these
        exit modules (`modules_digest`) at these layers, and drafts of at most `steps`. Other costs
        are fine (features carry them), if they are of the same exits."""
        facts = self.facts
        if facts.fingerprint != info.fingerprint or not info.fingerprint:
            raise ModelError(f"{where} belongs to other weights than {info.name}'s. {_AGAIN}")
        if tuple(layers) != facts.layers or info.num_layers != facts.num_layers:
            found = (
                f"exits at {facts.layers} of {facts.num_layers} layers, not {tuple(layers)} "
                f"of {info.num_layers}"
            )
            raise ModelError(f"{where} was trained for {found}. {_AGAIN}")
        if modules != facts.modules:
            raise ModelError(f"{where} was trained with other exit modules. {_AGAIN}")
        if not 1 <= steps <= facts.steps:
            found = f"drafts of at most {facts.steps} tokens, not {steps}"
            raise ModelError(f"{where} was trained for {found}. {_AGAIN}")
        if facts.version != VERSION or not set(facts.features) <= set(FEATURES):
            raise ModelError(
                f"{where} looks at features of version {facts.version}, this is {VERSION}. "
                "Train it again, or use the version of hasten that made it"
            )
        if costs is not None:
            sizes = (len(costs.layer), costs.layers, len(costs.verify) >= facts.steps + 2)
            if sizes != (len(facts.layers), facts.num_layers, True):
                raise ModelError(f"{where}: the cost table is of other exits or too few rows")

    # -- file ------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the file: whole, or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {"facts": np.array(self.facts.to_json())}
        for at, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            arrays[f"weight{at}"], arrays[f"bias{at}"] = weight, bias
        prior = self.prior
        arrays |= {"prior_ids": prior.ids.astype(np.int32), "prior_mean": prior.mean}
        arrays |= {"prior": prior.values.astype(np.float16)}
        arrays |= {"rates": np.array(self.rates), "length": np.array(self.length)}
        scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with scratch.open("wb") as file:
            np.savez_compressed(file, **arrays)
        scratch.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> LedeAgent:
        """Read a file. Raises ModelError, which says what is wrong and names the file."""
        try:
            with Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                count = sum(name.startswith("weight") for name in file.files)
                return cls(
                    AgentFacts.from_json(str(file["facts"])),
                    tuple(_numbers(file[f"weight{at}"]) for at in range(count)),
                    tuple(_numbers(file[f"bias{at}"]) for at in range(count)),
                    Prior(
                        file["prior_ids"].astype(np.int64),
                        _numbers(file["prior"]),
                        _numbers(file["prior_mean"]),
                    ),
                    tuple(file["rates"].tolist()),
                    float(file["length"]),
                )
        except _UNREADABLE as error:
            raise ModelError(
                f"{path} holds no agent that can be read ({error}). It should be a file that "
                "`hasten train lede fit` has written"
            ) from None


_UNREADABLE = (
    OSError, ValueError, KeyError, IndexError, TypeError, EOFError, zipfile.BadZipFile, ModelError
)  # fmt: skip
"""What a file that is missing, cut off or of another kind may raise."""


def _numbers(array: Any) -> Floats:
    return np.ascontiguousarray(array, dtype=np.float32)


def shipped(info: TargetInfo, name: str = SHIPPED) -> LedeAgent | None:
    """The agent that came with the package for these weights; None when there is none."""
    root = files("hasten") / "assets"
    if not info.fingerprint or not root.is_dir():
        return None
    for folder in root.iterdir():
        if (folder / name).is_file():
            with as_file(folder / name) as path:
                agent = LedeAgent.load(path)
            if agent.facts.fingerprint == info.fingerprint:
                return agent
    return None

"""The payoff predictor: how many tokens of a copied draft will be kept. Its file and its checks.

A predictor belongs to a model (its text is what was learned), to a tokenizer (kinds of tokens are
columns) and to the options of the cache (a score means something else with others).
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np

from hasten.drafters.suffix import Suffix
from hasten.errors import ModelError, OptionError
from hasten.payoff.features import FEATURES, Floats
from hasten.targets.base import TargetInfo

FORMAT = 1
MLP, RIDGE = "mlp", "ridge"
KINDS = (MLP, RIDGE)
SHIPPED = "payoff.npz"
"""Name of a predictor in the package's assets."""
AGAIN = "Train one with `hasten train payoff`"


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The cache that a predictor judges: suffix decoding in mode ``path``, of one request's text.
    Named as the options of `hvd`; the defaults are the paper's, as far as they are known (the
    factor isn't).
    """

    longest: int = 64
    max_tree_depth: int = 64
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1

    def check(self, owner: str = "") -> CacheOptions:
        """These options. Raises OptionError, naming `owner` + the option, for one out of range."""
        for name, ok, rule in (
            ("longest", self.longest >= 1, "at least 1"),
            ("max_tree_depth", self.max_tree_depth >= 2, "at least 2"),
            ("max_spec_factor", 0 <= self.max_spec_factor < float("inf"), "at least 0 and finite"),
            ("min_token_prob", 0 < self.min_token_prob <= 1, "in (0, 1]"),
        ):
            if not ok:
                raise OptionError(f"{owner}{name}", f"must be {rule}, got {getattr(self, name)!r}")
        return self

    def cache(self, eos_ids: frozenset[int]) -> Suffix:
        """A request's cache."""
        return Suffix(
            mode="path",
            depth=self.max_tree_depth,
            factor=self.max_spec_factor,
            least=self.min_token_prob,
            eos_ids=eos_ids,
        )


Layers = tuple[tuple[Floats, Floats], ...]


@dataclass(frozen=True, slots=True)
class Predictor:
    """A fitted predictor: data, kept as ``.npz``.

    kind          ``mlp``: layers with ReLU between them; ``ridge``: one layer over columns and
                  their products in pairs
    mean, scale   of the features, ``(F,)``
    layers        weights ``(in, out)`` and biases ``(out,)``; the last has one output
    cache         the options that it was trained for
    facts         ``target`` (fingerprint of the weights) and ``tokenizer``
                  (`hasten.payoff.features.digest_of`); more for people
    """

    kind: str
    mean: Floats
    scale: Floats
    layers: Layers
    cache: CacheOptions
    facts: Mapping[str, Any]

    def predict(self, x: Floats) -> Floats:
        """Tokens expected to be kept, ``(...,)``, from features ``(..., F)``. Of a draft of L
        tokens never more than L, and never less than none."""
        out: Floats = (x - self.mean) / self.scale
        if self.kind == RIDGE:
            out = with_products(out)
        for weight, bias in self.layers[:-1]:
            out = np.maximum(out @ weight + bias, 0.0)
        weight, bias = self.layers[-1]
        made: Floats = np.clip((out @ weight + bias)[..., 0], 0.0, x[..., _LENGTH])
        return made

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all."""
        path = Path(path)
        scratch = path.with_name(f".{path.name}.tmp")
        meta = {
            "format": FORMAT,
            "kind": "payoff",
            "model": self.kind,
            "features": FEATURES,
            "cache": asdict(self.cache),
            "facts": dict(self.facts),
        }
        arrays = {"mean": self.mean, "scale": self.scale}
        for number, (weight, bias) in enumerate(self.layers):
            arrays |= {f"weight{number}": weight, f"bias{number}": bias}
        with scratch.open("wb") as file:
            np.savez(file, meta=np.array(json.dumps(meta)), **arrays)  # type: ignore[arg-type]
        scratch.replace(path)


_LENGTH = FEATURES.index("length")
_UPPER = np.triu_indices(len(FEATURES))


def with_products(z: Floats) -> Floats:
    """Columns ``(..., F)`` and their products in pairs, squares too."""
    first, second = _UPPER
    return np.concatenate([z, z[..., first] * z[..., second]], axis=-1)


def width_of(kind: str) -> int:
    """Inputs of a kind's first layer."""
    return len(FEATURES) + (len(_UPPER[0]) if kind == RIDGE else 0)


# -- reading ---------------------------------------------------------------------------------------


def read(file: str | Path, where: str) -> Predictor:
    """A file's predictor. Raises ModelError, naming `where`, when it can't be read or used."""
    try:
        with Path(file).open("rb") as opened, np.load(opened, allow_pickle=False) as raw:
            meta = json.loads(str(raw["meta"]))
            arrays = {name: raw[name].astype(np.float32) for name in raw.files if name != "meta"}
        if meta["kind"] != "payoff" or meta["format"] != FORMAT:
            raise ValueError(f"it is {meta['kind']!r} of format {meta['format']}")
        if tuple(meta["features"]) != FEATURES:
            raise ValueError("it was fitted on other features than this version of hasten has")
        count = sum(name.startswith("weight") for name in arrays)
        layers = tuple((arrays[f"weight{n}"], arrays[f"bias{n}"]) for n in range(count))
        cache = CacheOptions(**meta["cache"]).check()
        made = Predictor(
            meta["model"], arrays["mean"], arrays["scale"], layers, cache, dict(meta["facts"])
        )
        _check(made)
        return made
    except (
        OSError, EOFError, ValueError, KeyError, TypeError, IndexError, zipfile.BadZipFile,
    ) as error:  # fmt: skip
        problem = f"{where} holds no payoff predictor that can be used ({error})"
        raise ModelError(f"{problem}. {AGAIN}") from None


def _check(made: Predictor) -> None:
    """Raise ValueError unless the sizes fit and all numbers are finite."""
    if made.kind not in KINDS or not made.layers or (made.kind == RIDGE and len(made.layers) > 1):
        raise ValueError(f"{made.kind!r} is no kind of predictor, or not with these layers")
    if any(size != (len(FEATURES),) for size in (made.mean.shape, made.scale.shape)):
        raise ValueError("its sizes don't fit its features")
    width = width_of(made.kind)
    for weight, bias in made.layers:
        if weight.ndim != 2 or weight.shape[0] != width or bias.shape != weight.shape[1:]:
            raise ValueError("its layers don't fit each other")
        width = weight.shape[1]
    if width != 1:
        raise ValueError("it must have one output")
    numbers: Sequence[Floats] = [made.mean, *(each for layer in made.layers for each in layer)]
    if not all(np.isfinite(each).all() for each in (*numbers, made.scale)):
        raise ValueError("some of its numbers aren't finite")
    if not (made.scale > 0).all():
        raise ValueError("some of its scales aren't positive")


def shipped(info: TargetInfo) -> Predictor | None:
    """The predictor that came with the package for these weights; None when there is none."""
    root = files("hasten") / "assets"
    if not info.fingerprint or not root.is_dir():
        return None
    for folder in root.iterdir():
        if (folder / SHIPPED).is_file():
            with as_file(folder / SHIPPED) as path:
                made = read(Path(path), str(folder))
            if made.facts.get("target") == info.fingerprint:
                return made
    return None


def find(file: str, info: TargetInfo, tokenizer: str, cache: CacheOptions) -> Predictor:
    """The predictor in `file` (empty: the one shipped), checked against the model, the tokenizer
    (its digest) and the cache. Raises OptionError or ModelError before anything has run."""
    where = file or "the package"
    made = read(Path(file).expanduser(), file) if file else shipped(info)
    if made is None:
        raise OptionError(
            "hvd.predictor",
            f"no payoff predictor is shipped for {info.name}",
            f"{AGAIN} and name its file: predictor=FILE; rule=frequency needs none",
        )
    if not info.fingerprint or made.facts.get("target") != info.fingerprint:
        raise ModelError(
            f"the payoff predictor in {where} was trained for other weights than {info.name}'s "
            f"({made.facts.get('model', 'it does not say which')}). {AGAIN} for these, or name "
            "the file that belongs to them"
        )
    if made.facts.get("tokenizer") != tokenizer:
        raise ModelError(
            f"the payoff predictor in {where} was trained with another tokenizer than "
            f"{info.name}'s. {AGAIN} for this one"
        )
    for name in (each.name for each in fields(CacheOptions)):
        trained, given = getattr(made.cache, name), getattr(cache, name)
        if trained != given:
            raise OptionError(
                f"hvd.{name}",
                f"the payoff predictor in {where} was trained for {name}={trained}, got {given}",
                f"Say {name}={trained}, or train another with `hasten train payoff`",
            )
    return made

"""Exit modules on disk: a folder with ``exits.json`` and ``exits.safetensors``.

Matrices are kept as 8-bit integers with a scale for each row, vectors in float32; the draft
vocabulary is a list of ids, its rows are the target's own. A folder belongs to one set of weights,
which its fingerprint names; modules of other weights are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hasten.errors import ModelError
from hasten.exits.bank import ExitBank, assemble
from hasten.exits.config import ExitConfig
from hasten.exits.modules import ExitModule, MakeProduct
from hasten.targets.base import Target, TargetInfo

FORMAT = 1
DESCRIPTION, TENSORS = "exits.json", "exits.safetensors"


@dataclass(frozen=True, slots=True)
class Stored:
    """What a folder holds; tensors by ``LAYER.NAME``, dequantised, float32."""

    fingerprint: str
    ids: tuple[int, ...]
    configs: tuple[ExitConfig, ...]
    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any]
    """How the modules were trained and what they reached, for people to read."""


def save(
    folder: str | Path,
    fingerprint: str,
    ids: Sequence[int],
    modules: Sequence[tuple[ExitConfig, Mapping[str, torch.Tensor]]],
    facts: Mapping[str, Any],
) -> None:
    """Write modules of one model, one a layer; each file is whole or not there. Raises ModelError
    when two stand at one layer."""
    layers = [config.layer for config, _ in modules]
    if len(set(layers)) != len(layers):
        raise ModelError(f"one exit module a layer, got some at {sorted(layers)}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {"ids": torch.tensor(sorted(ids), dtype=torch.int32)}
    for config, values in modules:
        for name in config.shapes():
            value = values[name].detach().float().cpu()
            if value.dim() == 2:
                scale = value.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127.0
                tensors[f"{config.layer}.{name}"] = (value / scale).round_().to(torch.int8)
                tensors[f"{config.layer}.{name}.scale"] = scale.squeeze(1)
            else:
                tensors[f"{config.layer}.{name}"] = value
    scratch = folder / f".{os.getpid()}.tmp"
    save_file({k: v.contiguous() for k, v in tensors.items()}, scratch)
    scratch.replace(folder / TENSORS)
    description = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "modules": [config.to_json() for config, _ in modules],
        "facts": dict(facts),
    }
    _describe(folder, description)


def note(folder: str | Path, facts: Mapping[str, Any]) -> None:
    """Replace what a folder says about its modules."""
    description = json.loads((Path(folder) / DESCRIPTION).read_text())
    _describe(Path(folder), {**description, "facts": dict(facts)})


def _describe(folder: Path, description: Mapping[str, Any]) -> None:
    scratch = folder / f".{os.getpid()}.tmp"
    scratch.write_text(json.dumps(description, indent=1) + "\n")
    scratch.replace(folder / DESCRIPTION)


def read(folder: str | Path) -> Stored:
    """A folder's modules. Raises ModelError, which says what is wrong and names the folder."""
    folder = Path(folder).expanduser()  # no shell does it after `modules=`
    try:
        description = _description(folder)
        configs = tuple(ExitConfig.from_json(each) for each in description["modules"])
        with safe_open(folder / TENSORS, framework="pt") as file:
            raw = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        ids = tuple(int(each) for each in raw.pop("ids").tolist())
        tensors, facts = _dequantised(raw), dict(description.get("facts", {}))
        return Stored(str(description["fingerprint"]), ids, configs, tensors, facts)
    except _UNREADABLE as error:
        raise ModelError(
            f"{folder} holds no exit modules that can be read ({error}). It should be a folder "
            f"with {DESCRIPTION} and {TENSORS}, as `hasten train exits` writes it"
        ) from None


_UNREADABLE = (
    OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError,
    SafetensorError, ModelError,
)  # fmt: skip
"""What a file that is missing, cut off or of another kind may raise."""


def _description(folder: Path) -> dict[str, Any]:
    description = json.loads((folder / DESCRIPTION).read_text())
    if description["format"] != FORMAT:
        raise ModelError(
            f"it is of format {description['format']}, this version of hasten reads {FORMAT}: "
            "train them again, or install the version that made them"
        )
    return dict(description)


def _dequantised(raw: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for name, value in raw.items():
        if name.endswith(".scale"):
            continue
        scale = raw.get(f"{name}.scale")
        out[name] = value.float() if scale is None else value.float() * scale.float().unsqueeze(1)
    return out


def check_belongs(stored: Stored, info: TargetInfo, where: str) -> None:
    """Raise ModelError when these modules were trained for other weights."""
    if stored.fingerprint != info.fingerprint or not info.fingerprint:
        raise ModelError(
            f"the exit modules in {where} belong to other weights than {info.name}'s: they can't "
            "draft for it. Name its own (modules=FOLDER), or train some with `hasten train exits`"
        )
    for config in stored.configs:
        inside = config.layer < info.num_layers and max(config.deep, default=0) <= info.num_layers
        if config.hidden != info.hidden_size or not inside:
            raise ModelError(f"the exit modules in {where} don't fit {info.name}'s sizes")
    ids = set(stored.ids)
    if len(ids) < 2 or min(ids) < 0 or max(ids) >= info.vocab_size:
        raise ModelError(f"the draft vocabulary in {where} isn't part of {info.name}'s")


def build(target: Target, stored: Stored, make: MakeProduct) -> ExitBank:
    """The modules over the target's own embeddings and head."""
    info = target.info
    modules = []
    for config in stored.configs:
        prefix = f"{config.layer}."
        own = {
            name.removeprefix(prefix): value
            for name, value in stored.tensors.items()
            if name.startswith(prefix)
        }
        modules.append(ExitModule(config, own, make, dtype=info.dtype, device=info.device))
    return assemble(target, modules, stored.ids, make)


def shipped(info: TargetInfo) -> Stored | None:
    """The modules that came with the package for these weights; None when there are none."""
    root = files("hasten") / "assets"
    if not info.fingerprint or not root.is_dir():
        return None
    for folder in root.iterdir():
        if not (folder / DESCRIPTION).is_file():
            continue
        description = json.loads((folder / DESCRIPTION).read_text())
        if description["fingerprint"] == info.fingerprint:
            with as_file(folder) as path:
                return read(path)
    return None

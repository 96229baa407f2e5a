"""DFlash drafters on disk: read as they were published, written in the first layout.

A folder has ``config.json`` and safetensors files. Embeddings and head are the target's; a reduced
draft vocabulary is a list of ids in a file of its own (`VOCABULARY`). Folders that hasten wrote
name the weights they belong to; public ones don't, and are held to the target's sizes.
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

from hasten.dflash.config import DFlashConfig, read_config
from hasten.dflash.net import DFlashNet
from hasten.errors import ModelError
from hasten.targets.base import TargetInfo

CONFIG, WEIGHTS, VOCABULARY = "config.json", "model.safetensors", "draft_vocabulary.safetensors"
_INDEX = "model.safetensors.index.json"
_IDS = "draft_ids"
_HEAD, _EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
_LENGTH_HEADS = ("thresh_head", "prob_head")
"""Tensors of length heads: those the description doesn't ask for are left out."""
_VARIANTS = {
    "qkv_proj": "fused query, key and value weights",
    "g_proj": "gated attention",
    "aux_hidden_norm": "a norm for each tapped layer",
    "markov": "a Markov head (DSpark's)",
    "confidence": "a confidence head (DSpark's)",
    "conv": "convolutions (DFlash2's)",
    "selector": "a candidate selector (DFlash2's)",
}
"""What is known of tensors that plain DFlash hasn't, by a part of their names."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A drafter read from a folder.

    net          in eval mode
    draft_ids    int64 ``(draft_vocab_size,)`` on the CPU, increasing: the ids its logits stand for;
                 None: all
    fingerprint  of the weights it belongs to; empty: it doesn't say
    head         its own rows ``(draft_vocab_size, hidden_size)``, where the folder brings some;
                 None: the target's
    about        what the folder says of its making
    """

    config: DFlashConfig
    net: DFlashNet
    draft_ids: torch.Tensor | None
    fingerprint: str
    head: torch.Tensor | None
    about: Mapping[str, Any]


def save(
    folder: str | Path,
    config: DFlashConfig,
    net: DFlashNet,
    draft_ids: torch.Tensor | None,
    about: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a drafter in the first layout; each file is whole or not there.

    `about` must hold ``target``, the fingerprint of the weights it belongs to; the rest is for
    people to read. `draft_ids` int64 ``(config.draft_vocab_size,)``, None where that is all ids.
    Raises ModelError when these contradict each other, or the folder can't be written to.
    """
    if not about.get("target"):
        raise ModelError("about['target'] must name the weights the drafter belongs to")
    _check_ids(draft_ids, config)
    folder = Path(folder)
    scratch = folder / f".{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, scratch, config, net, draft_ids, about, dtype)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"the drafter can't be written to {folder} ({error}). Make room there, or name another "
            "folder"
        ) from error
    finally:
        if folder.is_dir():
            scratch.unlink(missing_ok=True)


def _write(
    folder: Path,
    scratch: Path,
    config: DFlashConfig,
    net: DFlashNet,
    draft_ids: torch.Tensor | None,
    about: Mapping[str, Any],
    dtype: torch.dtype,
) -> None:
    """Each file by way of `scratch`; see `save`."""
    if draft_ids is None:
        (folder / VOCABULARY).unlink(missing_ok=True)
    else:
        save_file({_IDS: draft_ids.to(device="cpu", dtype=torch.int64).contiguous()}, scratch)
        scratch.replace(folder / VOCABULARY)
    tensors = {
        name: value.detach().to(device="cpu", dtype=dtype).contiguous()
        for name, value in net.state_dict().items()
    }
    save_file(tensors, scratch, metadata={"format": "pt"})
    scratch.replace(folder / WEIGHTS)
    written = config.to_json()
    written["dtype"] = str(dtype).removeprefix("torch.")
    written["hasten"] = {**about, **written["hasten"]}
    scratch.write_text(json.dumps(written, indent=1) + "\n")
    scratch.replace(folder / CONFIG)


def load(folder: str | Path, info: TargetInfo, *, dtype: torch.dtype | None = None) -> Loaded:
    """A folder's drafter for this target: its network in `dtype` (None: the target's) on the
    target's device.

    Raises ModelError, which names the folder and what is wrong: it can't be read, it is another
    algorithm or a variant of DFlash that hasten hasn't, tensors are missing, it was made for other
    weights, or its sizes aren't the target's.
    """
    folder = Path(folder).expanduser()  # no shell does it after `model=`
    try:
        data = json.loads((folder / CONFIG).read_text())
        config = read_config(data, target_layers=info.num_layers)
        hasten = data.get("hasten") or {}
        fingerprint = str(hasten.get("target") or "")
        check_belongs(config, fingerprint, info)
        tensors = _tensors(folder)
        ids = _draft_ids(folder, tensors, config)
        head = _head(tensors, config)
        net = _net(tensors, config)
    except _UNREADABLE as error:
        raise ModelError(f"no DFlash drafter can be read from {folder}: {error}") from None
    net = net.to(device=info.device, dtype=dtype or info.dtype).eval().requires_grad_(False)
    return Loaded(config, net, ids, fingerprint, head, hasten)


_UNREADABLE = (
    OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError,
    RuntimeError, SafetensorError, ModelError,
)  # fmt: skip
"""What a file that is missing, cut off or of another kind may raise."""


def check_made_for(
    info: TargetInfo, fingerprint: str, sizes: Sequence[tuple[str, int, int]], kind: str
) -> None:
    """Raise ModelError unless a drafter was made for this target.

    fingerprint  of the weights that its folder names; empty: it names none
    sizes        name, the drafter's, the target's; kind: as in ``hasten train KIND``
    """
    if fingerprint and fingerprint != info.fingerprint:
        raise ModelError(
            f"it was trained for other weights than {info.name}'s. Name its own drafter, or train "
            f"one with `hasten train {kind}`"
        )
    for name, own, wanted in sizes:
        if own != wanted:
            raise ModelError(
                f"its {name} is {own}, {info.name} has {wanted}: it was made for another model. "
                "Choose the drafter of this one"
            )


def check_belongs(config: DFlashConfig, fingerprint: str, info: TargetInfo) -> None:
    """Raise ModelError unless the drafter can draft for this target."""
    sizes = (
        ("hidden_size", config.hidden_size, info.hidden_size),
        ("vocab_size", config.vocab_size, info.vocab_size),
        ("num_target_layers", config.num_target_layers or info.num_layers, info.num_layers),
    )
    check_made_for(info, fingerprint, sizes, "dflash")
    if max(config.taps) > info.num_layers:
        raise ModelError(f"it taps layer {max(config.target_layer_ids)}, which isn't there")


def shipped(info: TargetInfo, kind: str = "dflash") -> Path | None:
    """The folder of the drafter of this kind that came with the package for these weights; None:
    there is none."""
    root = files("hasten") / "assets"
    if not info.fingerprint or not root.is_dir():
        return None
    for model in root.iterdir():
        described = model / kind / CONFIG
        if not described.is_file():
            continue
        said = json.loads(described.read_text())
        if said.get("hasten", {}).get("target") == info.fingerprint:
            with as_file(model / kind) as path:
                return path
    return None


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the folder's network, by name."""
    names = [WEIGHTS]
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text())
        names = sorted(set(index["weight_map"].values()))
    out: dict[str, torch.Tensor] = {}
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{_INDEX} names a file outside the folder: {name}")
        with safe_open(folder / name, framework="pt") as file:
            out.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
    return out


def _draft_ids(
    folder: Path, tensors: dict[str, torch.Tensor], config: DFlashConfig
) -> torch.Tensor | None:
    """The reduced draft vocabulary, from its own file or as speculators stores it: ``d2t`` holds
    what is to be added to a place to get its id, ``t2d`` which ids are in. They are taken out of
    `tensors`."""
    offsets, known = tensors.pop("d2t", None), tensors.pop("t2d", None)
    ids: torch.Tensor | None = None
    if (folder / VOCABULARY).is_file():
        with safe_open(folder / VOCABULARY, framework="pt") as file:
            ids = file.get_tensor(_IDS).to(torch.int64)
    elif offsets is not None:
        ids = torch.arange(len(offsets)) + offsets.to(torch.int64)
        if known is not None and not torch.equal(known.nonzero().flatten(), ids):
            raise ModelError("d2t and t2d name different ids")
    if ids is not None and len(ids) == config.vocab_size:
        ids = None
    _check_ids(ids, config)
    return ids


def _check_ids(ids: torch.Tensor | None, config: DFlashConfig) -> None:
    count = config.vocab_size if ids is None else len(ids)
    if count != config.draft_vocab_size:
        raise ModelError(
            f"a draft vocabulary of {config.draft_vocab_size} ids is announced, and {count} are "
            f"there ({VOCABULARY}, or d2t)"
        )
    if ids is None:
        return
    inside = int(ids.min()) >= 0 and int(ids.max()) < config.vocab_size
    if not inside or not bool((ids[1:] > ids[:-1]).all()):
        raise ModelError("the draft vocabulary must be increasing ids of the target's")


def _head(tensors: dict[str, torch.Tensor], config: DFlashConfig) -> torch.Tensor | None:
    """Head rows that the folder brings, taken out of `tensors` with the embeddings, which are the
    target's."""
    tensors.pop(_EMBEDDINGS, None)
    head = tensors.pop(_HEAD, None)
    wanted = (config.draft_vocab_size, config.hidden_size)
    if head is not None and tuple(head.shape) != wanted:
        raise ModelError(f"{_HEAD} is {tuple(head.shape)}, it should be {wanted}")
    return head


def _net(tensors: Mapping[str, torch.Tensor], config: DFlashConfig) -> DFlashNet:
    """The network with these tensors. Every one of its own must be there, and no other."""
    with torch.device("meta"):
        net = DFlashNet(config)
    wanted = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    found = {
        name: value
        for name, value in tensors.items()
        if name in wanted or not name.startswith(_LENGTH_HEADS)
    }
    if unknown := sorted(set(found) - set(wanted)):
        raise ModelError(_unknown(unknown))
    if missing := sorted(set(wanted) - set(found)):
        raise ModelError(f"tensors are missing: {_some(missing)}")
    for name, shape in wanted.items():
        if tuple(found[name].shape) != shape:
            raise ModelError(f"{name} is {tuple(found[name].shape)}, it should be {shape}")
    net.load_state_dict(found, strict=True, assign=True)
    return net


def _unknown(names: list[str]) -> str:
    told = {what for part, what in _VARIANTS.items() for name in names if part in name}
    because = f": it has {', '.join(sorted(told))}" if told else ""
    return (
        f"this isn't the DFlash that hasten runs{because} (tensors {_some(names)}). "
        "Choose a drafter of plain DFlash"
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

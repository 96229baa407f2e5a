"""EAGLE-3 drafters on disk: read as they were published, written in the layout of speculators.

A folder has ``config.json`` and safetensors or PyTorch files (read as tensors only: no code of
theirs is run). A drafter has a head of its own, mostly over a part of the vocabulary: ``d2t`` holds
what is to be added to a place to get its id. Folders that hasten wrote name the weights they belong
to; public ones don't, and are held to the target's sizes.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hasten.dflash.store import CONFIG, WEIGHTS, _some, check_made_for
from hasten.eagle3.config import Eagle3Config, first_generation, read_config
from hasten.eagle3.net import Eagle3Net
from hasten.errors import ModelError
from hasten.targets.base import TargetInfo

TORCH_WEIGHTS = "pytorch_model.bin"
OFFSETS, KNOWN = "d2t", "t2d"
_EMBEDDINGS = "embed_tokens.weight"
_FIRST_NAMES, _NAMES = "midlayer.", "layers.0."
_LAYER, _HIDDEN_NORM = f"{_NAMES}self_attn.q_proj.weight", f"{_NAMES}hidden_norm.weight"
_UNUSED = ("verifier_lm_head.", "verifier_norm.")
"""The target's own, which trainers may leave in."""
_VARIANTS = {
    "markov": "a Markov head (DSpark's)",
    "mask_hidden": "a state for masked places (P-EAGLE's)",
    "medusa": "Medusa's heads",
    "eh_proj": "multi-token prediction's projection (MTP)",
    "thresh_head": "a length head (DFlash's)",
    "qkv_proj": "fused query, key and value weights",
    "fc.bias": "a bias in fc (EAGLE-1's)",
}
"""What is known of tensors that EAGLE-3 hasn't, by a part of their names."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A drafter read from a folder.

    net          in eval mode
    draft_ids    int64 ``(draft_vocab_size,)`` on the CPU: the ids its logits stand for; None: all
    embeddings   its own table ``(vocab_size, hidden_size)``; None: the target's
    fingerprint  of the weights it belongs to; empty: it doesn't say
    about        what the folder says of its making
    """

    config: Eagle3Config
    net: Eagle3Net
    draft_ids: torch.Tensor | None
    embeddings: torch.Tensor | None
    fingerprint: str
    about: Mapping[str, Any]


def save(
    folder: str | Path,
    config: Eagle3Config,
    net: Eagle3Net,
    draft_ids: torch.Tensor | None,
    about: Mapping[str, Any],
    *,
    embeddings: torch.Tensor | None = None,
    architecture: str = "",
    tokens: int = 3,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a drafter in the layout of speculators; each file is whole or not there.

    `about` must hold ``target``, the fingerprint of the weights it belongs to, and may hold
    ``model``, their name; the rest is for people to read. `draft_ids` int64
    ``(config.draft_vocab_size,)``, None where that is all ids; `embeddings` a table of its own,
    None where it is the target's. `architecture` of the target and `tokens`, a chain's length, are
    what vLLM reads. Raises ModelError when these contradict each other.
    """
    if not about.get("target"):
        raise ModelError("about['target'] must name the weights the drafter belongs to")
    _check_ids(draft_ids, config)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".{os.getpid()}.tmp"
    own = {} if embeddings is None else {_EMBEDDINGS: embeddings}
    tensors = {
        name: value.detach().to(device="cpu", dtype=dtype).contiguous()
        for name, value in {**net.state_dict(), **own}.items()
    }
    if draft_ids is not None:
        ids = draft_ids.to(device="cpu", dtype=torch.int64)
        known = torch.zeros(config.vocab_size, dtype=torch.bool)
        known[ids] = True
        tensors |= {OFFSETS: ids - torch.arange(len(ids)), KNOWN: known}
    save_file(tensors, scratch, metadata={"format": "pt"})
    scratch.replace(folder / WEIGHTS)
    written = config.to_json()
    written["dtype"] = str(dtype).removeprefix("torch.")
    written["speculators_config"] = _proposal(str(about.get("model", "")), architecture, tokens)
    written["hasten"] = dict(about)
    scratch.write_text(json.dumps(written, indent=1) + "\n")
    scratch.replace(folder / CONFIG)


def _proposal(model: str, architecture: str, tokens: int) -> dict[str, Any]:
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": {"name_or_path": model, "architectures": [architecture]},
    }


def load(folder: str | Path, info: TargetInfo, *, dtype: torch.dtype | None = None) -> Loaded:
    """A folder's drafter for this target: its network in `dtype` (None: the target's) on the
    target's device.

    Raises ModelError, which names the folder and what is wrong: it can't be read, it is another
    kind of drafter, tensors are missing or too many, it was made for other weights, or its sizes
    aren't the target's.
    """
    folder = Path(folder).expanduser()  # no shell does it after `model=`
    dtype = dtype or info.dtype
    try:
        data = json.loads((folder / CONFIG).read_text())
        config = read_config(data, target_layers=info.num_layers)
        hasten = data.get("hasten") or {}
        fingerprint = str(hasten.get("target") or "")
        _check_belongs(config, fingerprint, info)
        tensors = _named(_tensors(folder))
        if _LAYER in tensors and _HIDDEN_NORM not in tensors:
            raise first_generation("it has no hidden_norm")
        ids = _draft_ids(tensors, config)
        embeddings = _embeddings(tensors, config, info)
        net = _net(tensors, config)
    except _UNREADABLE as error:
        raise ModelError(f"no EAGLE-3 drafter can be read from {folder}: {error}") from None
    net = net.to(device=info.device, dtype=dtype).eval().requires_grad_(False)
    if embeddings is not None:
        embeddings = embeddings.to(device=info.device, dtype=dtype)
    return Loaded(config, net, ids, embeddings, fingerprint, hasten)


_UNREADABLE = (
    OSError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError,
    RuntimeError, pickle.UnpicklingError, SafetensorError, ModelError,
)  # fmt: skip
"""What a file that is missing, cut off or of another kind may raise."""


def _check_belongs(config: Eagle3Config, fingerprint: str, info: TargetInfo) -> None:
    """Raise ModelError unless the drafter can draft for this target."""
    width = "hidden_size" if config.target_hidden_size == config.hidden_size else ""
    sizes = (
        (width or "target_hidden_size", config.target_hidden_size, info.hidden_size),
        ("vocab_size", config.vocab_size, info.vocab_size),
    )
    check_made_for(info, fingerprint, sizes, "eagle3")


# -- tensors -----------------------------------------------------------------------------------


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the folder, by the names they have there."""
    out: dict[str, torch.Tensor] = {}
    for name in _files(folder):
        if Path(name).name != name:
            raise ModelError(f"the index names a file outside the folder: {name}")
        if name.endswith(".safetensors"):
            with safe_open(folder / name, framework="pt") as file:
                out.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
        else:
            out.update(torch.load(folder / name, map_location="cpu", weights_only=True))
    return {name: value for name, value in out.items() if isinstance(value, torch.Tensor)}


def _files(folder: Path) -> list[str]:
    """Names of the files that hold the weights: safetensors where there are both kinds."""
    for whole in (WEIGHTS, TORCH_WEIGHTS):
        index = folder / f"{whole}.index.json"
        if index.is_file():
            return sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if (folder / whole).is_file():
            return [whole]
    raise ModelError(f"there is neither {WEIGHTS} nor {TORCH_WEIGHTS}")


def _named(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by the names of speculators, without those nobody reads."""
    out: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if name.startswith(_UNUSED) or name.endswith("rotary_emb.inv_freq"):
            continue
        new = name.replace(_FIRST_NAMES, _NAMES, 1) if name.startswith(_FIRST_NAMES) else name
        if new in out:
            raise ModelError(f"{new} is there twice, under two names")
        out[new] = value
    return out


def _draft_ids(tensors: dict[str, torch.Tensor], config: Eagle3Config) -> torch.Tensor | None:
    """The reduced draft vocabulary, taken out of `tensors`; None: all ids, each in its place."""
    offsets, known = tensors.pop(OFFSETS, None), tensors.pop(KNOWN, None)
    if offsets is None:
        if config.draft_vocab_size < config.vocab_size:
            raise ModelError(
                f"its head has {config.draft_vocab_size} of {config.vocab_size} ids, and "
                f"{OFFSETS}, which says which ones, is missing: download the folder again"
            )
        return None
    if offsets.is_floating_point():
        raise ModelError(f"{OFFSETS} holds {offsets.dtype} instead of whole numbers: it was cast")
    ids = torch.arange(len(offsets)) + offsets.to(torch.int64)
    _check_ids(ids, config)
    if known is not None and not torch.equal(known.nonzero().flatten(), ids.sort().values):
        raise ModelError(f"{OFFSETS} and {KNOWN} name different ids")
    return None if torch.equal(ids, torch.arange(config.vocab_size)) else ids


def _check_ids(ids: torch.Tensor | None, config: Eagle3Config) -> None:
    count = config.vocab_size if ids is None else len(ids)
    if count != config.draft_vocab_size:
        raise ModelError(
            f"a draft vocabulary of {config.draft_vocab_size} ids is announced, and {count} are "
            f"there ({OFFSETS})"
        )
    if ids is None:
        return
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(set(ids.tolist())) < count:
        raise ModelError("the draft vocabulary must be different ids of the target's")


def _embeddings(
    tensors: dict[str, torch.Tensor], config: Eagle3Config, info: TargetInfo
) -> torch.Tensor | None:
    """The drafter's own table, taken out of `tensors`; None: the target's, where that fits."""
    own, wanted = tensors.pop(_EMBEDDINGS, None), (config.vocab_size, config.hidden_size)
    if own is None and config.hidden_size != info.hidden_size:
        raise ModelError(
            f"it is {config.hidden_size} wide, {info.name} is {info.hidden_size}, and "
            f"{_EMBEDDINGS} of its own are missing"
        )
    if own is not None and tuple(own.shape) != wanted:
        raise ModelError(f"{_EMBEDDINGS} is {tuple(own.shape)}, it should be {wanted}")
    return own


def _net(tensors: Mapping[str, torch.Tensor], config: Eagle3Config) -> Eagle3Net:
    """The network with these tensors. Every one of its own must be there, and no other."""
    with torch.device("meta"):
        net = Eagle3Net(config)
    wanted = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    if unknown := sorted(set(tensors) - set(wanted)):
        raise ModelError(_unknown(unknown))
    if missing := sorted(set(wanted) - set(tensors)):
        raise ModelError(f"tensors are missing: {_some(missing)}")
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise ModelError(f"{name} is {tuple(tensors[name].shape)}, it should be {shape}")
    net.load_state_dict(dict(tensors), strict=True, assign=True)
    return net


def _unknown(names: list[str]) -> str:
    told = {what for part, what in _VARIANTS.items() for name in names if part in name}
    because = f": it has {', '.join(sorted(told))}" if told else ""
    return (
        f"this isn't the EAGLE-3 that hasten runs{because} (tensors {_some(names)} are too many). "
        "Choose an EAGLE-3 drafter"
    )

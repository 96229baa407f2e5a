"""What is read from a model's files: tensors on demand, end-of-sequence ids, a fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hasten.errors import ModelError

_INDEX = "model.safetensors.index.json"
_SAMPLES = 16
"""Numbers hashed of each tensor. A fine-tune changes nearly all of them, a copy none."""


class SafetensorsFolder(Mapping[str, torch.Tensor]):
    """The tensors of a folder's safetensors files, one or sharded, each read when asked for.

    A tensor is mapped from its file for as long as it lives, not copied: what is never used costs
    no memory, and what was used goes again. Names are the checkpoint's; a tied head has no entry of
    its own unless the checkpoint stores one.
    Raises ModelError when there are no such files or a shard is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._home: dict[str, Path] = {}
        for path in safetensors_files(folder):
            with _opened(path) as file:
                self._home.update(dict.fromkeys(file.keys(), path))

    def __getitem__(self, name: str) -> torch.Tensor:
        with _opened(self._home[name]) as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._home

    def shape_of(self, name: str) -> tuple[int, ...]:
        """A tensor's size, without reading it."""
        with _opened(self._home[name]) as file:
            return tuple(file.get_slice(name).get_shape())

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Rows first..last-1 of a tensor."""
        with _opened(self._home[name]) as file:
            rows: torch.Tensor = file.get_slice(name)[first:last]
        return rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)


def _opened(path: Path) -> Any:
    opened: Any = safe_open(path, framework="pt", device="cpu")
    return opened


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a model folder, as its index lists them, or its only one."""
    index = folder / _INDEX
    if not index.is_file():
        single = folder / "model.safetensors"
        if single.is_file():
            return [single]
        raise ModelError(
            f"{folder} has no weights: neither model.safetensors nor {_INDEX} is there."
        )
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} is damaged: {error!r}. Fetch it again.") from error
    missing = sorted(name for name in shards if not (folder / name).is_file())
    if missing:
        raise ModelError(
            f"{folder} is incomplete: {len(missing)} of {len(shards)} weight files are missing "
            f"({missing[0]}, ...). Fetch it again."
        )
    return [folder / name for name in sorted(shards)]


def has_safetensors(folder: Path) -> bool:
    """True when the folder has weights in this format (perhaps not all of them)."""
    return (folder / _INDEX).is_file() or (folder / "model.safetensors").is_file()


def eos_ids(generation_config: Any, config: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end an answer.

    All that the generation config and the model's config name, each an id, a list or nothing; the
    tokenizer's only when neither names one. Any of the three may be None. Empty: nothing ends an
    answer but its length.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = {
        token
        for holder in (generation_config, config, text)
        for token in _as_ids(getattr(holder, "eos_token_id", None))
    }
    return frozenset(found or _as_ids(getattr(tokenizer, "eos_token_id", None)))


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    ids = value if isinstance(value, (list, tuple, set, frozenset)) else [value]
    return [int(token) for token in ids if token is not None and int(token) >= 0]


def weights_fingerprint(architecture: str, tensors: Mapping[str, Any]) -> str:
    """A hash that tells models apart by their weights, the same for a folder and its loaded model.

    Covers the architecture, each tensor's name and shape, and a few numbers spread over it, rounded
    to bfloat16 so that float32 and bfloat16 copies of one model agree (float16 ones may not).
    Weights that can't be read (on the meta device) count by shape only. A state dict's values of
    other kinds count too: packed ones by the tensors in them, the rest by how they print.
    """
    digest = hashlib.sha256(architecture.encode())
    for name in sorted(tensors):
        if name == "lm_head.weight":
            continue  # a tied head is there or not, depending on how the model was saved
        for value in _flat(tensors[name]):
            if not isinstance(value, torch.Tensor):
                digest.update(f"|{name}={value!r}".encode())
                continue
            digest.update(f"|{name}{tuple(value.shape)}".encode())
            if value.numel() and not value.is_meta:
                digest.update(_sample(value.detach()).numpy().tobytes())
    return digest.hexdigest()


def _flat(value: Any) -> Iterable[Any]:
    """What a state dict's value is made of: torch packs a quantised weight with its bias."""
    if isinstance(value, (tuple, list)):
        return [part for item in value for part in _flat(item)]
    return [value]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    count = min(_SAMPLES, tensor.numel())
    where = [(2 * i + 1) * tensor.numel() // (2 * count) for i in range(count)]
    index = torch.tensor(where, device=tensor.device)
    picked = tensor.reshape(-1)[index].to(torch.bfloat16)
    return picked.float().cpu()

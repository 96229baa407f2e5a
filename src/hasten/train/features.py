"""What the target computes on training texts: hidden states of chosen layers, kept on disk.

Texts run through the fused target's layers in padded batches. States are stored in bfloat16, one
file a layer, all texts' rows one after another; a memory map reads what a batch needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from hasten.errors import OptionError
from hasten.targets.fused import FusedTarget
from hasten.targets.fused_layers import TorchDecoder

BATCH_ROWS = 4096
"""Rows of a padded batch at most (a longer text is a batch of its own)."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the target's answer; `output` is what is learned from."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    domain: str = ""
    split: str = "modules"

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)


def layer_file(folder: Path, layer: int) -> Path:
    """Where a layer's states are kept."""
    return folder / f"layer_{layer:03d}.bf16"


class Features:
    """Hidden states of texts, read from a folder that `compute` has written.

    offsets[i]  first row of text i; starts[i] the first row (in the text) of its output
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        meta = json.loads((self.folder / "meta.json").read_text())
        self.meta: dict[str, Any] = meta
        self.layers: tuple[int, ...] = tuple(meta["layers"])
        self.hidden_size: int = meta["hidden_size"]
        self.domains: list[str] = meta["domains"]
        self.splits: list[str] = meta["splits"]
        with (self.folder / "texts.npz").open("rb") as file, np.load(file) as loaded:
            self.tokens: npt.NDArray[np.int32] = loaded["tokens"]
            self.offsets: npt.NDArray[np.int64] = loaded["offsets"]
            self.starts: npt.NDArray[np.int64] = loaded["starts"]
        shape = (len(self.tokens), self.hidden_size)
        self._maps = {
            layer: np.memmap(layer_file(self.folder, layer), dtype=np.int16, mode="r", shape=shape)
            for layer in self.layers
        }

    def __len__(self) -> int:
        return len(self.starts)

    def length(self, text: int) -> int:
        """Rows of a text."""
        return int(self.offsets[text + 1] - self.offsets[text])

    def ids(self, text: int) -> torch.Tensor:
        """Its tokens, int64 ``(length,)``."""
        rows = slice(int(self.offsets[text]), int(self.offsets[text + 1]))
        return torch.from_numpy(self.tokens[rows].astype(np.int64))

    def states(self, layer: int, text: int) -> torch.Tensor:
        """Output of a layer at each row, bfloat16 ``(length, hidden_size)``."""
        rows = slice(int(self.offsets[text]), int(self.offsets[text + 1]))
        return torch.from_numpy(np.array(self._maps[layer][rows])).view(torch.bfloat16)


def compute(
    target: FusedTarget,
    texts: Sequence[Text],
    layers: Sequence[int],
    folder: str | Path,
    *,
    progress: Callable[[int], None] = lambda rows: None,
) -> Features:
    """Run `texts` and write the states of `layers` (1 to the last) to `folder`.

    `progress` is called with the rows done. Raises OptionError for layers the model hasn't.
    """
    info, folder = target.info, Path(folder)
    for layer in layers:
        if not 1 <= layer <= info.num_layers:
            raise OptionError("layers", f"there is no layer {layer}, only 1 to {info.num_layers}")
    folder.mkdir(parents=True, exist_ok=True)
    for stale in {*folder.glob("layer_*.bf16")} - {layer_file(folder, layer) for layer in layers}:
        stale.unlink()
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.concatenate([np.array([*t.prompt, *t.output], dtype=np.int32) for t in texts])
    starts = np.array([len(text.prompt) for text in texts], dtype=np.int64)
    np.savez(folder / "texts.npz", tokens=tokens, offsets=offsets, starts=starts)
    shape = (len(tokens), info.hidden_size)
    maps = {
        layer: np.memmap(layer_file(folder, layer), dtype=np.int16, mode="w+", shape=shape)
        for layer in layers
    }
    done = 0
    for batch in _batches(lengths):
        states = run_batch(target, [[*texts[i].prompt, *texts[i].output] for i in batch], layers)
        for layer, value in states.items():
            whole = value.to(torch.bfloat16).cpu().view(torch.int16).numpy()
            for row, i in enumerate(batch):
                maps[layer][offsets[i] : offsets[i + 1]] = whole[row, : lengths[i]]
        done += int(lengths[batch].sum())
        progress(done)
    for each in maps.values():
        each.flush()
    meta = {
        "fingerprint": info.fingerprint,
        "dtype": str(info.dtype),
        "layers": list(layers),
        "hidden_size": info.hidden_size,
        "domains": [text.domain for text in texts],
        "splits": [text.split for text in texts],
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return Features(folder)


def _batches(lengths: npt.NDArray[np.int64]) -> list[list[int]]:
    """Texts of like length together."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: int(lengths[i])):
        width = int(lengths[i])
        if not batches or (len(batches[-1]) + 1) * width > BATCH_ROWS:
            batches.append([])
        batches[-1].append(i)
    return batches


def run_batch(
    target: FusedTarget, texts: Sequence[Sequence[int]], layers: Sequence[int]
) -> dict[int, torch.Tensor]:
    """Hidden states after each of `layers`, ``(texts, longest, hidden_size)`` in the target's
    dtype; rows past a text's end hold nothing of use."""
    decoder = target.torch_decoder
    shape = decoder.shape
    width = max(len(text) for text in texts)
    ids = torch.zeros(len(texts), width, dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(list(text))
    kept: dict[int, torch.Tensor] = {}
    with torch.inference_mode():
        hidden = decoder.embed(ids.to(shape.device).view(-1))
        rotary = decoder.rotary(torch.arange(width, device=shape.device)).repeat(len(texts), 1)
        for index in range(max(layers)):
            hidden = _layer(decoder, index, hidden, rotary, len(texts), width)
            if index + 1 in layers:
                kept[index + 1] = hidden.view(len(texts), width, -1)
    return kept


def _layer(
    decoder: TorchDecoder,
    index: int,
    hidden: torch.Tensor,
    rotary: torch.Tensor,
    texts: int,
    width: int,
) -> torch.Tensor:
    shape = decoder.shape
    layer, buffer = decoder.layers[index], torch.empty_like(hidden)
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    qkv = layer.qkv(decoder.normalize(hidden, layer.attention_norm, buffer)).float()
    qkv = qkv.view(-1, heads + 2 * kv_heads, dim)
    if layer.head_norm is not None:
        decoder.normalize_heads(qkv, layer.head_norm)
    qkv.view(texts * width, -1).view(torch.complex64).mul_(rotary)
    parts = qkv.to(shape.dtype).view(texts, width, -1, dim).transpose(1, 2)
    q, k, v = parts.split_with_sizes([heads, kv_heads, kv_heads], 1)
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    # The rotary factor carries the softmax scale.
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    mixed = mixed.transpose(1, 2).reshape(texts * width, heads * dim)
    hidden = layer.out.add(mixed, hidden)
    gate, up = layer.gate_up(decoder.normalize(hidden, layer.mlp_norm, buffer)).chunk(2, 1)
    return layer.down.add(F.silu(gate).mul_(up), hidden)

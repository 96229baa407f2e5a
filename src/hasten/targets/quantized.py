"""Quantized weights: whole numbers of 8 or 4 bits with a scale and an offset per group of 32.

Made from floats (round to nearest), or taken from a GGUF file's own blocks as they are: Q8_0, Q4_0
and Q4_1 have the same groups, so no number is rounded twice. Other GGUF types are dequantised and
rounded to 8 bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from hasten._cache import cache_dir, scratch
from hasten.errors import ModelError
from hasten.native.library import GROUP, Q4, Q8

Quantize = Literal["int8", "int4", "gguf"]
QUANTIZE: tuple[Quantize, ...] = ("int8", "int4", "gguf")
"""What ``quantize=`` may name."""

_ROWS = 256
"""Rows that are rounded at once."""
_HALF = 65504.0
"""The largest float16."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight ``(out, in)``: number k of a row is ``d q + m`` of its group ``k // 32``.

    kind     `hasten.native.library.Q8` or `Q4`
    q        uint8 ``(out, in rounded up to whole groups)``, at most 15 for Q4
    d, m     float16 ``(out, groups)``
    columns  in
    """

    kind: int
    q: torch.Tensor
    d: torch.Tensor
    m: torch.Tensor
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        return self.q.shape[0], self.columns

    def by_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Quantized:
        """With `change`, which picks or reorders rows, done to all three tensors."""
        return replace(self, q=change(self.q), d=change(self.d), m=change(self.m))

    def rows(self, first: int, last: int) -> Quantized:
        """Rows first..last-1."""
        return self.by_rows(lambda part: part[first:last])

    def dense(self) -> torch.Tensor:
        """The numbers, float32 ``(out, in)``."""
        groups = self.q.view(len(self.q), -1, GROUP).float()
        value = groups * self.d.float().unsqueeze(2) + self.m.float().unsqueeze(2)
        return value.view(len(self.q), -1)[:, : self.columns]


def quantize(weight: torch.Tensor, bits: int) -> Quantized:
    """`weight` ``(out, in)`` rounded to 8 bits (symmetric) or 4 (between each group's ends)."""
    out, columns = weight.shape
    groups = -(-columns // GROUP)
    q = torch.empty(out, groups, GROUP, dtype=torch.uint8)
    d, m = (torch.empty(out, groups, dtype=torch.float16) for _ in range(2))
    for first in range(0, out, _ROWS):  # few at a time: what is freed again stays small
        part = slice(first, first + _ROWS)
        q[part], d[part], m[part] = _rounded(weight[part].float(), groups, bits)
    return Quantized(Q8 if bits == 8 else Q4, q.view(out, -1), d, m, columns)


def _rounded(
    x: torch.Tensor, groups: int, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.nn.functional.pad(x, (0, groups * GROUP - x.shape[1])).view(len(x), groups, GROUP)
    if bits == 8:
        d = (x.abs().amax(2) / 127).clamp_(max=_HALF / 128).half()
        m = d * -128
    else:
        low, high = x.amin(2).clamp_(-_HALF, _HALF), x.amax(2)
        m, d = low.half(), ((high - low) / 15).clamp_(max=_HALF).half()
    step = d.float().unsqueeze(2)
    q = torch.where(step > 0, (x - m.float().unsqueeze(2)).div_(step), 0.0)
    return q.round_().clamp_(0, 2**bits - 1).to(torch.uint8), d, m


def joined(parts: Sequence[Quantized]) -> Quantized:
    """Weights of one input, one below another; 4 bits become 8 where both kinds meet."""
    kind = max((part.kind for part in parts), key=lambda kind: kind == Q8)
    return Quantized(
        kind,
        torch.cat([part.q for part in parts]),
        torch.cat([part.d for part in parts]),
        torch.cat([part.m for part in parts]),
        parts[0].columns,
    )


# -- GGUF ------------------------------------------------------------------------------------------

_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROTATED = ("llama", "mistral")
"""Model types whose query and key rows a GGUF file holds pairwise interleaved."""


class GGUFTensors(Mapping[str, "torch.Tensor | Quantized"]):
    """A GGUF file's tensors by their transformers names: quantized ones as they are, lazily.

    Where they lie in the file is kept in the user's cache under `fingerprint`, as reading that from
    a file takes seconds. `dequantised` holds the names of those whose type has other groups, once
    they were read. Raises ModelError for a damaged file.
    """

    def __init__(self, path: Path, config: Any, fingerprint: str) -> None:
        self._path, self._config = path, config
        places = _places(path, fingerprint)
        self._places = {n: place for name, place in places.items() if (n := _name(name))}
        self.dequantised: set[str] = set()

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __getitem__(self, name: str) -> torch.Tensor | Quantized:
        shape = self._places[name].shape
        value = self.rows(name, 0, shape[0])
        heads = {
            "self_attn.q_proj": self._config.num_attention_heads,
            "self_attn.k_proj": self._config.num_key_value_heads,
        }.get(".".join(name.split(".")[3:5]))
        if heads is not None and self._config.model_type in _ROTATED:
            return _picked(value, _unrotated(value.shape[0], heads))
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def shape_of(self, name: str) -> tuple[int, ...]:
        """A tensor's size, without reading it."""
        return self._places[name].shape

    def rows(self, name: str, first: int, last: int) -> torch.Tensor | Quantized:
        """Rows first..last-1 as they follow each other in the file."""
        from gguf import GGMLQuantizationType, dequantize

        place = self._places[name]
        each = place.bytes // place.shape[0]
        try:
            data = np.fromfile(
                self._path, np.uint8, each * (last - first), offset=place.offset + each * first
            ).reshape(last - first, each)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self._path} can't be read: {error}. Is it complete?") from error
        if place.kind in _BLOCKS:
            return _blocks(place.kind, data, place.shape[1])
        if place.kind in ("F32", "F16"):
            dtype = torch.float32 if place.kind == "F32" else torch.float16
            return torch.from_numpy(data).view(dtype).view(last - first, *place.shape[1:])
        self.dequantised.add(name)
        dense = torch.from_numpy(dequantize(data, GGMLQuantizationType[place.kind]))
        return dense if len(place.shape) == 1 else quantize(dense, 8)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in a file: `shape` has the rows first."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


def _places(path: Path, fingerprint: str) -> dict[str, _Place]:
    note = cache_dir() / "gguf" / f"{fingerprint[:32]}.json"
    try:
        noted = json.loads(note.read_text(encoding="utf-8"))
        return {n: _Place(k, tuple(shape), o, b) for n, (k, shape, o, b) in noted.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # not there yet, or damaged
        found = _read_places(path)
    note.parent.mkdir(exist_ok=True)
    with scratch("gguf") as work:
        lines = {n: [p.kind, p.shape, p.offset, p.bytes] for n, p in found.items()}
        (work / note.name).write_text(json.dumps(lines), encoding="utf-8")
        (work / note.name).replace(note)
    return found


def _read_places(path: Path) -> dict[str, _Place]:
    from gguf import GGUFReader

    try:
        return {
            t.name: _Place(
                t.tensor_type.name,
                tuple(int(n) for n in reversed(t.shape)),
                int(t.data_offset),
                int(t.n_bytes),
            )
            for t in GGUFReader(path).tensors
        }
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{path} can't be read: {error}. Is the file complete?") from error


def _name(name: str) -> str | None:
    if name in _ENDS:
        return _ENDS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _NAMES:
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.{parts[3]}"
    return None if name == "rope_freqs.weight" else name


def _unrotated(rows: int, heads: int) -> torch.Tensor:
    """Where each of transformers' rows stands in the file: halves there, pairs here."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _picked(value: torch.Tensor | Quantized, order: torch.Tensor) -> torch.Tensor | Quantized:
    if isinstance(value, Quantized):
        return value.by_rows(lambda rows: rows[order])
    return value[order]


_BLOCKS = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
"""Bytes of a block of 32 numbers."""


def _blocks(kind: str, data: np.ndarray[Any, Any], columns: int) -> Quantized:
    """Rows of blocks ``(out, bytes)`` as they are in the file."""
    out = data.shape[0]
    raw = torch.from_numpy(data).view(out, -1, _BLOCKS[kind])
    scales = 4 if kind == "Q4_1" else 2
    head = raw[..., :scales].contiguous().view(torch.float16)
    d, body = head[..., 0].contiguous(), raw[..., scales:]
    if kind == "Q8_0":
        q = body.contiguous().view(torch.int8).short().add_(128).to(torch.uint8)
        return Quantized(Q8, q.reshape(out, -1), d, d * -128, columns)
    q = torch.cat([body & 15, body >> 4], -1).reshape(out, -1)
    m = head[..., 1].contiguous() if kind == "Q4_1" else d * -8
    return Quantized(Q4, q, d, m, columns)

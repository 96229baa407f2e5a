"""The kernels as Python sees them: the C structs of ``decoder.cpp``, ``vote.h``, ``exits.h`` and
``dflash.h``, and the functions."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hasten.errors import CapabilityError, ModelError
from hasten.native.build import compiled

_log = logging.getLogger(__name__)

F32, BF16, Q8, Q4 = range(4)
"""Kinds of packed weight; ``linear.h`` says how each is laid out."""
GROUP = 32
"""Features of a row that share a scale."""
LANES = 16
"""Slots of a tile of keys."""
STORED = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""What keys and values are stored as, by the dtype of their tensor; see ``attention.h``."""

AVX512, AVX512_BF16, AVX512_VNNI = 1, 2, 4
"""Bits of `Library.features`."""

_I64, _I32, _F32, _P = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p


class Linear(ctypes.Structure):
    """A packed weight: `weight` points to blocks, `bias` to floats or to nothing."""

    _fields_ = [
        ("weight", _P), ("bias", _P), ("in_", _I64), ("out", _I64), ("kind", _I32), ("unused", _I32)
    ]  # fmt: skip


class Layer(ctypes.Structure):
    """A block's four products and its norms' weights."""

    _fields_ = [
        ("qkv", Linear), ("out", Linear), ("gate_up", Linear), ("down", Linear),
        ("attention_norm", _P), ("mlp_norm", _P), ("head_norm", _P),
    ]  # fmt: skip


class Model(ctypes.Structure):
    """Sizes and weights of a decoder."""

    _fields_ = [
        ("layers", _I64), ("hidden", _I64), ("inner", _I64), ("heads", _I64), ("kv_heads", _I64),
        ("dim", _I64), ("stored", _I64), ("eps", _F32), ("rope_scale", _F32),
        ("layer", ctypes.POINTER(Layer)), ("frequencies", _P), ("norm", _P), ("head", Linear),
    ]  # fmt: skip


class Part(ctypes.Structure):
    """A block of keys and values, and how many of its slots a sequence sees."""

    _fields_ = [("base", _P), ("capacity", _I64), ("slots", _I64)]


class Sequence(ctypes.Structure):
    """A sequence's rows in a pass, see ``attention.h``."""

    _fields_ = [
        ("parts", ctypes.POINTER(Part)), ("count", _I64), ("committed", _I64), ("pending", _I64),
        ("rows", _I64), ("slots", _P), ("mask", _P),
    ]  # fmt: skip


class Pass(ctypes.Structure):
    """One pass, see ``decoder.cpp``."""

    _fields_ = [
        ("rows", _I64), ("sequences", _I64), ("first", _I64), ("last", _I64), ("threads", _I64),
        ("hidden", _P), ("positions", _P), ("sequence", ctypes.POINTER(Sequence)), ("taps", _P),
        ("tapped", _P), ("tap_count", _I64), ("logits", _P), ("wanted", _I64),
    ]  # fmt: skip


class ExitModel(ctypes.Structure):
    """Sizes and weights of an exit module, see ``exits.h``."""

    _fields_ = [
        ("hidden", _I64), ("inner", _I64), ("heads", _I64), ("kv_heads", _I64), ("dim", _I64),
        ("deep", _I64), ("half", _I64), ("eps", _F32), ("unused", _F32), ("table", _P),
        ("frequencies", _P), ("norm", _P), ("fuse", Linear), ("mixed", Linear), ("out", Linear),
        ("gate_up", Linear), ("down", Linear),
    ]  # fmt: skip


class Head(ctypes.Structure):
    """A draft vocabulary's head, see ``vote.h``."""

    _fields_ = [("product", Linear), ("extra", _P), ("extras", _I64), ("ids", _P)]


class ExitStep(ctypes.Structure):
    """One step of an exit module, see ``exits.h``."""

    _fields_ = [
        ("drafted", _I64), ("want", _I64), ("width", _I64), ("threads", _I64), ("tokens", _P),
        ("parents", _P), ("above", _P), ("hidden", _P), ("head", ctypes.POINTER(Head)),
        ("chances", _P), ("ids", _P),
    ]  # fmt: skip


class DFlashLayer(ctypes.Structure):
    """A layer of a DFlash drafter: its products and norms."""

    _fields_ = [
        ("q", Linear), ("k", Linear), ("v", Linear), ("out", Linear), ("gate", Linear),
        ("up", Linear), ("down", Linear), ("input_norm", _P), ("post_norm", _P), ("q_norm", _P),
        ("k_norm", _P),
    ]  # fmt: skip


class DFlashModel(ctypes.Structure):
    """Sizes and weights of a DFlash drafter, see ``dflash.h``."""

    _fields_ = [
        ("layers", _I64), ("hidden", _I64), ("inner", _I64), ("heads", _I64), ("kv_heads", _I64),
        ("dim", _I64), ("taps", _I64), ("slots", _I64), ("half", _I64), ("eps", _F32),
        ("rope_scale", _F32), ("layer", ctypes.POINTER(DFlashLayer)), ("frequencies", _P),
        ("context_norm", _P), ("norm", _P), ("mask", _P), ("fuse", Linear),
    ]  # fmt: skip


class DFlashStep(ctypes.Structure):
    """One step of a DFlash drafter, see ``dflash.h``."""

    _fields_ = [
        ("rows", _I64), ("want", _I64), ("width", _I64), ("threads", _I64), ("start", _I64),
        ("states", _P), ("anchor", _P), ("hidden", _P), ("head", ctypes.POINTER(Head)),
        ("chances", _P), ("ids", _P),
    ]  # fmt: skip


class Library:
    """The loaded kernels. Pointers are tensors' ``data_ptr()``; nothing is checked on the way."""

    def __init__(self, path: Path) -> None:
        try:
            self._dll = ctypes.CDLL(str(path))
        except OSError as error:
            raise CapabilityError(f"the CPU kernels can't be loaded: {error}") from error
        for name, structs in _STRUCTS.items():
            if self._function(name, _I64)() != _sizes(structs):
                raise CapabilityError("the CPU kernels were built with other structs than Python's")
        self.features: int = self._function("hasten_features", _I64)()
        self.weight_bytes = self._function("hasten_weight_bytes", _I64, _I32, _I64, _I64)
        self.pack = self._function("hasten_pack", None, _I32, _P, _I64, _I64, _P)
        self.pack_groups = self._function(
            "hasten_pack_groups", None, _I32, _P, _P, _P, _I64, _I64, _P
        )
        self.rows = self._function("hasten_rows", None, _P, _P, _I64, _P)
        self.multiply = self._function("hasten_multiply", None, _P, _P, _I64, _P, _I64)
        self.open = self._function("hasten_open", _P)
        self.close = self._function("hasten_close", None, _P)
        self.run = self._function("hasten_pass", _I64, _P, _P, _P)
        self.largest = self._function("hasten_largest", _I64, _P, _I64, _I64, _I64, _P, _P, _I64)
        self.move = self._function(
            "hasten_move", None, _P, _I64, _I64, _I64, _I64, _I64, _P, _P, _I64
        )
        self.exit_open = self._function("hasten_exit_open", _P)
        self.exit_close = self._function("hasten_exit_close", None, _P)
        self.exit_feed = self._function("hasten_exit_feed", _I64, _P, _P, _P, _P, _P, _I64)
        self.exit_step = self._function("hasten_exit_step", _I64, _P, _P, _P)
        self.dflash_open = self._function("hasten_dflash_open", _P)
        self.dflash_close = self._function("hasten_dflash_close", None, _P)
        self.dflash_bytes = self._function("hasten_dflash_bytes", _I64, _P)
        self.dflash_step = self._function("hasten_dflash_step", _I64, _P, _P, _P)

    def _function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        function: Any = getattr(self._dll, name)
        function.restype, function.argtypes = result, list(arguments)
        made: Callable[..., Any] = function
        return made


_STRUCTS: dict[str, tuple[type[ctypes.Structure], ...]] = {
    "hasten_sizes": (Linear, Layer, Model, Pass, Sequence),
    "hasten_exit_sizes": (ExitModel, Head, ExitStep),
    "hasten_dflash_sizes": (DFlashLayer, DFlashModel, DFlashStep),
}
"""By the function that tells their sizes as they were built."""


def _sizes(structs: Iterable[type[ctypes.Structure]]) -> int:
    return sum(ctypes.sizeof(struct) << 12 * i for i, struct in enumerate(structs))


@cache
def _load() -> Library | str:
    if os.environ.get("HASTEN_NATIVE", "1").lower() in ("0", "false", "off", "no"):
        return "HASTEN_NATIVE switches them off"
    try:
        return Library(compiled())
    except (CapabilityError, ModelError, OSError) as error:
        _log.info("no CPU kernels: %s", error)
        return str(error)


def library() -> Library:
    """The kernels, compiled at first use. Raises CapabilityError, saying why, without them."""
    found = _load()
    if isinstance(found, str):
        raise CapabilityError(found)
    return found


def loaded() -> Library | None:
    """The kernels where a model runs on them; None, and nothing compiled, as long as none does."""
    found = _load() if _load.cache_info().currsize else None
    return found if isinstance(found, Library) else None


def why_not_native(dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
    """Why hasten's CPU kernels can't run such a decoder; None when they can."""
    if device.type != "cpu":
        return f"they are for the CPU, not for {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"they have no {str(dtype).removeprefix('torch.')}"
    if head_dim % LANES:
        return f"head size {head_dim} is no multiple of {LANES}"
    found = _load()
    return found if isinstance(found, str) else None


def slot_width(stored: torch.dtype, head_dim: int) -> int:
    """Numbers of that dtype that a slot of one head takes; in int8 a float32 scale stands among
    them."""
    return head_dim + 4 if stored == torch.int8 else head_dim


def why_not_quick(dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
    """Why torch's operations run such a decoder when nobody chooses; None when the kernels do.

    They are written for AVX-512. Elsewhere they run, as compilers make of them what they can, and
    torch's are likely to be quicker.
    """
    reason = why_not_native(dtype, device, head_dim)
    if reason is None and not library().features & AVX512:
        reason = "this processor has no AVX-512, which they are written for"
    return reason


def multiplies_bytes(kernels: Library) -> bool:
    """Whether products of 8- and 4-bit weights have this processor's own instructions."""
    return bool(kernels.features & AVX512 and kernels.features & AVX512_VNNI)

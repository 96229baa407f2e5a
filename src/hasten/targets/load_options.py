"""What `hasten.targets.load.load_target` takes, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hasten.errors import OptionError
from hasten.targets.quantized import QUANTIZE, Quantize

ENGINES = ("auto", "fused", "transformers")

KERNELS = ("auto", "native", "torch")
"""What ``kernels=`` may name."""
Kernels = Literal["auto", "native", "torch"]

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class FusedOptions:
    """What only hasten's own decoder knows; see `load_target`."""

    quantize: Quantize | None = None
    kernels: Kernels = "auto"
    kv_dtype: torch.dtype | None = None
    exact: bool = False

    def named(self) -> str | None:
        """An option of these that needs the fused engine, as the user wrote it; None without."""
        if self.quantize is not None:
            return f"quantize={self.quantize!r}"
        if self.kernels == "native":
            return "kernels='native'"
        if self.kv_dtype is not None:
            return f"kv_dtype={str(self.kv_dtype).removeprefix('torch.')!r}"
        return "exact=True" if self.exact else None


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """`load_target`'s options, checked; None where the caller named nothing."""

    engine: str
    dtype: torch.dtype | None
    device: torch.device | None
    device_map: Any
    attn_implementation: str | None
    trust_remote_code: bool
    revision: str | None
    fused: FusedOptions

    def refuse_for_loaded_model(self) -> None:
        """Raise OptionError for what only makes sense while a model is being loaded."""
        named = {
            "dtype": self.dtype,
            "device": self.device,
            "device_map": self.device_map,
            "attn_implementation": self.attn_implementation,
            "trust_remote_code": self.trust_remote_code or None,
            "revision": self.revision,
        }
        for option, value in named.items():
            if value is not None:
                raise OptionError(
                    option,
                    "can't be given with a loaded model",
                    "Load the model with it, or leave it",
                )


def read_pair(pair: tuple[Any, ...], tokenizer: Any) -> tuple[Any, Any]:
    """Model and tokenizer of a pair."""
    if len(pair) != 2:
        raise OptionError("model", f"a tuple must be (model, tokenizer), got {len(pair)} items")
    if tokenizer is not None:
        raise OptionError("tokenizer", "given twice: in the pair and by name", "Give it once")
    return pair[0], pair[1]


def read_engine(engine: str) -> str:
    """The engine named."""
    if engine not in ENGINES:
        raise OptionError("engine", f"unknown: {engine!r}", f"Known: {', '.join(ENGINES)}")
    return engine


def read_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype named; None for none, or "auto"."""
    if isinstance(dtype, str) and dtype != "auto":
        if dtype not in _DTYPES:
            raise OptionError("dtype", f"unknown: {dtype!r}", f"Known: auto, {', '.join(_DTYPES)}")
        return _DTYPES[dtype]
    if isinstance(dtype, torch.dtype) and dtype not in _DTYPES.values():
        raise OptionError(
            "dtype", f"{dtype} is no dtype to run in", "Known: float32, bfloat16, float16"
        )
    return dtype if isinstance(dtype, torch.dtype) else None


def read_cache_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype of keys and values named."""
    if dtype in ("int8", torch.int8):
        return torch.int8
    known = "Known: float32, bfloat16, int8"
    try:
        found = read_dtype(dtype)
    except OptionError as error:
        raise OptionError("kv_dtype", f"unknown: {dtype!r}", known) from error
    if found == torch.float16:
        raise OptionError("kv_dtype", "can't be float16", known)
    return found


def read_device(device: str | torch.device | None) -> torch.device | None:
    """The device named, if it is there; None for none, or "auto"."""
    if device is None or device == "auto":
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(
            "device", f"unknown: {device!r}", 'Known: "cpu", "cuda", "mps"'
        ) from error
    absent = (found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count()) or (
        found.type == "mps" and not torch.backends.mps.is_available()
    )
    if absent:
        raise OptionError("device", f"{device} is not there on this machine", 'Take "cpu" or none')
    return found


def default_device() -> torch.device:
    """CUDA where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_names(quantize: Any, kernels: Any) -> None:
    """Raise OptionError for names that `quantize` and `kernels` can't have."""
    if quantize is not None and quantize not in QUANTIZE:
        names = ", ".join(map(repr, QUANTIZE))
        raise OptionError("quantize", f"unknown: {quantize!r}", f"Known: {names}, or None")
    if kernels not in KERNELS:
        raise OptionError("kernels", f"unknown: {kernels!r}", f"Known: {', '.join(KERNELS)}")


def check_given(given: Mapping[str, Any]) -> None:
    """Raise OptionError for names among these options of a load that none can have."""
    check_names(given.get("quantize"), given.get("kernels", "auto"))
    read_engine(given.get("engine", "auto"))
    read_dtype(given.get("dtype"))
    read_cache_dtype(given.get("kv_dtype"))

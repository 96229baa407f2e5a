"""From a config and tensors to a decoder: hasten's own CPU kernels where they run, else torch."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from hasten.errors import CapabilityError, OptionError
from hasten.native.library import why_not_native, why_not_quick
from hasten.targets.base import Ends
from hasten.targets.fused_config import head_dim, read_config
from hasten.targets.fused_layers import TorchDecoder
from hasten.targets.fused_native import NativeDecoder, NativeLinear
from hasten.targets.fused_weights import Checkpoint, LayerWeights, Shape, load_layer
from hasten.targets.load_options import Kernels, check_names, read_cache_dtype
from hasten.targets.quantized import Quantize, Quantized

_BITS: dict[Quantize | None, int] = {None: 0, "int8": 8, "int4": 4, "gguf": 16}


class Decoder(Protocol):
    """A model's blocks, embeddings and head, as `hasten.targets.fused.FusedTarget` runs them.

    tile  slots of keys that lie interleaved in the cache
    move  how slots of a cache block are copied, see `hasten.targets.cache.KVStore`; None: as rows
    """

    shape: Shape
    tile: int

    @property
    def move(self) -> Any:
        """See above."""
        ...

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of int64 ``(rows,)``, as `run` takes them."""
        ...

    def ends(self) -> Ends:
        """The model's first and last tensors."""
        ...

    def attention(
        self,
        layers: tuple[int, int],
        parts: Sequence[tuple[torch.Tensor, int]],
        slots: Sequence[int],
        committed: int,
        mask: torch.Tensor | None,
    ) -> Any:
        """What `run` needs of one sequence's rows.

        layers     the range the pass runs
        parts      ``(kv, slots)`` of the prefix segments and of the tail
        slots      those of the tail that the rows write, increasing
        committed  slots of the tail before the pending ones
        mask       float32 ``(rows, pending)``: 0 where a row sees a pending slot, else -inf; None
                   for a chain that ends the pending rows
        """
        ...

    def run(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        spots: Sequence[Any],
        layers: tuple[int, int],
        taps: Sequence[int],
        logits: int,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor], torch.Tensor | None]:
        """Rows through layers lo..hi-1: what comes out, the taps, logits of the last `logits`."""
        ...


def build_decoder(
    config: Any,
    tensors: Mapping[str, torch.Tensor | Quantized],
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantize: Quantize | None = None,
    kernels: Kernels = "auto",
    kv_dtype: torch.dtype | None = None,
    copy: bool = False,
) -> Decoder:
    """The decoder of a supported config, with `tensors` by their transformers names.

    Raises OptionError for options that contradict each other, CapabilityError when the kernels
    asked for can't run here, ModelError when tensors and config don't fit.
    """
    native = _choose(config, dtype, device, quantize, kernels)
    if kv_dtype is not None and not native:
        raise OptionError("kv_dtype", "is a choice of the native kernels", "Leave it out")
    cache = read_cache_dtype(kv_dtype)
    shape, frequencies = read_config(
        config, dtype, device, native=native, bits=_BITS[quantize], cache=cache
    )
    read = Checkpoint(tensors, shape, copy=copy)
    layers = []
    for index in range(shape.layers):
        layers.append(load_layer(read, index, shape))
        _give_back()
    norm = read("model.norm.weight", shape.hidden)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    tied = _tied(config, read, tensors)
    if native:
        made = _native(shape, read, layers, norm, frequencies, names, tied, config.vocab_size)
        _give_back()
        return made
    size = (config.vocab_size, shape.hidden)
    embeddings = read(names[0], *size)
    head = embeddings if tied else read(names[1], *size)
    return TorchDecoder(shape, layers, embeddings, norm, head, frequencies)


def _give_back() -> None:
    """Let the system have what was freed: glibc keeps it, between weights that stay, for good."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _native(
    shape: Shape,
    read: Checkpoint,
    layers: Sequence[LayerWeights],
    norm: torch.Tensor,
    frequencies: torch.Tensor,
    names: tuple[str, str],
    tied: bool,
    vocabulary: int,
) -> NativeDecoder:
    size = (vocabulary, shape.hidden)
    embeddings = NativeLinear.from_pieces(read.pieces(names[0], *size), *size)
    head = embeddings if tied else NativeLinear.from_pieces(read.pieces(names[1], *size), *size)
    return NativeDecoder(shape, layers, embeddings, norm, head, frequencies)


def _choose(
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    quantize: Quantize | None,
    kernels: Kernels,
) -> bool:
    """Whether the native kernels run this."""
    check_names(quantize, kernels)
    if kernels == "torch":
        if quantize is not None:
            raise OptionError(
                "kernels", f"torch's can't run quantize={quantize!r}", "Take 'native', or 'auto'"
            )
        return False
    place = (dtype, device, head_dim(config))
    if kernels == "auto" and quantize is None:
        return why_not_quick(*place) is None
    if (reason := why_not_native(*place)) is not None:
        asked = "kernels='native'" if quantize is None else f"quantize={quantize!r}"
        raise CapabilityError(f"{asked} needs hasten's CPU kernels, and {reason}")
    return True


def _tied(config: Any, read: Checkpoint, tensors: Mapping[str, torch.Tensor | Quantized]) -> bool:
    """Whether the head is the embeddings."""
    if "lm_head.weight" not in tensors:
        return bool(config.tie_word_embeddings)
    return read.equal("lm_head.weight", "model.embed_tokens.weight")

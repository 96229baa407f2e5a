"""The fused decoder on hasten's own CPU kernels: a pass is one call.

A row's bits are a function of the tokens it sees, whatever else is in its pass: rows beside it, the
tree it stands in, how the prompt was cut, which sequences share the pass. So greedy speculation
answers what plain decoding answers in every weight type, not up to near ties (`kernels` of
``hasten.load``). Hidden states are float32 between the products; each product rounds its inputs to
its own precision.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from hasten.errors import CapabilityError, ModelError
from hasten.native import library as native
from hasten.native.library import why_not_native
from hasten.targets.base import Ends
from hasten.targets.fused_weights import LayerWeights, Linear, Shape, make_linear
from hasten.targets.quantized import Quantized, quantize


class NativeLinear:
    """A product with a weight ``(out, in)`` packed for the kernels.

    `weight` is float32 or bfloat16 ``(out, in)``, or `Quantized`; `bias` ``(out,)`` or None.
    """

    __slots__ = ("_keep", "dtype", "kind", "struct")

    def __init__(self, weight: torch.Tensor | Quantized, bias: torch.Tensor | None = None) -> None:
        out, size = weight.shape
        self._pack([weight], out, size, bias)

    @classmethod
    def from_pieces(
        cls, pieces: Iterable[torch.Tensor | Quantized], out: int, size: int
    ) -> NativeLinear:
        """From consecutive rows of the weight, all pieces but the last of whole panels of 32."""
        made = cls.__new__(cls)
        made._pack(pieces, out, size, None)
        return made

    def _pack(
        self,
        pieces: Iterable[torch.Tensor | Quantized],
        out: int,
        size: int,
        bias: torch.Tensor | None,
    ) -> None:
        packed: torch.Tensor | None = None
        done = 0
        for piece in pieces:
            if packed is None:
                self.kind, self.dtype = _kind_of(piece)
                whole = native.library().weight_bytes(self.kind, out, size)
                packed = _memory(whole)
            begin = native.library().weight_bytes(self.kind, done, size)
            _pack_rows(piece, self.kind, packed.data_ptr() + begin)
            done += piece.shape[0]
        assert packed is not None
        bias = None if bias is None else bias.to(torch.float32).contiguous()
        self._keep = (packed, bias)
        self.struct = native.Linear(
            packed.data_ptr(), None if bias is None else bias.data_ptr(), size, out, self.kind, 0
        )

    @property
    def bytes(self) -> int:
        """Of the packed weight."""
        return self._keep[0].nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``(rows, in) -> (rows, out)`` in the dtype of `x`."""
        rows = x.to(torch.float32).contiguous()
        out = torch.empty(len(rows), self.struct.out)
        native.library().multiply(
            ctypes.byref(self.struct), rows.data_ptr(), len(rows), out.data_ptr(), _threads()
        )
        return out.to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The product plus `residual`."""
        return self(x).add_(residual)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, float32 ``(len(ids), in)``; ids int64 on the CPU."""
        out = torch.empty(len(ids), self.struct.in_)
        ids = ids.contiguous()
        native.library().rows(ctypes.byref(self.struct), ids.data_ptr(), len(ids), out.data_ptr())
        return out

    def dense(self) -> torch.Tensor:
        """The weight ``(out, in)``, float32 where it is quantized, else in its own dtype."""
        return self.rows(torch.arange(self.struct.out)).to(self.dtype)


def _memory(size: int) -> torch.Tensor:
    """Bytes outside the heap, in huge pages where the system has them: what is freed while weights
    are read would lie between them for good otherwise."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(size, dtype=torch.uint8)
    space = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        space.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(space, dtype=torch.uint8, count=size)


def _kind_of(weight: torch.Tensor | Quantized) -> tuple[int, torch.dtype]:
    """The kind it is packed as, and the dtype of the dense weight."""
    if isinstance(weight, Quantized):
        return weight.kind, torch.float32
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise CapabilityError(f"the CPU kernels have no weights of {weight.dtype}")
    return native.BF16 if weight.dtype == torch.bfloat16 else native.F32, weight.dtype


def _pack_rows(weight: torch.Tensor | Quantized, kind: int, place: int) -> None:
    kernels, (out, size) = native.library(), weight.shape
    if isinstance(weight, Quantized):
        parts = [part.contiguous() for part in (weight.q, weight.d, weight.m)]
        kernels.pack_groups(kind, *(part.data_ptr() for part in parts), out, size, place)
    else:
        whole = weight.contiguous()
        kernels.pack(kind, whole.data_ptr(), out, size, place)


@cache
def _array(kind: Any, size: int) -> Any:
    """The type of an array of structs, which ctypes forgets, and makes anew, when unused."""
    return kind * size


def _threads() -> int:
    return torch.get_num_threads()


def draft_linear(weight: torch.Tensor) -> Linear:
    """A product for a drafter's weight ``(out, in)``, as quick as this machine has it.

    Rounded to 8 bits where the kernels are quick at that: half the memory to read, and a draft is
    verified whatever it is made of.
    """
    kernels = None
    if why_not_native(torch.float32, weight.device, native.LANES) is None:
        kernels = native.library()
    if kernels is None or not native.multiplies_bytes(kernels):
        return make_linear(weight)
    return NativeLinear(quantize(weight, 8))


@dataclass(slots=True)
class Spot:
    """Where a sequence's rows stand in a pass: what `NativeDecoder.run` needs of them."""

    rows: int
    struct: native.Sequence
    keep: tuple[object, ...]
    """What the struct points to."""


class NativeDecoder:
    """The blocks, the embeddings and the head of a model, all packed.

    `embeddings` and `head` are one object where the model ties them. `norm` float32 ``(hidden,)``.
    """

    tile = native.LANES

    def __init__(
        self,
        shape: Shape,
        layers: Sequence[LayerWeights],
        embeddings: NativeLinear,
        norm: torch.Tensor,
        head: NativeLinear,
        frequencies: torch.Tensor,
    ) -> None:
        self.shape = shape
        self._kernels = native.library()
        self._embeddings, self._norm, self._head = embeddings, norm.float().contiguous(), head
        self._frequencies = frequencies.to(torch.float32).contiguous()
        self._weights = [_Block(layer) for layer in layers]
        self._layers = (native.Layer * len(layers))(*(block.struct for block in self._weights))
        self._model = native.Model(
            layers=shape.layers,
            hidden=shape.hidden,
            inner=shape.inner,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            dim=shape.head_dim,
            stored=native.STORED[shape.cache],
            eps=shape.eps,
            rope_scale=shape.rope_scale,
            layer=self._layers,
            frequencies=self._frequencies.data_ptr(),
            norm=self._norm.data_ptr(),
            head=head.struct,
        )
        self._model_at = ctypes.byref(self._model)
        self._workspace = self._kernels.open()
        weakref.finalize(self, self._kernels.close, self._workspace)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all packed weights, shared ones counted once."""
        products = [p for block in self._weights for p in block.products]
        ends = {id(end): end for end in (self._embeddings, self._head)}
        return sum(product.bytes for product in (*products, *ends.values()))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of int64 ``(rows,)``: float32 ``(rows, hidden)``."""
        return self._embeddings.rows(ids)

    def look_up(self, ids: array[int]) -> torch.Tensor:
        """The same of ids as plain numbers (``"q"``)."""
        struct, count = self._embeddings.struct, len(ids)
        out = torch.empty((count, self.shape.hidden), dtype=torch.float32)
        at, _ = ids.buffer_info()
        self._kernels.rows(ctypes.byref(struct), at, count, out.data_ptr())
        return out

    def ends(self) -> Ends:
        """The model's first and last tensors, unpacked: copies of their own."""
        embeddings = self._embeddings.dense().to(self.shape.dtype)
        tied = self._head is self._embeddings
        head = embeddings if tied else self._head.dense().to(self.shape.dtype)
        return Ends(embeddings, head, self._norm.to(self.shape.dtype), self.shape.eps)

    def attention(
        self,
        layers: tuple[int, int],
        parts: Sequence[tuple[torch.Tensor, int]],
        slots: Sequence[int],
        committed: int,
        mask: torch.Tensor | array[float] | None,
    ) -> Spot:
        """What `run` needs of one sequence's rows.

        `parts` are the cache's blocks and the slots to see of each, `slots` those the rows write in
        the last, `committed` how many of its slots are committed. `mask` is float32 ``(rows,
        pending)``, 0 where a row sees a pending slot, as a tensor or as plain numbers; None for a
        chain that ends the pending rows.
        """
        blocks = _array(native.Part, len(parts))(
            *[(kv.data_ptr(), kv.shape[2], count) for kv, count in parts]
        )
        places = array("i", slots)
        mask_at = None
        if isinstance(mask, torch.Tensor):
            mask = mask.contiguous()
            mask_at = mask.data_ptr()
        elif mask is not None:
            mask_at, _ = mask.buffer_info()
        struct = native.Sequence(
            parts=blocks,
            count=len(parts),
            committed=committed,
            pending=parts[-1][1] - committed,
            rows=len(places),
            slots=places.buffer_info()[0],
            mask=mask_at,
        )
        return Spot(len(places), struct, (blocks, places, mask, [kv for kv, _ in parts]))

    def run(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor | array[int],
        spots: Sequence[Spot],
        layers: tuple[int, int],
        taps: Sequence[int],
        logits: int,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor], torch.Tensor | None]:
        """Rows through layers lo..hi-1: what comes out, the taps, and logits of the last `logits`.

        `hidden` float32 ``(rows, hidden)`` is overwritten; positions int64 ``(rows,)``, or plain
        numbers (``"i"``). Taps are in
        the model's dtype, logits float32 ``(logits, vocab)``, None when none are wanted. Raises
        ModelError when the pass doesn't fit in memory.
        """
        rows = hidden.shape[0]
        wanted = [tap for tap in dict.fromkeys(taps) if layers[0] <= tap <= layers[1]]
        tapped = [torch.empty_like(hidden) for _ in wanted]
        out = None
        if logits:
            out = torch.empty((logits, self._head.struct.out), dtype=torch.float32)
        if isinstance(positions, torch.Tensor):
            positions = array("i", positions.tolist())
        structs = _array(native.Sequence, len(spots))(*[spot.struct for spot in spots])
        tap_layers = array("i", wanted)
        tap_places = array("Q", [x.data_ptr() for x in tapped])
        struct = native.Pass(
            rows=rows,
            sequences=len(spots),
            first=layers[0],
            last=layers[1],
            threads=_threads(),
            hidden=hidden.data_ptr(),
            positions=positions.buffer_info()[0],
            sequence=structs,
            taps=tap_layers.buffer_info()[0],
            tapped=tap_places.buffer_info()[0],
            tap_count=len(wanted),
            logits=None if out is None else out.data_ptr(),
            wanted=logits,
        )
        code = self._kernels.run(self._model_at, self._workspace, ctypes.byref(struct))
        if code:
            raise ModelError(f"there is no memory for a pass over {rows} rows")
        kept = {tap: x.to(self.shape.dtype) for tap, x in zip(wanted, tapped, strict=True)}
        return hidden, kept, out

    def move(self, kv: torch.Tensor, moved: Sequence[int], to: Sequence[int]) -> None:
        """Copy slots of a block, one after another: ``to[i]`` gets what ``moved[i]`` held."""
        layers, heads, capacity, _ = kv.shape
        old, new = array("i", moved), array("i", to)
        self._kernels.move(
            kv.data_ptr(), layers * heads, heads // 2, capacity, self.shape.head_dim,
            native.STORED[kv.dtype], old.buffer_info()[0], new.buffer_info()[0], len(moved),
        )  # fmt: skip


class _Block:
    """A layer's struct, and what it points to."""

    def __init__(self, layer: LayerWeights) -> None:
        products = [_own(p) for p in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        norms = (layer.attention_norm, layer.mlp_norm, layer.head_norm)
        self._norms = [None if n is None else n.float().contiguous() for n in norms]
        self.products = products
        self.struct = native.Layer(
            *(product.struct for product in products),
            *(None if norm is None else norm.data_ptr() for norm in self._norms),
        )


def _own(product: Linear) -> NativeLinear:
    assert isinstance(product, NativeLinear)
    return product

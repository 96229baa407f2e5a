"""The fast target for the Llama family: its own decoder over packed weights and shared KV blocks.

It agrees with the transformers model of the same weights (float32 logits within 1e-4) and
implements `hasten.targets.base.Target` in full: trees, forks, packed passes, layer ranges and taps.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from hasten.errors import CacheStateError, CapabilityError, ContextError, OptionError
from hasten.native.library import slot_width
from hasten.targets.base import Capabilities, Ends, Pass, Rows, TargetInfo
from hasten.targets.cache import CachedSequence, KVStore
from hasten.targets.fused_build import Decoder, build_decoder
from hasten.targets.fused_config import ARCHITECTURES, DTYPES, unsupported_reason
from hasten.targets.fused_layers import TorchDecoder
from hasten.targets.fused_native import NativeDecoder
from hasten.targets.fused_weights import Shape
from hasten.targets.load_options import Kernels
from hasten.targets.quantized import Quantize, Quantized

_CHUNK = 256
"""Prompt rows per pass."""
_CHUNK_SCORES = 1 << 26
"""Most attention scores a prompt chunk may have at once (rows x heads x context): bounds memory."""


class FusedTarget:
    """A Llama-family model behind hasten's loop; see `hasten.targets.base.Target` for the methods.

    layer_rows counts rows x layers run since the target was made.
    """

    capabilities = Capabilities(
        tree=True, rollback=True, layer_ranges=True, taps=True, fork=True, packed=True
    )

    def __init__(self, info: TargetInfo, decoder: Decoder) -> None:
        self.info = info
        self.layer_rows = 0
        self._decoder = decoder
        self._native = decoder if isinstance(decoder, NativeDecoder) else None
        shape = decoder.shape
        self._store = KVStore(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            width=slot_width(shape.cache, shape.head_dim),
            dtype=shape.cache,
            device=shape.device,
            limit=info.context_limit,
            tile=decoder.tile,
            move=decoder.move,
        )

    @staticmethod
    def unsupported(config: Any) -> str | None:
        """Why a model with this transformers config can't run here; None when it can."""
        return unsupported_reason(config)

    @classmethod
    def from_tensors(
        cls,
        config: Any,
        tensors: Mapping[str, torch.Tensor | Quantized],
        *,
        name: str,
        dtype: torch.dtype,
        device: torch.device,
        eos_ids: Iterable[int],
        fingerprint: str = "",
        copy: bool = False,
        quantize: Quantize | None = None,
        kernels: Kernels = "auto",
        kv_dtype: torch.dtype | None = None,
    ) -> FusedTarget:
        """A target from a transformers config and tensors by their transformers names.

        The mapping may be lazy; no tensor is changed. `copy` is for tensors that somebody else may
        change: none of their memory is kept. `quantize` rounds the weights to 8 or 4 bits, or
        (``"gguf"``) takes them as the mapping holds them; `kernels` and `kv_dtype` are those of
        `hasten.targets.load.load_target`. A head of other numbers than the embeddings is used
        whatever the config says about tying, as transformers does. `CapabilityError`
        when config or device aren't supported, `ModelError` when tensors and config don't fit.
        """
        reason = cls.unsupported(config)
        device = torch.device(device)
        if reason is None and device.type not in ("cpu", "cuda"):
            reason = f"it runs on cpu and cuda, not on {device.type}"
        if reason is not None:
            raise CapabilityError(
                f"{name} can't run in the fused decoder: {reason}. Use the transformers target"
            )
        if dtype not in DTYPES:
            raise OptionError("dtype", f"must be float32, bfloat16 or float16, got {dtype}")
        with torch.inference_mode(), torch.device("cpu"):
            decoder = build_decoder(
                config,
                tensors,
                dtype=dtype,
                device=device,
                quantize=quantize,
                kernels=kernels,
                kv_dtype=kv_dtype,
                copy=copy,
            )
        info = TargetInfo(
            name=name,
            architecture=ARCHITECTURES[config.model_type],
            vocab_size=config.vocab_size,
            eos_ids=frozenset(eos_ids),
            context_limit=config.max_position_embeddings,
            num_layers=decoder.shape.layers,
            hidden_size=decoder.shape.hidden,
            dtype=dtype,
            device=device,
            fingerprint=fingerprint,
            engine="fused",
            kernels="native" if decoder.shape.native else "torch",
            quantize=quantize or "",
        )
        return cls(info, decoder)

    @property
    def shape(self) -> Shape:
        """The decoder's sizes, dtype and device."""
        return self._decoder.shape

    @property
    def torch_decoder(self) -> TorchDecoder:
        """The decoder, for what runs its parts in an order of its own (training, batches in step).

        Raises CapabilityError when the native kernels run the model: load it with
        ``kernels="torch"``.
        """
        if not isinstance(self._decoder, TorchDecoder):
            raise CapabilityError(
                f"{self.info.name} runs on the native kernels: training and batches in step need "
                "torch's. Load it with kernels='torch'"
            )
        return self._decoder

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights; 0 with torch's kernels, which don't count them."""
        return self._decoder.weight_bytes if isinstance(self._decoder, NativeDecoder) else 0

    @property
    def bytes_in_use(self) -> int:
        """Bytes of keys and values held for all sequences, shared ones counted once."""
        return self._store.bytes_in_use

    def check(self) -> None:
        """Raise when the sequences' bookkeeping contradicts itself (for tests)."""
        self._store.check()

    def open(
        self, parent: CachedSequence | None = None, length: int | None = None
    ) -> CachedSequence:
        """A new empty sequence, or a fork of `parent`'s first `length` tokens (default all).

        A fork shares its parent's memory, but for a few last tokens.
        """
        with torch.inference_mode():
            return self._store.open(parent, length)

    def close(self, sequence: CachedSequence) -> None:
        """Give the sequence's memory back, except what forks use. Closing twice is harmless."""
        sequence.close()

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Keep the first `length` committed tokens; pending rows are dropped, forks unaffected."""
        sequence.truncate(length)

    def commit(self, sequence: CachedSequence, rows: Sequence[int]) -> None:
        """Keep these pending rows, a path from a root, all through every layer; drop the others."""
        sequence.commit(rows, self.info.num_layers)

    def rollback(self, sequence: CachedSequence) -> None:
        """Drop all pending rows."""
        sequence.need_open()
        sequence.pending_rows.clear()

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Input embeddings, ``(len(tokens), hidden_size)``, in the target's dtype on its device."""
        self._check_tokens(tokens)
        with torch.inference_mode():
            ids = torch.tensor(list(tokens), dtype=torch.int64, device=self.info.device)
            return self._decoder.embed(ids).to(self.info.dtype)

    def ends(self) -> Ends:
        """The model's first and last tensors, for drafters that share them. Packed ones are
        unpacked: copies of their own."""
        with torch.inference_mode():
            return self._decoder.ends()

    def prefill(
        self,
        sequence: CachedSequence,
        tokens: Sequence[int],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Pass:
        """Run and commit `tokens`, in chunks; logits of the last row, or of all.

        `all_logits` makes ``(len(tokens), vocab)`` of them: mind the memory.
        """
        self._check_prefill(sequence, tokens, taps)
        hidden: dict[int, list[torch.Tensor]] = {tap: [] for tap in taps}
        logits: list[torch.Tensor] = []
        done = 0
        with self._context():
            sequence.reserve(len(tokens))
            while done < len(tokens):
                rows = min(self._chunk_rows(sequence.length), len(tokens) - done)
                wanted = rows if all_logits else int(done + rows == len(tokens))
                kept, said = self._run_chunk(sequence, tokens[done : done + rows], taps, wanted)
                sequence.append(rows)
                done += rows
                for tap, pieces in hidden.items():
                    pieces.append(kept[tap])
                if said is not None:
                    logits.append(said)
            return Pass(_joined(logits), {tap: _joined(pieces) for tap, pieces in hidden.items()})

    def forward(
        self,
        batch: Sequence[Rows],
        *,
        layers: tuple[int, int] | None = None,
        taps: Sequence[int] = (),
    ) -> list[Pass]:
        """One pass over the rows of each sequence; they become pending.

        With ``layers=(lo, hi)`` and lo > 0 the rows named are those standing at layer lo. Hidden
        states are given for the taps within lo..hi. A refused pass changes nothing.
        """
        layers = layers or (0, self.info.num_layers)
        self._check_pass(batch, layers, taps)
        picked = [self._admit(rows, layers) for rows in batch]
        with self._context():
            added: list[Rows] = []
            try:
                for rows in batch if layers[0] == 0 else ():
                    rows.sequence.add(rows.tokens, rows.parents)
                    added.append(rows)
                out, kept, logits = self._run_rows(batch, picked, layers, taps)
            except BaseException:
                for rows in added:
                    rows.sequence.pending_rows.drop_last(len(rows.tokens))
                raise
            sizes = [len(indices) for indices in picked]
            top = layers[1] == self.info.num_layers
            values = [None] * len(sizes) if top else out.split_with_sizes(sizes)
            for rows, indices, value in zip(batch, picked, values, strict=True):
                rows.sequence.pending_rows.advance(indices, layers[1], value)
            return _per_sequence(sizes, logits, kept)

    @contextmanager
    def _torch_alone(self) -> Iterator[None]:
        with torch.inference_mode(), torch.autocast(self.info.device.type, enabled=False):
            yield

    def _context(self) -> AbstractContextManager[None]:
        """For torch's operations; hasten's own kernels care for neither mode."""
        return self._torch_alone() if self._native is None else nullcontext()

    def _run_chunk(
        self, sequence: CachedSequence, tokens: Sequence[int], taps: Sequence[int], logits: int
    ) -> tuple[dict[int, torch.Tensor], torch.Tensor | None]:
        """Runs prompt tokens through all layers: taps, and logits of the last `logits`; the caller
        commits them."""
        rows, first, start = len(tokens), sequence.tail_length, sequence.length
        layers, parts = (0, self.info.num_layers), sequence.parts(first + rows)
        slots = range(first, first + rows)
        spot = self._decoder.attention(layers, parts, slots, first, None)
        hidden, positions = self._inputs(tokens, range(start, start + rows), ())
        _, kept, said = self._decoder.run(hidden, positions, [spot], layers, taps, logits)
        self.layer_rows += rows * self.info.num_layers
        return kept, said

    def _run_rows(
        self,
        batch: Sequence[Rows],
        picked: Sequence[Sequence[int]],
        layers: tuple[int, int],
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor], torch.Tensor | None]:
        """Runs the `picked` pending rows of each sequence, one sequence after another."""
        tokens: list[int] = []
        positions: list[int] = []
        spots: list[Any] = []
        held: list[torch.Tensor] = []
        for rows, indices in zip(batch, picked, strict=True):
            sequence: CachedSequence = rows.sequence
            pending, first = sequence.pending_rows, sequence.tail_length
            tokens.extend(rows.tokens)
            positions.extend(sequence.length + pending.depths[i] for i in indices)
            slots = [first + i for i in indices]
            mask: Any = (
                pending.mask(indices, self.info.device)
                if self._native is None
                else pending.mask_numbers(indices)
            )
            parts = sequence.parts(first + len(pending))
            spots.append(self._decoder.attention(layers, parts, slots, first, mask))
            if layers[0]:
                held.extend(pending.held[i] for i in indices)
        hidden, places = self._inputs(tokens, positions, held)
        logits = len(tokens) if layers[1] == self.info.num_layers else 0
        self.layer_rows += len(tokens) * (layers[1] - layers[0])
        return self._decoder.run(hidden, places, spots, layers, taps, logits)

    def _inputs(
        self, tokens: Sequence[int], positions: Sequence[int], held: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Any]:
        """What the decoder runs: states (those held, or the tokens' embeddings), and positions."""
        if self._native is not None:  # after a pass any operation of torch's finds cold caches
            ids = array("q", tokens)
            hidden = torch.cat(list(held)) if held else self._native.look_up(ids)
            return hidden, array("i", positions)
        both = torch.tensor([*tokens, *positions], dtype=torch.int64, device=self.info.device)
        hidden = torch.cat(list(held)) if held else self._decoder.embed(both[: len(tokens)])
        return hidden, both[len(tokens) :]

    def _chunk_rows(self, context: int) -> int:
        room = _CHUNK_SCORES // (self.shape.heads * (context + _CHUNK))
        return max(min(room, _CHUNK), 16)

    def _admit(self, rows: Rows, layers: tuple[int, int]) -> list[int]:
        """The indices of the rows among their sequence's pending ones; raises if they can't run."""
        sequence: CachedSequence = rows.sequence
        sequence.need_open()
        self._check_tokens(rows.tokens)
        indices, depth = sequence.pending_rows.admit(rows.tokens, rows.parents, layers)
        self._check_room(sequence.length + depth + 1)
        return indices

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        size = self.info.vocab_size
        if len(tokens) and not (min(tokens) >= 0 and max(tokens) < size):
            wrong = next(token for token in tokens if not 0 <= token < size)
            problem = f"id {wrong} isn't in the model's vocabulary (0..{size - 1})"
            raise OptionError("tokens", problem, "Is this the model's own tokenizer?")

    def _check_room(self, tokens: int) -> None:
        if tokens > self.info.context_limit:
            raise ContextError(
                f"{tokens} tokens don't fit in the context of {self.info.context_limit}: shorten "
                "the prompt or ask for fewer new tokens"
            )

    def _check_taps(self, taps: Sequence[int]) -> None:
        for tap in taps:
            if not 0 <= tap <= self.info.num_layers:
                known = f"0 (embeddings) to {self.info.num_layers}"
                raise OptionError("taps", f"there is no layer {tap}, only {known}")

    def _check_prefill(
        self, sequence: CachedSequence, tokens: Sequence[int], taps: Sequence[int]
    ) -> None:
        sequence.need_open()
        if sequence.pending:
            raise CacheStateError(f"prefill: commit or drop the {sequence.pending} pending rows")
        if not len(tokens):
            raise ContextError("there are no tokens to run: a prompt needs at least one")
        self._check_taps(taps)
        self._check_tokens(tokens)
        self._check_room(sequence.length + len(tokens))

    def _check_pass(
        self, batch: Sequence[Rows], layers: tuple[int, int], taps: Sequence[int]
    ) -> None:
        if not 0 <= layers[0] < layers[1] <= self.info.num_layers:
            raise CacheStateError(f"layers {layers} isn't a range in 0..{self.info.num_layers}")
        if not batch or len({id(rows.sequence) for rows in batch}) < len(batch):
            raise CacheStateError("a pass needs at least one sequence, and each only once")
        self._check_taps(taps)


def _per_sequence(
    sizes: Sequence[int], logits: torch.Tensor | None, hidden: Mapping[int, torch.Tensor]
) -> list[Pass]:
    """Cuts what came out of a pass into one `Pass` a sequence."""
    if len(sizes) == 1:
        return [Pass(logits, hidden)]
    passes, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        taps = {tap: value[part] for tap, value in hidden.items()}
        passes.append(Pass(None if logits is None else logits[part], taps))
        start += size
    return passes


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))

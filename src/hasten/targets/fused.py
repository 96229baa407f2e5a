"""The fast target for the Llama family: its own decoder over packed weights and shared KV blocks.

It agrees with the transformers model of the same weights (float32 logits within 1e-4) and
implements `hasten.targets.base.Target` in full: trees, forks, packed passes, layer ranges and taps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hasten.errors import CacheStateError, CapabilityError, ContextError, OptionError
from hasten.targets.base import Capabilities, Ends, Pass, Rows, TargetInfo
from hasten.targets.cache import CachedSequence, KVStore
from hasten.targets.fused_config import ARCHITECTURES, read_config, unsupported_reason
from hasten.targets.fused_layers import Attention, Decoder, Rotary, causal_mask
from hasten.targets.fused_weights import Checkpoint, Shape, load_layer, make_linear

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

    def __init__(
        self,
        info: TargetInfo,
        decoder: Decoder,
        rotary: Rotary,
        embeddings: torch.Tensor,
        norm: torch.Tensor,
        head: torch.Tensor,
    ) -> None:
        self.info = info
        self.layer_rows = 0
        self._decoder, self._rotary = decoder, rotary
        self._embeddings, self._norm = embeddings, norm
        self._head, self._tied = make_linear(head), head is embeddings
        shape = decoder.shape
        self._store = KVStore(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.compute,
            device=shape.device,
            limit=info.context_limit,
        )

    @staticmethod
    def unsupported(config: Any) -> str | None:
        """Why a model with this transformers config can't run here; None when it can."""
        return unsupported_reason(config)

    @classmethod
    def from_tensors(
        cls,
        config: Any,
        tensors: Mapping[str, torch.Tensor],
        *,
        name: str,
        dtype: torch.dtype,
        device: torch.device,
        eos_ids: Iterable[int],
        fingerprint: str = "",
        copy: bool = False,
    ) -> FusedTarget:
        """A target from a transformers config and tensors by their transformers names.

        The mapping may be lazy; no tensor is changed. `copy` is for tensors that somebody else may
        change: none of their memory is kept. A head of other numbers than the embeddings is used
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
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise OptionError("dtype", f"must be float32, bfloat16 or float16, got {dtype}")
        with torch.inference_mode():
            shape, frequencies = read_config(config, dtype, device)
            read = Checkpoint(tensors, shape, copy=copy)
            decoder = Decoder(shape, [load_layer(read, i, shape) for i in range(shape.layers)])
            size = (config.vocab_size, shape.hidden)
            embeddings = read("model.embed_tokens.weight", *size)
            head = embeddings if _tied(config, read, tensors) else read("lm_head.weight", *size)
            norm = read("model.norm.weight", shape.hidden)
            info = TargetInfo(
                name=name,
                architecture=ARCHITECTURES[config.model_type],
                vocab_size=config.vocab_size,
                eos_ids=frozenset(eos_ids),
                context_limit=config.max_position_embeddings,
                num_layers=shape.layers,
                hidden_size=shape.hidden,
                dtype=dtype,
                device=device,
                fingerprint=fingerprint,
                engine="fused",
            )
            return cls(info, decoder, Rotary(frequencies, shape), embeddings, norm, head)

    @property
    def shape(self) -> Shape:
        """The decoder's sizes, dtype and device."""
        return self._decoder.shape

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
        with torch.inference_mode():
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
            return F.embedding(ids, self._embeddings)

    def ends(self) -> Ends:
        """The model's first and last tensors, for drafters that share them. A packed head that
        isn't the embeddings is unpacked: a copy of its own."""
        head = self._embeddings if self._tied else self._head.dense()
        return Ends(self._embeddings, head, self._norm, self._decoder.shape.eps)

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
        with torch.inference_mode(), torch.autocast(self.info.device.type, enabled=False):
            sequence.reserve(len(tokens))
            while done < len(tokens):
                rows = min(self._chunk_rows(sequence.length), len(tokens) - done)
                out, kept = self._run_chunk(sequence, tokens[done : done + rows], taps)
                sequence.append(rows)
                done += rows
                for tap, pieces in hidden.items():
                    pieces.append(kept[tap])
                if all_logits or done == len(tokens):
                    logits.append(self._logits(out if all_logits else out[-1:]))
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
        with torch.inference_mode(), torch.autocast(self.info.device.type, enabled=False):
            added: list[Rows] = []
            try:
                for rows in batch if layers[0] == 0 else ():
                    rows.sequence.add(rows.tokens, rows.parents)
                    added.append(rows)
                out, kept = self._run_rows(batch, picked, layers, taps)
                top = layers[1] == self.info.num_layers
                logits = self._logits(out) if top else None
            except BaseException:
                for rows in added:
                    rows.sequence.pending_rows.drop_last(len(rows.tokens))
                raise
            sizes = [len(indices) for indices in picked]
            for rows, indices, value in zip(
                batch, picked, out.split_with_sizes(sizes), strict=True
            ):
                rows.sequence.pending_rows.advance(indices, layers[1], None if top else value)
            return _per_sequence(sizes, logits, kept)

    def _run_chunk(
        self, sequence: CachedSequence, tokens: Sequence[int], taps: Sequence[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Runs prompt tokens through all layers; the caller commits them."""
        rows, first, start = len(tokens), sequence.tail_length, sequence.length
        layers = (0, self.info.num_layers)
        slots, mask = range(first, first + rows), causal_mask(rows, self.info.device)
        parts = sequence.parts(first + rows)
        attention = Attention(self._decoder.shape, layers, parts, slots, mask)
        ids, positions = self._inputs(tokens, range(start, start + rows))
        hidden = F.embedding(ids, self._embeddings)
        return self._run(hidden, positions, [attention], layers, taps)

    def _run_rows(
        self,
        batch: Sequence[Rows],
        picked: Sequence[Sequence[int]],
        layers: tuple[int, int],
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Runs the `picked` pending rows of each sequence, one sequence after another."""
        tokens: list[int] = []
        positions: list[int] = []
        attention: list[Attention] = []
        held: list[torch.Tensor] = []
        for rows, indices in zip(batch, picked, strict=True):
            sequence: CachedSequence = rows.sequence
            pending, first = sequence.pending_rows, sequence.tail_length
            tokens.extend(rows.tokens)
            positions.extend(sequence.length + pending.depths[i] for i in indices)
            slots = [first + i for i in indices]
            mask = pending.mask(indices, self.info.device)
            parts = sequence.parts(first + len(pending))
            attention.append(Attention(self._decoder.shape, layers, parts, slots, mask))
            if layers[0]:
                held.extend(pending.held[i] for i in indices)
        ids, places = self._inputs(tokens, positions)
        hidden = torch.cat(held) if held else F.embedding(ids, self._embeddings)
        return self._run(hidden, places, attention, layers, taps)

    def _run(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: Sequence[Attention],
        layers: tuple[int, int],
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        kept: dict[int, torch.Tensor] = {}

        def keep(layer: int, value: torch.Tensor) -> None:
            if layer in taps:
                kept[layer] = value

        out = self._decoder.run(hidden, self._rotary(positions), attention, layers, keep)
        self.layer_rows += hidden.shape[0] * (layers[1] - layers[0])
        return out, kept

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        eps = self._decoder.shape.eps
        return self._head(F.rms_norm(hidden, (self.info.hidden_size,), self._norm, eps))

    def _inputs(
        self, tokens: Sequence[int], positions: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and positions, int64 ``(rows,)`` on the device, in one transfer."""
        both = torch.tensor([*tokens, *positions], dtype=torch.int64, device=self.info.device)
        return both[: len(tokens)], both[len(tokens) :]

    def _chunk_rows(self, context: int) -> int:
        room = _CHUNK_SCORES // (self._decoder.shape.heads * (context + _CHUNK))
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


def _tied(config: Any, read: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether the head is the embeddings."""
    if "lm_head.weight" not in tensors:
        return bool(config.tie_word_embeddings)
    return read.equal("lm_head.weight", "model.embed_tokens.weight")


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

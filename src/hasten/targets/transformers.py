"""Any Hugging Face causal language model as a target, as it is: nothing of it is changed.

A tree is one pass with a 4-D mask and position ids; afterwards the keys and values of the kept
rows are gathered and the cache is cut. What a model can't do is found at load (`capabilities`) and
refused before a pass, so that no text ever comes from a bad cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hasten.errors import CapabilityError, ContextError, OptionError
from hasten.targets.base import Capabilities, TargetInfo
from hasten.targets.capabilities import PLAIN, self_check
from hasten.targets.hf_cache import LayerCache
from hasten.targets.hf_model import inspect_model, require_eval, tapped
from hasten.targets.masks import MaskKind, depths_of, tree_masks
from hasten.types import Pass, Rows

PREFILL_ROWS = 512


class HFSequence:
    """A sequence of a `TransformersTarget`: committed tokens, pending rows, the cache of both."""

    def __init__(self, cache: LayerCache, tokens: Sequence[int] = ()) -> None:
        self.cache = cache
        self.tokens: list[int] = list(tokens)
        self.pending_tokens: list[int] = []
        self.parents: list[int] = []
        self.lost = ""
        """Why the sequence can't be used any more; "" while it can."""

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.tokens)

    @property
    def pending(self) -> int:
        """Rows that wait for commit."""
        return len(self.parents)

    def settle(self, kept: Sequence[int]) -> None:
        """Take the pending tokens at `kept` over into the committed ones, and forget the others."""
        self.tokens += [self.pending_tokens[row] for row in kept]
        self.pending_tokens, self.parents = [], []


class TransformersTarget:
    """A Hugging Face causal LM object behind hasten's loop; see `hasten.targets.base.Target`.

    `model` may be on any device or spread over several, of any dtype, quantized or wrapped by PEFT.
    It must be in eval mode. Loading runs a self-check of about a dozen passes over few rows.

    `eos_ids` are the ids that end an answer, `fingerprint` names the weights, `prefill_rows` bounds
    the rows of a prompt's pass. Raises CapabilityError for a model that can't be a target.
    """

    def __init__(
        self,
        model: Any,
        *,
        name: str,
        eos_ids: frozenset[int],
        fingerprint: str = "",
        prefill_rows: int = PREFILL_ROWS,
    ) -> None:
        if prefill_rows < 1:
            raise OptionError("prefill_rows", f"must be at least 1, got {prefill_rows}")
        facts = inspect_model(model)
        self.facts = facts
        self.info = TargetInfo(
            name=name,
            architecture=facts.architecture,
            vocab_size=facts.vocab_size,
            eos_ids=eos_ids,
            context_limit=facts.context_limit,
            num_layers=facts.num_layers,
            hidden_size=facts.hidden_size,
            dtype=facts.dtype,
            device=facts.device,
            fingerprint=fingerprint,
            engine="transformers",
            whole_prompt=facts.whole_prompt,
        )
        self.prefill_rows = prefill_rows
        self.multi_row = False
        """True when rows may run together on a filled cache."""
        self.kinds: dict[str, MaskKind] | None = None
        """The masks that a tree pass needs, by layer type."""
        self.capabilities: Capabilities = PLAIN
        self.capabilities = self_check(self)

    def open(self, parent: HFSequence | None = None, length: int | None = None) -> HFSequence:
        """A new empty sequence, or a fork of `parent`'s first `length` committed tokens.

        A fork shares the memory of keys and values. CapabilityError when the parent's cache can't
        be cut down to `length` (a window has slid, or the state is recurrent).
        """
        if parent is None:
            if length:
                raise OptionError("length", f"must be 0 without a parent, got {length}")
            return HFSequence(LayerCache(self.facts.config))
        self._usable(parent)
        length = self._check_length(parent, parent.length if length is None else length)
        if length == 0:
            return HFSequence(LayerCache(self.facts.config))
        drop = self._cuttable(parent, length)
        twin = HFSequence(parent.cache.fork(), parent.tokens[:length])
        if drop:
            twin.cache.keep((), drop)
        return twin

    def close(self, sequence: HFSequence) -> None:
        """Give the sequence's memory back. Closing twice is harmless."""
        self._empty(sequence)
        sequence.lost = "the sequence is closed"

    def truncate(self, sequence: HFSequence, length: int) -> None:
        """Keep only the first `length` committed tokens; pending rows are dropped.

        CapabilityError, and nothing changed, when the cache can't be cut that far.
        """
        self._usable(sequence)
        if self._check_length(sequence, length) == 0:
            self._empty(sequence)
            return
        drop = self._cuttable(sequence, length)
        if drop:
            sequence.cache.keep((), drop)
        sequence.settle(())
        del sequence.tokens[length:]

    def prefill(
        self,
        sequence: HFSequence,
        tokens: Sequence[int],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Pass:
        """Run and commit `tokens` in chunks; logits ``(1, vocab)`` of the last row, or of all rows.

        After an error the sequence holds the chunks that were done, is empty, or refuses to go on.
        """
        self._usable(sequence)
        self._check_taps(taps)
        if not tokens:
            raise ContextError("there are no tokens to run: the prompt is empty")
        if sequence.pending:
            raise OptionError("sequence", "has pending rows; commit or roll back before a prefill")
        self._check_room(sequence, len(tokens))
        step = self._chunk(sequence, len(tokens))
        passes = []
        for start in range(0, len(tokens), step):
            chunk = list(tokens[start : start + step])
            passes.append(self._run(sequence, chunk, taps=taps, last_only=not all_logits))
            sequence.tokens += chunk
            if sequence.cache.recording:
                sequence.cache.keep((), 0)
        if not all_logits:
            passes[:-1] = [Pass(None, passed.hidden) for passed in passes[:-1]]
        return _joined(passes, taps)

    def forward(
        self,
        batch: Sequence[Rows],
        *,
        layers: tuple[int, int] | None = None,
        taps: Sequence[int] = (),
    ) -> list[Pass]:
        """One pass for each sequence's rows; they become pending. See `Target.forward`.

        CapabilityError before any pass for a layer range, for branches without `capabilities.tree`,
        and for more than one pending row without `capabilities.rollback`.
        """
        if layers not in (None, (0, self.info.num_layers)):
            raise CapabilityError(
                f"layers={layers}: a transformers model runs all its {self.info.num_layers} layers "
                "at once; methods that leave early need the fused target"
            )
        self._check_taps(taps)
        if len({id(rows.sequence) for rows in batch}) < len(batch):
            raise OptionError("batch", "names a sequence twice; give its rows at once")
        for rows in batch:
            self._admit(rows)
        return [self._run_rows(rows, taps) for rows in batch]

    def commit(self, sequence: HFSequence, rows: Sequence[int]) -> None:
        """Keep these pending rows (a root-to-node path, increasing) and drop the others."""
        self._usable(sequence)
        kept = list(rows)
        above = -1
        for row in kept:
            if not 0 <= row < sequence.pending or sequence.parents[row] != above:
                raise OptionError("rows", f"{kept} is no path from the last committed token")
            above = row
        if len(kept) < sequence.pending and not self.capabilities.rollback:
            raise self._cannot_cut("a pending row can't be dropped")
        if self.capabilities.rollback:
            sequence.cache.keep(kept, sequence.pending)
        sequence.settle(kept)

    def rollback(self, sequence: HFSequence) -> None:
        """Drop all pending rows; CapabilityError if there are any and rollback isn't possible."""
        if sequence.pending:
            self.commit(sequence, ())

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Input embeddings, ``(len(tokens), hidden_size)``, in the target's dtype on its device."""
        with torch.no_grad():
            ids = torch.tensor(list(tokens), dtype=torch.long, device=self.info.device)
            embedded: torch.Tensor = self.facts.embedding(ids)
            return embedded

    def _chunk(self, sequence: HFSequence, count: int) -> int:
        """How many rows of a prompt run together."""
        if sequence.length == 0 and (self.facts.whole_prompt or not self.multi_row):
            return count
        return self.prefill_rows if self.multi_row else 1

    def _run_rows(self, rows: Rows, taps: Sequence[int]) -> Pass:
        sequence: HFSequence = rows.sequence
        if self.capabilities.rollback:
            sequence.cache.record()
        parents = [*sequence.parents, *rows.parents]
        plain = len(parents) == 1 or not self.capabilities.tree
        passed = self._run(sequence, rows.tokens, parents=None if plain else parents, taps=taps)
        sequence.parents = parents
        sequence.pending_tokens += rows.tokens
        return passed

    def _run(
        self,
        sequence: HFSequence,
        tokens: Sequence[int],
        *,
        parents: list[int] | None = None,
        taps: Sequence[int],
        last_only: bool = False,
    ) -> Pass:
        """One call of the model; `parents` of all pending rows ask for a tree mask.

        The sequence's cache grows by the rows, or is put back when the call fails.
        """
        require_eval(self.facts.model)
        frontier = sequence.cache.frontier()
        try:
            with torch.no_grad(), sequence.cache.widened(sequence.pending):
                arguments = self._arguments(sequence, tokens, parents)
                if last_only and self.facts.keep_name:
                    arguments[self.facts.keep_name] = 1
                with tapped(self.facts, taps) as got:
                    output = self.facts.model(**arguments)
                logits = (output.logits if hasattr(output, "logits") else output[0])[0]
                device = self.info.device
                hidden = {layer: got[layer][0].to(device) for layer in taps}
                return Pass((logits[-1:] if last_only else logits).to(device), hidden)
        except BaseException:
            self._undo(sequence, frontier)
            raise

    def _arguments(
        self, sequence: HFSequence, tokens: Sequence[int], parents: list[int] | None
    ) -> dict[str, Any]:
        """What the model is called with; without `parents` the rows follow each other."""
        facts, device, count = self.facts, self.info.device, len(tokens)
        arguments: dict[str, Any] = {
            "input_ids": torch.tensor([list(tokens)], dtype=torch.long, device=device),
            facts.cache_name: sequence.cache.raw,
            "use_cache": True,
        }
        if facts.takes_return_dict:
            arguments["return_dict"] = True
        if parents is None:
            first = sequence.length + sequence.pending
            positions = torch.arange(first, first + count, device=device)
        else:
            assert self.kinds is not None
            depths = depths_of(parents)[-count:]
            positions = torch.tensor(depths, device=device) + sequence.length
            arguments["attention_mask"] = tree_masks(
                self.kinds,
                sequence.cache,
                committed=sequence.length,
                parents=parents,
                rows=count,
                device=device,
                additive=facts.dtype if facts.attention == "eager" else None,
            )
        if facts.takes_positions:
            arguments["position_ids"] = positions[None]
        return arguments

    def _undo(self, sequence: HFSequence, frontier: list[tuple[int, int]]) -> None:
        if sequence.length + sequence.pending == 0:
            self._empty(sequence)
        elif not sequence.cache.restore(frontier):
            sequence.lost = "a pass over the sequence failed and its cache can't be put back"

    def _empty(self, sequence: HFSequence) -> None:
        sequence.cache = LayerCache(self.facts.config)
        sequence.settle(())
        sequence.tokens = []

    def _admit(self, rows: Rows) -> None:
        """Check rows before they are run."""
        sequence: HFSequence = rows.sequence
        self._usable(sequence)
        count, pending = len(rows.tokens), sequence.pending
        if count == 0 or len(rows.parents) != count:
            raise OptionError("rows", f"need a parent each, got {count} and {len(rows.parents)}")
        for row, parent in enumerate(rows.parents, start=pending):
            if not -1 <= parent < row:
                raise OptionError("rows", f"row {row}: its parent {parent} must come before it")
        if not self.capabilities.rollback and (pending or count > 1):
            raise self._cannot_cut("one row is run and committed at a time")
        chained = list(rows.parents) == list(range(pending - 1, pending - 1 + count))
        if not self.capabilities.tree and not chained:
            notes = "; ".join(self.capabilities.notes)
            raise CapabilityError(f"{self.info.name} takes no trees, only chains: {notes}")
        self._check_room(sequence, 1 + max(depths_of([*sequence.parents, *rows.parents])))

    def _usable(self, sequence: HFSequence) -> None:
        if sequence.lost:
            raise CapabilityError(f"{sequence.lost}; open a new one")

    def _check_length(self, sequence: HFSequence, length: int) -> int:
        if not 0 <= length <= sequence.length:
            raise OptionError("length", f"must be in 0..{sequence.length}, got {length}")
        return length

    def _check_room(self, sequence: HFSequence, more: int) -> None:
        if sequence.length + more > self.info.context_limit:
            raise ContextError(
                f"{sequence.length} tokens and {more} more don't fit: the context of "
                f"{self.info.name} holds {self.info.context_limit}"
            )

    def _check_taps(self, taps: Sequence[int]) -> None:
        if taps and not (self.capabilities.taps and self.facts.layers is not None):
            raise CapabilityError(
                f"{self.info.name}: hidden states were asked for, but can't be tapped"
            )
        for layer in taps:
            if not 0 <= layer <= self.info.num_layers:
                raise OptionError("taps", f"must be in 0..{self.info.num_layers}, got {layer}")

    def _cuttable(self, sequence: HFSequence, length: int) -> int:
        """How many slots to drop to come down to `length` committed tokens; refuses by name."""
        drop = sequence.length - length + sequence.pending
        if drop and not (self.capabilities.rollback and sequence.cache.can_cut(drop)):
            raise self._cannot_cut(f"{sequence.length} tokens can't be cut to {length}")
        return drop

    def _cannot_cut(self, what: str) -> CapabilityError:
        reason = (
            "its state is recurrent or can't be cut"
            if not self.capabilities.rollback
            else ("what slid out of its attention window is gone")
        )
        return CapabilityError(f"{self.info.name}: {what}, because {reason}; open a new sequence")


def _joined(passes: Sequence[Pass], taps: Sequence[int]) -> Pass:
    """The passes of consecutive chunks as one."""
    logits = [passed.logits for passed in passes if passed.logits is not None]
    hidden = {layer: torch.cat([passed.hidden[layer] for passed in passes]) for layer in taps}
    return Pass(torch.cat(logits), hidden)

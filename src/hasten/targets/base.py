"""What the loop asks of a model: sequences with a cache that can be cut, and passes over trees.

One mechanism serves chat turns, several answers to one prompt, batches and particle populations: a
*sequence* is a handle on committed tokens; `open(parent, length)` forks one. Rows run by `forward`
are *pending* until `commit` keeps some of them or `rollback` drops them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from hasten.errors import ContextError
from hasten.types import Pass, Rows

__all__ = [
    "Capabilities",
    "Ends",
    "Pass",
    "Rows",
    "SequenceHandle",
    "Target",
    "TargetInfo",
    "check_prompt",
]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a target can do; found by structure and by a self-check at load, never by model name.

    tree          a pass may hold branches (tree mask and position ids are honoured)
    rollback      pending rows can be dropped; without it only one row at a time can be run
    layer_ranges  `forward(layers=(lo, hi))` works, with a KV frontier per layer
    taps          hidden states of chosen layers
    fork          `open(parent, length)` works, and whether it shares memory is the target's matter
    packed        rows of several sequences run in one pass
    notes         one sentence for each thing that is off, saying why (shown by ``hasten info``)
    """

    tree: bool = True
    rollback: bool = True
    layer_ranges: bool = False
    taps: bool = True
    fork: bool = True
    packed: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """Facts about a target that methods, costs and trained parts are keyed by.

    vocab_size is the number of rows of the LM head (it may exceed the tokenizer's). context_limit
    is the most tokens a sequence may hold. fingerprint identifies the weights whatever dtype they
    run in.
    """

    name: str
    architecture: str
    vocab_size: int
    eos_ids: frozenset[int]
    context_limit: int
    num_layers: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    fingerprint: str = ""
    engine: str = ""
    """``"fused"`` or ``"transformers"``."""
    kernels: str = ""
    """Of the fused engine: ``"native"`` (hasten's own) or ``"torch"``."""
    quantize: str = ""
    """How the fused engine's weights are quantized; empty: not at all."""
    whole_prompt: bool = False
    """A prompt's rotary angles depend on its length: it must be prefilled in one call."""

    @property
    def precision(self) -> str:
        """The dtype, and how weights are quantized if they are: ``"bfloat16, int8 weights"``."""
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}, {self.quantize} weights" if self.quantize else name


@dataclass(frozen=True, slots=True)
class Ends:
    """A target's first and last tensors, in its dtype on its device; nobody changes them.

    embeddings and head ``(vocab, hidden_size)``, norm ``(hidden_size,)``: the last norm's weight,
    with `eps`.
    """

    embeddings: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor
    eps: float


class SequenceHandle(Protocol):
    """A sequence of a target: `length` tokens are committed, `pending` rows wait for commit."""

    @property
    def length(self) -> int:
        """Committed tokens."""
        ...

    @property
    def pending(self) -> int:
        """Rows run and neither committed nor dropped."""
        ...


@runtime_checkable
class Target(Protocol):
    """A causal language model behind hasten's loop. Not thread-safe; one pass at a time."""

    info: TargetInfo
    capabilities: Capabilities

    def open(self, parent: Any = None, length: int | None = None) -> Any:
        """A new empty sequence, or a fork of `parent`'s first `length` committed tokens (default
        all)."""
        ...

    def close(self, sequence: Any) -> None:
        """Give the sequence's memory back. Closing twice is harmless."""
        ...

    def truncate(self, sequence: Any, length: int) -> None:
        """Keep only the first `length` committed tokens (pending rows are dropped)."""
        ...

    def prefill(
        self,
        sequence: Any,
        tokens: Sequence[int],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Pass:
        """Run and commit `tokens`, in chunks; logits of the last row, or of all with
        `all_logits`."""
        ...

    def forward(
        self,
        batch: Sequence[Rows],
        *,
        layers: tuple[int, int] | None = None,
        taps: Sequence[int] = (),
    ) -> list[Pass]:
        """One pass over the rows of each sequence; they become pending.

        `layers=(lo, hi)` runs decoder layers lo..hi-1 only (default all). With lo > 0 the rows
        named must be exactly the pending rows that stand at frontier lo, in order: they resume from
        their stored hidden states. Logits are given only when hi is the number of layers.
        """
        ...

    def commit(self, sequence: Any, rows: Sequence[int]) -> None:
        """Keep these pending rows (a root-to-node path, increasing) and drop the others."""
        ...

    def rollback(self, sequence: Any) -> None:
        """Drop all pending rows: the sequence is as after the last commit."""
        ...

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Input embeddings, ``(len(tokens), hidden_size)``, in the target's dtype on its device."""
        ...


def check_prompt(target: Target, prompt: Sequence[int]) -> None:
    """Refuse a prompt that can't be answered; raises ContextError."""
    limit = target.info.context_limit
    if len(prompt) == 0:
        raise ContextError("the prompt is empty: give at least one token")
    if len(prompt) >= limit:
        raise ContextError(
            f"the prompt has {len(prompt)} tokens, and the context of {target.info.name} holds "
            f"{limit}: no room for an answer. Shorten the prompt"
        )
    if min(prompt) < 0 or max(prompt) >= target.info.vocab_size:
        raise ContextError(
            f"the prompt holds ids outside 0..{target.info.vocab_size - 1}: was another model's "
            "tokenizer used?"
        )

"""What a drafter is: it sees ids and signals only, so it runs in any engine.

A drafter changes speed, never text. Its state belongs to one request; anything shared between
requests is explicit, bounded and off by default. Third-party drafters register through the
entry point group ``hasten.drafters`` (see `hasten.methods`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hasten.types import Budget, Draft, Round, RowSignals, Signals


@dataclass(slots=True)
class DraftContext:
    """Handed to `propose` each round.

    ids        prompt and answer so far, the pending root last. Read it, don't keep or change it.
    sample     draws from a float32 distribution ``(vocab,)``: ``sample(probs, position, count)``
               gives `count` distinct ids, drawn without replacement, with randomness keyed by the
               request's seed and position (never the global generator).
    warp       the request's sampling options as a function ``(prefix, logits (vocab,)) -> probs
               (vocab,)`` in float32, so that a drawing drafter's q goes through the same options as
               the target's p.
    greedy     True when the request is greedy.
    run_rows   ``run_rows(tokens, parents, layers)`` runs rows through some of the target's lower
               layers and gives their hidden states ``(rows, hidden_size)``; None when the target
               can't.
    embed      input embeddings of ids, ``(n, hidden_size)``; None when not asked for.
    others     requests that share this round's pass.
    """

    ids: Sequence[int]
    sample: Callable[[torch.Tensor, int, int], list[int]]
    warp: Callable[[Sequence[int], torch.Tensor], torch.Tensor]
    greedy: bool
    run_rows: Callable[[Sequence[int], Sequence[int], tuple[int, int]], torch.Tensor] | None = None
    embed: Callable[[Sequence[int]], torch.Tensor] | None = None
    others: int = 0
    model_seconds: float = 0.0
    """A drafter with a model of its own adds the seconds of its passes, and of choosing tokens from
    their logits, here: they aren't host work."""


class Drafter(Protocol):
    """One request's drafter.

    The order of calls: ``begin``, then per round ``propose`` and ``observe``, then ``end`` (always,
    also after an error). `observe` is called for the prefill round too.
    """

    name: str
    needs: Signals

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Start a request. With ``needs.prompt`` `signals` are those of the prompt's last rows: all
        of them, unless an earlier turn's cache made running the first ones unnecessary; the last
        one alone when there is one token to come."""
        ...

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """A draft whose tree's root is ``ctx.ids[-1]``; a lone root when there is nothing to
        say."""
        ...

    def observe(self, round: Round) -> None:
        """Learn what was kept."""
        ...

    def end(self) -> None:
        """Free what the request held."""
        ...


class BaseDrafter:
    """A drafter that needs nothing and remembers nothing; subclasses override what they use."""

    name: str = "drafter"
    needs: Signals = Signals()

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Nothing to prepare."""

    def observe(self, round: Round) -> None:
        """Nothing to learn."""

    def end(self) -> None:
        """Nothing to free."""


class ModelRunner(Protocol):
    """The part of `hasten.targets.base.Target` that a drafter with a model of its own uses."""

    info: Any

    def open(self, parent: Any = None, length: int | None = None) -> Any:
        """A new sequence."""
        ...

    def close(self, sequence: Any) -> None:
        """Free it."""
        ...

    def truncate(self, sequence: Any, length: int) -> None:
        """Cut committed tokens."""
        ...

    def prefill(self, sequence: Any, tokens: Sequence[int]) -> Any:
        """Run and commit tokens; a `hasten.types.Pass` with the last row's logits."""
        ...

    def forward(self, batch: Sequence[Any]) -> list[Any]:
        """Run `hasten.types.Rows`, which become pending."""
        ...

    def commit(self, sequence: Any, rows: Sequence[int]) -> None:
        """Keep some pending rows."""
        ...

    def rollback(self, sequence: Any) -> None:
        """Drop them."""
        ...

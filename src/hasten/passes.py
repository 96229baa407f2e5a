"""Running one pass of a target: whole, or resumed where early-exit rows stand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from hasten.errors import DrafterError
from hasten.targets.base import Target
from hasten.types import Draft, Pass, Rows


class Staged:
    """Rows that a drafter has run through lower layers ahead of the pass (early exit).

    The loop answers for them, not the drafter: what is resumed is exactly what was run, each row
    passes each layer once, and hidden states wanted from layers passed early aren't lost.
    `taps` are the layers whose outputs the drafter wants of every row; `layer_rows` counts rows x
    layers run, for drafting and for verification, rows given up included.
    """

    def __init__(self, target: Target, taps: Sequence[int]) -> None:
        self._target, self._taps = target, tuple(taps)
        self.layer_rows = 0
        self.clear()

    def clear(self) -> None:
        """Forget the rows (the target has dropped or committed them)."""
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.frontiers: list[int] = []
        # Earlier rows never stand below later ones, so rows pass any one layer in row order.
        self._hidden: dict[int, list[torch.Tensor]] = {}

    def run(
        self,
        sequence: Any,
        tokens: Sequence[int],
        parents: Sequence[int],
        layers: tuple[int, int],
    ) -> torch.Tensor:
        """Run new rows (``layers[0] == 0``), or all that stand at ``layers[0]``, up to
        ``layers[1]``; their hidden states ``(rows, hidden_size)``. Raises DrafterError."""
        low, high = layers
        top = self._target.info.num_layers
        if not 0 <= low < high < top:
            raise DrafterError(f"run_rows: layers {layers} must lie below the last one, {top}")
        rows = [(int(t), int(p)) for t, p in zip(tokens, parents, strict=True)]
        first = len(self.tokens) if low == 0 else self._standing(rows, low)
        frontiers = [*self.frontiers[:first], *[high] * len(rows)]
        if any(a < b for a, b in pairwise(frontiers)):
            raise DrafterError("run_rows: a row may not run ahead of the rows before it")
        if low == 0:
            self._add(rows)
        self.frontiers = frontiers
        passed = self._advance(sequence, first, low, high, (high,))
        return passed.hidden[high]

    def _standing(self, rows: list[tuple[int, int]], low: int) -> int:
        """Index of the first row at frontier `low`; they must be `rows`."""
        first = self.frontiers.index(low) if low in self.frontiers else len(self.tokens)
        if not rows or rows != list(zip(self.tokens[first:], self.parents[first:], strict=True)):
            raise DrafterError(f"run_rows: give all rows that stand at layer {low}, in order")
        return first

    def _add(self, rows: list[tuple[int, int]]) -> None:
        vocab_size, tree = self._target.info.vocab_size, self._target.capabilities.tree
        for token, parent in rows:
            at = len(self.tokens)
            if not 0 <= token < vocab_size:
                raise DrafterError(f"run_rows: id {token} is outside 0..{vocab_size - 1}")
            if not -1 <= parent < at or (parent == -1) != (at == 0):
                raise DrafterError("run_rows: a row's parent must be an earlier row, the root's -1")
            if not tree and parent != at - 1:
                raise DrafterError("run_rows: this target takes chains only")
            self.tokens.append(token)
            self.parents.append(parent)

    def _advance(
        self, sequence: Any, first: int, low: int, high: int, more: Sequence[int] = ()
    ) -> Pass:
        """Run the rows from `first` on through layers low..high-1, keeping the states wanted."""
        wanted = [t for t in self._taps if low < t <= high or t == low == 0]
        rows = Rows(sequence, tuple(self.tokens[first:]), tuple(self.parents[first:]))
        taps = tuple(sorted({*wanted, *more}))
        (passed,) = self._target.forward([rows], layers=(low, high), taps=taps)
        self.layer_rows += len(rows.tokens) * (high - low)
        for layer in wanted:
            self._hidden.setdefault(layer, []).append(passed.hidden[layer])
        return passed

    def problem(self, draft: Draft) -> str:
        """What is wrong when `draft`'s frontiers aren't those of the rows that were run; a draft
        without any has given those rows up."""
        count = len(self.tokens)
        if not draft.frontiers:
            return ""
        ran = (tuple(self.tokens), tuple(self.parents), tuple(self.frontiers))
        if ran != (draft.tree.tokens[:count], draft.tree.parents[:count], draft.frontiers):
            return (
                "its frontiers must be those of the rows run with run_rows, the tree's first nodes"
            )
        return ""

    def resume(self, rows: Rows) -> Pass:
        """Run `rows`, of which those already run come first, to the top.

        The lowest frontier is advanced to the next one until all stand together. Frontiers never
        increase along the rows, so the rows at the lowest one are always the last ones.
        """
        top = self._target.info.num_layers
        self.tokens, self.parents = list(rows.tokens), list(rows.parents)
        stand = [*self.frontiers, *[0] * (len(rows.tokens) - len(self.frontiers))]
        while True:
            low = min(stand)
            high = min((f for f in stand if f > low), default=top)
            first = stand.index(low)
            passed = self._advance(rows.sequence, first, low, high)
            stand[first:] = [high] * (len(stand) - first)
            if high == top:
                hidden = {layer: torch.cat(parts) for layer, parts in self._hidden.items()}
                return Pass(passed.logits, hidden)


def run_pass(
    target: Target, rows: Sequence[Rows], taps: Sequence[int], staged: Sequence[Staged]
) -> list[Pass]:
    """One full pass; rows that already ran some layers (early exit) resume where they stand."""
    resumed = False
    for r, s in zip(rows, staged, strict=True):
        if s.frontiers:
            resumed = True
        else:
            s.layer_rows += len(r.tokens) * target.info.num_layers
    if not resumed:
        return target.forward(rows, taps=taps)
    return [
        s.resume(r) if s.frontiers else target.forward([r], taps=taps)[0]
        for r, s in zip(rows, staged, strict=True)
    ]


def synchronize(target: Target) -> None:
    """Wait for an accelerator, so that a pass's time is its own."""
    if target.info.device.type == "cuda":
        torch.cuda.synchronize(target.info.device)

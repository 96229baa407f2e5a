"""A round's pass of the target: every row once, and which rows are whose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hasten.smc.drafting import Block
from hasten.smc.forest import Forest
from hasten.smc.proposals import run_rows
from hasten.targets.base import Target
from hasten.types import Pass


@dataclass(frozen=True, slots=True)
class Verified:
    """The target's word on a block.

    logits  raw, of all rows of all sequences, ``(rows, vocab)``
    places  for each particle its K + 1 rows in `logits`, the root's first
    paths   the same rows, as its sequence numbers them
    passes  how many the target took
    """

    logits: torch.Tensor
    places: list[list[int]]
    paths: list[list[int]]
    passes: int
    _found: list[Pass]
    _trees: list[int]

    @property
    def rows(self) -> int:
        """Rows run."""
        return len(self.logits)

    def logits_of(self, at: int) -> torch.Tensor:
        """Of the particle at this place of the block, ``(K + 1, vocab)``."""
        return self.logits[self.places[at]]

    def hidden_of(self, at: int) -> dict[int, torch.Tensor]:
        """Its taps, ``(K + 1, hidden)`` each."""
        hidden = self._found[self._trees[at]].hidden
        return {tap: rows[self.paths[at]] for tap, rows in hidden.items()}


def verify(target: Target, block: Block, taps: Sequence[int]) -> Verified:
    """Run roots and drafts to the top: all sequences in one pass where the target packs. `taps` are
    wanted where they lie above what the draft has run."""
    forest = Forest(block.lanes, block.tokens)
    layers = (block.frontier, target.info.num_layers) if block.frontier else None
    wanted = [tap for tap in taps if tap > block.frontier]
    rows = forest.rows()
    found = run_rows(target, rows, layers, wanted)
    logits: list[torch.Tensor] = []
    starts: list[int] = []
    for each in found:
        assert each.logits is not None
        starts.append(sum(map(len, logits)))
        logits.append(each.logits)
    pairs = zip(forest.trees, forest.paths, strict=True)
    return Verified(
        logits=torch.cat(logits) if len(logits) > 1 else logits[0],
        places=[[starts[tree] + node for node in path] for tree, path in pairs],
        paths=forest.paths,
        passes=1 if target.capabilities.packed else len(rows),
        _found=found,
        _trees=forest.trees,
    )

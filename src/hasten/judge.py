"""The target's word on the rows of a pass, as the verifiers ask for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hasten.sampling import Sampler


class PassJudge:
    """The target's word on one pass's rows (see `hasten.verify.Judge`)."""

    def __init__(
        self, sampler: Sampler, ids: Sequence[int], logits: torch.Tensor, best: list[int] | None
    ) -> None:
        self.sampler, self.ids, self.logits, self.best = sampler, ids, logits, best

    def _prefix(self, path: Sequence[int]) -> Sequence[int]:
        return [*self.ids, *path] if path else self.ids

    def choose(self, node: int, path: Sequence[int]) -> int:
        """The argmax, or the keyed draw. Raises ModelError where the logits hold NaN."""
        if self.best is not None and self.best[node] >= 0:
            return self.best[node]
        return self.sampler.choose(self._prefix(path), self.logits[node])

    def probs(self, node: int, path: Sequence[int]) -> torch.Tensor:
        """The distribution drawn from."""
        return self.sampler.probs(self._prefix(path), self.logits[node])

    def uniform(self, path: Sequence[int], index: int) -> float:
        """Keyed apart from all draws."""
        return self.sampler.uniform(len(self.ids) + len(path), "accept", index)

    def draw(self, probs: torch.Tensor, path: Sequence[int]) -> int:
        """Keyed apart from `choose`."""
        return self.sampler.draw(probs, len(self.ids) + len(path), 1, "residual")[0]

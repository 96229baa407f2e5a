"""The target's word on the rows of a pass, as the verifiers ask for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hasten.sampling import Sampler
from hasten.types import Draft


class PassJudge:
    """The target's word on one pass's rows (see `hasten.verify.Judge`).

    Beside what lossless verifiers ask it shows what arbitration does (`hasten.arbitration`), where
    the loop hands it over: the `draft` as it was proposed, outputs of layers by layer and row
    (`hidden`), and input embeddings (`embed`).
    """

    def __init__(
        self,
        sampler: Sampler,
        ids: Sequence[int],
        logits: torch.Tensor,
        best: list[int] | None,
        draft: Draft | None = None,
        hidden: Mapping[int, torch.Tensor] | None = None,
        embed: Callable[[Sequence[int]], torch.Tensor] | None = None,
    ) -> None:
        self.sampler, self.ids, self.logits, self.best = sampler, ids, logits, best
        self.draft, self.hidden, self.embed = draft, hidden or {}, embed

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

    # -- for arbitration -------------------------------------------------------------------------

    def answered(self, path: Sequence[int]) -> int:
        """Tokens of the answer before the one that follows `path`."""
        return len(self.ids) + len(path) - self.sampler.prompt_len

    def log_law(self, node: int, path: Sequence[int]) -> torch.Tensor:
        """Log-probabilities ``(vocab,)`` float32 of the token after `node`, -inf for ids that the
        request's options forbid: of the law drawn from; in a greedy request of the softmax, at
        temperature 1, of the logits that the token is the argmax of."""
        if self.sampler.params.is_greedy:
            row = self.sampler.process(self._prefix(path), self.logits[node])
            return torch.log_softmax(row, 0)
        return self.probs(node, path).log()

    def chance(self, path: Sequence[int], index: int) -> float:
        """A uniform in (0, 1) for a rule's own use, apart from all of `uniform` and the draws."""
        return self.sampler.uniform(len(self.ids) + len(path), "arbitration", index)

"""What a request reads off its passes: the best tokens, top-k, hidden states, distributions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from hasten.sampling import Sampler
from hasten.selection import argmax_rows, best_of_topk, topk_and_best
from hasten.types import Draft, Pass, RowSignals, Signals, TokenLogprob

NOTHING = RowSignals()


class Readback:
    """Reads what the sampler and the drafter (`needs`) want of a pass, each row looked at once.

    seconds   spent on argmax and top-k since it was last set to 0
    """

    def __init__(self, sampler: Sampler, needs: Signals) -> None:
        self._sampler, self._needs = sampler, needs
        self._spare = replace(needs, topk=0) if needs.sparse else needs
        self._best: list[int] | None = None
        """The pass's argmax of every row, where it came with the top-k."""
        self.seconds = 0.0
        self._plain_greedy = sampler.is_plain_greedy
        self._wanted = needs.topk > 0 or needs.probs or bool(needs.hidden)

    def round(
        self, passed: Pass, draft: Draft, ids: Sequence[int], idle: bool
    ) -> tuple[RowSignals, list[int] | None]:
        """Signals of a round's rows, and their greedy tokens where these are the answer.

        `idle`: nobody drafts now, so that what the drafter can spare is left out
        (`Signals.sparse`).
        """
        if not self._wanted:
            return NOTHING, self.argmax(passed, NOTHING)
        needs = self._spare if idle else self._needs
        signals = self.rows(passed, needs, draft, ids)
        return signals, self.argmax(passed, signals)

    def rows(
        self,
        passed: Pass,
        needs: Signals,
        draft: Draft | None = None,
        ids: Sequence[int] = (),
    ) -> RowSignals:
        """`needs`, of the rows of a pass; `probs` only with the draft whose rows they are."""
        top = values = probs = None
        if needs.topk and passed.logits is not None:
            started = time.perf_counter()
            values, top, self._best = topk_and_best(passed.logits, needs.topk)
            self.seconds += time.perf_counter() - started
        if needs.probs and draft is not None and passed.logits is not None:
            probs = self._all_probs(passed.logits, draft, ids)
        # A shared pass taps what any of its requests wants.
        hidden = {layer: passed.hidden[layer] for layer in needs.hidden}
        return RowSignals(top, values, hidden, probs)

    def argmax(self, passed: Pass, signals: RowSignals) -> list[int] | None:
        """Greedy choice of every row at once (ties: the lowest id), unless options change the
        logits; `signals` are those `rows` has just given, or nothing."""
        if not self._plain_greedy:
            return None
        logits = passed.logits
        assert logits is not None
        if signals.topk_ids is not None and self._best is not None:
            return self._best
        started = time.perf_counter()
        if signals.topk_ids is not None and signals.topk_logits is not None:
            best = best_of_topk(signals.topk_logits, signals.topk_ids, logits)
        else:
            best = argmax_rows(logits)
        self.seconds += time.perf_counter() - started
        return best

    def _all_probs(self, logits: torch.Tensor, draft: Draft, ids: Sequence[int]) -> torch.Tensor:
        """The sampler's distribution at every row, each with its own path's prefix."""
        rows, parents = draft.tree.tokens, draft.tree.parents
        if draft.extra is not None:
            rows, parents = rows + draft.extra.tokens, parents + draft.extra.parents
        out = []
        paths: dict[int, list[int]] = {0: []}
        for row, (token, parent) in enumerate(zip(rows, parents, strict=True)):
            if row:
                paths[row] = [*paths[parent], token]
            out.append(self._sampler.probs([*ids, *paths[row]], logits[row]))
        return torch.stack(out)

    def logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], top: int | None
    ) -> tuple[TokenLogprob, ...]:
        """Of emitted tokens, each at its row; nothing when `top` is None."""
        if top is None:
            return ()
        return tuple(
            self._sampler.logprob(logits[r], t, top) for r, t in zip(rows, tokens, strict=False)
        )


def join(parts: Sequence[RowSignals]) -> RowSignals:
    """Signals of consecutive chunks of rows as one."""
    layers = parts[0].hidden.keys()

    def cat(values: list[torch.Tensor | None]) -> torch.Tensor | None:
        tensors = [v for v in values if v is not None]
        return torch.cat(tensors) if tensors else None

    return RowSignals(
        cat([p.topk_ids for p in parts]),
        cat([p.topk_logits for p in parts]),
        {layer: torch.cat([p.hidden[layer] for p in parts]) for layer in layers},
    )

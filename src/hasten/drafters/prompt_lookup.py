"""Prompt lookup: copy what followed an earlier occurrence of the last few tokens.

Three rules for which occurrence is copied: ``latest`` (ours: the most recent one, longest n-gram
first), ``hf`` (transformers' ``prompt_lookup_num_tokens``: the leftmost one, cut before an
end-of-sequence id) and ``original`` (Saxena 2023, prompt-lookup-decoding: the leftmost one, and
only with a full continuation). Instead of scanning the context every round, positions of n-grams
are kept in one dictionary per length, so a round costs a few dictionary look-ups however long the
context.
"""

from __future__ import annotations

from collections.abc import Sequence

from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.errors import OptionError
from hasten.types import Budget, Draft, DraftTree, Round, RowSignals

MODES = ("latest", "hf", "original")


class PromptLookup(BaseDrafter):
    """A chain copied from the request's own ids.

    num_tokens    longest copy
    max_ngram     longest n-gram looked up first
    min_ngram     shortest n-gram trusted
    mode          which occurrence is copied, see the module
    eos_ids       a copy is cut before one of these in mode ``hf``
    """

    name = "prompt-lookup"

    def __init__(
        self,
        *,
        num_tokens: int = 10,
        max_ngram: int = 3,
        min_ngram: int = 1,
        mode: str = "latest",
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        if mode not in MODES:
            raise OptionError(
                "prompt-lookup.mode", f"unknown mode {mode!r}", f"Choose one of {', '.join(MODES)}"
            )
        if num_tokens < 1:
            raise OptionError("prompt-lookup.num_tokens", f"must be at least 1, got {num_tokens}")
        if not 1 <= min_ngram <= max_ngram:
            raise OptionError(
                "prompt-lookup.min_ngram",
                f"must be between 1 and max_ngram={max_ngram}, got {min_ngram}",
            )
        self.num_tokens, self.max_ngram, self.min_ngram, self.mode = (
            num_tokens,
            max_ngram,
            min_ngram,
            mode,
        )
        self.eos_ids = eos_ids
        self._ids: list[int] = []
        # _follow[n][n-gram] = index of the token after its first (hf, original) or latest
        # occurrence.
        self._follow: dict[int, dict[tuple[int, ...], int]] = {}

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Index the prompt."""
        self._ids = []
        self._follow = {n: {} for n in range(self.min_ngram, self.max_ngram + 1)}
        self._extend(prompt)

    def _extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. An n-gram is indexed once a token follows it, so the context's own end
        never matches itself."""
        ids = self._ids
        latest = self.mode == "latest"
        for token in tokens:
            end = len(ids)
            ids.append(token)
            for n, follow in self._follow.items():
                if end < n:
                    break
                gram = tuple(ids[end - n : end])
                if latest:
                    follow[gram] = end
                else:
                    follow.setdefault(gram, end)

    def _find(self) -> tuple[int, int] | None:
        """Index of the first token to copy and the n-gram's length, for the longest one seen
        before."""
        ids = self._ids
        for n in range(min(self.max_ngram, len(ids) - 1), self.min_ngram - 1, -1):
            start = self._follow[n].get(tuple(ids[-n:]))
            if start is None:
                continue
            if self.mode == "original" and start + max(self.num_tokens, n + 1) > len(ids):
                continue  # not a full continuation, or it would overlap the end matched
            return start, n
        return None

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """The copy, at most ``budget.nodes - 1`` and ``budget.depth`` tokens long."""
        found = self._find()
        if found is None:
            return Draft(DraftTree.chain(self._ids[-1]))
        start, length = found
        count = min(self.num_tokens, budget.nodes - 1, budget.depth)
        copy = self._ids[start : start + count]
        if self.mode == "latest":  # a copy that reaches its own start goes on: the text repeats
            copy += [copy[i % len(copy)] for i in range(count - len(copy))]
        elif self.mode == "hf":
            copy = copy[: next((i for i, t in enumerate(copy) if t in self.eos_ids), len(copy))]
        size = len(copy) + 1
        return Draft(
            DraftTree.chain(self._ids[-1], copy), sources=("lookup",) * size, ranks=(length,) * size
        )

    def observe(self, round: Round) -> None:
        """Index the new tokens."""
        self._extend(round.emitted)

    def end(self) -> None:
        """Drop the index."""
        self._ids, self._follow = [], {}

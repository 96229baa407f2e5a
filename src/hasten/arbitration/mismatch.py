"""A mismatch as a rule sees it: two tokens, two laws, and what went before; nothing after it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hasten.errors import CapabilityError, DrafterError
from hasten.judge import PassJudge


class Words:
    """What rules may know of tokens: which end an answer, and which are digits."""

    def __init__(self, eos_ids: Collection[int], tokenizer: Any) -> None:
        self.eos_ids = frozenset(eos_ids)
        self._tokenizer = tokenizer
        self._digits: dict[int, bool] = {}

    def ends(self, token: int) -> bool:
        """Whether it is an end-of-sequence id."""
        return token in self.eos_ids

    def digits(self, token: int) -> bool:
        """Whether its text is digits, spaces around them aside; without a tokenizer none is."""
        if self._tokenizer is None:
            return False
        if token not in self._digits:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            self._digits[token] = text.strip().isdecimal()
        return self._digits[token]


@dataclass(frozen=True, slots=True)
class Counts:
    """A request's mismatches before this one.

    mismatches  all of them; chosen: those where the draft's token was kept
    streak      how many of the last ones were kept, with none refused in between
    """

    mismatches: int = 0
    chosen: int = 0
    streak: int = 0

    def after(self, kept: bool) -> Counts:
        """With one more."""
        return Counts(self.mismatches + 1, self.chosen + kept, self.streak + 1 if kept else 0)


class Mismatch:
    """One place where the draft's token isn't the target's. Everything is computed when asked for.

    drafted, target  the two tokens, d and t; in a sampled request t is what a lossless verifier
                     emits after refusing d
    place            the drafted token's place in its block, from 1; length: K, the longest block
                     that the method drafts (not this block's: that would tell of tokens to come)
    position         index into the answer: tokens emitted before it, overridden ones included
    counts           this request's mismatches before this one
    """

    def __init__(
        self,
        judge: PassJudge,
        node: int,
        path: Sequence[int],
        drafted: int,
        target: int,
        *,
        length: int,
        counts: Counts,
        words: Words,
        layer: int,
    ) -> None:
        self.drafted, self.target = drafted, target
        self.place, self.length, self.counts = len(path) + 1, length, counts
        self.position = judge.answered(path)
        self.sampled = not judge.sampler.params.is_greedy
        self._judge, self._node, self._path = judge, node, tuple(path)
        self._words, self._layer = words, layer

    @property
    def number(self) -> int:
        """Mismatches of this request before this one."""
        return self.counts.mismatches

    @property
    def chosen(self) -> int:
        """Those where the draft's token was kept."""
        return self.counts.chosen

    @property
    def streak(self) -> int:
        """Draft's tokens kept at the last mismatches, with none refused in between."""
        return self.counts.streak

    # -- the two laws ----------------------------------------------------------------------------

    @cached_property
    def log_p(self) -> torch.Tensor:
        """The target's log-law, float32 ``(vocab,)`` (`PassJudge.log_law`), after the answer as it
        is, overridden tokens included."""
        return self._judge.log_law(self._node, self._path)

    @cached_property
    def log_q(self) -> torch.Tensor:
        """The draft's log-law, float32 ``(vocab,)``, -inf for ids that it can't draft: what the
        token was drawn from, or the softmax of the drafter's logits. Raises DrafterError."""
        draft = self._judge.draft
        assert draft is not None
        if self._node in draft.q:
            return draft.q[self._node].to(self.log_p.device, torch.float32).log()
        if self._node not in draft.laws:
            raise DrafterError("doesn't tell its laws: make it with laws=True")
        return torch.log_softmax(draft.laws[self._node].wide().to(self.log_p.device), 0)

    @cached_property
    def p(self) -> torch.Tensor:
        """The target's law, float32 ``(vocab,)``."""
        return self.log_p.exp()

    @cached_property
    def q(self) -> torch.Tensor:
        """The draft's law, float32 ``(vocab,)``."""
        return self.log_q.exp()

    # -- hidden states, for rules that need them ---------------------------------------------------

    @property
    def target_hidden(self) -> torch.Tensor:
        """The target's last state (before its final norm) that predicts this token, ``(size,)``."""
        return self._row(self._node)

    @property
    def drafted_hidden(self) -> torch.Tensor:
        """The target's last state at the drafted token itself, ``(size,)``."""
        return self._row(self._node + 1)

    @property
    def draft_hidden(self) -> torch.Tensor:
        """The drafter's state that its law comes from, ``(size,)``."""
        draft = self._judge.draft
        law = draft.laws.get(self._node) if draft is not None else None
        if law is None or law.hidden is None:
            raise DrafterError("doesn't tell its states: make it with laws=True")
        return law.hidden

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """The target's input embeddings of ids, ``(n, size)``."""
        assert self._judge.embed is not None
        return self._judge.embed(tokens)

    def _row(self, row: int) -> torch.Tensor:
        if self._layer not in self._judge.hidden:
            raise CapabilityError(
                "hidden states weren't read: a rule that wants them says so (needs_hidden)"
            )
        return self._judge.hidden[self._layer][row]

    # -- what is known of the tokens ---------------------------------------------------------------

    @property
    def drafted_ends(self) -> bool:
        """Whether d is an end-of-sequence id."""
        return self._words.ends(self.drafted)

    @property
    def target_ends(self) -> bool:
        """Whether t is one."""
        return self._words.ends(self.target)

    @property
    def both_digits(self) -> bool:
        """Whether both are digits."""
        return self._words.digits(self.drafted) and self._words.digits(self.target)

    def uniform(self, index: int = 0) -> float:
        """A number in (0, 1) keyed by the request's seed, the position and `index`."""
        return self._judge.chance(self._path, index)

"""How a request's drafts did, and which of its tokens were drafted."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from hasten.text import Detokenizer
from hasten.tickets import Update
from hasten.types import Round


class Speculation:
    """Counts over the rounds of a request, given as vLLM gives them."""

    def __init__(self) -> None:
        self._kept: Counter[int] = Counter()
        self._drafted = self._passes = self._tokens = 0

    def add(self, made: Round) -> None:
        """Count one round."""
        if made.tree is None:
            return
        self._passes += 1
        self._tokens += len(made.emitted)
        if made.drafted:
            self._kept[len(made.accepted[1:])] += 1
            self._drafted += made.drafted

    @property
    def tokens_per_pass(self) -> float:
        """Tokens emitted per target pass after the prompt's; plain decoding is 1."""
        return self._tokens / self._passes if self._passes else 1.0

    def as_json(self) -> dict[str, Any]:
        """vLLM's ``metrics.speculative_decoding``; a step is a pass that verified a draft."""
        steps = sum(self._kept.values())
        accepted = sum(kept * times for kept, times in self._kept.items())
        return {
            "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / self._drafted if self._drafted else 0.0,
            "acceptance_histogram": {str(k): self._kept[k] for k in sorted(self._kept)},
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": self._drafted,
            "num_spec_tokens": None,  # a draft is as long as pays
        }


class Marks:
    """Which parts of an answer's text come from kept draft tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._tokens: deque[tuple[str, bool]] = deque()
        self._text = ""
        """Given, and not matched with its tokens yet."""

    def pieces(self, update: Update) -> list[list[Any]]:
        """``[text, drafted]`` pairs; those of all updates joined are the answer.

        They may lag behind ``update.text``, which may be ahead of its round, and they stay behind
        it where text is held back (part of a character, the beginning of a stop string).
        """
        made = update.round
        drafted = max(len(made.accepted) - 1, 0)
        for place, token in enumerate(made.emitted):
            self._tokens.append((self._detokenizer.push((token,)), place < drafted))
        self._text += update.text
        out: list[list[Any]] = []
        while self._text and self._tokens:
            text, mark = self._tokens.popleft()
            given, rest = text[: len(self._text)], text[len(self._text) :]
            self._text = self._text[len(given) :]
            if rest:
                self._tokens.appendleft((rest, mark))
            _extend(out, given, mark)
        if made.finish is not None:
            # what decoding the whole adds at its end: part of a character
            _extend(out, self._text, False)
            self._text = ""
        return out


def _extend(pieces: list[list[Any]], text: str, mark: bool) -> None:
    if text and pieces and pieces[-1][1] is mark:
        pieces[-1][0] += text
    elif text:
        pieces.append([text, mark])

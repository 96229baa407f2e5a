"""Where an answer ends, decided token by token inside a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hasten.errors import OptionError
from hasten.text import TextStream
from hasten.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Cut:
    """What is left of a block: its first `kept` tokens, the one that ended the answer included.

    finish       None while the answer goes on
    stop_reason  the id or the stop string that ended it; None for a length
    """

    kept: int
    finish: FinishReason | None = None
    stop_reason: int | str | None = None


class Stopper:
    """One request's end: ids, stop strings and length, whatever blocks the tokens come in.

    An end-of-sequence id (unless ``ignore_eos``) or one of ``stop_token_ids`` ends the answer; it
    belongs to the ids and not to the text. A stop string ends it at the token that completes it
    (`TextStream` has the rules). ``max_new_tokens`` and `context_limit`, the most tokens of prompt
    and answer together, end it with LENGTH; on the same token a stop counts before a length.

    `text` gets the kept tokens and is closed at the end. It may be None when nobody wants text;
    with stop strings it is needed (OptionError). Build it with the request's ``stop`` and
    ``min_new_tokens``. The caller sees to ``max_new_tokens == 0`` and to a prompt without room.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_ids: frozenset[int],
        prompt_len: int,
        context_limit: int,
        text: TextStream | None,
    ) -> None:
        if params.stop and text is None:
            raise OptionError(
                "stop", "stop strings need a tokenizer", "Give one, or use stop_token_ids instead"
            )
        final = set(params.stop_token_ids)
        self._final = frozenset(final if params.ignore_eos else final | eos_ids)
        self._text = text
        self.remaining = max(min(params.max_new_tokens, context_limit - prompt_len), 0)
        """How many tokens may still come."""
        self._end: Cut | None = None

    def push(self, tokens: Sequence[int]) -> Cut:
        """Take the next block; after the end every block is cut to nothing."""
        if self._end is not None:
            return self._end
        cut = self._by_id(tokens)
        if self._text is not None:
            body = cut.kept - (cut.finish is FinishReason.STOP)
            hit = self._text.push(tokens[:body])
            if hit is not None:
                cut = Cut(hit.kept, FinishReason.STOP, hit.string)
        self.remaining -= cut.kept
        if cut.finish is not None:
            self._end = Cut(0, cut.finish, cut.stop_reason)
            if self._text is not None:
                self._text.close()
        return cut

    def _by_id(self, tokens: Sequence[int]) -> Cut:
        """The cut by ids and length alone."""
        for index, token in enumerate(tokens[: self.remaining]):
            if token in self._final:
                return Cut(index + 1, FinishReason.STOP, token)
        if len(tokens) >= self.remaining:
            return Cut(self.remaining, FinishReason.LENGTH)
        return Cut(len(tokens))

"""Ids to text as they come: `Detokenizer` says what is certain, `TextStream` minds stop strings.

Both give the same text however the ids are cut into blocks, so that a drafted answer reads, and
ends, as plain decoding's does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

from hasten.errors import HastenError

_UNKNOWN = "\ufffd"
_LONGEST_SPLIT = 3
"""Bytes of a UTF-8 character that may be there while it is still incomplete."""
_LONG_WINDOW = 64


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def decode(
        self, token_ids: Any, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> Any:
        """The text of some ids."""
        ...


class Detokenizer:
    """Incremental ``tokenizer.decode``: the pieces joined are the text of all ids decoded at once.

    A piece never ends inside a character: what later ids may still change is held back. Ids are
    decoded in a window that begins with the ids of an earlier piece, because a tokenizer may treat
    the start of a text differently (a leading space is dropped); so the cost is linear.

    `pending` is held-back text that reads as complete now. It is not empty only while the last id
    is one of SentencePiece's byte tokens (``<0x0A>``): a run of them is decoded as a whole, and
    comes out as U+FFFD from its first byte on when it ends inside a character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._bytes = _byte_tokens(tokenizer)
        # a run of byte tokens goes on across tokens that are left out
        self._silent = (
            _special_ids(tokenizer) if self._bytes and skip_special_tokens else frozenset()
        )
        self._window: list[int] = []
        self._read = 0  # ids of the window that belong to an earlier piece
        self._sent = 0  # characters of the window's text already given
        self._run: list[int] = []  # ids of the open run of byte tokens, not yet in the window
        self.pending = ""

    def push(self, tokens: Sequence[int]) -> str:
        """Add ids; the text that has become certain and wasn't given before."""
        self._run.extend(tokens)
        closed = self._closed()
        self._window += self._run[:closed]
        self._run = self._run[closed:]
        self.pending = self._valid_text(self._run) if self._run else ""
        return self._advance() if closed else ""

    def flush(self) -> str:
        """No more ids: the rest of the text. Push nothing afterwards."""
        self._window += self._run
        self._run, self.pending = [], ""
        return self._decode(self._window)[self._sent :]

    def fork(self) -> Detokenizer:
        """A copy that goes on independently."""
        other = copy(self)
        other._window, other._run = list(self._window), list(self._run)
        return other

    def is_bytewise(self, tokens: Iterable[int]) -> bool:
        """Whether the text after each of `tokens` may not be a beginning of the text after all."""
        return bool(self._bytes) and (bool(self._run) or any(t in self._bytes for t in tokens))

    def _closed(self) -> int:
        """How many of the waiting ids don't belong to a run of byte tokens that may go on."""
        end = len(self._run)
        if self._bytes:
            while end and (self._run[end - 1] in self._bytes or self._run[end - 1] in self._silent):
                end -= 1
        return end

    def _valid_text(self, run: Iterable[int]) -> str:
        data = bytes(self._bytes[t] for t in run if t in self._bytes)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            return data[: error.start].decode()

    def _advance(self) -> str:
        """The new text of the window; moves the window on when its text is complete."""
        text = self._decode(self._window)
        held = len(text) - len(text.rstrip(_UNKNOWN))
        end = len(text) - min(held, _LONGEST_SPLIT)
        if end <= self._sent:
            return ""
        piece = text[self._sent : end]
        self._sent = end
        if not held:
            self._move(self._read)
        elif len(self._window) > _LONG_WINDOW:
            self._split(text)
        return piece

    def _move(self, start: int) -> None:
        """Begin the window at `start`; everything in it has been given."""
        del self._window[:start]
        self._read = len(self._window)
        self._sent = len(self._decode(self._window))

    def _split(self, text: str) -> None:
        """Shorten a window that never completes (a model that emits broken bytes)."""
        cut = len(self._window) // 2
        left, right = self._decode(self._window[:cut]), self._decode(self._window[cut:])
        if left + right == text and len(left) <= self._sent:
            # equal, so no character crosses the cut
            del self._window[:cut]
            self._read, self._sent = 0, self._sent - len(left)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        return text


@dataclass(frozen=True, slots=True)
class StopHit:
    """A stop string was completed: by the `kept`-th token of the block pushed."""

    kept: int
    string: str


class TextStream:
    """An answer's text while it comes, cut before the first stop string.

    ``push`` the kept ids of each round (`hasten.stopping.Stopper` does), ``take`` a piece whenever
    one is wanted, ``close`` or ``flush`` at the end. The pieces joined are ``text``. A piece never
    holds what may turn out to be the beginning of a stop string, nor part of a character. Without
    stop strings nothing is decoded before somebody asks.

    The first token that completes a stop string ends the text; of several completed by the same
    token the one that starts first counts, then the one given first. Those completed by fewer than
    `min_new_tokens` tokens are part of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        min_new_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._stop = tuple(stop)
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._blind = max(min_new_tokens - 1, 0)  # tokens to come whose stop strings don't count
        self._queue: list[int] = []
        self._parts: list[str] = []
        self._taken = 0
        self._held = ""  # certain text that may be the beginning of a stop string
        self._seen = 0  # characters of held + pending text already searched
        self._closed = False

    def push(self, tokens: Sequence[int]) -> StopHit | None:
        """Add ids. On a hit the text ends before the stop string and the stream is closed."""
        if self._closed:
            raise HastenError("the text has ended: a closed TextStream takes no more ids")
        if not self._stop:
            self._queue.extend(tokens)
            return None
        blind = min(self._blind, len(tokens))
        self._blind -= blind
        if blind:
            self._keep(self._detokenizer.push(tokens[:blind]))
        hit = self._search(tokens[blind:])
        return StopHit(blind + hit.kept, hit.string) if hit is not None else None

    def take(self) -> str:
        """The text that is certain and wasn't taken yet; may be empty."""
        self._drain()
        piece = "".join(self._parts[self._taken :])
        self._taken = len(self._parts)
        return piece

    def close(self) -> None:
        """No more ids come: what was held back is text after all. Closing twice is harmless."""
        if not self._closed:
            self._drain()
            self._release(self._held + self._detokenizer.flush())
            self._closed = True

    def flush(self) -> str:
        """``close``, and the last piece."""
        self.close()
        return self.take()

    @property
    def text(self) -> str:
        """The whole text (so far: what is certain, until the stream is closed)."""
        self._drain()
        return "".join(self._parts)

    def _drain(self) -> None:
        if self._queue:
            self._release(self._detokenizer.push(self._queue))
            self._queue = []

    def _release(self, text: str) -> None:
        if text:
            self._parts.append(text)

    def _search(self, tokens: Sequence[int]) -> StopHit | None:
        """Push `tokens` up to the one that completes a stop string."""
        if len(tokens) > 1 and not self._detokenizer.is_bytewise(tokens):
            # one look at the block; only when it holds a stop string, find the token
            before = self._detokenizer.fork()
            new = self._detokenizer.push(tokens)
            if self._find(self._held + new) is None:
                self._keep(new)
                return None
            self._detokenizer = before
        for kept, token in enumerate(tokens, 1):
            new = self._detokenizer.push((token,))
            text = self._held + new + self._detokenizer.pending
            found = self._find(text)
            if found is not None:
                start, order = found
                self._release(text[:start])
                self._held, self._closed = "", True
                return StopHit(kept, self._stop[order])
            self._keep(new)
        return None

    def _find(self, text: str) -> tuple[int, int] | None:
        """Start and index of the stop string that counts among those ending after `_seen`."""
        found = []
        for order, string in enumerate(self._stop):
            start = text.find(string, max(self._seen - len(string) + 1, 0))
            if start >= 0:
                found.append((start, order))
        return min(found, default=None)

    def _keep(self, new: str) -> None:
        """Take `new` into the text, holding back what may be the beginning of a stop string."""
        text = self._held + new
        ending = _partial_end(text, self._stop)
        self._release(text[: len(text) - ending])
        self._held = text[len(text) - ending :]
        self._seen = ending + len(self._detokenizer.pending)


def _partial_end(text: str, strings: Sequence[str]) -> int:
    """Length of the longest end of `text` that is a proper beginning of one of `strings`."""
    for size in range(min(len(text), max(map(len, strings)) - 1), 0, -1):
        end = text[-size:]
        if any(len(s) > size and s.startswith(end) for s in strings):
            return size
    return 0


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    named = getattr(tokenizer, "all_special_ids", ())
    return frozenset(named).union(i for i, token in added.items() if token.special)


def _byte_tokens(tokenizer: Any) -> dict[int, int]:
    """SentencePiece's byte tokens: id -> byte; empty when the tokenizer has none."""
    to_ids = getattr(tokenizer, "convert_tokens_to_ids", None)
    to_tokens = getattr(tokenizer, "convert_ids_to_tokens", None)
    if to_ids is None or to_tokens is None:
        return {}
    found: dict[int, int] = {}
    for byte in range(256):
        name = f"<0x{byte:02X}>"
        token = to_ids(name)
        # an unknown name gives the id of the unknown token
        if not isinstance(token, int) or to_tokens(token) != name:
            return {}
        found[token] = byte
    letter = tokenizer.decode([to_ids("<0x41>")], clean_up_tokenization_spaces=False)
    return found if letter == "A" else {}

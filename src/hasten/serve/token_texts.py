"""Single tokens as text and bytes, for log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MOST = 65_536


class TokenTexts:
    """The text of each token on its own, special ones included; remembered, up to a bound.
    Several threads may ask."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def text(self, token: int) -> str:
        """What the token reads as; U+FFFD where it's part of a character."""
        return self._look_up(token)[0]

    def encoded(self, token: int) -> Sequence[int]:
        """Its bytes: joined, those of several tokens are the UTF-8 of their text."""
        return list(self._look_up(token)[1])

    def _look_up(self, token: int) -> tuple[str, bytes]:
        found = self._known.get(token)
        if found is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            found = self._known[token] = self._read(token)
        return found

    def _read(self, token: int) -> tuple[str, bytes]:
        if self._tokenizer is None:
            return str(token), str(token).encode()
        text: str = self._tokenizer.decode(
            [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        name = self._tokenizer.convert_ids_to_tokens(token)
        if isinstance(name, str):
            if name.startswith("▁") and not text.startswith(" "):
                text = f" {text}"  # a decoder drops the space at the start of a text
            if "\ufffd" in text and (raw := _raw_bytes(name)) is not None:
                return text, raw
        return text, text.encode("utf-8", "replace")


def _raw_bytes(name: str) -> bytes | None:
    """The bytes of a byte-level name (``Ġ`` is a space) or of a byte token (``<0xE2>``)."""
    if len(name) == 6 and name.startswith("<0x"):
        return bytes.fromhex(name[3:5])
    try:
        return bytes(_BYTE_OF[letter] for letter in name)
    except KeyError:
        return None


def _byte_letters() -> dict[str, int]:
    """Byte-level tokenizers write printable bytes as they are, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_letters()

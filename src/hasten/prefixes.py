"""Finished requests' sequences, kept so that the next turn of a conversation runs only what is new.

Reusing a prefix makes an answer come sooner, which tells whoever asks that the prefix was asked
before. So without a scope a kept sequence serves only a request that repeats the whole earlier
prompt and the beginning of its answer: somebody who goes on with the same conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hasten.errors import CapabilityError
from hasten.targets.base import Target

KNOWN = 8
"""Tokens of the answer that a request must repeat (or all, of a shorter one)."""
LEAST = 16
"""A shorter common prefix isn't worth a sequence."""


@dataclass(slots=True)
class _Kept:
    scope: str | None
    ids: list[int]
    prompt: int
    sequence: Any


class Prefixes:
    """Kept sequences, `tokens` tokens at most in all; the one used longest ago goes first.

    Not thread-safe: whoever holds the target's lock uses it.
    """

    def __init__(self, target: Target, tokens: int) -> None:
        self._target, self._most = target, tokens
        can = target.capabilities
        self._usable = can.rollback and can.fork and not target.info.whole_prompt
        self._kept: list[_Kept] = []

    @property
    def tokens(self) -> int:
        """Tokens held, those that sequences share counted for each."""
        return sum(len(each.ids) for each in self._kept)

    def take(self, ids: Sequence[int], scope: str | None) -> Any:
        """A sequence that holds a prefix of `ids` (not all of them), or a new one."""
        best, common = None, 0
        for each in self._kept:
            same = _common(each.ids, ids)
            if same > common and _may_use(each, same, scope):
                best, common = each, same
        if best is not None:
            self._kept.remove(best)
            self._kept.append(best)
            try:
                return self._target.open(best.sequence, min(common, len(ids) - 1))
            except CapabilityError:  # a window that has slid can't be cut back
                self._drop(best)
        return self._target.open()

    def keep(self, ids: Sequence[int], prompt: int, sequence: Any, scope: str | None) -> None:
        """Take over a finished request's sequence; `prompt` tokens of `ids` were its prompt."""
        held = list(ids[: sequence.length])
        if not self._usable or not LEAST <= len(held) <= self._most:
            self._target.close(sequence)
            return
        for each in [e for e in self._kept if e.scope == scope]:
            if _common(each.ids, held) == len(each.ids):  # an earlier turn
                self._drop(each)
        self._kept.append(_Kept(scope, held, prompt, sequence))
        while self.tokens > self._most:
            self._drop(self._kept[0])

    def clear(self) -> None:
        """Give all memory back."""
        while self._kept:
            self._drop(self._kept[0])

    def _drop(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        self._target.close(kept.sequence)


def _may_use(kept: _Kept, common: int, scope: str | None) -> bool:
    if kept.scope != scope or common < LEAST:
        return False
    answer = len(kept.ids) - kept.prompt
    return scope is not None or (answer > 0 and common >= kept.prompt + min(answer, KNOWN))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    low, high = 0, size  # a[:low] == b[:low], a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low

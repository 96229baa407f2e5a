"""What is known of a copied draft before it is verified, as numbers.

The paper names four groups: match statistics of the cache, the state of decoding, recent history,
and the kinds of tokens in the draft. The columns are our reconstruction (docs/methods/hvd.md).
Nothing here comes from logits, hidden states or a drawn token that isn't settled.
"""

from __future__ import annotations

import hashlib
import unicodedata
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hasten.drafters.suffix import SuffixQuery

Floats = npt.NDArray[np.float32]
Classes = npt.NDArray[np.uint8]

CLASSES = ("space", "punctuation", "bracket", "delimiter", "digit")
_BRACKETS, _DELIMITERS = frozenset("()[]{}<>"), frozenset(",:;\"'|/=")

WINDOW = 16
"""Rounds that count as recent."""
LONG_AGO = 64
HEAD = 8
"""Tokens of the draft's beginning."""

_CACHE = ("score", "match", "length", "token_score", "match_share", "least", "first")
_STATE = ("prompt", "answer", "place")
_STRUCTURE = tuple(f"{part}_{kind}" for part in ("head", "all", "first") for kind in CLASSES)
_HISTORY = (
    "cache_rate", "cache_mean", "cache_last", "mean", "last", "since_cache", "cache_whole",
)  # fmt: skip
FEATURES = (*_CACHE, *_STATE, *_STRUCTURE, *_HISTORY)
"""Names of the columns; the last ones (`History.columns`) depend on how earlier rounds went."""
STATIC = len(FEATURES) - len(_HISTORY)


# -- kinds of tokens -------------------------------------------------------------------------------

_TABLES: weakref.WeakKeyDictionary[Any, dict[int, Classes]] = weakref.WeakKeyDictionary()


def class_table(tokenizer: Any, vocab_size: int) -> Classes:
    """For each id whether its text has a character of each of `CLASSES`: ``(vocab_size, 5)`` uint8,
    made once for a tokenizer. Without one (ids only) there are none."""
    if tokenizer is None:
        return np.zeros((vocab_size, len(CLASSES)), np.uint8)
    made = _TABLES.setdefault(tokenizer, {})
    if vocab_size not in made:
        made[vocab_size] = _read_classes(tokenizer, vocab_size)
    return made[vocab_size]


def _read_classes(tokenizer: Any, vocab_size: int) -> Classes:
    table = np.zeros((vocab_size, len(CLASSES)), np.uint8)
    for name, token in tokenizer.get_vocab().items():
        if 0 <= token < vocab_size:
            text = tokenizer.decode(
                [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            # Decoders drop a space at the start of a text, which the name still shows.
            table[token] = classes_of(f" {text}" if name.startswith("▁") else text)
    return table


def classes_of(text: str) -> tuple[bool, ...]:
    """Whether the text has a character of each of `CLASSES`."""
    return (
        any(map(str.isspace, text)),
        any(unicodedata.category(char)[0] == "P" for char in text),
        not _BRACKETS.isdisjoint(text),
        not _DELIMITERS.isdisjoint(text),
        any(map(str.isdigit, text)),
    )


def digest_of(table: Classes) -> str:
    """What a predictor knows of a tokenizer, in a few letters."""
    return hashlib.sha256(repr(table.shape).encode() + table.tobytes()).hexdigest()[:32]


# -- rounds before ---------------------------------------------------------------------------------


class History:
    """One request's last rounds."""

    __slots__ = ("_last_copied", "_rounds", "_since", "_whole")

    def __init__(self) -> None:
        self._rounds: deque[tuple[bool, int]] = deque(maxlen=WINDOW)
        """Whether the cache drafted, and how many tokens were kept."""
        self._since, self._last_copied, self._whole = LONG_AGO, 0, False

    def add(self, cached: bool, drafted: int, kept: int) -> None:
        """A round is over: `kept` of the `drafted` tokens, the target's own not counted."""
        self._rounds.append((cached, kept))
        if cached:
            self._since, self._last_copied, self._whole = 0, kept, kept == drafted
        else:
            self._since = min(self._since + 1, LONG_AGO)

    def columns(self) -> tuple[float, ...]:
        """Of the last `WINDOW` rounds: share drafted by the cache, mean tokens kept of its drafts;
        tokens kept of its last draft; mean of all and of the last round; rounds since its last
        draft (log1p), and whether that was kept whole. Zeros where there is nothing to tell."""
        copied = [kept for cached, kept in self._rounds if cached]
        count = len(self._rounds) or 1
        return (
            len(copied) / count,
            sum(copied) / (len(copied) or 1),
            float(self._last_copied),
            sum(kept for _, kept in self._rounds) / count,
            float(self._rounds[-1][1]) if self._rounds else 0.0,
            float(np.log1p(self._since)),
            float(self._whole),
        )


# -- all of it -------------------------------------------------------------------------------------


def static_features(query: SuffixQuery, prompt: int, answer: int, table: Classes) -> Floats:
    """The columns that don't depend on earlier rounds: float32 ``(STATIC,)``.

    query    a draft of one token at least
    prompt   tokens of the prompt; answer: of the answer so far, the pending one included
    table    see `class_table`
    """
    length, match = len(query.tokens), query.match
    kinds = table[list(query.tokens)].astype(np.float32)
    out = np.empty(STATIC, np.float32)
    out[: len(_CACHE) + len(_STATE)] = (
        query.score,
        match,
        length,
        query.score / length,
        match / length,
        query.probs[-1],
        query.probs[0],
        np.log1p(prompt),
        np.log1p(answer),
        answer / (prompt + answer),
    )
    structure = out[len(_CACHE) + len(_STATE) :].reshape(3, len(CLASSES))
    structure[0], structure[1], structure[2] = kinds[:HEAD].mean(0), kinds.mean(0), kinds[0]
    return out


def features(static: Floats, history: Sequence[float]) -> Floats:
    """All columns: float32 ``(len(FEATURES),)``; `history` is `History.columns`'."""
    out = np.empty(len(FEATURES), np.float32)
    out[:STATIC], out[STATIC:] = static, history
    return out

"""Answers held to a grammar: JSON of a schema, a regular expression, or EBNF (extra: grammar).

A grammar masks the scores of the next token by the answer so far, so it is prefix-pure: drafts stay
free, every visited node of a draft tree is masked by its own path, and a drafted token that breaks
the grammar is simply not chosen. The answer is the one plain decoding gives under the same grammar.

    grammar = json_schema(llm.tokenizer, schema, vocab_size=info.vocab_size, eos_ids=info.eos_ids)
    llm.generate("Describe Ada Lovelace.", processors=[grammar])

JSON comes on one line, written as Python's ``json.dumps`` does; objects hold their declared
properties in the order of the schema. An answer cut by its length is a beginning of such a text.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hasten._schema import check_pattern, check_schema
from hasten.errors import OptionError

_CACHE_BYTES = 64 << 20
_MOST_VOCABULARIES = 4
_MOST_CHARACTERS = 65_536


def json_schema(
    tokenizer: Any,
    schema: Mapping[str, Any] | bool,
    *,
    vocab_size: int,
    eos_ids: Collection[int],
) -> Grammar:
    """JSON that fits `schema`; properties that an object doesn't declare are left out.

    tokenizer   the model's own (transformers)
    vocab_size  of the model's scores, which may be more than the tokenizer's
    eos_ids     the ids that end an answer: the only ones allowed once the JSON is complete

    Raises OptionError for a schema that isn't valid, or that says what can't be enforced: no
    keyword is ignored silently, annotations (``title``, ``description``, ...) apart.
    """
    check_schema(schema)
    text = json.dumps(schema)
    return _make(
        "json_schema", "schema", tokenizer, vocab_size, eos_ids, text, _compile_schema(strict=True)
    )


def json_object(tokenizer: Any, *, vocab_size: int, eos_ids: Collection[int]) -> Grammar:
    """Any JSON object. Arguments and errors as in `json_schema`."""
    text = '{"type": "object"}'
    return _make(
        "json_object", "schema", tokenizer, vocab_size, eos_ids, text, _compile_schema(strict=False)
    )


def regex(tokenizer: Any, pattern: str, *, vocab_size: int, eos_ids: Collection[int]) -> Grammar:
    """Text that `pattern` matches as a whole. Raises OptionError for what can't be enforced
    (look-around, back references, anchors inside). Arguments as in `json_schema`."""
    check_pattern(pattern, "pattern")
    return _make(
        "regex", "pattern", tokenizer, vocab_size, eos_ids, pattern, lambda c, t: c.compile_regex(t)
    )


def ebnf(tokenizer: Any, text: str, *, vocab_size: int, eos_ids: Collection[int]) -> Grammar:
    """Text of the grammar `text`, in xgrammar's EBNF (GBNF), whose start is ``root``. Raises
    OptionError when it can't be read. Arguments as in `json_schema`."""
    return _make(
        "ebnf", "grammar", tokenizer, vocab_size, eos_ids, text, lambda c, t: c.compile_grammar(t)
    )


class Grammar:
    """A compiled grammar, for ``processors``; requests share it, each with a matcher of its own."""

    def __init__(self, kind: str, compiled: Any, vocabulary: _Vocabulary) -> None:
        self._kind, self._compiled, self._vocabulary = kind, compiled, vocabulary

    def for_prompt(self, prompt_len: int) -> GrammarProcessor:
        """The processor of a request whose prompt has `prompt_len` tokens."""
        return GrammarProcessor(self._compiled, self._vocabulary, prompt_len)

    def __repr__(self) -> str:
        return f"Grammar({self._kind!r})"


class GrammarProcessor:
    """``(input_ids (1, n) int64, scores (1, vocab) float) -> scores`` with -inf for every token
    that no text of the grammar goes on with.

    Its answer depends on its arguments only: a matcher is kept at the last prefix asked about, and
    rolled back to what it has in common with the next one. A prefix that breaks the grammar (only
    drafts do, where their scores are asked for), or that holds the end already, may only end.
    """

    hasten_prefix_pure = True

    def __init__(self, compiled: Any, vocabulary: _Vocabulary, prompt_len: int) -> None:
        import xgrammar

        self._vocabulary, self._prompt_len = vocabulary, prompt_len
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bits = xgrammar.allocate_token_bitmask(1, vocabulary.size)
        self._ids: list[int] = []  # what the matcher has accepted
        self._lock = threading.Lock()  # requests of several threads may share their options

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Mask the tokens that can't follow ``input_ids[0]``; `scores` stay as they are."""
        answer = input_ids[0, self._prompt_len :].tolist()
        with self._lock:
            allowed = self._allowed(answer).to(scores.device)
        return scores.masked_fill(~_unpack(allowed, scores.shape[-1]), -torch.inf)

    def _allowed(self, answer: list[int]) -> torch.Tensor:
        """The bits ``(words,)`` int32 of the tokens that may follow."""
        if not self._go_to(answer) or self._matcher.is_terminated():
            return self._vocabulary.final
        self._matcher.fill_next_token_bitmask(self._bits)
        return self._bits[0]

    def _go_to(self, answer: list[int]) -> bool:
        """Bring the matcher to `answer`; False when that breaks the grammar."""
        held = len(self._ids)
        if answer[:held] != self._ids:
            held = next(
                (i for i, (a, b) in enumerate(zip(self._ids, answer, strict=False)) if a != b),
                min(held, len(answer)),
            )
            self._matcher.rollback(len(self._ids) - held)
            del self._ids[held:]
        for token in answer[held:]:
            if not self._accept(token):
                return False
            self._ids.append(token)
        return True

    def _accept(self, token: int) -> bool:
        # xgrammar complains on stderr about tokens that it can't take at all
        if token not in self._vocabulary.known or self._matcher.is_terminated():
            return False
        return bool(self._matcher.accept_token(token))


def _unpack(bits: torch.Tensor, size: int) -> torch.Tensor:
    """Bits ``(words,)`` int32 as ``(size,)`` bool."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits.unsqueeze(-1) >> shifts) & 1).flatten()[:size].to(torch.bool)


# -- compiling -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """A tokenizer as grammars see it.

    size      of the model's scores
    known     ids that can be part of a text, and those that end it
    final     bits ``(words,)`` int32 of the ids that end it
    compiler  xgrammar's, with a bounded cache
    """

    size: int
    known: frozenset[int]
    final: torch.Tensor
    compiler: Any


_vocabularies: OrderedDict[Any, tuple[Any, _Vocabulary]] = OrderedDict()
_vocabularies_lock = threading.Lock()

_Compile = Callable[[Any, str], Any]


def _compile_schema(*, strict: bool) -> _Compile:
    return lambda compiler, text: compiler.compile_json_schema(
        text, any_whitespace=False, strict_mode=strict
    )


def _make(
    kind: str,
    option: str,
    tokenizer: Any,
    vocab_size: int,
    eos_ids: Collection[int],
    text: str,
    compile: _Compile,
) -> Grammar:
    if not isinstance(text, str) or not text:
        raise OptionError(option, f"must be text, got {text!r}")
    if len(text) > _MOST_CHARACTERS:
        raise OptionError(option, f"is longer than {_MOST_CHARACTERS} characters")
    vocabulary = _vocabulary(tokenizer, vocab_size, frozenset(eos_ids), option == "schema")
    try:
        compiled = compile(vocabulary.compiler, text)
    except (RuntimeError, ValueError) as error:
        raise OptionError(option, f"can't be used: {_cleaned(error)}") from error
    return Grammar(kind, compiled, vocabulary)


def _cleaned(error: Exception) -> str:
    """xgrammar's message without the place in its sources, on one line."""
    text = " ".join(str(error).split())
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", text)


def _vocabulary(tokenizer: Any, size: int, eos_ids: frozenset[int], json_only: bool) -> _Vocabulary:
    """The vocabulary of a tokenizer; the last few are kept."""
    key = (id(tokenizer), size, eos_ids, json_only)
    with _vocabularies_lock:
        if key not in _vocabularies:
            # the tokenizer is held, so that its id isn't another one's
            _vocabularies[key] = (
                tokenizer,
                _read_vocabulary(tokenizer, size, eos_ids, json_only),
            )
        _vocabularies.move_to_end(key)
        while len(_vocabularies) > _MOST_VOCABULARIES:
            _vocabularies.popitem(last=False)
        return _vocabularies[key][1]


def _read_vocabulary(
    tokenizer: Any, size: int, eos_ids: frozenset[int], json_only: bool
) -> _Vocabulary:
    try:
        import xgrammar
    except ImportError as error:
        raise OptionError(
            "grammar", "needs the package xgrammar", "Install it: pip install 'hasten[grammar]'"
        ) from error
    final = sorted(i for i in eos_ids if 0 <= i < size)
    if not final:
        raise OptionError("grammar", "the model has no end-of-sequence id to end the answer with")
    try:
        seen = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=size, stop_token_ids=final
        )
    except (ValueError, AttributeError) as error:
        raise OptionError("grammar", f"this tokenizer can't be used: {error}") from error
    # Emptied tokens are never allowed. Special ones aren't part of an answer's text.
    banned = set(tokenizer.all_special_ids)
    banned.update(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    if json_only:
        # JSON on one line has no control character, yet xgrammar lets them into strings of a
        # bounded length.
        banned.update(
            i for i, piece in enumerate(seen.decoded_vocab) if min(piece, default=32) < 32
        )
    pieces: list[str | bytes] = [""] * size
    for piece, index in tokenizer.get_vocab().items():
        if index < size and index not in banned:
            pieces[index] = piece
    info = xgrammar.TokenizerInfo.from_vocab_and_metadata(pieces, seen.dump_metadata())
    bits = torch.zeros(len(xgrammar.allocate_token_bitmask(1, size)[0]), dtype=torch.int64)
    for token in final:
        bits[token // 32] |= 1 << (token % 32)
    known = {i for i, piece in enumerate(pieces) if piece}
    return _Vocabulary(
        size=size,
        known=frozenset(known.union(final)),
        final=bits.to(torch.int32),  # wraps: bit 31 is the sign
        compiler=xgrammar.GrammarCompiler(info, max_threads=2, cache_limit_bytes=_CACHE_BYTES),
    )

"""Sampling options as pure functions of (prefix, logits); see `Sampler`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from hasten import keyed
from hasten.errors import ModelError, OptionError
from hasten.types import LogitsProcessor, SamplingParams, TokenLogprob
from hasten.warpers import survivors, tempered

_KEEPS_STATE = "it keeps state from call to call, so it can't be asked about drafted tokens"
_WANTS_ROWS = "it wants rows of scores that aren't computed here"

REFUSED_PROCESSORS = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": _KEEPS_STATE,
    "SynthIDTextWatermarkLogitsProcessor": _KEEPS_STATE,
    "DiaEOSDelayPatternLogitsProcessor": _KEEPS_STATE,
    "WhisperNoSpeechDetection": _KEEPS_STATE,
    "ClassifierFreeGuidanceLogitsProcessor": _WANTS_ROWS,
    "DiaClassifierFreeGuidanceLogitsProcessor": _WANTS_ROWS,
    "DiaEOSChannelFilterLogitsProcessor": _WANTS_ROWS,
}
"""transformers' processors that can't be used, and why; known by name so as not to import them."""

_STATEFUL_PACKAGES = frozenset({"xgrammar", "outlines", "outlines_core", "llguidance", "guidance"})
"""Their processors advance a matcher at every call."""


class Sampler:
    """How one request's tokens are chosen: its `SamplingParams` as pure functions.

    ``prefix`` is prompt and answer so far (any sequence of ids), ``logits`` one row of the target,
    ``(vocab_size,)``, in any float dtype on any device. No call changes what a later call gives, so
    branches of a draft tree may be asked about in any order and any number of times.

    The definitions are those of transformers (penalties, bans, warpers; see `hasten.warpers` for
    ties) and OpenAI's for presence and frequency. Order: user processors, repetition,
    presence and frequency, logit_bias, no_repeat_ngram_size, bad_words_ids, min_new_tokens,
    temperature, top_k, top_p, min_p.

    Raises OptionError at construction for ids outside the vocabulary and for processors that keep
    state; in use, when the options leave no token. Raises ModelError for a row that holds NaN.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        eos_ids: frozenset[int],
        prompt_len: int,
        seed: int,
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.prompt_len = prompt_len
        self.seed = seed
        self._processors = tuple(_checked_processors(params.processors, prompt_len))
        self._bias_ids, self._biases = self._bias()
        self._bad_words = self._bad_word_table(eos_ids)
        self._final_ids = self._final(eos_ids)
        self._prompt_memo: tuple[list[int], torch.Tensor] = ([], torch.empty(0, dtype=torch.int64))

    # what the options depend on

    @property
    def prefix_free(self) -> bool:
        """True when processed logits don't depend on the prefix, so rows can go together."""
        p = self.params
        return not (
            self._processors
            or p.repetition_penalty != 1
            or p.presence_penalty
            or p.frequency_penalty
            or p.no_repeat_ngram_size
            or self._bans_final
            or any(self._bad_words)  # the empty prefix () holds the single-token words
        )

    @property
    def is_plain_greedy(self) -> bool:
        """True when the choice is the argmax of the raw logits."""
        return self.params.is_greedy and not self._changes

    @property
    def _bans_final(self) -> bool:
        return self.params.min_new_tokens > 0 and self._final_ids.numel() > 0

    @property
    def _changes(self) -> bool:
        return not self.prefix_free or bool(self._bad_words) or self._bias_ids.numel() > 0

    # the functions

    def process(self, prefix: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """The row ``(vocab,)`` float32 after all options before temperature.

        It may share memory with `logits` when no option changes anything: read it only.
        """
        if not self._changes:
            return logits.to(torch.float32)
        row = logits.to(torch.float32, copy=True)
        if self._processors:
            row = self._run_processors(prefix, row)
        self._penalize(prefix, row)
        if self._bias_ids.numel():
            row[self._bias_ids.to(row.device)] += self._biases.to(row.device)
        banned = self._banned(prefix)
        if banned:
            row[_tensor(list(banned)).to(row.device)] = -math.inf
        if self._bans_final and len(prefix) - self.prompt_len < self.params.min_new_tokens:
            row[self._final_ids.to(row.device)] = -math.inf
        return row

    def probs(self, prefix: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """The distribution ``(vocab,)`` float32 the token is drawn from; greedy: all on one id."""
        row = self.process(prefix, logits)
        if self.params.is_greedy:
            out = torch.zeros_like(row)
            out[self._best(row, prefix)] = 1.0
            return out
        scores, ids = self._warped(row, prefix)
        soft = torch.softmax(scores, 0)
        return soft if ids is None else torch.zeros_like(row).index_copy_(0, ids, soft)

    def choose(self, prefix: Sequence[int], logits: torch.Tensor) -> int:
        """The token at position ``len(prefix)``; the lowest id among equals when greedy.

        Draws are keyed by (seed, position), so the same prefix and logits give the same token
        however the row was computed, and logits off by a rounding error give nearly always the
        same (`keyed.race`). A drafter that draws with purpose "token" at the same position shares
        the noise, whatever filters are on: that is why there is one way to draw.
        """
        if self.params.is_greedy:
            return self._best(self.process(prefix, logits), prefix)
        return self.draw(self.probs(prefix, logits), len(prefix), 1, "token")[0]

    def draw(
        self, probs: torch.Tensor, position: int, count: int, purpose: str = "draft"
    ) -> list[int]:
        """Up to `count` distinct ids, drawn from ``probs (vocab,)`` without replacement, in order.

        Ids of probability 0 never come; fewer ids when the support is smaller. `purpose` keeps a
        drafter's draws independent of the target's at the same position ("token").
        """
        return keyed.draw(probs, count, self.seed, position, purpose)

    def uniform(self, position: int, purpose: str, index: int = 0) -> float:
        """A number in (0, 1) for accept tests, keyed by the request's seed and these arguments."""
        return keyed.uniform(self.seed, position, purpose, index)

    def logprob(self, logits: torch.Tensor, token: int, top: int = 0) -> TokenLogprob:
        """`token`'s log-probability under the raw row, and those of the `top` likeliest ids."""
        logprobs = torch.log_softmax(logits.to(torch.float32), 0)
        best: tuple[tuple[int, float], ...] = ()
        if top:
            values, ids = logprobs.topk(min(top, logprobs.numel()))
            pairs = zip(ids.tolist(), values.tolist(), strict=True)
            best = tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
        return TokenLogprob(token, float(logprobs[token]), best)

    # options before temperature

    def _run_processors(self, prefix: Sequence[int], row: torch.Tensor) -> torch.Tensor:
        ids = _tensor(prefix).to(row.device).unsqueeze(0)
        scores = row.unsqueeze(0)
        for processor in self._processors:
            scores = processor(ids, scores)
            if not isinstance(scores, torch.Tensor) or scores.shape != (1, self.vocab_size):
                got = tuple(scores.shape) if isinstance(scores, torch.Tensor) else repr(scores)
                name = getattr(processor, "__name__", type(processor).__name__)
                raise OptionError(
                    "processors", f"{name} gave {got}, not scores of shape (1, {self.vocab_size})"
                )
        return scores[0].to(torch.float32, copy=True)

    def _penalize(self, prefix: Sequence[int], row: torch.Tensor) -> None:
        p = self.params
        generated = list(prefix[self.prompt_len :])
        if p.repetition_penalty != 1:
            ids = torch.cat([self._prompt_ids(prefix), _tensor(generated)]).to(row.device)
            old = row[ids]
            row[ids] = torch.where(old < 0, old * p.repetition_penalty, old / p.repetition_penalty)
        if generated and (p.presence_penalty or p.frequency_penalty):
            counts = Counter(generated)
            ids = _tensor(list(counts)).to(row.device)
            times = _tensor(list(counts.values())).to(row.device)
            row[ids] -= p.frequency_penalty * times + p.presence_penalty

    def _prompt_ids(self, prefix: Sequence[int]) -> torch.Tensor:
        """The prompt's distinct ids; kept from the last call while the prompt is the same."""
        prompt = list(prefix[: self.prompt_len])
        if prompt != self._prompt_memo[0]:
            ids = _tensor([i for i in set(prompt) if i < self.vocab_size])
            self._prompt_memo = (prompt, ids)
        return self._prompt_memo[1]

    def _banned(self, prefix: Sequence[int]) -> set[int]:
        banned: set[int] = set()
        size = self.params.no_repeat_ngram_size
        if size and len(prefix) + 1 >= size:
            banned.update(_followers(prefix, size))
        for words in self._bad_words.values():
            length = len(next(iter(words)))
            if length <= len(prefix):
                banned.update(words.get(tuple(prefix[len(prefix) - length :]), ()))
        # a prompt may hold ids that the LM head lacks (image placeholders)
        return {i for i in banned if i < self.vocab_size}

    # faults in a row

    def _best(self, row: torch.Tensor, prefix: Sequence[int]) -> int:
        value, best = torch.max(row, 0)  # the first of equals
        self._check_top(float(value), prefix)
        return int(best)

    def _warped(
        self, row: torch.Tensor, prefix: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        top = float(row.max())
        self._check_top(top, prefix)
        return survivors(tempered(row, top, self.params.temperature), self.params)

    def _check_top(self, top: float, prefix: Sequence[int]) -> None:
        """Refuse a row by its largest value (NaN when it holds one)."""
        if math.isnan(top) or (top == math.inf and not self.params.is_greedy):
            raise ModelError(
                f"the logits after {len(prefix)} tokens hold NaN or infinity: the model or a "
                "logits processor is broken in this precision; try dtype='float32'"
            )
        if top == -math.inf:
            raise OptionError(
                self._banning_option(),
                f"every token is banned after {len(prefix)} tokens",
                "Loosen the options that ban tokens, or give the answer a way to end",
            )

    def _banning_option(self) -> str:
        p = self.params
        active = (
            ("processors", p.processors),
            ("logit_bias", p.logit_bias),
            ("bad_words_ids", p.bad_words_ids),
            ("no_repeat_ngram_size", p.no_repeat_ngram_size),
            ("min_new_tokens", p.min_new_tokens),
        )
        return " + ".join(name for name, value in active if value) or "logits"

    # checks at construction

    def _bias(self) -> tuple[torch.Tensor, torch.Tensor]:
        bias = self.params.logit_bias
        self._in_vocabulary("logit_bias", bias)
        for token, value in bias.items():
            if not isinstance(value, (int, float)) or not value < math.inf:
                raise OptionError(
                    "logit_bias",
                    f"id {token} has {value!r}: give a finite number, or -inf for a ban",
                )
        return _tensor(list(bias)), torch.tensor(list(bias.values()), dtype=torch.float32)

    def _bad_word_table(
        self, eos_ids: frozenset[int]
    ) -> dict[int, dict[tuple[int, ...], list[int]]]:
        """By length of what comes before the last id: those ids -> the last ids not to follow them.

        As in transformers a lone end-of-sequence id isn't a bad word.
        """
        table: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for word in self.params.bad_words_ids:
            self._in_vocabulary("bad_words_ids", word)
            if len(word) > 1 or word[0] not in eos_ids:
                table.setdefault(len(word) - 1, {}).setdefault(word[:-1], []).append(word[-1])
        return table

    def _final(self, eos_ids: frozenset[int]) -> torch.Tensor:
        self._in_vocabulary("stop_token_ids", self.params.stop_token_ids)
        known = {i for i in eos_ids if i < self.vocab_size}
        return _tensor(sorted(known.union(self.params.stop_token_ids)))

    def _in_vocabulary(self, option: str, ids: Iterable[int]) -> None:
        for i in ids:
            if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < self.vocab_size:
                raise OptionError(
                    option, f"{i!r} isn't a token id of this model (0..{self.vocab_size - 1})"
                )


def _followers(prefix: Sequence[int], size: int) -> list[int]:
    """The tokens that followed earlier occurrences of the last ``size - 1`` tokens."""
    ids = list(prefix)
    if size == 1:
        return ids
    tail, out, end = ids[1 - size :], [], size - 2
    try:
        while True:
            end = ids.index(tail[-1], end, len(ids) - 1)
            if ids[end - size + 2 : end + 1] == tail:
                out.append(ids[end + 1])
            end += 1
    except ValueError:
        return out


def _tensor(ids: Sequence[int]) -> torch.Tensor:
    # by way of numpy: ten times as fast as torch.tensor for a long list
    return torch.from_numpy(np.array(ids, dtype=np.int64))


def _checked_processors(processors: Iterable[Any], prompt_len: int) -> Iterable[LogitsProcessor]:
    """The processors in order, lists of them flattened, those for each request made; OptionError
    for one that can't be used."""
    for processor in processors:
        if isinstance(processor, (list, tuple)):
            yield from _checked_processors(processor, prompt_len)
            continue
        if hasattr(processor, "for_prompt"):
            processor = processor.for_prompt(prompt_len)
        name = type(processor).__name__
        if not callable(processor) or isinstance(processor, type):
            raise OptionError(
                "processors", f"{processor!r} isn't a callable (input_ids, scores) -> scores"
            )
        reason = _refusal(processor)
        if reason:
            raise OptionError(
                "processors",
                f"{name} can't be used: {reason}",
                "Leave it out, or decode with the model's own generate()",
            )
        yield processor


def _refusal(processor: Any) -> str:
    pure = getattr(processor, "hasten_prefix_pure", None)
    if pure is not None:
        return "" if pure else "it says that it isn't prefix-pure (hasten_prefix_pure is False)"
    for base in type(processor).__mro__:
        package = base.__module__.partition(".")[0]
        if package == "transformers" and base.__name__ in REFUSED_PROCESSORS:
            return REFUSED_PROCESSORS[base.__name__]
        if package in _STATEFUL_PACKAGES:
            return _KEEPS_STATE
    return ""

"""How tokens are chosen and when an answer ends: the options of a request, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hasten.errors import OptionError

LogitsProcessor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``(input_ids (1, n) int64, scores (1, vocab) float32) -> scores``: transformers' convention.

It must be *prefix-pure*: its answer depends on its two arguments only, never on earlier calls.
"""


class ProcessorMaker(Protocol):
    """Makes each request a processor of its own, that knows where the answer begins."""

    def for_prompt(self, prompt_len: int) -> LogitsProcessor:
        """The processor of a request whose prompt has so many tokens."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop; the defaults are greedy.

    Acts exactly as in plain decoding, whatever the drafter. Penalties and filters follow
    transformers' definitions and order (penalties, biases, bans, temperature, top-k, top-p, min-p);
    presence and frequency penalties follow OpenAI's (generated tokens only).

    max_new_tokens        at least 0; exactly this many unless a stop comes first
    temperature           0 is greedy; otherwise > 0
    top_k                 0 is off
    top_p                 in (0, 1]
    min_p                 in [0, 1]
    repetition_penalty    in [0.001, 1000], over prompt and answer; 1 is off
    presence_penalty      in [-2, 2], subtracted once from each generated id
    frequency_penalty     in [-2, 2], subtracted per occurrence
    no_repeat_ngram_size  0 is off
    logit_bias            id -> added to its logit
    bad_words_ids         sequences of ids never completed
    min_new_tokens        end-of-sequence ids are banned and stop strings ignored before this many
    stop                  strings that end the answer; not part of the text
    stop_token_ids        more ids that end the answer, besides the model's own
    ignore_eos            go on past end-of-sequence ids
    seed                  of this request's draws; None takes a fresh one (reported in the result)
    logprobs              None: none; n >= 0: each token's log-probability and the n likeliest
    processors            prefix-pure logits processors, run before the options above; or what makes
                          one for each request (`hasten.grammar`)
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    processors: tuple[LogitsProcessor | ProcessorMaker, ...] = ()

    def __post_init__(self) -> None:
        stop: Any = self.stop
        if isinstance(stop, str):
            object.__setattr__(self, "stop", (stop,))
        for name in ("stop", "stop_token_ids", "processors"):
            object.__setattr__(self, name, self._as(name, tuple, "a list"))
        for name, make, rule in (
            ("bad_words_ids", lambda words: tuple(map(tuple, words)), "a list of lists of ids"),
            ("logit_bias", dict, "a mapping of ids to numbers"),
        ):
            object.__setattr__(self, name, self._as(name, make, rule))
        self._check()

    def _as(self, option: str, make: Callable[[Any], Any], rule: str) -> Any:
        """The option's value as an immutable (or private) copy; None is none."""
        value = getattr(self, option)
        try:
            return make(() if value is None else value)
        except (TypeError, ValueError):
            raise OptionError(option, f"must be {rule}, got {value!r}") from None

    def _check(self) -> None:
        def need(option: str, ok: bool, rule: str) -> None:
            if not ok:
                raise OptionError(option, f"must be {rule}, got {getattr(self, option)!r}")

        for name in ("max_new_tokens", "min_new_tokens", "top_k", "no_repeat_ngram_size"):
            value = getattr(self, name)
            need(
                name,
                isinstance(value, int) and not isinstance(value, bool) and value >= 0,
                "a whole number >= 0",
            )
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            value = getattr(self, name)
            need(
                name,
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and math.isfinite(value),
                "a finite number",
            )
        need("temperature", self.temperature >= 0, ">= 0 (0 is greedy)")
        need("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        need("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        need(
            "repetition_penalty",
            1e-3 <= self.repetition_penalty <= 1e3,
            "in [0.001, 1000] (1 is off)",
        )
        need("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]")
        need("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]")
        need(
            "seed",
            self.seed is None or (isinstance(self.seed, int) and not isinstance(self.seed, bool)),
            "a whole number or None",
        )
        need(
            "logprobs",
            self.logprobs is None
            or (
                isinstance(self.logprobs, int)
                and not isinstance(self.logprobs, bool)
                and self.logprobs >= 0
            ),
            "None or a whole number >= 0",
        )
        need("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings")
        need("bad_words_ids", all(self.bad_words_ids), "non-empty sequences of ids")
        if self.min_new_tokens > self.max_new_tokens:
            raise OptionError(
                "min_new_tokens",
                f"{self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}",
            )

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is taken at each position."""
        return self.temperature == 0

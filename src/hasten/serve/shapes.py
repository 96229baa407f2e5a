"""Answers in OpenAI's shapes, whole or as chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from hasten.serve.requests import Request
from hasten.serve.token_texts import TokenTexts
from hasten.types import TokenLogprob

_LEAST = -9999.0
"""Stands for minus infinity, which JSON has no word for."""


class Shapes:
    """One request's answers: what all of its chunks have in common."""

    def __init__(
        self, request: Request, model: str, fingerprint: str | None, texts: TokenTexts
    ) -> None:
        self._request, self._texts = request, texts
        kind = "chat.completion" if request.chat else "text_completion"
        prefix = "chatcmpl" if request.chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if request.chat and request.stream else kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._offsets: dict[int, int] = {}

    def answer(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A whole response, or a chunk."""
        return {**self._head, "choices": choices, **more}

    def choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, finish: str | None
    ) -> dict[str, Any]:
        """One whole answer."""
        if not self._request.chat:
            return self.piece(index, text, logprobs, finish)
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(index, logprobs),
            "finish_reason": finish,
        }

    def role(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat answer."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, finish: str | None
    ) -> dict[str, Any]:
        """Part of an answer in a stream."""
        said = (
            {"delta": {"content": text} if text else {}} if self._request.chat else {"text": text}
        )
        return {
            "index": index,
            **said,
            "logprobs": self._logprobs(index, logprobs),
            "finish_reason": finish,
        }

    def _logprobs(self, index: int, given: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if given is None:
            return None
        if self._request.chat:
            content = [
                {
                    **self._token(each.token, each.logprob),
                    "top_logprobs": [self._token(*pair) for pair in each.top],
                }
                for each in given
            ]
            return {"content": content, "refusal": None}
        words = [self._texts.text(each.token) for each in given]
        offsets, at = [], self._offsets.get(index, 0)
        for word in words:
            offsets.append(at)
            at += len(word)
        self._offsets[index] = at
        return {
            "tokens": words,
            "token_logprobs": [_finite(each.logprob) for each in given],
            "top_logprobs": [self._likeliest(each) for each in given],
            "text_offset": offsets,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._texts.text(token),
            "logprob": _finite(logprob),
            "bytes": self._texts.encoded(token),
        }

    def _likeliest(self, each: TokenLogprob) -> dict[str, float]:
        """By text, the likelier of two tokens that read the same; the chosen one among them."""
        pairs = [*each.top, (each.token, each.logprob)]
        out: dict[str, float] = {}
        for token, logprob in pairs:
            out.setdefault(self._texts.text(token), _finite(logprob))
        return out


def usage(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    """What a request used, in tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)

"""Faults as OpenAI's clients expect them: a status and ``{"error": {...}}``."""

from __future__ import annotations

import json
import logging
import re
import traceback
from typing import Any

from starlette.responses import Response

from hasten.errors import (
    CapabilityError,
    ContextError,
    HastenError,
    OptionError,
    OverloadError,
    VocabularyError,
)

logger = logging.getLogger("hasten.serve")

_FIELDS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "schema": "response_format",
    "pattern": "response_format",
    "grammar": "response_format",
    "processors": "response_format",
}
"""The request's name of an option, where the library has another."""


class ApiError(Exception):
    """A fault that a client is told.

    status  of HTTP; `kind` and `code` are OpenAI's ``type`` and ``code``
    param   the request's field at fault
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind, self.headers = kind, headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's shape."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        """The whole response. ASCII: a message may repeat what no encoding has."""
        text = json.dumps(self.body)
        return Response(text, self.status, self.headers, media_type="application/json")


def bad(param: str, message: str, *, code: str | None = None) -> ApiError:
    """A field that can't be used."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def too_long(tokens: int, limit: int, param: str) -> ApiError:
    """A prompt that leaves no room for an answer."""
    return ApiError(
        400,
        f"This model's context holds {limit} tokens, and the prompt alone has {tokens}. Shorten it",
        param=param,
        code="context_length_exceeded",
    )


def shutting_down() -> ApiError:
    """The server is about to end."""
    return ApiError(
        503,
        "The server is shutting down",
        kind="server_error",
        code="shutting_down",
        headers={"Connection": "close", "Retry-After": "5"},
    )


def as_api_error(error: BaseException) -> ApiError:
    """Whatever went wrong as a client is told; what is no fault of the request's is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OverloadError):
        return ApiError(
            429,
            "Too many requests wait already. Try again later",
            kind="rate_limit_error",
            code="queue_full",
            headers={"Retry-After": "1"},
        )
    if isinstance(error, OptionError):
        name = re.split(r"[. ]", error.option)[0]  # "racer.nodes", "processors + logit_bias"
        param = _FIELDS.get(name, name)
        message = str(error)
        if param != name and message.startswith(name):
            message = param + message[len(name) :]
        return ApiError(400, message, param=param)
    if isinstance(error, ContextError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, (CapabilityError, VocabularyError)):
        return ApiError(400, str(error), param="method")
    log_fault(error)
    message = str(error) if isinstance(error, HastenError) else "The server failed: see its log"
    return ApiError(500, message, kind="server_error", code="internal_error")


def log_fault(error: BaseException) -> None:
    """Where an error happened, without its message: that may hold a user's text."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s\n%s", type(error).__name__, frames)
    logger.debug("the message: %s", error)

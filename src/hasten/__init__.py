"""hasten makes any causal language model answer faster without changing what it says."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from hasten import errors as errors
from hasten.errors import HastenError as HastenError

if TYPE_CHECKING:
    from hasten.api import LLM as LLM
    from hasten.api import load as load
    from hasten.methods import configure as configure
    from hasten.streams import AsyncStream as AsyncStream
    from hasten.streams import Stream as Stream
    from hasten.types import FinishReason as FinishReason
    from hasten.types import Result as Result
    from hasten.types import SamplingParams as SamplingParams

try:
    __version__ = version("hasten")
except PackageNotFoundError:  # a source tree that isn't installed
    __version__ = "0+unknown"

_LAZY = {
    "LLM": "hasten.api",
    "AsyncStream": "hasten.streams",
    "Stream": "hasten.streams",
    "load": "hasten.api",
    "configure": "hasten.methods",
    "FinishReason": "hasten.types",
    "Result": "hasten.types",
    "SamplingParams": "hasten.types",
}

__all__ = [
    "LLM",
    "AsyncStream",
    "FinishReason",
    "HastenError",
    "Result",
    "SamplingParams",
    "Stream",
    "configure",
    "errors",
    "load",
    "plugins",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import the rest on first use: ``import hasten`` (and the CLI's ``--help``) stay quick."""
    from importlib import import_module

    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name == "plugins":
        return import_module("hasten.plugins")
    raise AttributeError(f"module 'hasten' has no attribute {name!r}")

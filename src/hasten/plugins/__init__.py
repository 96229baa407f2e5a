"""hasten inside other engines; nothing here imports an engine until it is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """A plug-in, imported on first use: ``hasten.plugins.transformers``."""
    full = f"{__name__}.{name}"
    if not name.startswith("_"):
        try:
            return import_module(full)
        except ModuleNotFoundError as error:
            if error.name != full:
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

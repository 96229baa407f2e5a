"""What a caller may hand over as a prompt, and as sampling options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from operator import index
from typing import Any

from hasten.errors import OptionError
from hasten.types import SamplingParams

_PARAMS = {f.name for f in fields(SamplingParams)}


def as_ids(prompt: Any) -> list[int] | None:
    """The ids of a prompt given as ids; None for text and messages. Raises OptionError."""
    if hasattr(prompt, "tolist"):  # an array or a tensor, maybe with a batch of one
        prompt = prompt.tolist()
        if len(prompt) == 1 and isinstance(prompt[0], list):
            prompt = prompt[0]
    if isinstance(prompt, str):
        return None
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Sequence):
        hint = "Give its input_ids" if hasattr(prompt, "input_ids") else ""
        raise OptionError("prompt", f"must be text, ids or messages, got {prompt!r}", hint)
    if any(isinstance(each, Mapping) for each in prompt):
        return None
    try:
        if any(isinstance(each, bool) for each in prompt):
            raise TypeError
        return [index(each) for each in prompt]
    except TypeError:
        raise OptionError("prompt", "must be one row of ids, text or messages") from None


def merge(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    """`params` with `options` laid over it. Raises OptionError for an unknown name."""
    unknown = [name for name in options if name not in _PARAMS]
    if unknown:
        raise OptionError(
            unknown[0],
            "no such option",
            f"Options: {', '.join(sorted(_PARAMS))}, method, verify, template, system, trace, rule",
        )
    if params is None:
        return SamplingParams(**options)
    if not isinstance(params, SamplingParams):
        raise OptionError("params", f"must be a SamplingParams, got {params!r}")
    return replace(params, **options)

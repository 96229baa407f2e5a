"""Taking a JSON object apart: every field is checked, and none is ignored silently."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from hasten.serve.faults import ApiError, bad

_WORDS = {str: "text", bool: "true or false", list: "a list", dict: "an object"}


def read_json(body: bytes) -> dict[str, Any]:
    """A request's body as an object. Raises ApiError (400)."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise ApiError(400, f"The body isn't valid JSON: {why}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object", code="invalid_json")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} isn't JSON")


class Fields:
    """The fields of one object, taken one by one; null is the same as left out.

    `at` names the object in messages (``"messages[0]."``). `close` refuses what was not taken.
    """

    def __init__(self, values: Mapping[str, Any], at: str = "") -> None:
        self._left = dict(values)
        self._at = at
        self._known: list[str] = []

    def name(self, field: str) -> str:
        """The field as messages name it."""
        return f"{self._at}{field}"

    def take(self, field: str, kind: type | None = None) -> Any:
        """The value of a field, None when it isn't given; `kind` is str, bool, list or dict."""
        self._known.append(field)
        value = self._left.pop(field, None)
        if value is not None and kind is not None and not isinstance(value, kind):
            raise bad(self.name(field), f"must be {_WORDS[kind]}, got {shown(value)}")
        return value

    def number(self, field: str, low: float = -math.inf, high: float = math.inf) -> float | None:
        """A finite number in [low, high]."""
        value = self.take(field)
        if value is None:
            return None
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not fits or not low <= value <= high or abs(value) > 1e300:
            raise bad(self.name(field), f"must be a number{_span(low, high)}, got {shown(value)}")
        return float(value)

    def whole(self, field: str, low: int, high: int | None = None) -> int | None:
        """A whole number in [low, high]."""
        value = self.take(field)
        if value is None:
            return None
        top = 2**63 - 1 if high is None else high
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= top:
            span = _span(low, math.inf if high is None else high)
            raise bad(self.name(field), f"must be a whole number{span}, got {shown(value)}")
        return value

    def only(self, field: str, allowed: tuple[Any, ...], why: str) -> None:
        """A field that may only say what happens anyway."""
        value = self.take(field)
        if value is not None and not any(
            type(value) is type(each) and value == each for each in allowed
        ):
            raise bad(self.name(field), f"{why}, got {shown(value)}", code="unsupported_value")

    def close(self) -> None:
        """Refuse every field that wasn't taken."""
        if self._left:
            field = next(iter(self._left))
            raise bad(
                self.name(field[:80]),
                f"no such field here. Known: {', '.join(sorted(self._known))}",
                code="unknown_parameter",
            )


def shown(value: Any) -> str:
    """A value in a message: what it is, at most a few characters of it."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    try:
        text = json.dumps(value)
    except ValueError:  # an integer of thousands of digits
        return "a number"
    return text if len(text) <= 40 else text[:37] + "..."


def _span(low: float, high: float) -> str:
    if low == -math.inf:
        return "" if high == math.inf else f" <= {high:g}"
    return f" >= {low:g}" if high == math.inf else f" in [{low:g}, {high:g}]"

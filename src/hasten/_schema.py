"""What of JSON Schema a grammar enforces; the rest is refused by name before anything runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

from hasten.errors import OptionError

_DEEPEST = 64


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NOTES = _words(
    "title description default examples example deprecated readOnly writeOnly "
    "discriminator definitions $schema $id $comment $defs"
)
"""Keywords that say nothing about what is valid."""

_BOUNDS = _words("minimum maximum exclusiveMinimum exclusiveMaximum")
_KEYWORDS = {
    "null": frozenset[str](),
    "boolean": frozenset[str](),
    "integer": _BOUNDS | {"multipleOf"},
    "number": _BOUNDS,
    "string": _words("minLength maxLength pattern format"),
    "array": _words("items prefixItems minItems maxItems"),
    "object": _words(
        "properties required additionalProperties patternProperties propertyNames "
        "minProperties maxProperties"
    ),
}
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_FORMATS = _words(
    "date time date-time duration email hostname ipv4 ipv6 uuid uri "
    "uri-reference uri-template json-pointer relative-json-pointer"
)
_TOGETHER = (
    # each pair is enforced apart, but not together
    ("pattern", "minLength"),
    ("pattern", "maxLength"),
    ("pattern", "format"),
    ("format", "minLength"),
    ("format", "maxLength"),
    ("properties", "patternProperties"),
    ("properties", "propertyNames"),
    ("patternProperties", "propertyNames"),
)


def check_schema(schema: Any) -> None:
    """Raise OptionError (option ``schema``) unless every keyword of `schema` will be enforced."""
    try:
        json.dumps(schema)
        _Checker(schema).run()
    except (RecursionError, TypeError, ValueError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError("schema", f"isn't a JSON Schema: {error}") from error


def check_pattern(pattern: Any, option: str, at: str = "") -> None:
    """Raise OptionError for a regular expression with parts that would be ignored."""
    if not isinstance(pattern, str):
        raise OptionError(option, f"{at}a pattern must be text, got {pattern!r}")
    bare = re.sub(r"\\.", "..", pattern, flags=re.DOTALL)  # escaped characters
    bare = re.sub(r"\[\^?\]?[^\]]*\]", lambda m: "." * len(m.group()), bare)  # classes
    if found := re.search(r"\(\?(?!:)", bare):
        raise OptionError(
            option, f"{at}{pattern[found.start() :][:4]!r} of a pattern can't be enforced"
        )
    if "^" in bare[1:] or "$" in bare[:-1]:
        raise OptionError(
            option, f"{at}in {pattern!r} ^ or $ stand inside", "Put them at its ends only"
        )


_ESCAPED_IN_JSON = re.compile(
    r"""["]|\\\\|\\[nrtfv0c]|\\x(?:[01].|22|5[cC])|\\u00(?:[01].|22|5[cC])""", re.DOTALL
)


def _check_json_pattern(pattern: Any, at: str) -> None:
    """`check_pattern`, and no characters that JSON writes another way than they are."""
    check_pattern(pattern, "schema", f"at {at}: ")
    named = re.sub(r"\[\^(?:\\.|[^\]])*\]", "", pattern, flags=re.DOTALL)
    if _ESCAPED_IN_JSON.search(named):
        raise OptionError(
            "schema",
            f"at {at}: quotes, backslashes and control characters in the pattern {pattern!r} "
            "can't be enforced",
        )


class _Checker:
    """One schema being checked; `at` is a JSON pointer for messages."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._followed = {"#"}
        self._leads: dict[str, set[str]] = {}
        """From a reference to those it leads to without a container in between."""

    def run(self) -> None:
        """Check the whole schema."""
        self.check(self._root, "#", 0, "#")
        for ref in self._leads:
            self._refuse_circle(ref)

    def check(self, schema: Any, at: str, depth: int, origin: str) -> None:
        """`origin` is the reference that leads here without a container in between, or empty."""
        if depth > _DEEPEST:
            raise OptionError("schema", f"is nested more than {_DEEPEST} deep")
        if isinstance(schema, bool):
            return
        if not isinstance(schema, Mapping):
            raise OptionError("schema", f"at {at}: must be an object, got {schema!r}")
        keys = {k for k in schema if k not in _NOTES and not k.startswith("x-")}
        alone = [k for k in _ALONE if k in keys]
        if alone:
            self._check_alone(schema, keys, alone[0], at, depth, origin)
        elif keys:
            self._check_typed(schema, keys, at, depth)

    def _check_alone(
        self,
        schema: Mapping[str, Any],
        keys: set[str],
        key: str,
        at: str,
        depth: int,
        origin: str,
    ) -> None:
        values = schema["enum"] if key == "enum" else [schema.get("const")]
        beside = keys - {key}
        if key in ("enum", "const") and isinstance(values, list):
            types = self._types(schema, at) if "type" in keys else tuple(_KEYWORDS)
            if all(_is(value, types) for value in values):
                beside -= {"type"}
        if beside:
            raise OptionError(
                "schema", f"at {at}: {key!r} isn't enforced together with {_names(beside)}"
            )
        if key == "$ref":
            self._follow(schema["$ref"], at, depth, origin)
        elif key in ("anyOf", "oneOf", "allOf"):
            self._check_branches(schema[key], key, at, depth, origin)

    def _check_branches(self, branches: Any, key: str, at: str, depth: int, origin: str) -> None:
        if not isinstance(branches, list) or not branches:
            raise OptionError("schema", f"at {at}: {key!r} must be a list of schemas")
        if key == "allOf" and len(branches) > 1:
            raise OptionError("schema", f"at {at}: 'allOf' of several schemas can't be enforced")
        for index, branch in enumerate(branches):
            self.check(branch, f"{at}/{key}/{index}", depth + 1, origin)
        if key == "oneOf" and not all(self._apart(a, b) for a, b in combinations(branches, 2)):
            raise OptionError(
                "schema",
                f"at {at}: 'oneOf' is enforced only where its schemas can't both hold (other "
                "types, or a required property with other constants)",
                "Use 'anyOf'",
            )

    def _check_typed(self, schema: Mapping[str, Any], keys: set[str], at: str, depth: int) -> None:
        known = frozenset[str]().union(*_KEYWORDS.values())
        if unknown := keys - known - {"type"}:
            raise OptionError(
                "schema", f"at {at}: {_names(unknown)} can't be enforced", "Leave it out"
            )
        types = self._types(schema, at)
        if misplaced := keys - {"type"}.union(*(_KEYWORDS[t] for t in types)):
            raise OptionError(
                "schema", f"at {at}: {_names(misplaced)} isn't enforced on {' or '.join(types)}"
            )
        if "multipleOf" in keys and "number" in types:
            raise OptionError("schema", f"at {at}: 'multipleOf' is enforced on integers only")
        for first, second in _TOGETHER:
            if first in keys and second in keys:
                raise OptionError(
                    "schema", f"at {at}: {first!r} isn't enforced together with {second!r}"
                )
        self._check_string(schema, at)
        self._check_object(schema, keys, at)
        for child, where in _children(schema):
            self.check(child, f"{at}/{where}", depth + 1, "")

    def _check_string(self, schema: Mapping[str, Any], at: str) -> None:
        if "pattern" in schema:
            _check_json_pattern(schema["pattern"], at)
        if "format" in schema and schema["format"] not in _FORMATS:
            raise OptionError(
                "schema",
                f"at {at}: format {schema['format']!r} can't be enforced",
                f"Known: {', '.join(sorted(_FORMATS))}",
            )

    def _check_object(self, schema: Mapping[str, Any], keys: set[str], at: str) -> None:
        declared = schema.get("properties", {})
        if not isinstance(declared, Mapping):
            raise OptionError("schema", f"at {at}: 'properties' must be an object")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(r, str) for r in required):
            raise OptionError("schema", f"at {at}: 'required' must be a list of names")
        if undeclared := set(required) - set(declared):
            raise OptionError(
                "schema", f"at {at}: {_names(undeclared)} is required and not among 'properties'"
            )
        is_open = bool(schema.get("additionalProperties")) or "patternProperties" in keys
        if "minProperties" in keys and (is_open or not declared):
            raise OptionError(
                "schema", f"at {at}: 'minProperties' is enforced on declared properties only"
            )
        names = schema.get("propertyNames")
        if names is not None:
            if not isinstance(names, Mapping) or set(names) - _NOTES - {"pattern", "type"}:
                raise OptionError("schema", f"at {at}: 'propertyNames' may hold a pattern only")
            self._check_string(names, f"{at}/propertyNames")
        for pattern in schema.get("patternProperties", {}):
            _check_json_pattern(pattern, at)

    def _types(self, schema: Mapping[str, Any], at: str) -> tuple[str, ...]:
        named = schema.get("type")
        types = [named] if isinstance(named, str) else named
        if not isinstance(types, list) or not types or any(t not in _KEYWORDS for t in types):
            raise OptionError(
                "schema", f"at {at}: give a 'type' ({', '.join(_KEYWORDS)}), got {named!r}"
            )
        return tuple(types)

    # references

    def _follow(self, ref: Any, at: str, depth: int, origin: str) -> None:
        found = self._resolve(ref, at)
        if origin:
            self._leads.setdefault(origin, set()).add(ref)
        if ref not in self._followed:
            self._followed.add(ref)
            self.check(found, ref, depth + 1, ref)

    def _refuse_circle(self, start: str) -> None:
        reached, ahead = set[str](), [start]
        while ahead:
            for ref in self._leads.get(ahead.pop(), set()) - reached:
                if ref == start:
                    raise OptionError("schema", f"at {ref}: refers to itself without end")
                reached.add(ref)
                ahead.append(ref)

    def _resolve(self, ref: Any, at: str) -> Any:
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise OptionError(
                "schema", f"at {at}: the reference {ref!r} can't be followed", "Use '#/$defs/NAME'"
            )
        found = self._root
        for part in ref.split("/")[1:]:
            if not isinstance(found, Mapping) or part not in found:
                raise OptionError("schema", f"at {at}: the reference {ref!r} leads nowhere")
            found = found[part]
        return found

    # branches that can't both hold

    def _apart(self, a: Any, b: Any) -> bool:
        a, b = self._plain(a), self._plain(b)
        kinds = self._kinds(a), self._kinds(b)
        if kinds[0] and kinds[1] and not kinds[0] & kinds[1]:
            return True
        if (mine := _values(a)) is not None and (other := _values(b)) is not None:
            return not mine & other
        if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
            return False
        for name in set(a.get("required", ())) & set(b.get("required", ())):
            mine = _values(self._plain(a["properties"][name]))
            other = _values(self._plain(b["properties"][name]))
            if mine is not None and other is not None and not mine & other:
                return True
        return False

    def _plain(self, schema: Any) -> Any:
        """`schema` itself, references followed (they have been checked)."""
        while isinstance(schema, Mapping) and "$ref" in schema:
            schema = self._resolve(schema["$ref"], "#")
        return schema

    def _kinds(self, schema: Any) -> set[str]:
        """The types that `schema` allows; empty: not known."""
        if not isinstance(schema, Mapping) or "type" not in schema:
            return set()
        return {"number" if t == "integer" else t for t in self._types(schema, "#")}


def _children(schema: Mapping[str, Any]) -> Iterable[tuple[Any, str]]:
    """The schemas inside a schema, with their places."""
    for key in ("properties", "patternProperties"):
        inside = schema.get(key, {})
        if not isinstance(inside, Mapping):
            raise OptionError("schema", f"{key!r} must be an object")
        yield from ((child, f"{key}/{name}") for name, child in inside.items())
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield schema[key], key
    prefix = schema.get("prefixItems", [])
    if not isinstance(prefix, list):
        raise OptionError("schema", "'prefixItems' must be a list")
    yield from ((child, f"prefixItems/{index}") for index, child in enumerate(prefix))


def _values(schema: Any) -> set[str] | None:
    """The values of a constant or an enumeration, as JSON; None for another schema."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return {json.dumps(schema["const"], sort_keys=True)}
    if "enum" in schema:
        return {json.dumps(value, sort_keys=True) for value in schema["enum"]}
    return None


def _is(value: Any, types: Iterable[str]) -> bool:
    """Whether a JSON value is of one of `types`."""
    if isinstance(value, bool):
        kinds = {"boolean"}
    elif isinstance(value, (int, float)):
        whole = isinstance(value, int) or value.is_integer()
        kinds = {"number", "integer"} if whole else {"number"}
    elif value is None:
        kinds = {"null"}
    else:
        kinds = {
            "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
        }
    return bool(kinds & set(types))


def _names(keys: Iterable[str]) -> str:
    return ", ".join(repr(k) for k in sorted(keys))

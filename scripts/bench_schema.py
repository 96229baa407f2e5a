"""JSON of a schema with speculation on and off: are all answers valid, and which is faster?

    python scripts/bench_schema.py [--dtype bfloat16] [--repeats 3] [--max-new-tokens 160]

Each prompt is answered by every method under the same grammar, in turns; decode only, from the
first token on. Valid: the answer parses, and holds exactly the schema's properties with values of
their types. An answer cut by its length can't be valid, and is counted apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import hasten
from hasten.grammar import json_schema

TEXT: dict[str, Any] = {"type": "string", "maxLength": 60}
PERSON = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "age": {"type": "integer"},
        "city": TEXT,
        "languages": {"type": "array", "items": TEXT, "maxItems": 4},
    },
    "required": ["name", "age", "city", "languages"],
}
ORDER = {
    "type": "object",
    "properties": {
        "order": {"type": "integer"},
        "items": {
            "type": "array",
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {"product": TEXT, "count": {"type": "integer"}},
                "required": ["product", "count"],
            },
        },
        "express": {"type": "boolean"},
    },
    "required": ["order", "items", "express"],
}
EVENT = {
    "type": "object",
    "properties": {
        "title": TEXT,
        "date": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
        "kind": {"enum": ["meeting", "concert", "trip", "other"]},
        "people": {"type": "array", "items": TEXT, "maxItems": 4},
    },
    "required": ["title", "date", "kind", "people"],
}
CASES: list[tuple[dict[str, Any], str]] = [
    (
        PERSON,
        "Marta Lind is 41 years old, lives in Gothenburg and speaks Swedish, German and Thai.",
    ),
    (PERSON, "In Porto lives João Reis, 29, who speaks Portuguese and English."),
    (PERSON, "Amara Okafor (35) moved to Leeds; her languages are Igbo, English and French."),
    (PERSON, "Kenji Mori, a baker from Sapporo, turned 62 and speaks only Japanese."),
    (ORDER, "Order 4417, express: two desk lamps and one oak shelf."),
    (ORDER, "Please send order 902 by ordinary mail. It holds 12 pencils and 3 notebooks."),
    (ORDER, "Express order 77: one kettle, four cups, one teapot."),
    (ORDER, "Order number 31008 has 5 bags of coffee. No hurry."),
    (EVENT, "On 2025-03-14 Ana, Bo and Cleo meet for the budget meeting."),
    (EVENT, "The spring concert of Lena Vogt and Paul Roth is on 2026-05-02."),
    (EVENT, "Trip to the lake with Omar and Sofia, 2025-08-21."),
    (EVENT, "Remember the dentist: 2025-11-30, nobody else comes along."),
]


def fits(schema: dict[str, Any], text: str) -> bool:
    """Whether `text` is JSON with the schema's properties and types (of the schemas above)."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return _fits(schema, value)


def _fits(schema: dict[str, Any], value: Any) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "object":
        properties = schema["properties"]
        return (
            isinstance(value, dict)
            and list(value) == list(properties)
            and all(_fits(properties[name], each) for name, each in value.items())
        )
    if kind == "array":
        return (
            isinstance(value, list)
            and len(value) <= schema["maxItems"]
            and all(_fits(schema["items"], each) for each in value)
        )
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, {"string": str, "boolean": bool}[kind])


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--methods", default="ar;racer;auto", help="split at semicolons")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    options = parser.parse_args()
    llm = hasten.load(dtype=options.dtype, method="ar")
    info, names = llm.target.info, options.methods.split(";")
    for name in names:
        llm.generate("Hello", method=name, max_new_tokens=8)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    found = {name: {"tokens": 0, "valid": 0, "cut": 0, "same": 0} for name in names}
    lengths: dict[str, list[float]] = {name: [] for name in names}
    for at, (schema, text) in enumerate(CASES):
        grammar = json_schema(
            llm.tokenizer, schema, vocab_size=info.vocab_size, eos_ids=info.eos_ids
        )
        ids = llm.tokenize(f"{text}\nWrite this as JSON.")
        times: dict[str, list[float]] = {name: [] for name in names}
        answers: dict[str, Any] = {}
        for repeat in range(options.repeats):
            for step in range(len(names)):
                name = names[(at + repeat + step) % len(names)]
                result = llm.generate(
                    ids,
                    method=name,
                    processors=[grammar],
                    max_new_tokens=options.max_new_tokens,
                )
                times[name].append(result.metrics.decode_s)
                answers[name] = result
        for name in names:
            result, mine = answers[name], found[name]
            seconds[name].append(statistics.median(times[name]))
            lengths[name].append(result.metrics.mean_accepted_length)
            mine["tokens"] += result.metrics.pass_tokens
            mine["cut"] += result.finish_reason == "length"
            mine["valid"] += fits(schema, result.text)
            mine["same"] += result.tokens == answers[names[0]].tokens
    print(f"{info.name}, {info.precision}, {info.kernels} kernels; {len(CASES)} prompts\n")
    print("| method | tokens/s | speedup | length | valid | cut by length | same ids |")
    print("|---|---|---|---|---|---|---|")
    plain = found[names[0]]["tokens"] / sum(seconds[names[0]])
    for name in names:
        mine = found[name]
        speed = mine["tokens"] / sum(seconds[name])
        print(
            f"| `{name}` | {speed:.1f} | {speed / plain:.2f}x | "
            f"{statistics.mean(lengths[name]):.2f} | {mine['valid']}/{len(CASES)} | "
            f"{mine['cut']} | {mine['same']}/{len(CASES)} |"
        )


if __name__ == "__main__":
    main()

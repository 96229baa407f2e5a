"""Prompt suites: the package's own by name, anybody's from a JSON Lines file.

A file's rows have ``turns`` (a list of user messages) or ``question`` (one message), and optionally
``category`` (the group) and ``question_id`` or ``task_id``; other keys are ignored. That covers
Spec-Bench, MT-bench and GSM8K in their published forms.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hasten.bench.output import OVERALL
from hasten.errors import OptionError

SUITES: dict[str, str] = {
    "mini": "48 prompts in six groups (multi_turn, translation, summarization, qa, math, rag)",
    "mixed": "the prompts of mini, the kind of work changing every three requests",
    "editing": "40 prompts in four groups (rewrite_code, proofread, fill_template, convert)",
    "agent": "40 prompts in four groups (extract_json, continue_log, multi_turn, tool_calls)",
    "adversarial": "24 prompts that mislead drafts (random_ids, no_repeats, decoys)",
}
"""Suites by name, with a sentence for ``--help``."""

_FILES = {"mini": "mini", "mixed": "mini", "editing": "editing", "agent": "agent"}
"""The suites that are shipped as a file, and its name without ``.jsonl``."""

MULTI_TURN = "multi_turn"
_MT_BENCH = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)
"""MT-bench's categories in the order of their question ids: ten each, from 81 on."""
_MIXED_RUN = 3


@dataclass(frozen=True, slots=True)
class SuiteRow:
    """One row: user messages in `turns`, at least one.

    `random_tokens` ids of noise come before the first, of `random_kinds` different ids (0: of the
    whole vocabulary), see `adversarial.random_ids` and `session.first_ids`.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    random_tokens: int = 0
    random_kinds: int = 0


@dataclass(frozen=True, slots=True)
class Suite:
    """Rows in the order they are measured; `sha256` is that of their file, "" without one."""

    name: str
    rows: tuple[SuiteRow, ...]
    sha256: str = ""

    @property
    def categories(self) -> tuple[str, ...]:
        """The groups, in order of appearance."""
        return tuple(dict.fromkeys(row.category for row in self.rows))


def load_suite(name: str | Path, limit: int | None = None) -> Suite:
    """The suite called `name`, or the rows of that file; with `limit`, see `spread`.

    The same name and limit give the same rows each time. Raises OptionError for an unknown suite
    and for a malformed file, naming the line.
    """
    text = str(name)
    if text == "adversarial":
        from hasten.bench.adversarial import adversarial_rows

        return Suite(text, tuple(spread(adversarial_rows(), limit)))
    if text in _FILES:
        raw = (files("hasten.bench") / "suites" / f"{_FILES[text]}.jsonl").read_bytes()
        rows = spread(parse_rows(raw, text), limit)
        if text == "mixed":
            rows = mix(rows)
        return Suite(text, tuple(rows), hashlib.sha256(raw).hexdigest())
    raw = _read(text)
    return Suite(text, tuple(spread(parse_rows(raw, text), limit)), hashlib.sha256(raw).hexdigest())


def _read(name: str) -> bytes:
    path = Path(name).expanduser()
    known = f"Known: {', '.join(SUITES)}; or give the path of a JSON Lines file"
    try:
        if path.is_dir():
            raise OptionError("suite", f"{name} is a folder", known)
        return path.read_bytes()
    except (FileNotFoundError, ValueError):
        raise OptionError("suite", f"no such suite or file: {name!r}", known) from None
    except OSError as error:
        raise OptionError("suite", f"can't read {name}: {error.strerror or error}") from error


# -- rows of a file --------------------------------------------------------------------------------


def parse_rows(raw: bytes, name: str) -> list[SuiteRow]:
    """Rows of a JSON Lines file called `name`; blank lines are skipped.

    Raises OptionError with the line's number for the first bad row, and when there is none at all.
    """
    rows: list[SuiteRow] = []
    numbers: list[Any] = []
    for at, line in enumerate(raw.split(b"\n"), 1):
        if line.strip():
            row, number = _parse_row(line, at, name)
            rows.append(row)
            numbers.append(number)
    if not rows:
        raise OptionError("suite", f"{name} holds no rows")
    return _group_mt_bench(rows, numbers)


def _parse_row(line: bytes, at: int, name: str) -> tuple[SuiteRow, Any]:
    """A row and its question id as it stands in the file."""

    def bad(problem: str) -> OptionError:
        hint = 'A row is a JSON object with "turns" (a list of texts) or "question" (a text)'
        return OptionError("suite", f"{name}, line {at}: {problem}", hint)

    try:
        made = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise bad("is not UTF-8") from None
    except ValueError as error:
        raise bad(f"is not JSON ({error})") from None
    if not isinstance(made, dict):
        raise bad(f"is a {type(made).__name__}, not an object")
    if "turns" not in made and "question" not in made:
        raise bad("has neither turns nor question")
    turns = made["turns"] if "turns" in made else [made["question"]]
    if not isinstance(turns, list) or not turns:
        raise bad("turns must be a list of at least one text")
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise bad("every turn, or the question, must be a text that isn't empty")
    if any("\ud800" <= char <= "\udfff" for turn in turns for char in turn):
        raise bad("holds half of a surrogate pair, which is no text")
    category = made.get("category", _default_category(name))
    if not isinstance(category, str) or not category or category == OVERALL:
        raise bad(f"category must be a text other than {OVERALL!r}, got {category!r}")
    number = made.get("question_id", made.get("task_id"))
    return SuiteRow(str(at if number is None else number), category, tuple(turns)), number


def _default_category(name: str) -> str:
    """The group of rows that name none: the file's name without its suffix."""
    stem = Path(name).stem
    return stem if stem and stem != OVERALL else "all"


def _group_mt_bench(rows: list[SuiteRow], numbers: list[Any]) -> list[SuiteRow]:
    """Put MT-bench's eight categories into one group.

    Other sets use the same words ("coding", "reasoning"), so a category counts as MT-bench's only
    when each of its rows has MT-bench's mark: follow-up turns, or the right question id.
    """
    others: set[str] = set()
    for row, number in zip(rows, numbers, strict=True):
        if row.category not in _MT_BENCH:
            continue
        first = 81 + 10 * _MT_BENCH.index(row.category)
        marked = len(row.turns) > 1 or (isinstance(number, int) and first <= number < first + 10)
        if not marked:
            others.add(row.category)
    return [
        SuiteRow(row.id, MULTI_TURN, row.turns)
        if row.category in _MT_BENCH and row.category not in others
        else row
        for row in rows
    ]


# -- choice and order ------------------------------------------------------------------------------


def spread(rows: Iterable[SuiteRow], limit: int | None) -> list[SuiteRow]:
    """`limit` rows in the suite's order, as many of each group as of the others.

    The first groups get what doesn't divide, a small group leaves its share to the others; within a
    group the rows are taken at even distances. None: all rows.
    """
    everything = list(rows)
    if limit is None or limit >= len(everything):
        return everything
    groups: dict[str, list[int]] = {}
    for at, row in enumerate(everything):
        groups.setdefault(row.category, []).append(at)
    share = dict.fromkeys(groups, 0)
    left = limit
    while left:
        for group in groups:
            if left and share[group] < len(groups[group]):
                share[group] += 1
                left -= 1
    taken = [
        places[i * len(places) // share[group]]
        for group, places in groups.items()
        for i in range(share[group])
    ]
    return [everything[at] for at in sorted(taken)]


def mix(rows: Iterable[SuiteRow]) -> list[SuiteRow]:
    """The same rows, taken from the groups in turn, three of each at a time."""
    groups: dict[str, list[SuiteRow]] = {}
    for row in rows:
        groups.setdefault(row.category, []).append(row)
    runs = [[g[i : i + _MIXED_RUN] for i in range(0, len(g), _MIXED_RUN)] for g in groups.values()]
    return [row for turn in zip_longest(*runs, fillvalue=[]) for run in turn for row in run]

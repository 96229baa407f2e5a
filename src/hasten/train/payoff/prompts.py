"""Prompts whose answers repeat much of them: edits, templates, extraction, logs, second turns.

Ordinary training prompts seldom make a model copy for long, and a payoff predictor has to see when
it does. The texts come from the files of installed packages, the requests around them are hasten's
own words; nothing of the suites that results are measured on is in them.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from email import message_from_string
from itertools import zip_longest
from pathlib import Path

from hasten.train.sources import package_root

KINDS = ("rewrite", "template", "extract", "log", "second-turn")
DOMAINS = {"rewrite": "code", "second-turn": "code"}
"""Of rows (`hasten.train.rows`); the other kinds are ``chat``."""

_SUFFIXES = (".py", ".toml", ".cfg", ".ini", ".json", ".yaml", ".yml", ".css", ".js")
_MOST_BYTES = 200_000
_LEAST_LINES, _MOST_LINES, _MOST_CHARS = 8, 26, 1100

_REWRITE_WAYS = (
    "Below is part of the file {name}. {change} Give me the text with that change and nothing "
    "else.\n\n```\n{text}\n```",
    "{change} Apart from that it has to stay exactly as it is. Print the result in full.\n\n"
    "```\n{text}\n```",
    "```\n{text}\n```\n\nI need one edit in the code above ({name}): {change} Show the edited "
    "version, complete.",
)
_SECOND_WAYS = (
    "Good. One more edit: {change} Print everything again.",
    "Now do this as well: {change} Show the whole thing once more.",
    "{change} Repeat the complete text with this edit too.",
)
_TEMPLATE_WAYS = (
    "Fill in this form for the package described below. Keep its lines.\n\n{form}\n\n{facts}",
    "Use the facts to complete the template, leaving its wording alone.\n\nFacts:\n{facts}\n\n"
    "Template:\n{form}",
)
_EXTRACT_WAYS = (
    "Turn each line into a JSON object with the keys name, version and summary, one object a "
    "line.\n\n{lines}",
    "Make a JSON list out of these packages. Every element needs name, version, summary.\n\n"
    "{lines}",
)
_LOG_WAYS = (
    "A copy job writes the log below. Write its next eight lines in the same format; the files "
    "still to come are {rest}.\n\n{log}",
    "Continue this log, one line for each of these files: {rest}.\n\n{log}",
)
_FORM = (
    "Package sheet\n-------------\nName of the package: [NAME]\nRelease in use: [VERSION]\n"
    "Purpose: [SUMMARY]\n\nThe package [NAME] is installed in release [VERSION]. Questions about "
    "[NAME] go to the maintainers of [NAME]. Before [NAME] is replaced by a newer release than "
    "[VERSION], tell everybody who depends on [NAME]."
)
_NEW_NAMES = ("entry", "payload", "current", "item_ref", "holder", "record", "subject")


@dataclass(frozen=True, slots=True)
class Task:
    """A conversation to be answered: user turns, at least one; `kind` is one of `KINDS`."""

    kind: str
    source: str
    turns: tuple[str, ...]


def tasks(seed: int, root: Path | None = None) -> Iterator[Task]:
    """Tasks of all kinds in turn, the same for a seed and the same files, until no kind has more.
    `root` is searched instead of the installed packages."""
    root = package_root() if root is None else root
    makers: dict[str, Callable[[Path, random.Random], Iterator[Task]]] = {
        "rewrite": _rewrites,
        "template": _templates,
        "extract": _extracts,
        "log": _logs,
        "second-turn": _second_turns,
    }
    streams = [makers[kind](root, random.Random(f"{kind}-{seed}")) for kind in KINDS]
    for together in zip_longest(*streams):
        yield from (task for task in together if task is not None)


# -- files -----------------------------------------------------------------------------------------


def _files(root: Path, rng: random.Random, suffixes: Iterable[str]) -> list[Path]:
    """Files under `root` with one of these suffixes, shuffled; hasten's own are left out."""
    wanted = frozenset(suffixes)
    found = [
        path
        for path in sorted(root.rglob("*"))
        if path.suffix in wanted and not path.relative_to(root).parts[0].startswith("hasten")
    ]
    rng.shuffle(found)
    return found


def _text(path: Path) -> str:
    """A file's text; empty when it can't be read or is huge."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return ""
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _pieces(root: Path, rng: random.Random) -> Iterator[tuple[Path, str]]:
    """A passage of some lines of each file that has one, no passage twice."""
    seen: set[str] = set()
    for path in _files(root, rng, _SUFFIXES):
        lines = [line.rstrip() for line in _text(path).split("\n")]
        starts = [n for n, line in enumerate(lines) if line and not line[0].isspace()]
        if not starts:
            continue
        first = rng.choice(starts)
        piece = "\n".join(lines[first : first + rng.randint(_LEAST_LINES, _MOST_LINES)]).strip()
        fits = piece.count("\n") >= _LEAST_LINES - 2 and len(piece) <= _MOST_CHARS
        if fits and "```" not in piece and piece not in seen:
            seen.add(piece)
            yield path, piece


# -- one change ------------------------------------------------------------------------------------


def _change(text: str, rng: random.Random) -> str | None:
    """A small edit of this text, as a request; None where none of those known fits."""
    makers = [_rename, _renumber, _drop_line, _add_line]
    rng.shuffle(makers)
    return next((said for make in makers if (said := make(text, rng))), None)


def _rename(text: str, rng: random.Random) -> str | None:
    words = re.findall(r"\b[a-z][a-z_]{3,14}\b", text)
    often = sorted({word for word in words if 2 <= words.count(word) <= 6})
    if not often:
        return None
    return f"Call `{rng.choice(often)}` `{rng.choice(_NEW_NAMES)}` instead, wherever it occurs."


def _renumber(text: str, rng: random.Random) -> str | None:
    numbers = sorted({n for n in re.findall(r"\b\d{1,4}\b", text) if text.count(n) == 1})
    if not numbers:
        return None
    return f"The number {rng.choice(numbers)} must become {rng.randint(2, 9999)}."


def _lines_of_their_own(text: str) -> list[str]:
    lines = [line.strip() for line in text.split("\n")]
    return [line for line in lines if 8 <= len(line) <= 60 and lines.count(line) == 1]


def _drop_line(text: str, rng: random.Random) -> str | None:
    lines = _lines_of_their_own(text)
    return f"Leave out the line `{rng.choice(lines)}`." if lines else None


def _add_line(text: str, rng: random.Random) -> str | None:
    lines = _lines_of_their_own(text)
    if not lines:
        return None
    return f"Before the line `{rng.choice(lines)}` there has to be a comment that says: revised."


# -- the kinds -------------------------------------------------------------------------------------


def _rewrites(root: Path, rng: random.Random) -> Iterator[Task]:
    for path, piece in _pieces(root, rng):
        if change := _change(piece, rng):
            asked = rng.choice(_REWRITE_WAYS).format(name=path.name, change=change, text=piece)
            yield Task("rewrite", path.relative_to(root).parts[0], (asked,))


def _second_turns(root: Path, rng: random.Random) -> Iterator[Task]:
    for path, piece in _pieces(root, rng):
        first, second = _change(piece, rng), _change(piece, rng)
        if first and second and first != second:
            asked = rng.choice(_REWRITE_WAYS).format(name=path.name, change=first, text=piece)
            again = rng.choice(_SECOND_WAYS).format(change=second)
            yield Task("second-turn", path.relative_to(root).parts[0], (asked, again))


def _described(root: Path, rng: random.Random) -> list[dict[str, str]]:
    """Name, version and summary of the packages under `root`, shuffled."""
    found = []
    for path in sorted(root.rglob("METADATA")):
        told = message_from_string(_text(path))
        facts = {key: str(told[key] or "") for key in ("Name", "Version", "Summary")}
        if all(facts.values()) and "\n" not in facts["Summary"]:
            found.append({key.lower(): value[:120] for key, value in facts.items()})
    rng.shuffle(found)
    return [each for each in found if not each["name"].startswith("hasten")]


def _templates(root: Path, rng: random.Random) -> Iterator[Task]:
    for facts in _described(root, rng):
        told = "\n".join(f"{key}: {value}" for key, value in facts.items())
        asked = rng.choice(_TEMPLATE_WAYS).format(form=_FORM, facts=told)
        yield Task("template", facts["name"], (asked,))


def _extracts(root: Path, rng: random.Random) -> Iterator[Task]:
    """Groups of packages, as many as there are packages; a package is in several."""
    known = _described(root, rng)
    for _ in known if len(known) >= 3 else ():
        some = rng.sample(known, min(rng.randint(3, 6), len(known)))
        lines = [f"{p['name']} {p['version']} - {p['summary']}" for p in some]
        asked = rng.choice(_EXTRACT_WAYS).format(lines="\n".join(lines))
        yield Task("extract", some[0]["name"], (asked,))


def _logs(root: Path, rng: random.Random) -> Iterator[Task]:
    """A log of files being copied, in a format of its own each time."""
    paths = _files(root, rng, _SUFFIXES)
    formats = (
        "{time} INFO copy: {path} -> /backup/{path} ({size} bytes) ok",
        "[{time}] worker-1 copied file={path} bytes={size} status=done",
        '{{"time": "{time}", "event": "copied", "file": {quoted}, "bytes": {size}}}',
    )
    for at in range(0, len(paths) - 16, 16):
        form, clock, lines = rng.choice(formats), rng.randint(0, 80_000), []
        names = ["/".join(path.relative_to(root).parts[-2:]) for path in paths[at : at + 16]]
        for name in names[:8]:
            clock += rng.randint(1, 40)
            time = f"{clock // 3600:02}:{clock // 60 % 60:02}:{clock % 60:02}"
            size, quoted = rng.randint(90, 99_999), json.dumps(name)
            lines.append(form.format(time=time, path=name, size=size, quoted=quoted))
        asked = rng.choice(_LOG_WAYS).format(log="\n".join(lines), rest=", ".join(names[8:]))
        yield Task("log", names[0], (asked,))

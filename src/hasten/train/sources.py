"""Prompts to make training text from, in five domains.

math           rows with a ``question`` (GSM8K's training file)
chat           rows with ``turns``; and user turns sampled from the model itself (`SELF`)
code           functions with docstrings of installed packages
summarisation  long docstrings and documentation files of installed packages
translation    message catalogues (``*.mo``) of installed packages

Nothing of them is kept in the project: a source is read where it is installed. A file that can't be
read is passed over. What two files share (a vendored module, a licence) is taken once, so that a
split of the prompts is one of the texts too. The requests around the texts are hasten's own words,
none of them a measuring set's.
"""

from __future__ import annotations

import ast
import gettext
import hashlib
import json
import random
import re
import struct
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hasten.errors import OptionError

SELF = "self"
"""User turns sampled from the model: made by `hasten.train.data`, not read from anywhere."""

MEASURING = ("spec_bench", "human_eval", "gsm8k_test", "mgsm", "math_dev", "mt_bench")
"""Names of public sets that results are measured on: refused as a source of training prompts."""

_LANGUAGES = {
    "de": "German",
    "fr": "French",
    "es": "Spanish",
    "it": "Italian",
    "nl": "Dutch",
    "pt": "Portuguese",
    "pt_BR": "Portuguese",
    "sv": "Swedish",
    "da": "Danish",
    "pl": "Polish",
    "cs": "Czech",
    "ro": "Romanian",
    "ru": "Russian",
    "uk": "Ukrainian",
    "tr": "Turkish",
    "zh_CN": "Chinese",
    "ja": "Japanese",
}
_CODE_WAYS = (
    "Finish this function.\n\n{head}",
    "Here is the beginning of a Python function. Write the rest of it.\n\n{head}",
    "Explain what this Python function does.\n\n```python\n{text}\n```",
    "What could go wrong when this is called?\n\n```python\n{text}\n```",
    "Write a docstring and comments for this function:\n\n```python\n{text}\n```",
    "I need a Python function named `{name}`. {first}",
    "Write unit tests for this function:\n\n```python\n{text}\n```",
    "Rewrite this function so that it is easier to read.\n\n```python\n{text}\n```",
)
_SUMMARY_WAYS = (
    "Give me a short summary of this text.\n\n{text}",
    "Sum up the following in three sentences.\n\n{text}",
    "{text}\n\nWhat are the main points of the text above?",
    "Read this and list what matters most.\n\n{text}",
    "Explain this to a beginner in a few sentences:\n\n{text}",
    "Here is a piece of documentation.\n\n{text}\n\nWhat does it say about {topic}?",
    "Shorten this to a single paragraph: {text}",
)
_TRANSLATION_WAYS = (
    ("Please translate this from {language} into English: {text}", 4),
    ("Give the English translation of this {language} text.\n\n{text}", 3),
    ("What does this {language} sentence mean in English? {text}", 2),
    ("{text}\n\nPut this into English.", 1),
    ("How would you say this in {language}? {english}", 2),
)
_MOST_BYTES = 400_000
_LEAST_WORDS, _MOST_WORDS = 60, 320
_SAME_EVERYWHERE = re.compile(r"licen[cs]e|copying|notice|authors", re.IGNORECASE)
"""Files that say much the same in every package."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message. `domain` is one of `DOMAINS`, `source` says where it is from."""

    domain: str
    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Source:
    """Where prompts of a domain come from: a file of rows, a folder to search, what is installed
    (path None), or the model itself (`own`)."""

    domain: str
    path: Path | None = None
    own: bool = False

    def __str__(self) -> str:
        """As it is typed."""
        where = SELF if self.own else self.path
        return self.domain if where is None else f"{self.domain}={where}"


DEFAULT = ("chat=self", "code", "summarisation", "translation")
"""The sources that need no file."""


def parse(text: str) -> Source:
    """``"DOMAIN"``, ``"DOMAIN=PATH"`` or ``"chat=self"`` as a source. Raises OptionError for an
    unknown domain, a path that isn't there or can't be of use, and a measuring set."""
    domain, given, where = text.partition("=")
    domain, where = domain.strip(), where.strip()
    if domain not in DOMAINS:
        raise OptionError("source", f"no such domain: {domain!r}", f"Domains: {', '.join(DOMAINS)}")
    if domain == "chat" and where == SELF:
        return Source(domain, own=True)
    if not where:
        if given or DOMAINS[domain] is None:
            more = f" or {domain}=self" if domain == "chat" else ""
            raise OptionError("source", f"{domain} needs a file", f"Give {domain}=PATH{more}")
        return Source(domain)
    path = Path(where).expanduser()
    refuse_measuring(path)
    if not path.exists():
        raise OptionError("source", f"{domain}: there is no {path}")
    if path.is_dir() and DOMAINS[domain] is None:
        raise OptionError("source", f"{domain} needs a file, and {path} is a folder")
    return Source(domain, path)


def prompts(source: Source, seed: int) -> Iterator[Prompt]:
    """All prompts of a source, the same in the same order for a seed; a file's rows shuffled.

    A file is read at once, and OptionError raised when it can't be; folders are searched at the
    first `next`. What the model samples itself isn't here: OptionError.
    """
    if source.own:
        raise OptionError("source", f"{source} has no prompts of its own: the model makes them")
    if source.path is not None and source.path.is_file():
        rows = list(read_rows(source.path, source.domain))
        random.Random(f"{source.domain}-{seed}").shuffle(rows)
        return iter(rows)
    roots = _installed(source.domain) if source.path is None else [source.path]
    reader = DOMAINS[source.domain]
    assert reader is not None, "parse lets only these pass"
    return reader(roots, seed)


def refuse_measuring(path: Path) -> None:
    """Raise OptionError when a file, or its folder, has the name of a `MEASURING` set."""
    for name in (path.stem, path.absolute().parent.name):
        plain = re.sub(r"[^a-z0-9]", "", name.lower())
        if any(measured.replace("_", "") in plain for measured in MEASURING):
            raise OptionError(
                "source",
                f"{path} looks like a set that results are measured on",
                "Name a training set",
            )


def read_rows(path: str | Path, domain: str) -> Iterator[Prompt]:
    """Prompts of a JSON-lines file: rows with ``turns`` (the first) or ``question``.

    Raises OptionError for a file that can't be read, and for a `MEASURING` set.
    """
    path = Path(path)
    refuse_measuring(path)
    hint = "It must hold JSON lines with 'turns' or 'question'"
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError("source", f"can't read prompts from {path}: {error}", hint) from None
    found = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row["turns"][0] if "turns" in row else row["question"]
            text.encode("utf-8")  # half a surrogate pair is no text
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            problem = f"{path}, line {number} is no prompt ({type(error).__name__}: {error})"
            raise OptionError("source", problem, hint) from None
        if text.strip():
            found += 1
            yield Prompt(domain, path.stem, text)
    if not found:
        raise OptionError("source", f"{path} holds no prompts", hint)


def package_root() -> Path:
    """Where this environment's packages are installed."""
    return Path(sysconfig.get_paths()["purelib"])


def _installed(domain: str) -> list[Path]:
    """Where `domain` is read from when no folder is named."""
    roots = [package_root()]
    if domain == "translation":
        roots += [Path(prefix) / "share" / "locale" for prefix in (sys.base_prefix, "/usr")]
    return list(dict.fromkeys(root for root in roots if root.is_dir()))


# -- the domains that are searched for in folders --------------------------------------------------


def code_prompts(root: Path | Iterable[Path], seed: int) -> Iterator[Prompt]:
    """Questions about functions with docstrings in Python files under `root`."""
    rng = random.Random(f"code-{seed}")
    files = _shuffled(root, ("*.py",), rng)
    for package, _, found in _in_turns(files, _functions, 3, rng):
        yield Prompt("code", package, rng.choice(_CODE_WAYS).format_map(found))


def summary_prompts(root: Path | Iterable[Path], seed: int) -> Iterator[Prompt]:
    """Requests to summarise docstrings and passages of documentation files under `root`."""
    rng = random.Random(f"summarisation-{seed}")
    files = _shuffled(root, ("*.py", "METADATA", "*.md", "*.rst", "*.txt"), rng)
    for package, path, found in _in_turns(files, _passages, 1, rng):
        topic = path.stem if path.name != "METADATA" else path.parent.name.split("-")[0]
        text = rng.choice(_SUMMARY_WAYS).format(topic=topic, **found)
        yield Prompt("summarisation", package, text)


def translation_prompts(roots: Path | Iterable[Path], seed: int) -> Iterator[Prompt]:
    """Requests to translate messages of the catalogues under `roots`."""
    rng = random.Random(f"translation-{seed}")
    ways = [way for way, _ in _TRANSLATION_WAYS]
    weights = [weight for _, weight in _TRANSLATION_WAYS]
    files = _shuffled(roots, ("*.mo",), rng)
    for _, path, found in _in_turns(files, _messages, 4, rng):
        text = rng.choices(ways, weights)[0].format_map(found)
        yield Prompt("translation", path.stem, text)


DOMAINS: dict[str, Callable[[Path | Iterable[Path], int], Iterator[Prompt]] | None] = {
    "math": None,
    "chat": None,
    "code": code_prompts,
    "summarisation": summary_prompts,
    "translation": translation_prompts,
}
"""The domains, and what finds their prompts in folders; None where only a file of rows will do."""


def _in_turns(
    files: list[tuple[Path, Path]],
    read: Callable[[Path], list[dict[str, str]]],
    take: int,
    rng: random.Random,
) -> Iterator[tuple[str, Path, dict[str, str]]]:
    """What `read` finds in each file, `take` pieces of it; then the next of each, until all is
    given: ``(package, path, piece)``. A piece whose ``text`` was given before is left out."""
    seen: set[bytes] = set()
    salt, start = rng.random(), 0
    while files:
        unfinished = []
        for top, path in files:
            within = path.relative_to(top)
            pieces = read(path)
            random.Random(f"{salt}-{within.as_posix()}").shuffle(pieces)
            for piece in pieces[start : start + take]:
                digest = hashlib.blake2b(piece["text"].encode(), digest_size=12).digest()
                if digest not in seen:
                    seen.add(digest)
                    yield within.parts[0], path, piece
            if len(pieces) > start + take:
                unfinished.append((top, path))
        files, start = unfinished, start + take


def _shuffled(
    roots: Path | Iterable[Path], kinds: Iterable[str], rng: random.Random
) -> list[tuple[Path, Path]]:
    """Files under `roots` that match, each after its root, shuffled; hasten's own are left out."""
    found = {
        path: root
        for root in ([roots] if isinstance(roots, Path) else roots)
        for kind in kinds
        for path in root.rglob(kind)
        if path.relative_to(root).parts[0].split("-")[0] != "hasten"
    }
    made = [(found[path], path) for path in sorted(found)]
    rng.shuffle(made)
    return made


# -- what is in a file -----------------------------------------------------------------------------


def _read(path: Path) -> str:
    """A file of text; empty when it can't be read or is huge."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return ""
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError):
        return ""


def _documented(source: str) -> list[ast.Module | ast.FunctionDef | ast.ClassDef]:
    """The module and what it and its classes define, where it can be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # others' escape sequences are no concern of the user's
            tree = ast.parse(source)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    outer = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    inner = [child for node in outer if isinstance(node, ast.ClassDef) for child in node.body]
    return [tree, *outer, *(child for child in inner if isinstance(child, ast.FunctionDef))]


def _functions(path: Path) -> list[dict[str, str]]:
    """Public functions: name, head (signature and docstring), text, the docstring's first line."""
    source = _read(path)
    lines, found = source.split("\n"), []
    for node in _documented(source):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith(("_", "test")):
            continue
        doc, end = ast.get_docstring(node), node.end_lineno or node.lineno
        if not doc or not 4 <= end - node.lineno <= 30 or not 40 <= len(doc) <= 700:
            continue
        text = textwrap.dedent("\n".join(lines[node.lineno - 1 : end]))
        head_lines = (node.body[0].end_lineno or node.lineno) - node.lineno + 1
        head = "\n".join(text.split("\n")[:head_lines])
        if len(text) < 1600:
            first = re.split(r"(?<=\.)\s", doc.replace("\n", " "))[0]
            found.append({"name": node.name, "head": head, "text": text, "first": first})
    return found


def _passages(path: Path) -> list[dict[str, str]]:
    """Passages of 60 to 320 words of running text, none overlapping another.

    In a Python file they are docstrings, each by itself.
    """
    if _SAME_EVERYWHERE.match(path.name):
        return []
    text = _read(path)
    whole = [text]
    if path.suffix == ".py":
        whole = [ast.get_docstring(node) or "" for node in _documented(text)]
    found = []
    for part in whole:
        rng = random.Random(part)  # a copy in another file is cut alike, so it is seen to be one
        paragraphs = [" ".join(each.split()) for each in re.split(r"\n\s*\n", part)]
        prose = [p for p in paragraphs if p.count(" ") > max(11, len(p) / 12)]
        words = [word for p in prose for word in (*p.split(), "\n")]
        while len(words) > _LEAST_WORDS:
            count = rng.randint(_LEAST_WORDS, _MOST_WORDS)
            piece, words = words[:count], words[count:]
            found.append({"text": " ".join(piece).replace(" \n ", "\n").strip()})
    return found


def _messages(path: Path) -> list[dict[str, str]]:
    """English and translated messages of 40 to 400 characters."""
    language = next((_LANGUAGES[part] for part in path.parts if part in _LANGUAGES), None)
    if language is None:
        return []
    try:
        with path.open("rb") as file:
            catalogue = getattr(gettext.GNUTranslations(file), "_catalog", {})
    except (OSError, ValueError, LookupError, EOFError, struct.error, RecursionError):
        return []
    return [
        {"language": language, "english": english, "text": foreign}
        for english, foreign in catalogue.items()
        if isinstance(english, str) and 40 <= len(english) <= 400 and foreign not in ("", english)
    ]

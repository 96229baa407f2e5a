"""Training text on disk: a folder with ``meta.json`` and ``rows.jsonl``, one answer a line.

A row's split is a function of its prompt's ids, so it never changes, and a prompt that was answered
twice is in one split. `read` also takes a single file of rows, ``.jsonl`` or ``.jsonl.gz``; where
its rows name no domain, it is told from the source.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from hasten.errors import OptionError
from hasten.train.sources import DOMAINS

SPLITS = ("modules", "policy", "test")
"""Train draft modules on the first, policies on the second, and report on the third."""
ROWS, META = "rows.jsonl", "meta.json"
SCHEMA = 1
"""Counted up when a reader of the last layout couldn't read the next."""

_LONGEST_LINE = 1 << 24


@dataclass(frozen=True, slots=True)
class Row:
    """One answer: ids of the prompt as the model saw it, and of the answer, its end included."""

    domain: str
    source: str
    split: str
    temperature: float
    prompt: Sequence[int]
    output: Sequence[int]


def split_of(prompt: Sequence[int]) -> str:
    """The split of a prompt of ids: 80% modules, 10% policy, 10% test, by a checksum."""
    tenth = zlib.crc32(repr(list(prompt)).encode()) % 10
    return SPLITS[max(tenth - 7, 0)]


def read(
    path: str | Path, *, split: str | None = None, domains: Collection[str] | None = None
) -> Iterator[Row]:
    """The rows of a folder or a file, in their order: of one split, of some domains, or all.

    A last line that a writer has not finished is left out. Raises OptionError for an unknown split
    or domain, at once, and for what can't be read.
    """
    if split is not None and split not in SPLITS:
        raise OptionError("split", f"no such split: {split!r}", f"Splits: {', '.join(SPLITS)}")
    for domain in domains or ():
        if domain not in DOMAINS:
            hint = f"Domains: {', '.join(DOMAINS)}"
            raise OptionError("domains", f"no such domain: {domain!r}", hint)
    path = Path(path).expanduser()
    if path.is_dir():
        read_meta(path)
        path = path / ROWS
    if not path.is_file():
        raise OptionError("data", f"there is no {path}", "Make it with `hasten train data`")
    return (
        row
        for row in _rows(path)
        if split in (None, row.split) and (domains is None or row.domain in domains)
    )


def _rows(path: Path) -> Iterator[Row]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    number, line = 0, b"\n"
    try:
        with opener(path, "rb") as file:
            for line in file:
                number += 1
                yield _row(json.loads(line))
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
        if isinstance(error, ValueError) and not line.endswith(b"\n"):
            return  # the last line, half written
        where = f"{path}, line {number}" if number else str(path)
        problem = f"can't read {where} ({type(error).__name__}: {error})"
        raise OptionError("data", problem, "It must hold rows of `hasten train data`") from None


def _row(made: Mapping[str, Any]) -> Row:
    source, prompt, output = str(made["source"]), made["prompt"], made["output"]
    if not (prompt and output and all(type(token) is int for token in (*prompt, *output))):
        raise ValueError("prompt and output must be lists of ids")
    domain = made.get("domain") or ("math" if source.startswith("gsm8k") else "chat")
    split = made.get("split") or split_of(prompt)
    if domain not in DOMAINS or split not in SPLITS:
        raise ValueError(f"domain {domain!r} or split {split!r} isn't known")
    return Row(domain, source, split, float(made["temperature"]), prompt, output)


def read_meta(folder: Path) -> dict[str, Any]:
    """What ``meta.json`` says. Raises OptionError when there is none, or of another schema."""
    try:
        made = json.loads((folder / META).read_text(encoding="utf-8"))
        schema = made["schema"]
        assert isinstance(made["runs"], list)
    except (OSError, ValueError, LookupError, TypeError, AssertionError):
        hint = "Name a folder that `hasten train data` made"
        raise OptionError("data", f"{folder} has no readable {META}", hint) from None
    if schema != SCHEMA:
        hint = "Use the version of hasten that made it"
        raise OptionError("data", f"{folder} has schema {schema}, this is {SCHEMA}", hint)
    return dict(made)


class Known:
    """Prompts met so far, by digest."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def add(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt is a new one."""
        digest = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=12).digest()
        before = len(self._digests)
        self._digests.add(digest)
        return len(self._digests) > before


class Store:
    """A folder that rows are added to, by one process at a time; use it in a ``with``.

    identity  ``model``, ``fingerprint`` and ``dtype`` of the rows to come
    known     gets the prompts that are there

    Opening mends what a killed writer left. `tokens` and `rows` count what is there, by domain.
    Raises OptionError when the folder can't be used, is in use, or has rows of another model.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], known: Known) -> None:
        self.folder, self._identity, self._known = folder, {"schema": SCHEMA, **identity}, known
        self.tokens: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(folder / ".lock")
            self._lock.acquire(timeout=0)
        except Timeout:
            raise OptionError("out", f"another process is writing to {folder}") from None
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self._meta = self._open_meta()
            self._file = self._open_rows(folder / ROWS)
        except OSError as error:
            self._lock.release()
            raise self._unwritable(error) from error
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._lock.release()

    def _unwritable(self, error: OSError) -> OptionError:
        return OptionError("out", f"can't write to {self.folder} ({error.strerror or error})")

    def _open_meta(self) -> dict[str, Any]:
        """The folder's facts, or new ones for an empty folder."""
        rows = self.folder / ROWS
        if not (self.folder / META).exists():
            if rows.exists() and rows.stat().st_size:
                problem = f"{self.folder} has rows, and no {META} to say of which model"
                raise OptionError("out", problem, "Name another folder")
            return {**self._identity, "runs": []}
        made = read_meta(self.folder)
        # Names may change with a folder's place; they count where nothing better is known.
        model = "fingerprint" if self._identity["fingerprint"] else "model"
        for name in (model, "dtype"):
            if made.get(name) != self._identity[name]:
                found, wanted = made.get(name), self._identity[name]
                raise OptionError(
                    "out",
                    f"{self.folder} has rows of {made.get('model')}, {name} {found!r}; this is "
                    f"{self._identity['model']}, {name} {wanted!r}",
                    "Name another folder",
                )
        return made

    def _open_rows(self, path: Path) -> IO[bytes]:
        if path.exists():
            _mend(path)
            for row in _rows(path):
                self._count(row)
        return path.open("ab")

    def _count(self, row: Row) -> None:
        self.tokens[row.domain] += len(row.output)
        self.rows[row.domain] += 1
        self._known.add(row.prompt)

    def begin(self, run: Mapping[str, Any]) -> None:
        """Note a run (its options and seed) in ``meta.json``, with the rows there before it."""
        self._meta["runs"].append({**run, "rows_before": self.rows.total()})
        draft = self.folder / f".{META}"
        try:
            draft.write_text(json.dumps(self._meta, indent=1) + "\n", encoding="utf-8")
            draft.replace(self.folder / META)
        except OSError as error:
            raise self._unwritable(error) from error

    def add(self, rows: Iterable[Row]) -> None:
        """Append rows and see that they are on disk."""
        rows = list(rows)
        lines = [json.dumps(asdict(row), separators=(",", ":")).encode() + b"\n" for row in rows]
        try:
            self._file.write(b"".join(lines))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error
        for row in rows:
            self._count(row)


def _mend(path: Path) -> None:
    """Finish a last line without an end, or cut it off where it isn't whole."""
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _LONGEST_LINE, 0))
        last = file.read().rpartition(b"\n")[2]
        if not last:
            return
        try:
            _row(json.loads(last))
            file.write(b"\n")
        except (ValueError, KeyError, TypeError):
            file.truncate(size - len(last))

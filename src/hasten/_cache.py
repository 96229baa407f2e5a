"""The user's cache of prepared models: where it is, how a folder enters it whole and is checked.

A prepared folder appears by one rename, so it is never half made; its ``hasten.json`` (the marker)
holds the source's fingerprint and the size and sha256 of each file. Sizes are compared at each load
(microseconds), hashes only by `broken_files` (half a second a gigabyte).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from hasten.errors import ModelError

MARKER = "hasten.json"
LAYOUT = 1
"""Counted up when prepared folders change in a way that old ones must be made again."""

_BUILDING = ".building-"


def offline() -> bool:
    """True when ``HASTEN_OFFLINE`` or ``HF_HUB_OFFLINE`` is set: nothing may be fetched."""
    off = ("", "0", "false", "no", "off")
    return any(
        os.environ.get(name, "").strip().lower() not in off
        for name in ("HASTEN_OFFLINE", "HF_HUB_OFFLINE")
    )


def cache_dir() -> Path:
    """The cache folder (made if missing): ``HASTEN_CACHE``, else the platform's user cache.

    Raises ModelError when it can't be made or written.
    """
    named = os.environ.get("HASTEN_CACHE")
    path = Path(named).expanduser() if named else _platform_cache() / "hasten"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"can't make the cache folder {path} ({error.strerror or error}). "
            "Set HASTEN_CACHE to a folder you can write to."
        ) from error
    return path.absolute()


def _platform_cache() -> Path:
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"])
    return Path.home() / ".cache"


@dataclass(frozen=True, slots=True)
class Marker:
    """What ``hasten.json`` says of a prepared folder.

    fingerprint  identifies the weights, whatever dtype they are stored or run in
    files        name -> (bytes, sha256)
    dtype        of the stored weights, as ``"float32"``
    """

    fingerprint: str
    files: dict[str, tuple[int, str]]
    dtype: str


def write_marker(folder: Path, *, fingerprint: str, dtype: str) -> None:
    """Hash every file of `folder` and write its marker."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.iterdir())
        if path.name != MARKER
    }
    marker = {"layout": LAYOUT, "fingerprint": fingerprint, "dtype": dtype, "files": files}
    (folder / MARKER).write_text(json.dumps(marker, indent=1), encoding="utf-8")


def read_marker(folder: Path) -> Marker | None:
    """The marker of `folder`; None when it has none, or a file is missing or of another size."""
    try:
        raw: dict[str, Any] = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        if raw["layout"] != LAYOUT:
            return None
        files = {name: (int(f["bytes"]), str(f["sha256"])) for name, f in raw["files"].items()}
        marker = Marker(str(raw["fingerprint"]), files, str(raw["dtype"]))
        if any((folder / name).stat().st_size != size for name, (size, _) in files.items()):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return marker


def broken_files(folder: Path) -> list[str]:
    """Names of files of a prepared folder that aren't what was written; reads everything.

    The marker itself is named when it is missing or a file's size is wrong.
    """
    marker = read_marker(folder)
    if marker is None:
        return [MARKER]
    return [n for n, (_, digest) in marker.files.items() if sha256_file(folder / n) != digest]


def sha256_file(path: Path, update: Callable[[int], None] | None = None) -> str:
    """The file's sha256 in hex; `update` is told the bytes read so far."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            done += len(block)
            if update is not None:
                update(done)
    return digest.hexdigest()


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the machine-wide lock `name`; says so on stderr when another process has it."""
    folder = cache_dir() / "locks"
    try:
        folder.mkdir(exist_ok=True)
        lock = FileLock(str(folder / f"{name}.lock"))
        try:
            lock.acquire(timeout=1)
        except Timeout:
            say(f"waiting for another process that is preparing {name}")
            lock.acquire()
    except OSError as error:
        raise ModelError(
            f"can't write to the cache folder {folder} ({error.strerror or error}). "
            "Set HASTEN_CACHE to a folder you can write to."
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def scratch(prefix: str = "work") -> Iterator[Path]:
    """A temporary folder inside the cache, always removed; a rename out of it is atomic."""
    folder = Path(tempfile.mkdtemp(prefix=f"{_BUILDING}{prefix}-", dir=cache_dir()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def build_folder(final: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a new folder, then put it at `final` by one rename.

    The caller holds `locked(final.name)`, so what a killed process left behind can be removed here,
    and a broken folder at `final` replaced. Nothing stays when `fill` raises or is interrupted.
    """
    for leftover in cache_dir().glob(f"{_BUILDING}{final.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with scratch(final.name) as work:
        new = work / "new"
        new.mkdir()
        fill(new)
        final.parent.mkdir(parents=True, exist_ok=True)
        if final.exists():
            final.rename(work / "old")
        new.rename(final)


def say(text: str) -> None:
    """One line on stderr: long work that the user did not ask for by name is announced."""
    Console(stderr=True, highlight=False).print(f"hasten: {text}")


@contextmanager
def progress(text: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr; gives a function that takes the bytes done so far.

    Without `total` the bar pulses. Where stderr is no terminal one line announces the work instead.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        say(text)
        yield lambda done: None
        return
    columns = [TextColumn("hasten: {task.description}"), BarColumn()]
    columns += [DownloadColumn()] if total else []
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda done: bar.update(task, completed=min(done, total) if total else done)

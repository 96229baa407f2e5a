"""What commands that measure have in common: files made whole or not at all, and a progress bar."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from hasten.cli.screen import err, quiet_transformers
from hasten.errors import OptionError

if TYPE_CHECKING:
    from hasten.bench.config import ProgressCallback


def told(path: Path | None) -> None:
    """Say on stderr where something was written."""
    if path is not None:
        err().print(f"written: {path}", style="dim", soft_wrap=True)


def prepare_model(model: Any) -> None:
    """Fetch and convert the model first: that shows bars of its own."""
    from hasten.targets.catalog import prepare, resolve

    prepare(resolve(model))
    quiet_transformers()


@contextmanager
def output_file(option: str, path: Path | None) -> Iterator[Path | None]:
    """A file beside `path` to write to, made before the run so that a bad path is told at once.

    It becomes `path` by one rename when all went well, and is removed otherwise. `option` is named
    when the path is bad.
    """
    if path is None:
        yield None
        return
    path = path.expanduser().resolve()
    if path.is_dir():
        raise OptionError(option, f"{path} is a folder", "Name a file")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise OptionError(
            option, f"can't write to {path.parent} ({error.strerror or error})"
        ) from error
    os.close(handle)
    draft = Path(name)
    try:
        yield draft
        # mkstemp makes files only their owner can read; the result is an ordinary one
        umask = os.umask(0)
        os.umask(umask)
        draft.chmod(0o666 & ~umask)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def progress_bar() -> Iterator[ProgressCallback]:
    """A progress bar on stderr, driven by the runner."""
    from hasten.bench.config import Progress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = err()
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("load", total=None)

        def show(at: Progress) -> None:
            what = " ".join(part for part in (at.phase, at.method) if part)
            bar.update(
                task, description=f"{what:<28.28}", completed=at.done, total=at.total or None
            )

        yield show

"""Files that a run writes: whole or not there, and faults that name the option of their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hasten.errors import OptionError


@contextmanager
def writing(folder: Path, option: str = "out") -> Iterator[None]:
    """Tell what fails inside as a fault of `option`, which names `folder`: OptionError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        told: BaseException = error
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            told = error.__context__  # torch.save, on a full disk, hides what the system says
        problem = f"can't write to {folder} ({told})"
        raise OptionError(option, problem, "Make room there, or name another folder") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what becomes `path` at the end; its folder is made. Raises as `writing`."""
    scratch = path.with_name(f".{path.name}.tmp")
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield scratch
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)

"""Tables that are made once for a set of weights: where they are kept, how they are found again.

A table is one file of numpy arrays beside the weights' fingerprint, in the user's cache under its
kind, or shipped with an embedded model. Broken files, and those of other weights, are passed over.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np

from hasten._cache import cache_dir
from hasten.errors import HastenError, ModelError
from hasten.targets.base import TargetInfo

Array = np.ndarray[Any, Any]


def find(info: TargetInfo, kind: str) -> Iterator[dict[str, Array]]:
    """The arrays of each file of a kind that was made for these weights, the user's own first."""
    if not info.fingerprint:
        return
    try:
        own = [_path(info, kind)]
    except HastenError:  # no usable cache
        own = []
    for path in own:
        if (arrays := _read(path, info.fingerprint)) is not None:
            yield arrays
    assets = files("hasten") / "assets"
    for folder in assets.iterdir() if assets.is_dir() else ():
        with as_file(folder / f"{kind}.npz") as path:
            if (arrays := _read(path, info.fingerprint)) is not None:
                yield arrays


def keep(info: TargetInfo, kind: str, arrays: Mapping[str, Array]) -> Path:
    """Write a table to the cache; the file. Raises ModelError when it can't be written there, or
    the weights have no fingerprint to find it by."""
    if not info.fingerprint:
        raise ModelError(f"the weights of {info.name} aren't known: tables can't be kept for them")
    path = _path(info, kind)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, info.fingerprint, arrays)
    except OSError as error:
        raise ModelError(
            f"can't write to {path.parent} ({error}). Make room there, or set HASTEN_CACHE"
        ) from error
    return path


def write(path: Path, fingerprint: str, arrays: Mapping[str, Array]) -> None:
    """Write a table to `path`, atomically."""
    scratch = path.with_suffix(f".{os.getpid()}-{time.time_ns()}.tmp")
    try:
        with scratch.open("wb") as file:
            np.savez_compressed(file, fingerprint=np.array(fingerprint), **arrays)  # type: ignore[arg-type]
        scratch.replace(path)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)


def small(ids: Array) -> Array:
    """Token ids in the narrowest type that holds them."""
    return ids.astype(np.uint16 if ids.size == 0 or int(ids.max()) < 1 << 16 else np.int32)


def _path(info: TargetInfo, kind: str) -> Path:
    digest = hashlib.sha256(info.fingerprint.encode()).hexdigest()[:24]
    return cache_dir() / kind / f"{digest}.npz"


def _read(path: Path, fingerprint: str) -> dict[str, Array] | None:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            if str(stored["fingerprint"]) != fingerprint:
                return None
            arrays = {name: stored[name] for name in stored.files if name != "fingerprint"}
    except Exception:  # a damaged file can raise anything that zip's and numpy's parsers do
        return None
    return arrays if all(isinstance(each, np.ndarray) for each in arrays.values()) else None

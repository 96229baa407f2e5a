"""Compiles the kernels for this very processor, once, into the user's cache.

A C++ compiler is all it takes: `$CXX`, or ``g++``, ``c++``, ``clang++``, whichever is found first.
The result is kept by a hash of the sources, the flags, the compiler and the processor, so that a
cache shared by machines never serves one the other's instructions.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

from hasten._cache import build_folder, cache_dir, locked, progress
from hasten.errors import CapabilityError

SOURCES = Path(__file__).parent
_UNITS = ("decoder.cpp", "exits.cpp", "dflash.cpp")
_NAME = "kernels.so"
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = (
    "-std=c++17 -O3 -march=native -fopenmp -shared -fPIC -ffp-contract=off -fno-math-errno "
    "-fno-trapping-math -w"
)
"""Contraction is off: where a product and a sum are to be one operation, the source says so."""
_TIMEOUT_S = 300


def compiled(portable: bool = False) -> Path:
    """The kernels' shared library, compiled if it isn't there yet (some seconds).

    `portable` leaves out instructions of one kind of processor (for tests). Raises CapabilityError,
    saying why, where there is no compiler or it fails.
    """
    compiler = _compiler()
    flags = shlex.split(_FLAGS) + (["-DHASTEN_PORTABLE"] if portable else [])
    place = cache_dir() / "native" / _key(compiler, flags)
    if (place / _NAME).is_file():
        return place / _NAME
    with locked(f"native-{place.name}"):
        if not (place / _NAME).is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            with progress("compiling the CPU kernels (once)"):
                build_folder(place, lambda work: _compile(compiler, flags, work / _NAME))
    return place / _NAME


def _compiler() -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        if shutil.which(named[0]) is None:
            raise CapabilityError(f"the compiler that CXX names, {named[0]!r}, isn't there")
        return named
    for name in _COMPILERS:
        if shutil.which(name):
            return [name]
    raise CapabilityError(
        "there is no C++ compiler to build the CPU kernels with: install g++, or name one in CXX"
    )


def _key(compiler: list[str], flags: list[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(path.name.encode() + path.read_bytes())
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    for part in (*compiler, *flags, platform.machine(), _processor()):
        digest.update(part.encode() + b"\0")
    digest.update(version)
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What ``-march=native`` depends on, as far as it can be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "cpu family", "model", "flags", "Features", "CPU part")
    found = {line for line in lines if line.split(":")[0].strip() in wanted}
    return "\n".join(sorted(found))


def _compile(compiler: list[str], flags: list[str], into: Path) -> None:
    command = [*compiler, *flags, *(str(SOURCES / unit) for unit in _UNITS), "-o", str(into)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CapabilityError(f"the CPU kernels can't be compiled: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = next((line for line in lines if "error" in line), lines[-1] if lines else "no word")
        raise CapabilityError(f"the CPU kernels can't be compiled by {compiler[0]}: {said.strip()}")

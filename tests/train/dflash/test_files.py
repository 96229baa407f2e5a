"""What a run writes is whole or not there, and what fails is told in the system's words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hasten.errors import OptionError
from hasten.train.dflash.files import replacing, writing


def write(path: Path, words: str, error: BaseException | None = None) -> None:
    with replacing(path) as scratch:
        scratch.write_text(words)
        assert not path.exists() or path.read_text() != words
        if error is not None:
            raise error


def test_a_file_takes_its_place_at_the_end_or_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write(path, "first")
    assert path.read_text() == "first"
    with pytest.raises(KeyboardInterrupt):
        write(path, "half", KeyboardInterrupt())
    assert path.read_text() == "first"
    assert [each.name for each in path.parent.iterdir()] == ["file"]


def test_a_place_that_takes_nothing_is_named_with_its_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"^out: can't write to .*file .*another folder"):
        write(tmp_path / "file" / "below", "x")
    inside = tmp_path / "nobody" / "x"
    with pytest.raises(OptionError, match=r"^work: can't write to .*x"), writing(tmp_path, "work"):
        inside.write_text("")


def test_a_full_disk_is_called_by_its_name(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.is_char_device():
        pytest.skip("needs /dev/full")

    def save() -> None:
        with replacing(tmp_path / "file"), full.open("wb") as file:
            torch.save({"a": torch.zeros(1 << 16)}, file)

    with pytest.raises(OptionError, match="No space left on device"):
        save()
    assert list(tmp_path.iterdir()) == []

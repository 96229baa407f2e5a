"""``hasten train lede arms`` on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Hasten


def test_it_says_what_it_writes(run: Hasten) -> None:
    result = run("train", "lede", "arms", "--help")
    assert result.exit_code == 0
    for words in ("FILE.rounds.npz", "--documents", "--agent", "--modules"):
        assert words in result.stdout


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--documents", "0", "documents: must be at least 1"),
        ("--minutes", "0", "minutes: must be above 0"),
        ("--max-new-tokens", "0", "tokens: must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_model_is_loaded(
    run: Hasten, told: Callable[[Any], str], tmp_path: Path, option: str, value: str, words: str
) -> None:
    out = tmp_path / "arms.npz"
    command = ["train", "lede", "arms", "-o", str(out), "--data", "nowhere", "-m", "nothing"]
    assert words in told(run(*command, option, value))
    assert not out.exists()

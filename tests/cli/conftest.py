"""Fixtures of the command-line tests: a tiny model's folder, and a way to run commands on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.tiny import save_tiny

if TYPE_CHECKING:
    import hasten

Hasten = Callable[..., Any]
"""``hasten("generate", "x", input=...)`` runs a command line and gives typer's result."""


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same screen and no debugging, wherever the tests run."""
    for name in ("HASTEN_DEBUG", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny-llama")))


@pytest.fixture(scope="session")
def native_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model that the native kernels can run; skips where there are none."""
    import torch

    from hasten.native.library import why_not_native

    reason = why_not_native(torch.float32, torch.device("cpu"), 16)
    if reason is not None:
        pytest.skip(f"needs the native kernels, and {reason}")
    return str(save_tiny(tmp_path_factory.mktemp("tiny-native"), head_dim=16))


@pytest.fixture(scope="session")
def llm(tiny_model: str) -> hasten.LLM:
    import hasten

    return hasten.load(tiny_model, device="cpu")


@pytest.fixture
def run() -> Hasten:
    """Runs a command line in this process."""
    from typer.testing import CliRunner

    from hasten.cli import app

    def call(*args: str, input: str | bytes | None = None) -> Any:
        return CliRunner().invoke(app, list(args), input=input)

    return call


@pytest.fixture
def generate(run: Hasten, tiny_model: str) -> Hasten:
    """Runs ``hasten generate`` on the tiny model."""

    def call(*args: str, input: str | bytes | None = None) -> Any:
        return run("generate", "--model", tiny_model, "--device", "cpu", *args, input=input)

    return call


def error_line(result: Any) -> str:
    """The one line of stderr of a command that failed with code 2."""
    assert result.exit_code == 2, (result.exit_code, result.stdout, result.stderr)
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert "Traceback" not in result.output
    return str(line.removeprefix("error: "))


@pytest.fixture
def told() -> Callable[[Any], str]:
    """Checks that a command failed in one clean line, and gives it."""
    return error_line


@pytest.fixture
def suite(tmp_path: Path) -> str:
    """A suite file of two prompts in two groups."""
    path = tmp_path / "suite.jsonl"
    path.write_text(
        '{"question": "abcabcabc", "category": "one"}\n{"turns": ["xyz", "?"], "category": "two"}\n'
    )
    return str(path)

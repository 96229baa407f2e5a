"""The options of loading a model: every command hands them on, and names a bad one at once."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest

import hasten
from hasten.errors import ModelError
from hasten.targets.load import load_target
from tests.cli.conftest import Hasten

COMMANDS = ("generate", "chat", "info", "verify", "calibrate", "bench")
FLAGS = {
    "dtype": "bfloat16",
    "device": "cpu",
    "engine": "fused",
    "quantize": "int8",
    "kernels": "native",
    "kv_dtype": "int8",
}


@pytest.fixture
def command(run: Hasten, tiny_model: str, suite: str) -> Hasten:
    """Runs a command by name on the tiny model, with more flags."""
    lines = {
        "generate": ["generate", "abc", "--model", tiny_model],
        "chat": ["chat", "--model", tiny_model],
        "info": ["info", tiny_model],
        "verify": ["verify", tiny_model, "--suite", suite],
        "calibrate": ["calibrate", tiny_model],
        "bench": ["bench", "--model", tiny_model, "--suite", suite],
    }
    return lambda name, *flags: run(*lines[name], *flags)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each call of `hasten.load`, which gives no model."""
    calls: list[dict[str, Any]] = []

    def load(model: Any = None, **options: Any) -> None:
        calls.append(options)
        raise ModelError("that is all")

    monkeypatch.setattr(hasten, "load", load)
    monkeypatch.setattr("hasten.bench.runner.load", load)
    return calls


@pytest.mark.parametrize("name", COMMANDS)
def test_options_that_are_given_reach_load(
    command: Hasten, told: Callable[[Any], str], asked: list[dict[str, Any]], name: str
) -> None:
    flags = [part for key, value in FLAGS.items() for part in (_flag(key), value)]
    assert told(command(name, *flags, "--exact")) == "that is all"
    (options,) = asked
    options.pop("method", None)
    assert options == {**FLAGS, "exact": True}


@pytest.mark.parametrize("name", COMMANDS)
def test_options_that_are_not_given_are_the_library_s_choice(
    command: Hasten, asked: list[dict[str, Any]], name: str
) -> None:
    command(name)
    (options,) = asked
    options.pop("method", None)
    defaults = signature(load_target).parameters
    assert options == {key: defaults[key].default for key in options}
    assert name == "bench" or options == {}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("quantize", "int3"),
        ("kernels", "cuda"),
        ("kv_dtype", "float16"),
        ("kv_dtype", "int4"),
        ("engine", "steam"),
        ("dtype", "int3"),
    ],
)
def test_a_bad_value_is_named_before_the_model_is_prepared(
    command: Hasten,
    told: Callable[[Any], str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    option: str,
    value: str,
) -> None:
    monkeypatch.setattr("hasten.targets.catalog.prepare", lambda *a, **k: pytest.fail("prepared"))
    assert told(command(name, _flag(option), value)).startswith(f"{_flag(option)}: ")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--quantize", "int8", "--kernels", "torch"], "--kernels: torch's can't run"),
        (["--kv-dtype", "bfloat16", "--kernels", "torch"], "--kv-dtype: is a choice of the native"),
        (["--kv-dtype", "int8"], "--kv-dtype: is a choice of the native kernels"),  # head size 8
        (["--kv-dtype", "int8", "--engine", "transformers"], "has no kv_dtype='int8'"),
        (["--quantize", "int8", "--engine", "transformers"], "--engine: 'transformers' has no"),
        (["--quantize", "gguf"], "--quantize: 'gguf' takes a GGUF file's own blocks"),
        (["--quantize", "int4"], "quantize='int4' needs hasten's CPU kernels, and head size 8"),
        (["--kernels", "native"], "kernels='native' needs hasten's CPU kernels, and head size 8"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_can_not_be_met_are_named(
    command: Hasten, told: Callable[[Any], str], flags: list[str], words: str
) -> None:
    assert words in told(command("generate", "--device", "cpu", *flags))


def test_help_tells_the_library_s_defaults() -> None:
    import typer

    from hasten.cli import app

    command = typer.main.get_command(app).commands["bench"]  # type: ignore[attr-defined]
    told = {p.name: p.show_default for p in command.params}
    defaults = signature(load_target).parameters
    assert (told["engine"], told["kernels"]) == (
        defaults["engine"].default,
        defaults["kernels"].default,
    )
    assert {*FLAGS, "exact"} <= told.keys()
    assert "loading" not in told


def test_keys_and_values_are_of_the_dtype_that_is_named(
    run: Hasten, native_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    load = hasten.load
    monkeypatch.setattr(hasten, "load", lambda *a, **k: made.append(load(*a, **k)) or made[-1])
    flags = ("--model", native_model, "--device", "cpu", "--kernels", "native", "-n", "4")
    for name in ("bfloat16", "int8"):
        done = run("generate", "abc", "--method", "prompt-lookup", *flags, "--kv-dtype", name)
        assert done.exit_code == 0, done.output
        assert str(made[-1].target.shape.cache) == f"torch.{name}"
    assert len(made) == 2


def test_a_drafter_s_model_runs_on_the_target_s_kind_of_kernels(native_model: str) -> None:
    for kernels in ("native", "torch"):
        llm = hasten.load(native_model, device="cpu", method="ar", kernels=kernels)
        other, _ = llm._load_other(native_model)
        assert (llm.target.info.kernels, other.info.kernels) == (kernels, kernels)


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")

"""Every fault is one clean line on stderr that names the option; exit codes are as documented."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Hasten
from tests.cli.tiny import CONTEXT, save_tiny

Told = Callable[[Any], str]

BAD_OPTIONS = [
    (["-t", "-1"], "--temperature: "),
    (["-t", "nan"], "--temperature: "),
    (["-t", "warm"], "'--temperature'"),
    (["--top-p", "0"], "--top-p: "),
    (["--top-p", "1.5"], "--top-p: "),
    (["--top-k", "-2"], "--top-k: "),
    (["--min-p", "2"], "--min-p: "),
    (["--repetition-penalty", "0"], "--repetition-penalty: "),
    (["-n", "-1"], "--max-new-tokens: "),
    (["-n", "many"], "'--max-new-tokens'"),
    (["--stop", ""], "--stop: "),
    (["--logprobs", "-1"], "--logprobs: "),
    (["--verify", "hope"], "--verify: "),
    (["--verify", "greedy", "-t", "1"], "--verify: "),
    (["--method", "guess"], "--method: unknown method 'guess'"),
    (["--method", "prompt-lookup,nodes=0"], "prompt-lookup.nodes: "),
    (["--method", "prompt-lookup,nodes=many"], "prompt-lookup.nodes: "),
    (["--method", "prompt-lookup,width=2"], "prompt-lookup.width: "),
    (["--method", "prompt-lookup:best"], "variant 'best'"),
    (["--method", "draft-model"], "draft-model.model: "),
    (["--dtype", "int3"], "--dtype: "),
    (["--engine", "steam"], "--engine: "),
    (["--device", "abacus"], "--device: "),
    (["--quantize", "int3"], "--quantize: "),
    (["--quantize", "gguf"], "--quantize: 'gguf' takes a GGUF file's own blocks"),
    (["--kernels", "metal"], "--kernels: "),
    (["--kv-dtype", "float16"], "--kv-dtype: "),
    (["--kernels", "native", "--engine", "transformers"], "--engine: "),
    (["--prompt-file", "x.txt"], "--prompt-file: contradicts"),
    (["--trace", "--json"], "--trace: contradicts --json"),
    (["--stream", "--json"], "--stream: contradicts --json"),
    (["--no-such-option"], "--no-such-option"),
]


@pytest.mark.parametrize(("flags", "words"), BAD_OPTIONS, ids=[" ".join(f) for f, _ in BAD_OPTIONS])
def test_a_bad_option_is_named(generate: Hasten, told: Told, flags: list[str], words: str) -> None:
    assert words in told(generate("abc", *flags))


@pytest.mark.parametrize(
    "prompt", [["", "-n", "4"], ["-"], []], ids=["argument", "dash", "nothing"]
)
def test_an_empty_prompt_is_refused(generate: Hasten, told: Told, prompt: list[str]) -> None:
    assert "prompt: is empty" in told(generate(*prompt))


def test_a_prompt_at_the_context_limit_is_refused(generate: Hasten, told: Told) -> None:
    line = told(generate("a" * CONTEXT, "--no-template"))
    assert f"{CONTEXT} tokens" in line
    assert "Shorten the prompt" in line


def test_a_prompt_just_under_the_context_limit_gets_what_fits(generate: Hasten) -> None:
    assert generate("a" * (CONTEXT - 1), "--no-template").exit_code == 0


def test_text_that_is_no_utf8_is_refused(generate: Hasten, told: Told, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert "prompt: stdin isn't UTF-8" in told(generate("-", input=b"caf\xe9"))
    assert "--prompt-file: " in told(generate("--prompt-file", str(tmp_path / "latin")))
    assert "--prompt-file: can't read" in told(generate("--prompt-file", str(tmp_path / "none")))


def test_a_path_that_is_no_model_is_refused(run: Hasten, told: Told, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("no weights here")
    for path in (tmp_path / "nothing", tmp_path, tmp_path / "notes.md"):
        assert str(path) in told(run("generate", "x", "--model", str(path)))
    assert "unknown-alias" in told(run("info", "unknown-alias"))


def test_a_system_message_needs_a_chat_template(run: Hasten, told: Told, tmp_path: Path) -> None:
    model = str(save_tiny(tmp_path / "plain", template=False))
    line = told(run("generate", "x", "--system", "Be brief.", "--model", model))
    assert line.startswith("--system: needs a chat template")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["methods", "guess"], "'guess'"),
        (["verify", "--suite", "no-such.jsonl"], "--suite: "),
        (["verify", "--suite", "no-such.txt"], "--suite: "),
        (["verify", "--temperature", "0"], "--temperature: "),
        (["verify", "--max-new-tokens", "-1"], "--max-new-tokens: "),
        (["verify", "--limit", "0"], "'--limit'"),
        (["bench", "--methods", "ar,guess"], "'guess'"),
        (["bench", "--suite", "no-such"], "--suite: "),
        (["bench", "--limit", "0"], "'--limit'"),
        (["bench", "--turns", "some"], "--turns: "),
        (["bench", "--repeats", "0"], "--repeats: "),
        (["bench", "--max-new-tokens", "0"], "--max-new-tokens: "),
        (["bench", "--temperature", "-1"], "--temperature: "),
        (["bench", "--peers", "abacus"], "abacus"),
        (["chat", "--temperature", "-1"], "--temperature: "),
        (["chat", "--method", "guess"], "--method: "),
        (["sing"], "'sing'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_other_commands_name_their_bad_option(
    run: Hasten, told: Told, tiny_model: str, command: list[str], words: str
) -> None:
    takes_model = command[0] in ("verify", "bench", "chat")
    assert words in told(run(*command, *(["--model", tiny_model] if takes_model else [])))


def test_an_unexpected_fault_is_one_line_too(
    run: Hasten, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hasten.methods.all_methods", lambda: 1 / 0)
    line = told(run("methods"))
    assert line.startswith("ZeroDivisionError")
    assert "HASTEN_DEBUG=1" in line


@pytest.mark.parametrize("words", [["generate", "x", "-t", "-1"], ["generate", "x", "-m", "no"]])
def test_debugging_raises_the_fault(
    run: Hasten, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    from hasten import HastenError

    monkeypatch.setenv("HASTEN_DEBUG", "1")
    assert isinstance(run(*words).exception, HastenError)


def test_ctrl_c_ends_with_130_and_a_short_line(
    generate: Hasten, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hasten

    def interrupted(self: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(hasten.Stream, "__next__", interrupted)
    result = generate("abc")
    assert (result.exit_code, result.stderr) == (130, "stopped\n")


def command_line(*args: str, **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "hasten", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **more,
    )


def test_a_reader_that_goes_away_ends_it_quietly() -> None:
    process = command_line("methods", "--json")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


@pytest.mark.skipif(os.name == "nt", reason="Windows sends no SIGINT to one process")
def test_ctrl_c_in_a_real_process_leaves_no_traceback(tiny_model: str) -> None:
    process = command_line(
        "generate", "abc", "--ignore-eos", "-n", "200", "--method", "ar", "--model", tiny_model
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)  # it is answering
    process.send_signal(signal.SIGINT)
    said = process.stderr.read()
    process.stdout.close()
    process.stderr.close()
    assert process.wait() in (0, 130)  # 0: the answer was complete before the signal came
    assert b"Traceback" not in said

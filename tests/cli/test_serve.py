"""``hasten serve``: what it prints, how it ends, and what stops it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

for package in ("fastapi", "uvicorn", "prometheus_client", "openai"):
    pytest.importorskip(package, reason=f"needs {package} (the extra serve, and dev)")


def test_it_serves_until_it_is_told_to_end(tiny_model: str) -> None:
    import openai

    command = [sys.executable, "-m", "hasten", "serve", "--model", tiny_model, "--device", "cpu"]
    command += ["--port", "0", "--method", "prompt-lookup", "--served-model-name", "tiny", "--log"]
    environment = {**os.environ, "HASTEN_API_KEY": "k3y", "NO_COLOR": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as running:
        try:
            assert running.stdout is not None
            line = running.stdout.readline()
            assert " serves tiny (prompt-lookup, float32, fused engine)" in line, line
            url = line.split()[0]
            with openai.OpenAI(base_url=f"{url}/v1", api_key="k3y", max_retries=0) as client:
                got = client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "a secret"}], max_tokens=5
                )
            assert got.usage is not None
            assert got.usage.completion_tokens <= 5
            running.send_signal(signal.SIGTERM)
            out, err = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 0, err
    assert out == ""
    assert "POST /v1/chat/completions 200" in err
    assert "secret" not in err
    assert "k3y" not in err
    assert "Traceback" not in err


def test_a_port_in_use_is_one_clear_line_before_the_model_is_loaded(
    run: Callable[..., Any], told: Callable[[Any], str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = told(run("serve", "--model", "/no/such/model", "--port", port))
    assert line.startswith(f"--port: can't listen on 127.0.0.1:{port}: ")
    assert "0 takes any that is free" in line


@pytest.mark.parametrize(
    ("options", "start"),
    [
        (["--host", "no.such.host.invalid"], "--host: can't listen"),
        (["--port", "99999"], "--port: can't listen"),
        (["--max-concurrency", "0"], "--max-concurrency: must be"),
        (["--queue", "-1"], "--queue: must be"),
        (["--max-tokens", "0"], "--max-tokens: must be"),
        (["--max-body", "0"], "--max-body: must be"),
        (["--grace", "-1"], "--grace: must be"),
        (["--grace", "nan"], "--grace: must be"),
        (["--api-key", " "], "--api-key: must be"),
        (["--allow-origin", "example.com"], "--allow-origin: 'example.com' isn't"),
        (["--method", "no-such"], "--method: unknown method"),
        (["--methods", "ar,no-such"], "--methods: unknown method 'no-such'"),
        (["--port", "x"], "Invalid value for '--port'"),
    ],
)
def test_bad_options_are_named_as_they_are_typed(
    run: Callable[..., Any], told: Callable[[Any], str], options: list[str], start: str
) -> None:
    line = told(run("serve", "--model", "/no/such/model", "--port", "0", *options))
    assert line.startswith(start), line
    assert ".." not in line


def test_a_method_that_cannot_be_loaded_is_told_at_the_start(
    run: Callable[..., Any], told: Callable[[Any], str], tiny_model: str
) -> None:
    arguments = ["--model", tiny_model, "--device", "cpu", "--port", "0", "--method", "ar"]
    assert "draft-model" in told(run("serve", *arguments, "--methods", "draft-model"))


def test_without_the_extra_it_says_what_to_install(
    run: Callable[..., Any], told: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    line = told(run("serve"))
    assert "needs the package uvicorn" in line
    assert "pip install 'hasten[serve]'" in line


def test_the_help_shows_no_key(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASTEN_API_KEY", "s3cret")
    got = run("serve", "--help")
    assert got.exit_code == 0
    assert "HASTEN_API_KEY" in got.output
    assert "s3cret" not in got.output

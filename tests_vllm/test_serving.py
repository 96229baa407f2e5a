"""Over HTTP, eight at a time, streaming and not: answers are complete, and counters show drafts."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import MAX_TOKENS, K

START_S = 300
PROMPTS = [
    f"Repeat this sentence three times: the {colour} fox jumps over the lazy dog."
    for colour in ("red", "blue", "green", "white", "black", "brown", "grey", "golden")
]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    speculate = (
        '{"method": "custom_class", "model": "hasten.plugins.vllm.Proposer", '
        f'"num_speculative_tokens": {K}}}'
    )
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "8"]
    command += ["--enforce-eager", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "smol", "--speculative-config", speculate]
    environment = {**os.environ, "HASTEN_VLLM": "auto;row_cost=0.02"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + START_S
        while not _healthy(url):
            assert process.poll() is None, log.read_text()[-8000:]
            assert time.monotonic() < until, log.read_text()[-8000:]
            time.sleep(1)
        yield url
        assert process.poll() is None, log.read_text()[-8000:]
        assert "hasten failed" not in log.read_text()
    finally:
        process.terminate()
        process.wait(60)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _counters(url: str) -> dict[str, int]:
    text = httpx.get(f"{url}/metrics").text
    found = re.findall(
        r"^vllm:spec_decode_num_(\w+)_total\{[^}]*\} ([\d.e+]+)$", text, re.MULTILINE
    )
    return {name: int(float(value)) for name, value in found if "per_pos" not in name}


def _ask(url: str, prompt: str, **options: Any) -> tuple[str, str]:
    """The answer's text and why it ended."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300)
    made = client.chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=MAX_TOKENS,
        **options,
    )
    if not options.get("stream"):
        choice = made.choices[0]
        return choice.message.content, choice.finish_reason
    text, finish = "", ""
    for chunk in made:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish


def _ask_all(url: str, **options: Any) -> list[tuple[str, str]]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: _ask(url, prompt, **options), PROMPTS))


def test_eight_at_a_time_are_answered_alike_streaming_or_not(server: str) -> None:
    before = _counters(server)
    whole = _ask_all(server, temperature=0)
    streamed = _ask_all(server, temperature=0, stream=True)
    assert streamed == whole
    assert all(text and finish in ("stop", "length") for text, finish in whole)
    after = _counters(server)
    moved = {name: after[name] - before[name] for name in after}
    assert 0 < moved["accepted_tokens"] <= moved["draft_tokens"] <= K * moved["drafts"]


def test_sampled_requests_with_seeds_and_stops_are_served(server: str) -> None:
    answers = _ask_all(server, temperature=0.8, top_p=0.9, seed=3, stop=["dog"])
    assert all("dog" not in text for text, _ in answers)


def test_answers_in_a_grammar_keep_to_it(server: str) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue", "green"]}, "fast": {"type": "boolean"}},
        "required": ["colour", "fast"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "fox", "schema": schema}}
    for text, finish in _ask_all(server, temperature=0, response_format=wanted):
        assert finish == "stop"
        made = json.loads(text)
        assert set(made) == {"colour", "fast"}
        assert made["colour"] in ("red", "blue", "green")


def test_a_request_that_is_broken_off_does_not_stop_the_others(server: str) -> None:
    body = {"model": "smol", "prompt": PROMPTS[0], "max_tokens": 512, "stream": True}
    with httpx.stream("POST", f"{server}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    assert all(text for text, _ in _ask_all(server, temperature=0))

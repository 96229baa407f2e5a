"""A real server over a tiny model, on a free port, in a thread."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from hasten.api import LLM
from hasten.serve.app import create_app
from hasten.serve.run import Server, address, bind
from hasten.serve.service import Service
from hasten.serve.settings import ServerOptions

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello, hello!"}]


@dataclass
class Live:
    """A running server."""

    url: str
    service: Service
    server: Server
    thread: threading.Thread

    @property
    def llm(self) -> LLM:
        return self.service.llm

    @property
    def model(self) -> str:
        return self.service.name

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60
        )

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        headers = {"Content-Type": "application/json", **more.pop("headers", {})}
        content = json.dumps(body)
        return httpx.post(f"{self.url}{path}", content=content, headers=headers, timeout=60, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60, **more)

    def metric(self, name: str) -> float:
        """The sum of a metric's series whose name and labels begin with `name`."""
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(name)]
        assert lines, name
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def idle(self) -> None:
        """Wait until nothing runs any more."""
        worker = self.service.worker
        wait_for(lambda: not (self.service.jobs or worker.active or worker.waiting))


def wait_for(true: Callable[[], Any], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.005)


@contextmanager
def serving(llm: LLM, **options: Any) -> Iterator[Live]:
    """Run a server; at the end nothing of it may be left."""
    settings = ServerOptions(**options)
    app = create_app(llm, settings)
    ready = threading.Event()
    with bind("127.0.0.1", 0) as bound:
        server = Server(app, grace=settings.grace, on_ready=ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        assert ready.wait(30)
        live = Live(address(bound), app.state.service, server, thread)
        try:
            yield live
        finally:
            server.stop()
            thread.join(30)
            assert not thread.is_alive()
    assert not live.service.jobs
    assert live.service.worker.active == live.service.worker.waiting == 0


def events(response: httpx.Response) -> list[Any]:
    """The values of a stream of events; the last must be [DONE]."""
    lines = [line for line in response.read().decode().split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def pieces(chunks: list[Any], index: int = 0) -> list[str]:
    """The texts of one choice of a stream."""
    found = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                found.append(
                    choice["delta"].get("content", "") if "delta" in choice else choice["text"]
                )
    return found


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, in OpenAI's shape and nothing else."""
    body = response.json()
    assert set(body) == {"error"}, body
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert "Traceback" not in response.text
    return error

"""Fixtures of the server's tests: tiny models, and servers over them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import hasten
from hasten.api import LLM
from tests.tiny_llm import make_model, make_tokenizer, metered

for package in ("fastapi", "uvicorn", "prometheus_client", "openai", "httpx"):
    pytest.importorskip(package, reason=f"needs {package} (the extra serve, and dev)")

from tests.serve.live import Live, serving  # noqa: E402  # after the check that it can be imported


@pytest.fixture(scope="session")
def shared() -> LLM:
    """A tiny Llama in hasten's own decoder, with a context of 1,024."""
    model = make_model(max_position_embeddings=1024)
    return hasten.load((model, make_tokenizer()), method="prompt-lookup")


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The model; fails when a sequence is left open."""
    with metered(shared) as counted:
        yield counted


@pytest.fixture
def live(llm: LLM) -> Iterator[Live]:
    """A server with the usual options."""
    with serving(llm) as running:
        yield running


@pytest.fixture
def slow(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """A model whose passes take a hundredth of a second, so that nothing ends by itself."""
    target: Any = llm.target
    forward = target.forward

    def wait_and_run(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.01)
        return forward(*args, **kwargs)

    monkeypatch.setattr(target, "forward", wait_and_run)
    return llm

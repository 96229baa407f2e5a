"""The embedded model as a folder, the prompts, and vLLM's answers to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
K = 8
MAX_TOKENS = 64
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}

SPECULATE: dict[str, Any] = {
    "plain": None,
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": K,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    },
    "hasten": {
        "method": "custom_class",
        "model": "hasten.plugins.vllm.Proposer",
        "num_speculative_tokens": K,
    },
}


@pytest.fixture(scope="session")
def model() -> Path:
    """The embedded model in float32 with its tokenizer, from hasten's cache."""
    from hasten.targets.catalog import prepare, resolve

    return prepare(resolve("smollm2-135m"))


@pytest.fixture(scope="session")
def prompts(model: Path) -> list[list[int]]:
    """24 prompts as ids: 12 of `mini`, 6 of `editing`, 6 of `agent`."""
    from hasten.bench.prompts import load_suite
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    out = []
    for suite, limit in (("mini", 12), ("editing", 6), ("agent", 6)):
        for row in load_suite(suite, limit).rows:
            messages = [{"role": "user", "content": row.turns[0]}]
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            out.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return out


Answer = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def answer(
    model: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Answer:
    """``answer(way, options="", samplings=..., known=True)``: see answer.py. A run is kept."""
    folder = tmp_path_factory.mktemp("answers")
    done: dict[str, dict[str, Any]] = {}

    def run(
        way: str,
        options: str = "",
        samplings: tuple[dict[str, Any], ...] = (GREEDY,),
        known: bool = True,
    ) -> dict[str, Any]:
        name = f"{way} {options} {samplings} {known}"
        if name not in done:
            job = {
                "model": str(model),
                "prompts": prompts,
                "speculate": SPECULATE[way],
                "max_tokens": MAX_TOKENS,
                "samplings": samplings,
                "known": known,
            }
            done[name] = _run(job, folder, options)
            print(f"\n{way} {options}: {summary(done[name], len(prompts))}")
        return done[name]

    return run


def _run(job: dict[str, Any], folder: Path, options: str) -> dict[str, Any]:
    made, out = folder / "job.json", folder / "out.json"
    made.write_text(json.dumps(job))
    command = [sys.executable, str(HERE / "answer.py"), str(made), str(out)]
    environment = {**os.environ, "HASTEN_VLLM": options}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-8000:]
    return {**json.loads(out.read_text()), "log": ran.stdout + ran.stderr}


def tokens_per_pass(run: dict[str, Any]) -> float:
    """Mean accepted length as hasten counts it: tokens emitted per pass of a request's decoding."""
    tokens = sum(len(ids) - 1 for ids in run["answers"][0])  # the prompt's pass gives the first
    return tokens / (tokens - run["counters"][0]["accepted"])


def tokens_per_draft(run: dict[str, Any]) -> float:
    """Mean acceptance length as vLLM counts it: of the passes that had a draft."""
    counters = run["counters"][0]
    return 1 + counters["accepted"] / max(counters["drafts"], 1)


def summary(run: dict[str, Any], prompts: int) -> str:
    """A line for people (``pytest -s``)."""
    return (
        f"{prompts} prompts, {run['counters'][0]}, {tokens_per_pass(run):.2f} tokens per pass, "
        f"{tokens_per_draft(run):.2f} per pass with a draft"
    )

"""A tiny LLM that ends answers early, and files of prompts for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hasten
from hasten.api import LLM
from tests.tiny_llm import make_model, make_tokenizer

END = 257
EOS = [*range(0, 256, 12), END]


def make_llm(**changes: Any) -> LLM:
    """A byte-level model with a chat template; many ids end an answer."""
    return hasten.load((make_model(eos_token_id=EOS, **changes), make_tokenizer()), method="ar")


def prompt_file(folder: Path, name: str, count: int, length: int = 20) -> str:
    """A file of `count` questions, none equal to another."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    rows = ({"question": f"{name} {at} ".ljust(length - at % 7, "x")} for at in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)

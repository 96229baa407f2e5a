"""A tiny LLM whose lower layer drafts, and problems that it gets right now and then."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import hasten
from hasten.api import LLM
from tests.tiny_llm import make_model, make_tokenizer

DRAFT = "draft=early-exit,head=own,exits=1"
METHOD = f"cospec:target,{DRAFT},length=3"


@cache
def tiny() -> LLM:
    """Byte-level, float32, on the fused target; shared."""
    pair = (make_model(eos_token_id=[257, *range(0, 256, 23)]), make_tokenizer())
    return hasten.load(pair, method="ar", engine="fused")


@dataclass(frozen=True)
class Asked:
    """A problem whose answer is right when its text has an even length (or an odd one)."""

    id: str
    parity: int = 0
    family: str = "even"
    answer: str = ""

    @property
    def item(self) -> str:
        return self.id

    @property
    def held_out(self) -> bool:
        return False

    @property
    def prompt(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"question {self.id}"}]

    def correct(self, text: str) -> bool:
        return len(text) % 2 == self.parity


def asked(count: int, split: str = "train", parity: int = 0) -> list[Any]:
    return [Asked(f"{split}{at}", parity) for at in range(count)]

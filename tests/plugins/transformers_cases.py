"""Tiny models, plain `generate`, and drafters that know its answer, as methods of the registry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.conformance import drafters
from tests.targets import tiny_models

from hasten import methods
from hasten.drafters.base import Drafter
from hasten.methods import Method
from hasten.policies.base import FixedPolicy, Policy
from hasten.types import RowSignals

KINDS = {
    "oracle": drafters.Oracle,
    "adversarial": drafters.Adversarial,
    "flaky": drafters.Flaky,
    "wide": drafters.Wide,
    "drawn": drafters.Drawn,
}
TRUTHS: list[list[int]] = []
"""Prompts with their plain answers; a drafter takes the one that begins with its prompt."""


def make_method(name: str) -> Method:
    class Knowing(KINDS[name]):  # type: ignore[name-defined,misc]
        def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
            super().begin(prompt, signals)
            known = (t for t in TRUTHS if t[: len(prompt)] == list(prompt))
            self.truth = next(known, [])

    def make() -> tuple[Drafter, Policy]:
        return Knowing(vocab=tiny_models.VOCAB), FixedPolicy(nodes=9)

    return Method(name, "a test drafter", lambda _options, _context: make)


@pytest.fixture
def knowing(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The test drafters as methods; the list takes the truths they know."""
    methods.all_methods()
    for name in KINDS:
        monkeypatch.setitem(methods._REGISTRY, name, make_method(name))
    TRUTHS.clear()
    return TRUTHS


class Passes:
    """Counts a model's passes while its hook is on."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        self._handle = model.get_input_embeddings().register_forward_pre_hook(self._one)

    def _one(self, *_: Any) -> None:
        self.count += 1

    def stop(self) -> int:
        self._handle.remove()
        return self.count


def prompt(count: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.tensor([tiny_models.random_ids(count, seed)])


def generate(model: Any, ids: torch.Tensor, speculation: Any = None, **options: Any) -> Any:
    """`model.generate` of unpadded prompts, greedy and without an end unless `options` say so."""
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 24, **options}
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, custom_generate=speculation, **options)


def learn(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    """The plain answer with `options`, told to the drafters in its unstopped form."""
    lengths = {k: v for k, v in options.items() if k not in _ENDS}
    TRUTHS.extend(generate(model, ids, **lengths).tolist())
    return generate(model, ids, **options)


_ENDS = ("eos_token_id", "stopping_criteria", "max_time")

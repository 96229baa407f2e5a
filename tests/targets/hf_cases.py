"""Models by what they can do, and how the tests of the transformers target drive them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.targets import tiny_models as tiny

from hasten.targets.transformers import TransformersTarget
from hasten.types import Rows

TREES = [
    (tiny.llama, "sdpa"),
    (tiny.llama, "eager"),
    (tiny.qwen2, "sdpa"),
    (tiny.qwen3, "sdpa"),
    (tiny.qwen3, "eager"),
    (tiny.mistral, "sdpa"),
    (tiny.mistral, "eager"),
    (tiny.gemma2, "eager"),
    (tiny.gemma3, "sdpa"),
    (tiny.gemma3, "eager"),
    (tiny.llama4, "sdpa"),
    (tiny.mixtral, "sdpa"),
    (tiny.gpt2, "sdpa"),
    (tiny.gpt2, "eager"),
]
CHAINS = [(tiny.mpt, None), (tiny.bloom, None), (tiny.lfm2, "sdpa"), (tiny.lfm2, "eager")]
PLAIN = [
    (tiny.mamba2, None),
    (tiny.falcon_mamba, None),
    (tiny.jamba, "sdpa"),
    (tiny.qwen3_next, "sdpa"),
]
WINDOWED = [(tiny.mistral, "sdpa"), (tiny.gemma3, "eager"), (tiny.llama4, "sdpa")]
PROMPT = tiny.random_ids(20, seed=1)
TREE = (-1, 0, 0, 1, 2, 4, 4, 0)
"""Root 0 with children 1, 2, 7; 1-3; 2-4; 4 with children 5, 6."""
NODES = tuple(tiny.random_ids(len(TREE), seed=2))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Passes this small lose more by waking threads than they win: 20 times on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def named(cases: list[Any]) -> Any:
    names = [f"{kind.__name__}-{attention or 'default'}" for kind, attention in cases]
    return pytest.mark.parametrize(("kind", "attention"), cases, ids=names)


@functools.cache
def target_of(kind: Any, attention: str | None) -> TransformersTarget:
    return make(tiny.build(kind, attention=attention))


def make(model: Any, **options: Any) -> TransformersTarget:
    return TransformersTarget(model, name="tiny", eos_ids=frozenset({2}), **options)


def filled(target: TransformersTarget, ids: Sequence[int] = PROMPT) -> Any:
    sequence = target.open()
    target.prefill(sequence, ids)
    return sequence


def logits_of(passed: Any) -> torch.Tensor:
    assert passed.logits is not None
    logits: torch.Tensor = passed.logits
    return logits


def run(target: TransformersTarget, sequence: Any, ids: Any, parents: Any) -> torch.Tensor:
    return logits_of(target.forward([Rows(sequence, tuple(ids), tuple(parents))])[0])


def step(target: TransformersTarget, sequence: Any, token: int) -> torch.Tensor:
    logits = run(target, sequence, [token], [-1])[0]
    target.commit(sequence, [0])
    return logits


def assert_same(got: torch.Tensor, right: torch.Tensor) -> None:
    scale = float(right.abs().max())
    torch.testing.assert_close(got, right, rtol=0, atol=1e-5 * scale)


def path_to(node: int, parents: Sequence[int] = TREE) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def assert_goes_on_like(target: TransformersTarget, sequence: Any, ids: Sequence[int]) -> None:
    """The sequence holds `ids`, and what follows is what a fresh pass says."""
    assert sequence.tokens == list(ids)
    assert (sequence.length, sequence.pending) == (len(ids), 0)
    more = tiny.random_ids(3, seed=9)
    right = tiny.fresh_logits(target.facts.model, [*ids, *more])[-3:]
    assert_same(torch.stack([step(target, sequence, token) for token in more]), right)


def use(target: TransformersTarget) -> None:
    """Every kind of pass the target allows."""
    sequence = target.open()
    target.prefill(sequence, PROMPT, taps=(0, 3))
    if target.capabilities.tree:
        target.forward([Rows(sequence, NODES[:4], TREE[:4])], taps=(1, 3))
        target.commit(sequence, [0, 2])
    target.forward([Rows(sequence, (5,), (-1,))])
    target.commit(sequence, [0])
    target.embed([3])

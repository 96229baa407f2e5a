"""``exact=True``: a target is tried at load, and refused where a row's bits depend on its pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.targets.fused_models import WEIGHTS, fused, llama, random_model
from tests.tiny_llm import make_model, make_tokenizer

import hasten
from hasten.errors import CapabilityError
from hasten.native.library import why_not_native
from hasten.targets.exactness import why_not_exact
from hasten.targets.fused_native import NativeDecoder

if (missing := why_not_native(torch.float32, torch.device("cpu"), 16)) is not None:
    pytest.skip(f"no CPU kernels here: {missing}", allow_module_level=True)


def spoiled(monkeypatch: pytest.MonkeyPatch, where: Callable[[int], bool]) -> None:
    """Kernels that give other bits to passes whose number of rows is one of those."""
    run = NativeDecoder.run

    def changed(self: NativeDecoder, hidden: torch.Tensor, *rest: Any) -> Any:
        count = len(hidden)
        out, kept, logits = run(self, hidden, *rest)
        if where(count) and logits is not None:
            logits[-1] += 1e-6 * logits[-1].abs().max()
        return out, kept, logits

    monkeypatch.setattr(NativeDecoder, "run", changed)


@pytest.mark.parametrize("weights", ["float32", "int4", "bfloat16", "bfloat16-int8-cache"])
def test_the_native_kernels_are_exact(weights: str) -> None:
    assert why_not_exact(fused(random_model(llama(head_dim=16)), **WEIGHTS[weights])) is None


@pytest.mark.parametrize(("rows", "said"), [(2, "chain of 2"), (16, "chain of 16")])
def test_other_bits_at_other_row_counts_are_found(
    rows: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = fused(random_model(llama(head_dim=16)), kernels="native")
    spoiled(monkeypatch, lambda count: count >= rows)
    assert said in str(why_not_exact(target))


@pytest.mark.parametrize(("rows", "said"), [(66, "of a tree"), (40, "of a prompt")])
def test_other_bits_in_trees_or_prompts_alone_are_found(
    rows: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = fused(random_model(llama(head_dim=16)), kernels="native")
    spoiled(monkeypatch, lambda count: count == rows)
    assert said in str(why_not_exact(target))
    assert target.bytes_in_use == 0


def test_exact_refuses_such_a_model_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = (make_model(head_dim=16), make_tokenizer())
    assert hasten.load(pair, exact=True, method="ar").target.info.kernels == "native"
    spoiled(monkeypatch, lambda count: count >= 3)
    hasten.load(pair, method="ar")
    with pytest.raises(CapabilityError, match=r"exact=True: .* isn't bit-exact here"):
        hasten.load(pair, exact=True, method="ar")


def test_exact_is_the_fused_engines() -> None:
    pair = (make_model(head_dim=16), make_tokenizer())
    with pytest.raises(hasten.HastenError, match="exact=True"):
        hasten.load(pair, exact=True, engine="transformers")

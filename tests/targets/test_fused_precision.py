"""Lower precision, other kernels, real weights, and the bits of a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tests.targets import tiny_models as tiny
from tests.targets.fused_models import (
    KINDS,
    TOLERANCE,
    chain,
    close,
    fused,
    random_model,
)

from hasten.targets import fused_weights
from hasten.targets.fused import FusedTarget
from hasten.targets.load import load_target


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["biases", "qwen3"])
def test_lower_precision_agrees_as_well_as_transformers_does(kind: str, dtype: torch.dtype) -> None:
    model, ids = random_model(KINDS[kind]), tiny.random_ids(60)
    want = tiny.fresh_logits(model, ids)
    theirs = tiny.fresh_logits(random_model(KINDS[kind]).to(dtype), ids).float()
    target = fused(model, dtype)
    sequence = target.open()
    target.prefill(sequence, ids[:50])
    out = target.forward([chain(sequence, ids[50:])], taps=(1,))[0]
    assert out.logits is not None
    assert out.logits.dtype == out.hidden[1].dtype == target.embed([1]).dtype == dtype
    ours_off, theirs_off = (x.float() - want[50:] for x in (out.logits, theirs[50:]))
    assert ours_off.norm() <= 1.5 * theirs_off.norm()


@pytest.mark.parametrize("kind", ["biases", "tied", "qwen3"])
def test_unpacked_weights_and_unfolded_norms_agree(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = random_model(KINDS[kind]), tiny.random_ids(40)
    monkeypatch.setattr(fused_weights, "can_pack", lambda *_: False)
    monkeypatch.setattr(fused_weights.Shape, "folds_norms", property(lambda _: False))
    target = fused(model)
    sequence = target.open()
    logits = target.prefill(sequence, ids, all_logits=True).logits
    close(logits, tiny.fresh_logits(model, ids))


def forced_bits(target: FusedTarget, ids: Sequence[int], start: int, rows: int) -> torch.Tensor:
    """Logits of ids[start:], run `rows` at a time after a prompt of ids[:start]."""
    sequence = target.open()
    target.prefill(sequence, ids[:start])
    logits = []
    for first in range(start, len(ids), rows):
        piece = ids[first : first + rows]
        logits.append(target.forward([chain(sequence, piece)])[0].logits)
        target.commit(sequence, range(len(piece)))
    target.close(sequence)
    return torch.cat([part for part in logits if part is not None])


def kernels_sum_in_known_order() -> bool:
    """Whether this CPU's batched product is the one `_SUM_BLOCK` and `_LEAST_ROWS` describe."""
    generator = torch.Generator().manual_seed(0)
    left = torch.rand(2, 12, 600, generator=generator)
    right = torch.randn(2, 600, 64, generator=generator)
    whole, blocks = torch.bmm(left, right), torch.zeros(2, 12, 64)
    for part, other in zip(left.split(192, 2), right.split(192, 1), strict=True):
        blocks.baddbmm_(part, other)
    few = torch.bmm(left[:, :4].contiguous(), right)
    packs = fused_weights.can_pack(torch.bfloat16, "cpu")
    return packs and torch.equal(whole, blocks) and torch.equal(few, whole[:, :4])


@pytest.mark.skipif(
    not kernels_sum_in_known_order(),
    reason="this CPU's matrix kernels sum in another order, so bits differ with the row count",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gets_the_same_bits_however_many_rows_run(smollm2: Any, dtype: torch.dtype) -> None:
    target = smollm2.target
    if dtype != torch.float32:
        target = load_target("smollm2-135m", dtype=dtype, device="cpu").target
    text = "She wrote down what ships, storms and strange birds had told her. " * 40
    ids = smollm2.tokenizer(text)["input_ids"]
    for start in (5, 185, 375):
        piece = ids[: start + 16]
        plain = forced_bits(target, piece, start, 1)
        for rows in (2, 3, 8, 16):
            assert torch.equal(forced_bits(target, piece, start, rows), plain)
        sequence = target.open()
        logits = target.prefill(sequence, piece, all_logits=True).logits
        target.close(sequence)
        assert logits is not None
        assert torch.equal(logits[start:], plain)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_gives_the_same_logits(dtype: torch.dtype) -> None:
    model, ids = random_model(), tiny.random_ids(40)
    want = tiny.fresh_logits(model, ids)
    target = fused(model, dtype, "cuda")
    sequence = target.open()
    tolerance = TOLERANCE if dtype == torch.float32 else 0.1 * float(want.abs().max())
    close(target.prefill(sequence, ids[:30], all_logits=True).logits, want[:30], tolerance)
    logits = target.forward([chain(sequence, ids[30:])])[0].logits
    close(logits, want[30:], tolerance)


def test_the_embedded_model_agrees_with_transformers(smollm2_dir: Path) -> None:
    theirs = hf.AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(smollm2_dir)
    text = "Explain tail recursion in plain words, with an example in Python. " * 3
    ids = tokenizer(text)["input_ids"]
    want = tiny.fresh_logits(theirs, ids)
    target = fused(theirs)
    sequence = target.open()
    close(target.prefill(sequence, ids[:-8], all_logits=True).logits, want[:-8])
    close(target.forward([chain(sequence, ids[-8:-1])])[0].logits, want[-8:-1])
    target.commit(sequence, range(7))
    close(target.forward([chain(sequence, ids[-1:])])[0].logits, want[-1:])

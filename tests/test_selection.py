"""Argmax and top-k are exact, whatever the dtype, size and signs; argmax ties: the lowest id."""

from __future__ import annotations

import pytest
import torch

from hasten.selection import argmax_rows, best_of_topk, topk_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
VOCABS = [1, 7, 24, 4096, 4097, 5000, 8191, 49_152]


def _logits(rows: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=gen) * 4).to(dtype)


def _reference(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
    return values[:, :k].float(), ids[:, :k]


def _check(logits: torch.Tensor, k: int) -> None:
    values, ids = topk_rows(logits, k)
    right_values, right_ids = _reference(logits, min(k, logits.shape[1]))
    assert ids.dtype == torch.int64
    assert values.dtype == torch.float32
    assert torch.equal(values, right_values)
    assert torch.equal(logits.gather(1, ids).float(), values)
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    assert argmax_rows(logits) == right_ids[:, 0].tolist()
    assert best_of_topk(values, ids, logits) == right_ids[:, 0].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_both_are_exact(vocab: int, dtype: torch.dtype) -> None:
    for rows in (1, 3, 24):
        _check(_logits(rows, vocab, dtype), 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_ties_are_no_trouble_and_argmax_takes_the_lowest_id(vocab: int, dtype: torch.dtype) -> None:
    for levels in (1, 2, 5):  # so few values that most of a row is tied
        logits = _logits(6, vocab, dtype).abs_().mul_(levels / 20).round_().add_(1)
        _check(logits, 8)
        _check(logits - 1, 8)
        _check(-logits, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_enough_positive_logits_are_exact_too(dtype: torch.dtype) -> None:
    logits = _logits(6, 5000, dtype)
    logits[0] = -logits[0].abs() - 1
    logits[1] = -logits[1].abs() - 1
    logits[1, 4321] = 3.0
    logits[2] = 0.0
    logits[3, :] = -torch.inf
    logits[4, :] = -torch.inf
    logits[4, [17, 4999]] = torch.tensor([-2.0, 5.0], dtype=dtype)
    _check(logits, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_are_sorted_like_numbers(dtype: torch.dtype) -> None:
    logits = _logits(2, 6000, dtype)
    logits[0, [5998, 40]] = torch.inf
    logits[1, :5990] = -torch.inf
    _check(logits, 8)


@pytest.mark.parametrize("k", [1, 8, 64, 200])
def test_any_number_of_candidates(k: int) -> None:
    for vocab in (50, 5000, 49_152):
        _check(_logits(3, vocab, torch.bfloat16), k)
        _check(_logits(3, vocab, torch.float32), k)


def test_candidates_in_the_last_incomplete_block_are_found() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = _logits(2, 49_152 + 5, dtype)
        logits[0, -5:] = torch.tensor([50.0, 49, 48, 47, 50], dtype=dtype)
        logits[1, -1] = 50.0
        _check(logits, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_nan_row_stays_in_the_vocabulary_and_changes_no_other_row(dtype: torch.dtype) -> None:
    logits = _logits(4, 5000, dtype)
    logits[3] = -logits[3].abs()
    clean_values, _ = topk_rows(logits, 8)
    clean_best = argmax_rows(logits)
    for nan in (torch.nan, -torch.nan):
        broken = logits.clone()
        broken[1] = nan
        broken[2, 77] = nan
        values, ids = topk_rows(broken, 8)
        best = argmax_rows(broken)
        assert bool(((ids >= 0) & (ids < 5000)).all())
        assert best[1] == -1, "a row of NaN has no choice"
        assert -1 <= best[2] < 5000
        for k in (1, 8):
            assert best_of_topk(*topk_rows(broken, k), broken) == best, "both ways agree"
        for row in (0, 3):
            assert torch.equal(values[row], clean_values[row])
            assert best[row] == clean_best[row]
        for row in range(4):  # alone as in company
            assert argmax_rows(broken[row : row + 1]) == best[row : row + 1]


def test_rows_that_are_a_view_are_read_right() -> None:
    wide = _logits(6, 10_000, torch.bfloat16)
    _check(wide[::2, 1:9001], 8)
    _check(wide.t()[:5000].t(), 8)
    _check(_logits(6, 10_000, torch.float32)[:, 999:], 8)


def test_no_rows_give_no_rows() -> None:
    values, ids = topk_rows(torch.zeros(0, 9000), 8)
    assert values.shape == ids.shape == (0, 8)
    assert argmax_rows(torch.zeros(0, 9000)) == []


def test_the_logits_are_not_changed() -> None:
    logits = -_logits(3, 9000, torch.bfloat16).abs()
    before = logits.clone()
    topk_rows(logits, 8)
    argmax_rows(logits)
    assert torch.equal(logits, before)

"""Argmax and top-k over rows of logits, exact and quick on a CPU.

torch's CPU kernels for both take a large share of a pass. Where a model runs on hasten's own
kernels, float32 rows are looked at once, by another of them. Else the bits of 16-bit logits are
compared as integers, which sort like the numbers as long as these are positive; rows where they
aren't are done again the slower way.

A row that holds NaN has no right answer: ids stay inside the vocabulary, and that is all.
"""

from __future__ import annotations

from array import array

import numpy as np
import torch

from hasten.native.library import Library, loaded

_SORTABLE = (torch.bfloat16, torch.float16, torch.float32)
_BLOCK = 128
_SHIFT = 7
"""``_BLOCK == 1 << _SHIFT``"""


def argmax_rows(logits: torch.Tensor) -> list[int]:
    """The lowest id of each row's largest logit; ``(rows, vocab)`` in any float dtype.

    -1 for a row that is broken: its largest value is NaN. (A lone NaN may go unseen in 16 bits.)
    """
    if logits.device.type != "cpu" or logits.dtype == torch.float64:
        values, places = logits.max(-1)
        out: list[int] = torch.where(values.isnan(), -1, places).tolist()
        return out
    if (kernels := _kernels(logits, 1)) is not None:
        rows, vocab = logits.shape
        lowest, values_of = array("q", bytes(8 * rows)), array("f", bytes(4 * rows))
        if not kernels.largest(
            logits.data_ptr(), rows, vocab, 1, values_of.buffer_info()[0], lowest.buffer_info()[0],
            torch.get_num_threads(),
        ):  # fmt: skip
            return lowest.tolist()
    if logits.dtype == torch.float32:
        numbers = logits.numpy()
        best = numbers.argmax(-1)
        found: list[int] = best.tolist()
        for row, value in enumerate(numbers[range(len(found)), best].tolist()):
            if value != value:
                found[row] = -1
        return found
    bits = logits.view(torch.int16).numpy()
    best = bits.argmax(-1)
    ids: list[int] = best.tolist()
    for row, top in enumerate(bits[range(len(ids)), best].tolist()):
        if not 0 < top <= _INFINITY[logits.dtype]:  # nothing positive, or NaN
            ids[row] = argmax_rows(logits[row : row + 1].float())[0]
    return ids


_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


def _kernels(logits: torch.Tensor, k: int) -> Library | None:
    """The kernels, where they are in use and can look at these rows: `Library.largest` gives 0
    unless one holds NaN, and of equal logits the lowest ids, in order."""
    fits = logits.dtype == torch.float32 and logits.device.type == "cpu" and 0 < k <= _FEW
    return loaded() if fits and logits.is_contiguous() and logits.shape[1] >= k else None


_FEW = 64
"""Candidates kept in order while a row is looked at; more are sorted faster otherwise."""


def topk_and_best(
    logits: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, list[int] | None]:
    """`topk_rows`, and `argmax_rows` where it comes with it; else None."""
    k = min(k, logits.shape[1])
    if (kernels := _kernels(logits, k)) is not None:
        rows, vocab = logits.shape
        values = torch.empty((rows, k), dtype=torch.float32)
        ids = torch.empty((rows, k), dtype=torch.int64)
        if not kernels.largest(
            logits.data_ptr(), rows, vocab, k, values.data_ptr(), ids.data_ptr(),
            torch.get_num_threads(),
        ):  # fmt: skip
            best: list[int] = ids.numpy()[:, 0].tolist()
            return values, ids, best
    return *_topk(logits, k), None


def topk_rows(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(values (rows, k) float32, ids (rows, k) int64)`` on the CPU, largest first; equal logits
    in any order (with k = 1: the lowest id). `k` beyond the vocabulary is cut to it."""
    values, ids, _ = topk_and_best(logits, k)
    return values, ids


def _topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`topk_rows` without hasten's kernels.

    On a CPU in two steps: the k blocks of ids with the largest maxima hold the k largest logits,
    and only they are searched. After a pass every operation finds cold caches, so their number
    counts more than their size; numpy's are the lighter ones.
    """
    rows, vocab = logits.shape
    if k == 1 and logits.device.type == "cpu":
        best = torch.tensor(argmax_rows(logits), dtype=torch.int64)[:, None]
        ids = best.clamp(min=0)
        values = logits.gather(1, ids.to(logits.device)).float().cpu()
        return values.masked_fill_(best < 0, torch.nan), ids
    blocks = vocab >> _SHIFT
    quick = logits.device.type == "cpu" and logits.dtype in _SORTABLE and blocks > 2 * k and rows
    if not quick or not logits.is_contiguous():
        values, ids = torch.topk(logits, k, dim=-1)
        return values.float().cpu(), ids.cpu()
    short = logits.dtype != torch.float32
    sortable = logits.view(torch.int16) if short else logits
    body = sortable[:, : blocks << _SHIFT].view(rows, blocks, _BLOCK)
    chosen = body.amax(-1).topk(k, dim=-1, sorted=False).indices.numpy()
    row = np.arange(rows)[:, None]
    found = body.numpy()[row, chosen].reshape(rows, k << _SHIFT)
    if blocks << _SHIFT < vocab:  # the last, shorter block is always searched
        found = np.concatenate([found, sortable.numpy()[:, blocks << _SHIFT :]], 1)
        chosen = np.concatenate([chosen, np.full((rows, 1), blocks)], 1)
    top, places = torch.from_numpy(found).topk(k, dim=-1)
    if short and top.numpy()[:, -1].min() <= 0:  # fewer than k positive logits: sorted otherwise
        values, ids = torch.topk(logits, k, dim=-1)
        return values.float(), ids
    at = places.numpy()
    ids = torch.from_numpy((chosen[row, at >> _SHIFT] << _SHIFT) + (at & (_BLOCK - 1)))
    return (top.view(logits.dtype).float() if short else top), ids


def best_of_topk(values: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor) -> list[int]:
    """What `argmax_rows` gives for `logits`, from their `topk_rows`, which saves looking twice."""
    top = values.numpy()
    best: list[int] = ids.numpy()[:, 0].tolist()
    if top.shape[1] == 1:
        return [-1 if nan else each for each, nan in zip(best, np.isnan(top[:, 0]), strict=True)]
    # Rows where the largest is alone need nothing more; NaN is never greater.
    for row, alone in enumerate((top[:, 0] > top[:, 1]).tolist()):
        if not alone:
            best[row] = _tied(top[row].tolist(), ids[row].tolist(), logits[row : row + 1])
    return best


def _tied(top: list[float], ids: list[int], logits: torch.Tensor) -> int:
    """The lowest id of the largest logit of one row, or -1 where it is NaN."""
    largest = top[0]
    exact = logits.dtype != torch.float64  # the values are float32
    if exact and largest == largest and top[-1] < largest:
        return min(i for value, i in zip(top, ids, strict=True) if value == largest)
    return argmax_rows(logits)[0]  # ids that tie may not be listed

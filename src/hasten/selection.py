"""Argmax and top-k over rows of logits: exact, lowest id first among equals, and quick on a CPU.

torch's CPU kernels for both take a large share of a pass. Here the bits of the logits are compared
as integers instead, which sort like the numbers as long as these are positive; rows where they
aren't are done again the slower way. What comes out for a row depends on that row alone.

A row that holds NaN has no right answer: ids stay inside the vocabulary, and that is all.
"""

from __future__ import annotations

import torch

_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_BLOCK_BYTES = 256
_SMALL = 4096
"""Rows up to this long are simply sorted."""


def argmax_rows(logits: torch.Tensor) -> list[int]:
    """The lowest id of each row's largest logit; ``(rows, vocab)`` in any float dtype."""
    if logits.device.type != "cpu" or logits.dtype == torch.float64:
        out: list[int] = logits.argmax(-1).tolist()
        return out
    if logits.dtype == torch.float32:
        found: list[int] = logits.numpy().argmax(-1).tolist()
        return found
    best = torch.from_numpy(logits.view(torch.int16).numpy().argmax(-1))
    ids: list[int] = best.tolist()
    doubtful = ~(logits.gather(1, best[:, None])[:, 0] > 0)  # nothing positive, or NaN
    for row in doubtful.nonzero()[:, 0].tolist():
        ids[row] = int(logits[row].float().numpy().argmax())
    return ids


def topk_rows(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(values (rows, k) float32, ids (rows, k) int64)`` on the CPU, largest first.

    Among equal logits the lower id comes first (on the CPU), so the first column is the argmax:
    bfloat16 logits are often equal at the top. `k` beyond the vocabulary is cut to it.
    """
    rows, vocab = logits.shape
    k = min(k, vocab)
    if logits.device.type != "cpu":
        values, ids = torch.topk(logits, k, dim=-1)
        return values.float().cpu(), ids.cpu()
    if vocab <= max(_SMALL, 256 * k) or logits.dtype not in _BITS or rows == 0:
        values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values[:, :k].float(), ids[:, :k]
    bits = logits.view(_BITS[logits.dtype])
    ids = _top_bits(bits, k)
    values = logits.gather(1, ids)
    doubtful = ~(values[:, -1] > 0)  # fewer than k positive logits, or NaN
    if bool(doubtful.any()):
        again = bits[doubtful]
        # Negative numbers sort backwards by their bits: flip all but the sign.
        again = again ^ ((again >> (8 * again.element_size() - 1)) & torch.iinfo(bits.dtype).max)
        ids[doubtful] = _top_bits(again, k)
        values = logits.gather(1, ids)
    return values.float(), ids


def _top_bits(bits: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of the k largest integers of each row, ties to the lower id.

    In two steps: the k blocks of ids with the largest maxima (ties to the lower block) hold the k
    largest, and only they, and what is left over at the row's end, are searched.
    """
    vocab = bits.shape[1]
    size = _BLOCK_BYTES // bits.element_size()
    blocks = vocab // size
    body = bits[:, : blocks * size].reshape(-1, blocks, size)
    chosen = _first_largest(body.amax(-1), k).sort(-1).values
    found = body.gather(1, chosen[..., None].expand(-1, -1, size)).flatten(1)
    if blocks * size < vocab:
        found = torch.cat([found, bits[:, blocks * size :]], 1)
    # The blocks are in order, so an earlier place among the found is a lower id.
    at = _first_largest(found, k)
    block = (at // size).clamp_(max=k - 1)
    inside = chosen.gather(1, block) * size + at % size
    return torch.where(at < k * size, inside, at + (blocks - k) * size)


def _first_largest(numbers: torch.Tensor, k: int) -> torch.Tensor:
    """Places of the k largest of each row, largest first, ties to the earlier place."""
    width = numbers.shape[1]
    keys = numbers.to(torch.int64).mul_(width).sub_(torch.arange(width))
    return keys.topk(k, -1).indices

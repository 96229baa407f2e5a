"""Does a row get the same bits whatever else is in its pass? Tried on the model itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hasten.targets.base import Target
from hasten.types import Rows

_TOKENS = 40
"""Of the text that is tried: rows beyond the sizes at which kernels change."""
_PROMPT = 7


def why_not_exact(target: Target) -> str | None:
    """Why a row's logits depend on its pass; None when they have the same bits in every way tried.

    Token by token, as chains of several lengths, as a branch of a tree beside others, and as a
    prompt. Some dozens of passes.
    """
    limit, vocabulary = target.info.context_limit, target.info.vocab_size
    count = min(_TOKENS, limit - 1)
    ids = [(2 * i + 1) * vocabulary // (2 * count) for i in range(count)]
    alone = _run(target, ids, [1] * (count - _PROMPT))
    for rows in (2, 3, 5, 8, 16, count - _PROMPT):
        if rows <= count - _PROMPT and not torch.equal(alone, _run(target, ids, [rows])):
            return f"a row of a chain of {rows} isn't what it is alone"
    if target.capabilities.tree and not torch.equal(alone, _branch(target, ids)):
        return "a row of a tree isn't what it is alone"
    if not torch.equal(alone, _prompt(target, ids)):
        return "a row of a prompt isn't what it is alone"
    return None


def _run(target: Target, ids: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Logits of all rows after the prompt, run as chains of these sizes, the last one repeated."""
    sequence = target.open()
    target.prefill(sequence, ids[:_PROMPT])
    done, logits, turn = _PROMPT, [], 0
    while done < len(ids):
        size = min(sizes[min(turn, len(sizes) - 1)], len(ids) - done)
        rows = Rows(sequence, tuple(ids[done : done + size]), tuple(range(-1, size - 1)))
        logits.append(_logits(target, rows))
        target.commit(sequence, range(size))
        done, turn = done + size, turn + 1
    target.close(sequence)
    return torch.cat(logits)


def _branch(target: Target, ids: Sequence[int]) -> torch.Tensor:
    """The same rows as every other row of a tree whose other rows are branches of one row each."""
    sequence = target.open()
    target.prefill(sequence, ids[:_PROMPT])
    tokens: list[int] = []
    parents: list[int] = []
    for i, token in enumerate(ids[_PROMPT:]):
        parent = 2 * i - 1 if i else -1
        tokens += [ids[i % _PROMPT], token]
        parents += [parent, parent]
    logits = _logits(target, Rows(sequence, tuple(tokens), tuple(parents)))
    target.close(sequence)
    return logits[1::2]


def _prompt(target: Target, ids: Sequence[int]) -> torch.Tensor:
    sequence = target.open()
    logits = target.prefill(sequence, ids, all_logits=True).logits
    target.close(sequence)
    assert logits is not None
    return logits[_PROMPT:]


def _logits(target: Target, rows: Rows) -> torch.Tensor:
    logits = target.forward([rows])[0].logits
    assert logits is not None
    return logits

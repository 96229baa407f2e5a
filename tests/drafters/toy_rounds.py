"""Rounds of a drafter against a next-token function, without the loop: what rows would say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hasten.drafters.base import DraftContext, Drafter
from hasten.drafts import check_draft
from hasten.types import Budget, Draft, Round, RowSignals

NextToken = Callable[[Sequence[int]], int]
"""The target's choice after a prefix."""

WIDE = Budget(10_000, 10_000)


def row_paths(draft: Draft) -> list[list[int]]:
    """For each row of the pass, riding ones too, the rows from the root to it."""
    parents = list(draft.tree.parents) + list(draft.extra.parents if draft.extra else ())
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if row else []), row])
    return paths


def row_tokens(draft: Draft) -> list[int]:
    """Tokens of all rows of the pass."""
    return [*draft.tree.tokens, *(draft.extra.tokens if draft.extra else ())]


def begin(drafter: Drafter, prompt: Sequence[int], after: NextToken) -> list[int]:
    """Start a request; the ids so far, the first answered token last."""
    drafter.begin(tuple(prompt), RowSignals())
    token = after(prompt)
    drafter.observe(Round(0, (token,)))
    return [*prompt, token]


def propose(drafter: Drafter, ids: Sequence[int], budget: Budget = WIDE) -> Draft:
    """A checked draft."""
    ctx = DraftContext(ids=ids, sample=None, warp=None, greedy=True)  # type: ignore[arg-type]
    draft = drafter.propose(ctx, budget)
    check_draft(draft, ids[-1], budget, 1_000_000)
    return draft


def settle(
    drafter: Drafter, ids: list[int], draft: Draft, after: NextToken, *, riding: bool = True
) -> int:
    """Verify greedily and observe; moves `ids` on and gives the number of emitted tokens.

    Without `riding` the extra rows were left out of the pass.
    """
    tokens = row_tokens(draft)
    best = [after([*ids[:-1], *(tokens[r] for r in path)]) for path in row_paths(draft)]
    kids, node, accepted, emitted = draft.tree.children(), 0, [0], [best[0]]
    while found := [k for k in kids[node] if draft.tree.tokens[k] == best[node]]:
        node = found[0]
        accepted.append(node)
        emitted.append(best[node])
    rows = best if riding else best[: len(draft.tree)]
    signals = RowSignals(topk_ids=torch.tensor(rows)[:, None])
    ids += emitted
    drafter.observe(Round(1, tuple(emitted), draft.tree, tuple(accepted), signals=signals))
    return len(emitted)


def run(
    drafter: Drafter, prompt: Sequence[int], after: NextToken, rounds: int
) -> tuple[list[Draft], list[int]]:
    """That many rounds: their drafts, and how many tokens each emitted."""
    ids = begin(drafter, prompt, after)
    drafts, lengths = [], []
    for _ in range(rounds):
        drafts.append(propose(drafter, ids))
        lengths.append(settle(drafter, ids, drafts[-1], after))
    return drafts, lengths

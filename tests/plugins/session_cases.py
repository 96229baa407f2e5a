"""Sessions of an engine that verifies greedily, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tests.plugins.fake_texts import VOCAB, NextToken

from hasten.plugins.session import EngineFacts, Session, Source, even_costs, prepare
from hasten.policies.cost_model import CostModel
from hasten.types import Draft

FREE = 0.001
"""Rows that cost nothing worth the name."""
PROMPT = (3, 5, 9, 12, 7, 31, 22, 40, 18, 5, 9)


def facts(**changes: Any) -> EngineFacts:
    return EngineFacts(**{"name": "toy", "vocab_size": VOCAB, "context_limit": 4096, **changes})


def source(
    method: str = "suffix", most: int = 6, row_cost: float = FREE, window: int = 0, **changes: Any
) -> Source:
    costs = CostModel(even_costs(row_cost))
    more = {"window": window} if window else {}
    return prepare(method, facts(**changes), most=most, costs=costs, **more)


def verified(ids: Sequence[int], draft: Draft, after: NextToken) -> list[int]:
    """What a greedy engine emits for a draft."""
    children, node, path = draft.tree.children(), 0, list(ids)
    out = []
    while True:
        token = after(path)
        out.append(token)
        path.append(token)
        kept = [kid for kid in children[node] if draft.tree.tokens[kid] == token]
        if not kept:
            return out
        node = kept[0]


def run(
    session: Session,
    count: int,
    after: NextToken,
    prompt: Sequence[int] = PROMPT,
    topk: int = 0,
) -> tuple[list[int], int]:
    """`count` tokens or a few more, and the passes they took."""
    session.begin(prompt)
    ids = [*prompt, after(prompt)]
    session.commit(ids[-1:])
    passes = 0
    while len(ids) < len(prompt) + count:
        draft = session.propose()
        assert draft.tree.tokens[0] == ids[-1]
        rows = _topk(ids, draft, after, topk) if topk else None
        new = verified(ids, draft, after)
        ids += new
        session.commit(new, rows)
        passes += 1
    session.end()
    return ids[len(prompt) :], passes


def _topk(ids: Sequence[int], draft: Draft, after: NextToken, k: int) -> torch.Tensor:
    """Rows of a chain: the target's choice, then its neighbours."""
    rows = [after([*ids, *draft.tree.tokens[1 : 1 + at]]) for at in range(len(draft.tree))]
    return torch.tensor([[(best + i) % VOCAB for i in range(k)] for best in rows])

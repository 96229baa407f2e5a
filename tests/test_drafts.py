"""What is checked in a draft, and what becomes of one that the target can't run as it is."""

from __future__ import annotations

import pytest
import torch

from hasten.drafts import check_draft, collapse, prune, without_far_rows
from hasten.errors import DrafterError
from hasten.types import Budget, Draft, DraftTree, ExtraRows

WIDE = DraftTree((9, 1, 2, 3, 4, 5), (-1, 0, 0, 1, 1, 2))
Q = torch.full((10,), 0.1)


def test_a_sound_draft_passes() -> None:
    draft = Draft(
        WIDE,
        q={0: Q, 2: Q.double()},
        extra=ExtraRows((1, 1), (5, 6)),
        frontiers=(2, 2, 1),
        sources=("a",) * 6,
        ranks=(0,) * 6,
    )
    check_draft(draft, 9, Budget(6, 2), 10)
    check_draft(Draft(DraftTree.chain(9)), 9, Budget(1, 0), 10)


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (Draft(WIDE, ranks=(0,)), "ranks"),
        (Draft(WIDE, extra=ExtraRows((1, 1), (0,))), "parent"),
        (Draft(WIDE, extra=ExtraRows((1,), (6,))), "parent"),
        (Draft(WIDE, q={0: Q[:9]}), "q must be"),
        (Draft(WIDE, q={-1: Q}), "q is given for node -1"),
        (Draft(WIDE, q={0: Q * torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 1, 1, 1])}), "token 2"),
        (Draft(WIDE, q={0: Q * torch.nan}), "no probability"),
    ],
)
def test_a_broken_draft_is_refused(draft: Draft, words: str) -> None:
    with pytest.raises(DrafterError, match=words):
        check_draft(draft, 9, Budget(8, 3), 10)


def test_a_tree_becomes_the_chain_of_first_children() -> None:
    draft = Draft(
        WIDE,
        q={0: Q, 1: 2 * Q, 2: 3 * Q},
        extra=ExtraRows((1,), (0,)),
        sources=("r", "a", "b", "c", "d", "e"),
        ranks=(0, 1, 2, 3, 4, 5),
    )
    chain = collapse(draft)
    assert chain.tree == DraftTree.chain(9, [1, 3])
    assert chain.extra is None
    assert chain.sources == ("r", "a", "c")
    assert chain.ranks == (0, 1, 3)
    assert {n: float(q[0]) for n, q in chain.q.items()} == pytest.approx({0: 0.1, 1: 0.2})


def test_a_chain_keeps_its_resumed_rows_when_its_extra_rows_go() -> None:
    draft = Draft(DraftTree.chain(9, [1, 2]), extra=ExtraRows((1,), (0,)), frontiers=(2, 1))
    assert collapse(draft) == Draft(DraftTree.chain(9, [1, 2]), frontiers=(2, 1))


def test_pruning_keeps_the_nodes_named_and_what_belongs_to_them() -> None:
    draft = Draft(WIDE, q={0: Q, 2: 2 * Q}, sources=("r", "a", "b", "c", "d", "e"))
    part = prune(draft, [2, 5])
    assert part.tree == DraftTree((9, 2, 5), (-1, 0, 1))
    assert part.sources == ("r", "b", "e")
    assert {n: float(q[0]) for n, q in part.q.items()} == pytest.approx({0: 0.1, 1: 0.2})
    assert prune(draft, []).tree == DraftTree.chain(9)
    assert prune(draft, [1, 2, 3, 4, 5]) is draft


def test_extra_rows_deeper_than_the_context_are_left_out() -> None:
    near = Draft(DraftTree.chain(9, [1]), extra=ExtraRows((2, 3), (1, 2)))
    assert without_far_rows(near, 3) is near
    assert without_far_rows(near, 2) == Draft(DraftTree.chain(9, [1]))
    plain = Draft(DraftTree.chain(9, [1, 2, 3]))
    assert without_far_rows(plain, 3) is plain

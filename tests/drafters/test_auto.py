"""`auto`'s drafter: copies first, stored candidates after, each with a rank that tells how good."""

from __future__ import annotations

import pytest
import torch
from tests.drafters.test_racer import context

from hasten.drafters.auto import Auto, Worth
from hasten.drafters.ranks import COPIED, LOGITS, copied_rank, prior
from hasten.types import Budget, Draft, DraftTree, Round, RowSignals

TEXT = [5, 6, 7, 8, 9, 5, 6, 7]


def begun(text: list[int], rows: dict[int, list[int]] | None = None) -> Auto:
    """A drafter that has read `text`; `rows` are the stored candidates by token."""
    drafter = Auto(breadth=2)
    drafter.begin(tuple(text[:-1]), RowSignals())
    store(drafter, text[:-1], rows or {})
    drafter.observe(Round(0, (text[-1],)))
    return drafter


def store(drafter: Auto, tokens: list[int], rows: dict[int, list[int]]) -> None:
    """Stored candidates of tokens, as if each had been evaluated in a round."""
    listed = torch.tensor([rows.get(token, [0, 1]) for token in tokens])
    drafter._successors.update(tokens, listed)


def draft(drafter: Auto, text: list[int], nodes: int = 9, depth: int = 9) -> Draft:
    return drafter.propose(context(text), Budget(nodes, depth))


def test_copies_come_first_and_stored_candidates_fill_the_rest() -> None:
    made = draft(begun(TEXT), TEXT)
    copies = [t for t, s in zip(made.tree.tokens, made.sources, strict=True) if s == COPIED]
    assert copies[:2] == [8, 9]
    assert made.sources[len(copies) + 1 :] == (LOGITS,) * (8 - len(copies))
    assert len(made.tree) == 9


def test_without_anything_to_copy_the_tree_is_of_stored_candidates() -> None:
    drafter = begun([1, 2, 3, 4])
    row = RowSignals(torch.tensor([[7, 3]]))
    drafter.observe(Round(1, (9,), DraftTree.chain(4), (0,), signals=row))
    assert len(draft(drafter, [1, 2, 3, 4, 9]).tree) == 1, "9 was never evaluated"
    drafter = begun([1, 2, 3, 4])
    guess = DraftTree((4, 9), (-1, 0))
    rows = RowSignals(torch.tensor([[9, 3], [7, 3]]))
    drafter.observe(Round(1, (9,), guess, (0,), signals=rows))
    assert draft(drafter, [1, 2, 3, 4, 9], nodes=3).tree.tokens == (9, 7, 3)


@pytest.mark.parametrize(("row", "agrees"), [([8, 1], 2), ([1, 8], 1), ([1, 2], 0)])
def test_a_copy_s_rank_tells_whether_the_model_proposed_it_before(
    row: list[int], agrees: int
) -> None:
    made = draft(begun(TEXT, {7: row}), TEXT)
    at = made.tree.tokens.index(8)
    assert made.sources[at] == COPIED
    assert made.ranks[at] % 3 == agrees


def test_an_agreed_copy_is_thought_better_of() -> None:
    chances = [prior(COPIED, copied_rank(1, 0.5, agrees), 1) for agrees in (0, 1, 2)]
    assert chances == sorted(set(chances))
    assert all(0 < prior(COPIED, copied_rank(99, 1.0, a), 9) < 1 for a in (0, 1, 2))


def test_budget_and_depth_are_kept() -> None:
    for nodes in (1, 2, 5, 40):
        for depth in (1, 2, 40):
            made = draft(begun(TEXT * 3), TEXT * 3, nodes, depth)
            assert len(made.tree) <= nodes
            assert max(made.tree.depths) <= depth


def test_nothing_is_drafted_after_the_end_of_an_answer() -> None:
    text = [5, 6, 7, 2, 9, 4, 5, 6, 7]
    drafter = Auto(breadth=2, eos_ids=frozenset({2}))
    drafter.begin(tuple(text[:-1]), RowSignals())
    store(drafter, text[:-1], {})
    drafter.observe(Round(0, (7,)))
    tree = draft(drafter, text).tree
    assert 2 in tree.tokens
    assert all(tree.tokens[p] != 2 for p in tree.parents[1:])
    assert 9 not in tree.tokens


def test_nothing_is_left_of_a_request() -> None:
    drafter = begun(TEXT)
    drafter.end()
    assert len(drafter._successors) == 0
    assert len(drafter._suffix._tree) == 0
    drafter.begin((1, 2), RowSignals())
    drafter.observe(Round(0, (7,)))
    assert len(draft(drafter, [1, 2, 7]).tree) == 1


# -- the module ------------------------------------------------------------------------------------


def test_a_module_that_never_helps_is_asked_now_and_then_only() -> None:
    worth = Worth()
    asked = 0
    for _ in range(200):
        if worth.ask(0):
            asked += 1
            worth.note([7, 8], [7])
        worth.learn(7)  # the others named it too
    assert asked < 60
    assert asked >= 200 // Worth.PATIENCE


def test_a_module_that_helps_again_is_asked_again() -> None:
    worth = Worth()
    for token in [5] * 100 + [8] * 100:
        if worth.ask(0):
            worth.note([7, 8], [7])
        worth.learn(token)
    assert all(_asks(worth, 8) for _ in range(10))


def _asks(worth: Worth, token: int) -> bool:
    asked = worth.ask(0)
    if asked:
        worth.note([7, 8], [7])
    worth.learn(token)
    return asked


def test_a_round_in_which_it_was_not_asked_says_nothing_about_the_module() -> None:
    worth, other = Worth(), Worth()
    worth.learn(3)
    assert worth.ask(0) == other.ask(0)
    worth.note([3], [])
    worth.learn(3)
    before = worth._helps
    worth.learn(4)
    assert worth._helps == before


def test_beside_others_a_question_must_help_more_often() -> None:
    alone, beside = Worth(0.1), Worth(0.1)
    # it helps a third of the time: enough alone, and not in a quarter of a pass
    asked = [0, 0]
    for turn in range(300):
        for at, (worth, others) in enumerate(((alone, 0), (beside, 3))):
            if worth.ask(others):
                asked[at] += 1
                worth.note([turn % 3], [])
                worth.learn(0)
    assert asked[0] > 250
    assert asked[1] < 60

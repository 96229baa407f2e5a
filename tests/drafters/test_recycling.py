"""Token recycling fills the paper's template, or its likeliest part, from the latest top-k."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tests.drafters.test_racer import context, rows

from hasten.drafters.recycling import TEMPLATE, TokenRecycling, best_paths
from hasten.drafters.successors import SuccessorTable
from hasten.types import Budget, DraftTree, Round, RowSignals


def test_the_template_is_the_papers() -> None:
    assert len(TEMPLATE) == len(set(TEMPLATE)) == 80
    assert Counter(map(len, TEMPLATE)) == {1: 8, 2: 21, 3: 25, 4: 15, 5: 8, 6: 3}
    children = Counter(path[:-1] for path in TEMPLATE)
    assert [children[(r,)] for r in range(8)] == [8, 4, 3, 2, 1, 1, 1, 1]
    assert [children[(0, r)] for r in range(8)] == [8, 3, 2, 1, 1, 1, 1, 1]
    assert (children[(0, 0, 0)], children[(0, 0, 0, 0)], children[(0, 0, 0, 0, 0)]) == (5, 3, 2)
    assert (0, 0, 0, 1, 0, 0) in TEMPLATE
    for path in TEMPLATE:  # ranks of siblings are 0, 1, 2...
        assert path[:-1] == () or path[:-1] in TEMPLATE
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in TEMPLATE


@pytest.mark.parametrize("count", [0, 1, 2, 7, 23, 63, 79, 80, 200])
def test_the_budgeted_form_is_the_likeliest_part_closed_under_parents(count: int) -> None:
    paths = best_paths(count)
    assert len(paths) == min(count, 80)
    kept = set(paths)
    assert kept <= set(TEMPLATE)
    assert all(path[:-1] in kept or len(path) == 1 for path in paths)
    assert all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in kept for path in paths)
    assert kept <= set(best_paths(count + 1))


def _full_table(vocab: int) -> SuccessorTable:
    table = SuccessorTable()
    every = torch.arange(vocab)
    table.update(every.tolist(), every[:, None] * 8 + torch.arange(8) + 1)
    return table


def test_each_node_is_the_candidate_its_path_names() -> None:
    drafter = TokenRecycling(table=_full_table(400_000))
    draft = drafter.propose(context([0]), Budget(81, 100))
    tree = draft.tree
    assert len(tree) == 81
    ranks = {}
    for node in range(1, 81):
        place = tree.tokens[node] - 8 * tree.tokens[tree.parents[node]] - 1
        assert 0 <= place < 8
        ranks[node] = (*ranks.get(tree.parents[node], ()), place)
    assert sorted(ranks.values(), key=lambda p: (len(p), p)) == list(TEMPLATE)
    assert set(draft.sources[1:]) == {"logits"}


def test_a_budget_that_changes_changes_the_template() -> None:
    drafter = TokenRecycling(table=_full_table(400_000))
    for nodes in (81, 5, 24, 1, 200):
        tree = drafter.propose(context([0]), Budget(nodes, 100)).tree
        assert len(tree) == min(nodes, 81)
    assert max(drafter.propose(context([0]), Budget(81, 2)).tree.depths) == 2


def test_unknown_rows_draft_nothing_and_what_hangs_on_them_neither() -> None:
    drafter = TokenRecycling()
    drafter.begin((5, 6), RowSignals())
    assert drafter.propose(context([5, 6]), Budget(81, 100)).tree == DraftTree.chain(6)
    drafter.begin((6,), RowSignals(topk_ids=torch.tensor([[11, 12, 13, 14, 15, 16, 17, 18]])))
    tree = drafter.propose(context([5, 6]), Budget(81, 100)).tree
    assert tree.tokens == (6, 11, 12, 13, 14, 15, 16, 17, 18)


def test_rejected_rows_are_learned_and_accepted_ones_win() -> None:
    drafter = TokenRecycling()
    drafter.begin((3,), RowSignals())
    tree = DraftTree((3, 4, 5, 4), (-1, 0, 0, 2))
    ids = torch.tensor([[10 * i + j for j in range(8)] for i in range(4)])
    drafter.observe(Round(1, (4, 9), tree, (0, 1), signals=RowSignals(topk_ids=ids)))
    assert list(drafter._table.get(5)) == ids[2].tolist()
    assert list(drafter._table.get(4)) == ids[1].tolist()


def test_the_prompt_warms_up_only_where_asked() -> None:
    assert TokenRecycling().needs.prompt
    assert not TokenRecycling(warm_up=False).needs.prompt


def test_a_request_leaves_nothing_unless_the_table_is_shared() -> None:
    own = TokenRecycling()
    own.begin((1, 2), rows([1, 2], 100))
    own.end()
    assert own.propose(context([2]), Budget(9, 9)).tree == DraftTree.chain(2)
    table = SuccessorTable(10)
    for _ in range(2):
        shared = TokenRecycling(table=table)
        shared.begin((1, 2), rows([1, 2], 100))
        shared.end()
    assert len(table) == 2
    assert len(TokenRecycling(table=table).propose(context([2]), Budget(9, 9)).tree) > 1

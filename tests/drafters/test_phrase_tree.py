"""Growing a draft tree by phrases."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.drafters.test_racer import context

from hasten import phrases
from hasten.drafters import auto
from hasten.drafters.auto import Auto
from hasten.drafters.phrase_tree import grow_phrases, usual
from hasten.drafters.racer import Racer
from hasten.drafters.ranks import PHRASE, prior
from hasten.drafters.successors import SuccessorTable
from hasten.drafters.tree_builder import TreeBuilder
from hasten.types import Budget, RowSignals

# After (1, 2) mostly 3, sometimes 7; then 4, 5, 6.
MADE = phrases.build([([1, 2], [3, 4, 5, 6])] * 9 + [([1, 2], [7, 8])] * 3)


def grown(ids: list[int], *, nodes: int = 16, depth: int = 9, **options: object) -> TreeBuilder:
    tree = TreeBuilder(ids[-1], nodes, depth)
    table = options.pop("table", SuccessorTable())
    grow_phrases(tree, MADE, table, ids, **options)  # type: ignore[arg-type]
    return tree


def paths(tree: TreeBuilder) -> set[tuple[int, ...]]:
    out: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(tree)):
        out[node] = (*out[tree.parents[node]], tree.tokens[node])
    return set(out.values()) - {()}


def test_the_likeliest_paths_come_first_and_no_more_than_asked_for() -> None:
    tree = grown([1, 2], limit=3)
    assert tree.tokens == [2, 3, 4, 5]
    assert set(tree.sources[1:]) == {PHRASE}
    assert paths(grown([1, 2], limit=9)) == {
        (3,), (3, 4), (3, 4, 5), (3, 4, 5, 6), (7,), (7, 8)
    }  # fmt: skip


def test_a_text_without_known_context_grows_nothing() -> None:
    assert grown([2]).tokens == [2]
    assert grown([5, 1]).tokens == [1]


def test_nodes_of_other_sources_are_kept_and_gone_on_from() -> None:
    tree = TreeBuilder(2, 16, 9)
    tree.add(0, 3, "copied", 5)
    grow_phrases(tree, MADE, SuccessorTable(), [1, 2], limit=2)
    assert tree.sources[1] == "copied"
    assert (3, 4) in paths(tree)
    assert len(tree) == 4  # one that was there, two of its own


def test_the_trees_bounds_hold_and_shallow_paths_go_on_beside_deep_ones() -> None:
    assert len(grown([1, 2], nodes=3)) == 3
    shallow = grown([1, 2], depth=1)
    assert paths(shallow) == {(3,), (7,)}


def test_nothing_grows_after_an_end_of_sequence_id() -> None:
    tree = TreeBuilder(2, 16, 9, {3})
    grow_phrases(tree, MADE, SuccessorTable(), [1, 2])
    assert paths(tree) == {(3,), (7,), (7, 8)}


def test_ranks_tell_share_context_length_and_agreement() -> None:
    table = SuccessorTable()
    table.update([2], torch.tensor([[3, 9]]))
    agreed, alone = grown([9, 1, 2], table=table), grown([9, 1, 2])
    assert agreed.ranks[1] == alone.ranks[1] + 2
    assert prior(PHRASE, agreed.ranks[1], 1) > prior(PHRASE, alone.ranks[1], 1)
    longer = alone.tokens.index(5)  # after 2, 3, 4: a context of three
    assert alone.ranks[longer] // 3 % 2 == 1
    assert alone.ranks[1] // 3 % 2 == 0
    for rank in range(48):
        assert 0 < prior(PHRASE, rank, 1) < 1


@pytest.mark.parametrize("drafter", [Racer(phrases=MADE), Auto(phrases=MADE)])
def test_drafters_grow_them_between_copies_and_stored_candidates(drafter: Racer | Auto) -> None:
    drafter.begin((1, 2), RowSignals())
    table = drafter._successors if isinstance(drafter, Auto) else drafter._state.successors
    table.update([1, 2], torch.tensor([[2, 5], [11, 12]]))
    draft = drafter.propose(context([1, 2]), Budget(16, 9))
    named = dict(zip(draft.tree.tokens, draft.sources, strict=True))
    assert named[3] == PHRASE
    assert named[11] == "logits"
    assert draft.tree.tokens.index(3) < draft.tree.tokens.index(11)
    drafter.end()


def test_the_usual_followers_are_those_of_the_longest_known_context() -> None:
    assert usual(MADE, [9, 1, 2]) == [3, 7]
    assert usual(MADE, [1, 2]) == [3, 7]
    assert usual(MADE, [2, 3, 4]) == [5]
    assert usual(MADE, [2]) == usual(MADE, [9, 9, 9]) == []


def test_a_module_that_says_what_phrases_say_too_is_not_thought_to_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto, "grow", lambda *args, **kwargs: {0: [(3, 0.9), (11, 0.05)]})
    for phrases_, helps in ((MADE, False), (None, True)):
        drafter = Auto(phrases=phrases_)
        monkeypatch.setattr(drafter, "_session", SimpleNamespace(runs=[None]))
        before = drafter._worth._helps
        drafter._ask(TreeBuilder(2, 16, 9), context([1, 2]), {})
        drafter._worth.learn(3)
        assert (drafter._worth._helps > before) == helps

from __future__ import annotations

from hasten.smc.forest import Forest
from hasten.smc.proposals import Lane


class Handle:
    """Stands for a sequence of a target."""


def test_lanes_of_their_own_get_chains() -> None:
    lanes = [Lane(slot, 7, Handle()) for slot in (0, 3)]
    forest = Forest(lanes, [[1, 2], [1, 2]])
    assert [(r.tokens, r.parents) for r in forest.rows()] == [((7, 1, 2), (-1, 0, 1))] * 2
    assert [r.sequence for r in forest.rows()] == [lane.sequence for lane in lanes]
    assert forest.paths == [[0, 1, 2], [0, 1, 2]]
    assert [level.of for level in forest.levels] == [[0, 1]] * 3


def test_lanes_of_one_sequence_share_rows_as_long_as_they_drafted_the_same() -> None:
    held = Handle()
    forest = Forest([Lane(slot, 7, held) for slot in range(4)])
    assert [level.of for level in forest.levels] == [[0, 0, 0, 0]]
    first = forest.grow([1, 2, 1, 2])
    assert (first.of, first.firsts) == ([0, 1, 0, 1], [0, 1])
    second = forest.grow([5, 5, 6, 5])
    assert (second.of, second.firsts) == ([0, 1, 2, 1], [0, 1, 2])
    (rows,) = forest.rows()
    assert rows.tokens == (7, 1, 2, 5, 5, 6)
    assert rows.parents == (-1, 0, 0, 1, 2, 1)
    assert forest.paths == [[0, 1, 3], [0, 2, 4], [0, 1, 5], [0, 2, 4]]
    (last,) = forest.last_rows()
    assert (last.tokens, last.parents) == ((5, 5, 6), (1, 2, 1))


def test_a_forest_grown_step_by_step_is_the_one_grown_at_once() -> None:
    held, other = Handle(), Handle()
    lanes = [Lane(0, 7, held), Lane(1, 7, held), Lane(2, 7, other)]
    drafts = [[1, 2], [1, 3], [1, 2]]
    steps, whole = Forest(lanes), Forest(lanes, drafts)
    for tokens in zip(*drafts, strict=True):
        steps.grow(tokens)
    assert steps.rows() == whole.rows()
    assert steps.paths == whole.paths
    assert steps.levels == whole.levels
    assert [level.of for level in whole.levels] == [[0, 0, 1], [0, 0, 1], [0, 1, 2]]
    assert whole.trees == [0, 0, 1]


def test_without_lanes_there_is_nothing() -> None:
    assert Forest(()).rows() == []

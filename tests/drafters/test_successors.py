"""The successor table keeps the latest candidates of each token, and no more rows than it may."""

from __future__ import annotations

import pytest
import torch

from hasten.drafters.successors import SuccessorTable


def _rows(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def test_a_token_never_evaluated_has_no_candidates() -> None:
    table = SuccessorTable()
    table.update([5], _rows([1, 2]))
    assert list(table.get(5)) == [1, 2]
    assert list(table.get(0)) == []


def test_later_rows_overwrite_earlier_ones() -> None:
    table = SuccessorTable()
    table.update([5, 6, 5], _rows([1, 2], [3, 4], [7, 8]))
    assert list(table.get(5)) == [7, 8]
    table.update([5], _rows([9, 1]))
    assert list(table.get(5)) == [9, 1]


@pytest.mark.parametrize("capacity", [None, 100])
def test_rows_of_accepted_nodes_win_over_rejected_ones(capacity: int | None) -> None:
    table = SuccessorTable(capacity)
    table.update([5, 6, 5, 5], _rows([1, 1], [2, 2], [3, 3], [4, 4]), last=(0, 2))
    assert list(table.get(5)) == [3, 3]
    assert list(table.get(6)) == [2, 2]
    table.update([5, 5], _rows([1, 1], [2, 2]), last=(0,))
    assert list(table.get(5)) == [1, 1]


def test_rows_beyond_the_tokens_are_left_out() -> None:
    table = SuccessorTable()
    table.update([5], _rows([1, 2], [3, 4]))
    assert len(table) == 1
    with pytest.raises(ValueError, match="zip"):
        table.update([5, 6], _rows([1, 2]))


def test_the_rows_written_longest_ago_go_first() -> None:
    table = SuccessorTable(capacity=3)
    table.update([1, 2, 3], _rows([10], [20], [30]))
    table.update([1], _rows([11]))  # written again: 2 is the oldest now
    table.update([4], _rows([40]))
    assert len(table) == 3
    assert [list(table.get(t)) for t in (1, 2, 3, 4)] == [[11], [], [30], [40]]
    table.update(list(range(50)), torch.arange(50)[:, None])
    assert len(table) == 3
    assert list(table.get(49)) == [49]


def test_without_a_capacity_there_are_as_many_rows_as_tokens() -> None:
    table = SuccessorTable()
    for start in range(20):
        table.update(list(range(start, start + 100)), torch.zeros(100, 8, dtype=torch.int64))
    assert len(table) == 119


def test_a_reset_forgets_and_a_fork_is_apart() -> None:
    table = SuccessorTable(4)
    table.update([1, 2], _rows([10], [20]))
    other = table.fork()
    table.reset()
    assert len(table) == 0
    assert [list(other.get(t)) for t in (1, 2)] == [[10], [20]]
    assert other.capacity == 4
    other.update([3], _rows([30]))
    assert list(table.get(3)) == []

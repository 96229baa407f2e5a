"""Several drafters in one tree."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.drafters.test_racer import context

from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.drafters.combined import Combined
from hasten.types import Budget, Draft, DraftTree, Round, RowSignals, Signals


class Fixed(BaseDrafter):
    """Proposes one tree, cut to its budget; writes down what it is told."""

    def __init__(
        self, tokens: Sequence[int], parents: Sequence[int], *, source: str = "", needs: Signals
    ) -> None:
        self.name, self.needs = source or "fixed", needs
        self._tokens, self._parents, self._source = tuple(tokens), tuple(parents), source
        self.calls: list[object] = []

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        self.calls.append(("begin", tuple(prompt)))

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        self.calls.append(budget.nodes)
        size = min(budget.nodes, len(self._tokens))
        tree = DraftTree(self._tokens[:size], self._parents[:size])
        if not self._source:
            return Draft(tree)
        return Draft(tree, sources=(self._source,) * size, ranks=tuple(range(size)))

    def observe(self, round: Round) -> None:
        self.calls.append(round)

    def end(self) -> None:
        self.calls.append("end")
        if self.name == "stubborn":
            raise KeyError("no end")


def _two() -> tuple[Fixed, Fixed]:
    one = Fixed((9, 1, 2, 3), (-1, 0, 1, 2), source="one", needs=Signals(topk=3, hidden=(2,)))
    two = Fixed(
        (9, 1, 5, 6, 2), (-1, 0, 1, 0, 1), needs=Signals(topk=8, hidden=(1, 2), prompt=True)
    )
    return one, two


def test_proposals_are_fused_and_keep_their_first_source() -> None:
    draft = Combined(_two(), name="both", shares=(1.0, 1.0)).propose(context([9]), Budget(20, 9))
    assert draft.tree == DraftTree((9, 1, 2, 3, 5, 6), (-1, 0, 1, 2, 1, 0))
    assert draft.sources == ("", "one", "one", "one", "", "")
    assert draft.ranks == (0, 1, 2, 3, 0, 0)


def test_each_gets_its_share_and_the_tree_stays_in_the_budget() -> None:
    one, two = _two()
    combined = Combined((one, two), name="both", shares=(0.5, 1.0))
    draft = combined.propose(context([9]), Budget(5, 9))
    assert (one.calls, two.calls) == ([3], [5])
    assert draft.tree == DraftTree((9, 1, 2, 5, 6), (-1, 0, 1, 1, 0))
    full = combined.propose(context([9]), Budget(2, 9))
    assert len(full.tree) == 2
    assert two.calls == [5]  # there was no room left to ask it


def test_nothing_hangs_on_a_node_that_found_no_room() -> None:
    one, two = _two()
    draft = Combined((one, two), name="both", shares=(1.0, 1.0)).propose(context([9]), Budget(5, 1))
    assert max(draft.tree.depths) == 1
    assert draft.tree.tokens == (9, 1, 6)


def test_it_needs_what_any_of_them_needs() -> None:
    needs = Combined(_two(), name="both", shares=(1.0, 1.0)).needs
    assert needs == Signals(topk=8, hidden=(1, 2), prompt=True)


def test_all_are_told_and_ended_also_when_one_fails() -> None:
    one, two = _two()
    one.name = "stubborn"
    combined = Combined((one, two), name="both", shares=(1.0, 1.0))
    combined.begin((9,), RowSignals())
    made = Round(0, (4,))
    combined.observe(made)
    with pytest.raises(KeyError, match="no end"):
        combined.end()
    assert one.calls == two.calls == [("begin", (9,)), made, "end"]

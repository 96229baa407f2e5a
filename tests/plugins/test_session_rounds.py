"""A session tells its drafter what an engine kept, from its beginning to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.plugins.fake_texts import VOCAB, register
from tests.plugins.session_cases import PROMPT, source

from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.errors import DrafterError
from hasten.plugins import session
from hasten.plugins.session import Session
from hasten.types import Budget, Draft, DraftTree, Round, RowSignals, Signals


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting takes no time: how long drafts are doesn't depend on how busy the machine is."""
    monkeypatch.setattr(session, "perf_counter", lambda: 0.0)


# -- what it is told -------------------------------------------------------------------------------


class Recorder(BaseDrafter):
    """Keeps what it is told, and drafts a tree of two branches."""

    name = "recorder"
    needs = Signals(topk=2)

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.prompts: list[tuple[int, ...]] = []
        self.first: list[RowSignals] = []
        self.ends = 0

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        self.prompts.append(tuple(prompt))
        self.first.append(signals)

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        root = ctx.ids[-1]
        tree = DraftTree((root, 10, 11, 12), (-1, 0, 1, 2))
        return Draft(tree)

    def observe(self, round: Round) -> None:
        self.rounds.append(round)

    def end(self) -> None:
        self.ends += 1


def recording(monkeypatch: pytest.MonkeyPatch) -> tuple[Session, Recorder]:
    name = register(monkeypatch, Recorder)
    session = source(name, topk=True).open()
    drafter: Any = session.drafter
    return session, drafter


def test_a_drafter_is_told_of_rounds_as_by_hastens_own_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, told = recording(monkeypatch)
    session.begin((1, 2), torch.tensor([[3, 4]]))
    session.commit([3])
    session.propose()
    rows = torch.tensor([[10, 1], [11, 1], [13, 1], [5, 1]])
    session.commit([10, 11, 13], rows)
    first, second = told.rounds
    assert told.prompts == [(1, 2)]
    assert told.first[0].topk_ids is not None
    assert (first.index, first.tree, first.accepted, first.emitted) == (0, None, (), (3,))
    assert (second.index, second.accepted, second.emitted) == (1, (0, 1, 2), (10, 11, 13))
    assert second.tree is not None
    assert second.tree.tokens == (3, 10, 11, 12)
    assert second.signals.topk_ids is rows


def test_a_draft_that_the_engine_cut_is_told_as_it_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    session, told = recording(monkeypatch)
    session.begin((1, 2))
    session.commit([3])
    session.propose()
    session.commit([10, 20], torch.tensor([[10, 1], [20, 1]]))
    assert told.rounds[1].tree is not None
    assert told.rounds[1].tree.tokens == (3, 10)
    assert told.rounds[1].accepted == (0, 1)


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [
        pytest.param([10, 30, 31], 4, id="another path than any drafted"),
        pytest.param([10, 11, 12, 40, 41], 4, id="more than was drafted"),
        pytest.param([10], 9, id="other rows than were drafted"),
    ],
)
def test_steps_that_nobody_told_of_are_caught_up_on(
    tokens: list[int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, told = recording(monkeypatch)
    session.begin((1, 2))
    session.commit([3])
    session.propose()
    session.commit(tokens, torch.zeros((rows, 2), dtype=torch.int64))
    late = told.rounds[1]
    assert (late.tree, late.accepted, late.emitted) == (None, (), tuple(tokens))
    assert late.signals.topk_ids is None
    assert session.ids == [1, 2, 3, *tokens]
    session.propose()
    session.commit([10, 5])
    assert told.rounds[2].accepted == (0, 1)


def test_nothing_committed_is_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    session, told = recording(monkeypatch)
    session.begin((1, 2))
    session.commit([])
    assert told.rounds == []


def test_only_the_end_of_a_long_prompt_is_read() -> None:
    session = source("suffix", window=8, context_limit=40).open()
    session.begin(list(range(30)))
    session.commit([1])
    assert session.ids == [*range(22, 30), 1]
    assert session.length == 31
    assert len(session.propose().tree) <= 9


# -- its life --------------------------------------------------------------------------------------


def test_a_fork_goes_on_by_itself() -> None:
    session = source("suffix").open()
    session.begin((1, 2, 3, 4, 5, 1, 2))
    session.commit([3])
    other = session.fork()
    assert other.length == session.length
    assert other.propose().tree.tokens == session.propose().tree.tokens == (3, 4, 5, 1, 2, 3, 4)
    other.commit([9])
    assert session.ids == [1, 2, 3, 4, 5, 1, 2, 3]
    assert session.propose().tree.tokens[1] == 4


def test_a_fork_of_a_long_text_knows_its_length() -> None:
    session = source("suffix", window=4).open()
    session.begin(range(10))
    session.commit([1, 2, 3])
    assert session.fork().length == session.length == 13


def test_begun_anew_it_knows_nothing_of_the_text_before() -> None:
    session = source("suffix").open()
    session.begin((1, 2, 3, 4, 1, 2))
    session.commit([3])
    session.begin((8, 9))
    session.commit([3])
    assert session.ids == [8, 9, 3]
    assert len(session.propose().tree) == 1


def test_begun_anew_it_has_ended_first_and_has_another_drafter_and_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, told = recording(monkeypatch)
    policy = session.policy
    session.begin((1, 2))
    session.begin((3, 4))
    assert told.ends == 1
    assert told.prompts == [(1, 2)]
    assert session.policy is not policy


def test_ended_twice_it_holds_nothing() -> None:
    session = source("suffix").open()
    session.begin(PROMPT)
    session.commit([1])
    session.end()
    session.end()
    assert (session.ids, session.length) == ([], 0)


class Broken(BaseDrafter):
    name = "broken"

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        raise ZeroDivisionError("of no use")


class Overlong(BaseDrafter):
    name = "overlong"

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        return Draft(DraftTree.chain(ctx.ids[-1], [1] * (budget.nodes + 5)))


class Drawing(BaseDrafter):
    name = "drawing"

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        ctx.sample(torch.ones(VOCAB), 1, 1)
        raise AssertionError("never reached")


@pytest.mark.parametrize(
    ("drafter", "says"),
    [
        (Broken, "ZeroDivisionError: of no use"),
        (Overlong, "nodes for a budget"),
        (Drawing, "drawn drafts"),
    ],
)
def test_a_drafter_that_fails_is_named(
    drafter: type, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = source(register(monkeypatch, drafter)).open()
    session.begin((1, 2))
    session.commit([3])
    with pytest.raises(DrafterError, match=f"{drafter.name}.*propose.*{says}"):
        session.propose()

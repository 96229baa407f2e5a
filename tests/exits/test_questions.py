"""What a question to the module at exit 0 costs is timed on real rounds, and leaves no trace."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hasten.builtin import auto, exit_sources
from hasten.builtin.exit_sources import Questions, exit_costs, probe_ms, question_share
from hasten.drafters.auto import GROWTH, Auto
from hasten.drafters.exit_tree import Growth
from hasten.methods import MethodContext
from tests.exits import exit_models as tiny
from tests.exits.exit_models import VOCAB
from tests.exits.layerskip import COSTS

EVEN = range(0, VOCAB, 2)


def bank() -> tiny.ExitBank:
    return tiny.bank((("deep", 0),), EVEN)


def test_every_question_follows_a_pass_and_takes_all_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, made, asked = tiny.target(), bank(), []
    ran = target.layer_rows
    grow = exit_sources.grow

    def noted(tree: object, *args: object) -> object:
        said = grow(tree, *args)  # type: ignore[arg-type]
        asked.append({tree.depths[node] for node in said})  # type: ignore[attr-defined]
        return said

    monkeypatch.setattr(exit_sources, "grow", noted)
    share = question_share(target, made, Growth(least=0.0, steps=2, mass=2.0), repeats=4)
    assert share > 0
    assert asked == [{0, 1}] * 6
    assert target.layer_rows > ran
    target.check()


def test_a_questions_rows_are_fed_as_a_rounds() -> None:
    questions = Questions(tiny.target(), bank(), 9, GROWTH)
    (run,) = questions._session.runs
    for asked in range(1, 4):
        assert questions.run_pass() > 0
        assert questions.ask() > 0
        assert run.length == 8 + asked
    questions.close()
    tiny.target().check()


def test_a_share_is_the_quartile_of_questions_over_that_of_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([900.0, 900.0, 10.0, 300.0, 11.0, 12.0])
    monkeypatch.setattr(Questions, "run_pass", lambda self: 20.0)
    monkeypatch.setattr(Questions, "ask", lambda self: next(times))
    assert question_share(tiny.target(), bank(), GROWTH, repeats=4) == 11.0 / 20.0


def test_a_failing_pass_leaves_no_sequence_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    target = tiny.target()
    close = type(target).close
    monkeypatch.setattr(type(target), "close", lambda s, q: (closed.append(q), close(s, q)))

    def fails(self: object) -> float:
        raise RuntimeError("no more")

    monkeypatch.setattr(Questions, "run_pass", fails)
    with pytest.raises(RuntimeError, match="no more"):
        question_share(target, bank(), GROWTH)
    assert len(closed) == 1


@pytest.mark.parametrize(("share", "asks"), [(0.05, True), (0.2, True), (0.21, False)])
def test_auto_asks_where_a_question_costs_little_and_must_help_as_often(
    share: float, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, target = bank(), tiny.target()
    monkeypatch.setattr(auto, "_module_at_zero", lambda target: made)
    monkeypatch.setattr(auto, "question_share", lambda *_: share)
    context = MethodContext(target, SimpleNamespace(), lambda name: (target, None), COSTS)
    drafter, _ = auto.METHODS[0].prepare(auto.AutoOptions(), context)()
    assert isinstance(drafter, Auto)
    assert (drafter._session is not None) == asks
    if asks:
        assert drafter._least == share
    off, _ = auto.METHODS[0].prepare(auto.AutoOptions(exits=False), context)()
    assert isinstance(off, Auto)
    assert off._session is None


def test_probes_are_timed_at_every_exit() -> None:
    made = tiny.bank((("deep", 0), ("adapter", 2), ("lens", 4)), EVEN)
    with torch.inference_mode():
        assert all(probe_ms(made, number, 3) > 0 for number in range(3))
    assert len(exit_costs(tiny.target(), made, COSTS, 4).probe) == 3

"""What a request's modules say depends on its text, not on how they were fed and asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from tests.exits import exit_models as tiny
from tests.exits.exit_models import LAYERS
from tests.exits.exit_requests import prompt_of

from hasten.drafters import exit_session
from hasten.drafters.exit_session import ExitSession, TorchRun
from hasten.exits.modules import ExitModule, ExitState
from hasten.types import DraftTree, Round, RowSignals

HIDDEN = 32
KINDS = [("lens", 2), ("affine", 2), ("adapter", 2), ("deep", 0), ("deep", 4)]
TEXT = prompt_of(3, 24)


def states(tokens: Sequence[int] = TEXT) -> dict[int, torch.Tensor]:
    """The target's states of a text after every layer, by one whole pass."""
    target = tiny.target()
    sequence = target.open()
    hidden = target.prefill(sequence, tokens, taps=range(LAYERS + 1)).hidden
    target.close(sequence)
    return dict(hidden)


def rows(hidden: Mapping[int, torch.Tensor], start: int, stop: int) -> dict[int, torch.Tensor]:
    return {layer: value[start:stop] for layer, value in hidden.items()}


def module(kind: str, layer: int) -> ExitModule:
    return tiny.module(tiny.config(kind, layer, HIDDEN))


def runner(kind: str, layer: int) -> TorchRun:
    return TorchRun(module(kind, layer), tiny.target().ends().embeddings)


def whole(kind: str, layer: int, tokens: Sequence[int] = TEXT) -> torch.Tensor:
    """The module's outputs at every row of a text, ``(rows, hidden)``, in one go."""
    made, hidden = module(kind, layer), states(tokens)
    features = None
    if made.config.deep:
        fused = made.fused([hidden[at] for at in made.config.deep])
        features = torch.cat([torch.zeros_like(fused[:1]), fused[:-1]])
    given = hidden[layer] if layer else tiny.target().embed(tokens)
    return made.run(ExitState(), given, features, verified=len(tokens), want=len(tokens))


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.fixture(autouse=True)
def _inference() -> object:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("step", [1, 3, 7, 23])
@pytest.mark.parametrize(("kind", "layer"), KINDS)
def test_rows_fed_in_any_pieces_and_asked_at_any_time_say_the_same(
    kind: str, layer: int, step: int
) -> None:
    hidden, wanted, at_work = states(), whole(kind, layer), runner(kind, layer)
    for start in range(0, len(TEXT) - 1, step):
        stop = min(start + step, len(TEXT) - 1)
        at_work.feed(TEXT[start:stop], rows(hidden, start, stop))
        root = hidden[layer][stop : stop + 1] if layer else None
        for _ in range(1 + stop % 2):  # asked twice: the same
            close(at_work.first(TEXT[stop], root), wanted[stop : stop + 1])


@pytest.mark.parametrize(("kind", "layer"), KINDS[2:])
def test_shadows_and_questions_in_turns_leave_each_other_alone(kind: str, layer: int) -> None:
    hidden, wanted, at_work = states(), whole(kind, layer), runner(kind, layer)
    at_work.feed(TEXT[:5], rows(hidden, 0, 5))
    for start in range(5, len(TEXT) - 4, 3):
        root = hidden[layer][start : start + 1] if layer else None
        if start % 2:  # the queue was emptied by the question, or is longer than what is asked for
            close(at_work.first(TEXT[start], root), wanted[start : start + 1])
        at_work.feed(TEXT[start : start + 3], rows(hidden, start, start + 3))
        close(at_work.verified(3), wanted[start : start + 3])


@pytest.mark.parametrize(("kind", "layer"), [("adapter", 2), ("deep", 0), ("deep", 4)])
def test_drafted_rows_leave_no_trace_once_the_round_is_over(kind: str, layer: int) -> None:
    hidden, wanted, at_work = states(), whole(kind, layer), runner(kind, layer)
    for at in range(1, 11):
        at_work.feed(TEXT[at - 1 : at], rows(hidden, at - 1, at))
        root = hidden[layer][at : at + 1] if layer else None
        above = at_work.first(TEXT[at], root)
        close(above, wanted[at : at + 1])
        for depth in (1, 2, 3):  # guesses that come to nothing
            state = torch.randn(1, HIDDEN) if layer else None
            above = at_work.more([7 * depth], state, above, (depth,))


def test_an_adapter_sees_drafted_rows_as_it_will_see_them_verified() -> None:
    # its states are the target's own, so a right draft looks like the text itself
    hidden, wanted, at_work = states(), whole("adapter", 2), runner("adapter", 2)
    at_work.feed(TEXT[:9], rows(hidden, 0, 9))
    above = at_work.first(TEXT[9], hidden[2][9:10])
    for depth in (1, 2, 3):
        row = 9 + depth
        above = at_work.more([TEXT[row]], hidden[2][row : row + 1], above, (depth,))
        close(above, wanted[row : row + 1])


def test_a_text_known_from_its_middle_on_is_that_text_alone() -> None:
    # an earlier turn's rows aren't run again: positions and features start at what is given
    hidden = states()
    for kind, layer in (("adapter", 2), ("deep", 4)):
        session = ExitSession(tiny.bank([(kind, layer)]))
        taps = session.bank.taps
        session.begin(TEXT[:-1], RowSignals(hidden={at: hidden[at][10:-1] for at in taps}))
        (run,) = session.runs
        fresh = runner(kind, layer)
        fresh.module = run.module
        fresh.feed(TEXT[10:-1], rows(hidden, 10, len(TEXT) - 1))
        root = hidden[layer][-1:]
        close(run.first(TEXT[-1], root), fresh.first(TEXT[-1], root))
        assert run.length == len(TEXT) - 11


def test_a_session_without_any_signals_still_answers() -> None:
    session = ExitSession(tiny.bank([("deep", 0), ("adapter", 2)]))
    session.begin(TEXT, RowSignals())
    for run in session.runs:
        state = None if run.config.layer == 0 else states()[2][-1:]
        assert session.logits(run, run.first(TEXT[-1], state)).isfinite().all()


def test_kept_nodes_of_a_tree_are_fed_along_their_path() -> None:
    session = ExitSession(tiny.bank([("adapter", 2)]))
    hidden = states()
    session.begin(TEXT[:4], RowSignals(hidden={2: hidden[2][:4]}))
    # node 2, then 4, are kept; 1 and 3 were other guesses
    tree = DraftTree((TEXT[4], 90, TEXT[5], 91, TEXT[6]), (-1, 0, 0, 2, 2))
    order = torch.tensor([4, 20, 5, 21, 6])
    signals = RowSignals(hidden={2: hidden[2][order]})
    session.observe(
        Round(1, (TEXT[5], TEXT[6], TEXT[7]), tree=tree, accepted=(0, 2, 4), signals=signals)
    )
    run = session.runs[0]
    alone = TorchRun(run.module, tiny.target().ends().embeddings)
    alone.feed(TEXT[:7], rows(hidden, 0, 7))
    close(run.first(TEXT[7], hidden[2][7:8]), alone.first(TEXT[7], hidden[2][7:8]))


@pytest.mark.parametrize(("kind", "layer"), KINDS[2:])
def test_rows_wait_until_they_are_many_and_then_say_the_same(
    kind: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_session, "MOST_WAITING", 8)
    hidden, wanted, at_work = states(), whole(kind, layer), runner(kind, layer)
    waiting = []
    for start in range(0, 20, 4):
        at_work.feed(TEXT[start : start + 4], rows(hidden, start, start + 4))
        waiting.append(start + 4 - at_work.length)
    assert waiting == [4, 8, 4, 8, 4]
    root = hidden[layer][20:21] if layer else None
    close(at_work.first(TEXT[20], root), wanted[20:21])


def test_a_prompt_is_put_in_before_the_first_draft() -> None:
    session = ExitSession(tiny.bank([("deep", 0), ("adapter", 2), ("lens", 4)]))
    session.begin(TEXT, RowSignals(hidden={at: states()[at] for at in session.bank.taps}))
    assert [run.length for run in session.runs] == [len(TEXT), len(TEXT), 0]


def test_a_session_that_ended_holds_nothing() -> None:
    session = ExitSession(tiny.bank([("adapter", 2)], range(0, 199, 2)))
    session.begin(TEXT, RowSignals(hidden={2: states()[2]}))
    assert len(session.head.ids) > 100
    session.end()
    assert session.runs == []
    assert len(session.head.ids) == 100

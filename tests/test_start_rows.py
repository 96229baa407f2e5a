"""Start rows: what a model says after each token alone, made once, kept, shipped, and drafted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hasten import methods, start_rows
from hasten.drafters.racer import Racer, RacerState
from hasten.drafters.recycling import TokenRecycling
from hasten.drafters.successors import SuccessorTable
from hasten.errors import CapabilityError
from hasten.methods import MethodContext
from hasten.targets.catalog import resolve
from hasten.types import Budget, DraftTree, RowSignals, SamplingParams
from tests.conformance.harness import COSTS, load_other, prompt_of, run
from tests.conformance.toy_target import ToyTarget, ToyTokenizer
from tests.drafters.test_racer import context, propose

ROWS = np.arange(1000)[:, None] * 8 % 1000 + np.arange(8) + 1  # of token t: 8t + 1, 8t + 2...


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# -- making and keeping ----------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 5, 24, 100])
def test_each_row_is_what_the_model_says_after_the_context_and_the_token(batch: int) -> None:
    target = ToyTarget()
    seen: list[tuple[int, int]] = []
    rows = start_rows.build(target, 3, batch=batch, progress=lambda *x: seen.append(x))
    for token in range(24):
        logits = target.logits_after([3, token])
        assert rows[token].tolist() == torch.topk(logits, 8).indices.tolist()
    assert rows.dtype == np.int32
    assert seen[-1] == (24, 24)
    assert target.live == []


def test_a_target_without_tree_masks_is_refused_and_an_error_leaves_nothing_open() -> None:
    with pytest.raises(CapabilityError, match="branches"):
        start_rows.build(ToyTarget(tree=False), 3)
    target = ToyTarget()

    def fail(passes: int) -> None:
        raise RuntimeError("no power")

    target.before_pass = fail
    with pytest.raises(RuntimeError, match="no power"):
        start_rows.build(target, 3)
    assert target.live == []


def test_kept_rows_come_back_for_these_weights_only() -> None:
    info = ToyTarget().info
    rows = start_rows.build(ToyTarget(), 3)
    assert start_rows.load(info) is None
    path = start_rows.save(info, rows)
    loaded = start_rows.load(info)
    assert loaded is not None
    assert np.array_equal(loaded, rows)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert start_rows.load(replace(info, fingerprint="other")) is None
    assert start_rows.load(replace(info, fingerprint="")) is None
    assert start_rows.load(replace(info, vocab_size=25)) is None
    assert start_rows.load(replace(info, dtype=torch.bfloat16)) is not None


def test_rows_without_candidates_are_left_out() -> None:
    info = ToyTarget().info
    start_rows.save(info, np.zeros((24, 0), dtype=np.int32))
    assert start_rows.load(info) is None


def test_ids_outside_the_vocabulary_are_left_out() -> None:
    info = ToyTarget().info
    start_rows.save(info, np.full((24, 8), 24, dtype=np.int32))
    assert start_rows.load(info) is None


def test_large_vocabularies_are_kept_whole() -> None:
    info = replace(ToyTarget().info, vocab_size=70_000)
    rows = np.full((70_000, 8), 69_999, dtype=np.int32)
    start_rows.save(info, rows)
    loaded = start_rows.load(info)
    assert loaded is not None
    assert np.array_equal(loaded, rows)


def test_the_context_is_a_line_break_where_that_is_one_id() -> None:
    class Lines:
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [9] if text == "\n" else [1, 2]}

    assert start_rows.context_token(Lines(), frozenset({5, 7})) == 9
    assert start_rows.context_token(ToyTokenizer(), frozenset({5, 7})) == 5
    assert start_rows.context_token(None, frozenset()) == 0


def test_the_embedded_models_rows_are_shipped_for_its_weights() -> None:
    info = replace(
        ToyTarget().info, fingerprint=resolve("smollm2-135m").fingerprint, vocab_size=49_152
    )
    rows = start_rows.load(info)
    assert rows is not None
    assert rows.shape == (49_152, 8)
    assert all(len(set(row)) == 8 for row in rows[::501].tolist())


# -- drafting --------------------------------------------------------------------------------------


def test_a_token_not_seen_yet_is_drafted_by_its_start_row() -> None:
    table = SuccessorTable(start=ROWS)
    assert list(table.get(5)) == []
    assert list(table.first(5)) == list(range(41, 49))
    assert list(table.first(1000)) == []
    assert len(table) == 0
    for drafter in (Racer(start=ROWS), TokenRecycling(start=ROWS)):
        drafter.begin((5,), RowSignals())
        draft = drafter.propose(context([5]), Budget(9, 9))
        assert draft.tree.tokens[1] == 41
        assert set(draft.sources[1:]) == {"start"}


def test_what_was_seen_comes_before_start_rows() -> None:
    drafter = Racer(ngram=0, start=ROWS)
    drafter.begin((5,), RowSignals(topk_ids=torch.tensor([[11, 12, 13, 14, 15, 16, 17, 18]])))
    draft = propose(drafter, [5], 12)
    assert draft.tree.tokens[1:9] == (11, 12, 13, 14, 15, 16, 17, 18)
    assert draft.sources == ("", *["logits"] * 8, *["start"] * 3)
    assert draft.tree.tokens[9:] == (89, 90, 91)


def test_start_rows_are_no_part_of_what_is_learned() -> None:
    state = RacerState(successors=SuccessorTable(10, ROWS))
    state.successors.update([5], torch.tensor([[1, 2]]))
    for after in (state.fork(), state):
        after.reset()
        assert len(after.successors) == 0
        assert list(after.successors.first(5)) == list(range(41, 49))
    drafter = Racer(start=ROWS)
    drafter.end()
    assert list(drafter._state.successors.first(5)) == list(range(41, 49))


@pytest.mark.parametrize("method", ["racer", "recycling", "auto", "racer,scope=session"])
def test_methods_use_start_rows_where_there_are_some_and_answers_stay_plain(method: str) -> None:
    target = ToyTarget(eos_ids=())
    prepared = MethodContext(target, ToyTokenizer(), load_other, COSTS)
    params = SamplingParams(max_new_tokens=40)
    sources: dict[bool, set[str]] = {}
    for kept in (False, True):
        if kept:
            start_rows.save(target.info, start_rows.build(target, 3))
        drafter, policy = methods.prepare(methods.parse(method), prepared)()
        got = run(target, prompt_of(3), params, drafter, policy=policy)
        assert got.tokens == target.plain(prompt_of(3), params)
        sources[kept] = {source for r in got.rounds for source in r.sources}
    assert "start" not in sources[False]
    assert "start" in sources[True]


@pytest.mark.parametrize("method", ["racer,start=off", "racer:paper", "recycling:paper"])
def test_start_rows_can_be_switched_off(method: str) -> None:
    target = ToyTarget()
    start_rows.save(target.info, start_rows.build(target, 3))
    prepared = MethodContext(target, ToyTokenizer(), load_other, COSTS)
    drafter, _ = methods.prepare(methods.parse(method), prepared)()
    drafter.begin((5,), RowSignals())
    assert drafter.propose(context([5]), Budget(9, 9)).tree == DraftTree.chain(5)

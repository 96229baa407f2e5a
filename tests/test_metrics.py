"""Rounds -> figures: tokens are conserved, rates are rates, units are what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hasten.metrics import Summary
from hasten.types import DraftTree, Round, Times

PREFILL = Round(0, (7,), times=Times(total=2.0, target=1.5))
WIDE = Round(  # node 2, then 3: both kept
    1,
    (3, 5, 8),
    tree=DraftTree((7, 2, 3, 5), (-1, 0, 0, 2)),
    accepted=(0, 2, 3),
    sources=("root", "a", "b", "b"),
    times=Times(total=1.0, draft=0.25, target=0.5, topk=0.125, draft_model=0.125),
)
CHAIN = Round(
    2,
    (1, 2),
    tree=DraftTree.chain(8, [1, 9, 9]),
    accepted=(0, 1),
    times=Times(total=0.5, target=0.25),
)
PLAIN = Round(3, (4,), tree=DraftTree.chain(2), accepted=(0,), times=Times(total=0.5, target=0.5))
SHORT = Round(4, (6, 6), tree=DraftTree.chain(4, [6]), accepted=(0, 1))
ALL = (PREFILL, WIDE, CHAIN, PLAIN, SHORT)


def test_tokens_are_conserved() -> None:
    summary = Summary.of(ALL)
    assert summary.new_tokens == sum(len(r.emitted) for r in ALL) == 9
    assert summary.rounds == 5
    assert summary.target_passes == 4
    assert summary.pass_tokens == 8
    assert summary.accepted_lengths == {3: 1, 2: 2, 1: 1}
    assert (summary.drafted, summary.accepted, summary.draft_rounds) == (7, 4, 3)


def test_the_prefill_counts_in_no_decode_figure() -> None:
    summary = Summary.of([PREFILL])
    assert summary.new_tokens == 1
    assert summary.mean_accepted_length == 1.0
    assert summary.tokens_per_s == 0.0
    assert summary.time_to_first_token_s == 2.0
    assert summary.end_to_end_s == 2.0


def test_rates_and_lengths() -> None:
    summary = Summary.of(ALL)
    assert summary.mean_accepted_length == 2.0
    assert summary.acceptance_rate == pytest.approx(4 / 7)
    assert summary.depth_drafted == {1: 3, 2: 2, 3: 1}
    assert summary.depth_accepted == {1: 3, 2: 1}


def test_conditional_acceptance_counts_only_rounds_where_something_was_drafted_below() -> None:
    # depth 2 was tried in WIDE (kept) and CHAIN (refused), not in SHORT
    assert Summary.of(ALL).conditional_acceptance() == {1: 1.0, 2: 0.5}
    # the kept node of a wide draft may have nothing below it although another node has
    other = Round(1, (2, 8), tree=DraftTree((7, 2, 3, 5), (-1, 0, 0, 2)), accepted=(0, 1))
    assert Summary.of([other]).conditional_acceptance() == {1: 1.0}


def test_sources_are_counted_without_the_root() -> None:
    summary = Summary.of(ALL)
    assert summary.source_drafted == {"a": 1, "b": 2}
    assert summary.source_accepted == {"b": 2}


def test_times_are_decode_only_and_split_without_overlap() -> None:
    summary = Summary.of(ALL)
    assert summary.decode_s == 2.0
    assert summary.tokens_per_s == 4.0
    assert summary.end_to_end_s == 4.0
    assert WIDE.times.host == 0.25
    assert summary.per_pass_ms("target") == 1e3 * 1.25 / 4
    assert summary.per_pass_ms("host") == 1e3 * 0.5 / 4
    assert summary.per_pass_ms("decode") == 500.0
    assert Summary().per_pass_ms("topk") == 0.0


def test_host_time_is_never_negative() -> None:
    assert Times(total=1.0, target=1.5).host == 0.0


def test_layer_rows_are_counted_per_round_without_the_prefill() -> None:
    layers = 6
    trees = [replace(each, layer_rows=layers * len(each.tree or ())) for each in ALL[1:]]
    summary = Summary.of([replace(PREFILL, layer_rows=600), *trees])
    assert summary.layer_rows == layers * (summary.drafted + summary.target_passes) == 66
    assert summary.layer_rows_per_round == 66 / 4
    assert Summary.of([PREFILL]).layer_rows_per_round == 0.0


def test_merging_is_as_adding_all_rounds() -> None:
    merged = Summary.of(ALL[:2])
    merged.merge(Summary.of(ALL[2:]))
    assert merged == Summary.of(ALL)


def test_nothing_drafted_is_plain_decoding() -> None:
    summary = Summary.of([PREFILL, PLAIN])
    assert summary.mean_accepted_length == 1.0
    assert summary.acceptance_rate == 0.0
    assert summary.conditional_acceptance() == {}
    assert Summary().mean_accepted_length == 1.0

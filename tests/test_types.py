"""The data passed around: checked when made, frozen afterwards."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from hasten.errors import DrafterError, HastenError, OptionError
from hasten.types import Budget, Draft, DraftTree, Round, SamplingParams


def test_a_tree_knows_depths_children_and_paths() -> None:
    tree = DraftTree((9, 1, 2, 3, 4), (-1, 0, 0, 2, 3))
    assert tree.depths == (0, 1, 1, 2, 3)
    assert tree.children() == [[1, 2], [], [3], [4], []]
    assert tree.path(4) == [0, 2, 3, 4]
    assert tree.path(0) == [0]
    assert len(tree) == 5
    assert not tree.is_chain


def test_a_chain_is_a_tree() -> None:
    assert DraftTree.chain(9, [1, 2]) == DraftTree((9, 1, 2), (-1, 0, 1))
    assert DraftTree.chain(9).is_chain
    assert DraftTree.chain(9, [1, 2]).is_chain


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [((), ()), ((1,), (0,)), ((1, 2), (-1,)), ((1, 2), (-1, 1)), ((1, 2), (-1, -1)), ((1,), ())],
)
def test_a_broken_tree_is_refused(tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
    with pytest.raises(DrafterError):
        DraftTree(tokens, parents)


def test_data_is_frozen_and_takes_no_stray_attributes() -> None:
    for data in (DraftTree.chain(1), SamplingParams(), Round(0, ()), Draft(DraftTree.chain(1))):
        name = dataclasses.fields(data)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(data, name, None)
        with pytest.raises((AttributeError, TypeError)):
            data.stray = 1  # type: ignore[union-attr]
    assert Budget(2, 1) == Budget(2, 1)


BAD: list[tuple[str, Any]] = [
    ("max_new_tokens", -1),
    ("max_new_tokens", 1.5),
    ("max_new_tokens", True),
    ("max_new_tokens", None),
    ("max_new_tokens", "9"),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", None),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", -1),
    ("min_p", -0.1),
    ("min_p", 1.01),
    ("repetition_penalty", 0.0),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("no_repeat_ngram_size", -1),
    ("bad_words_ids", [[]]),
    ("bad_words_ids", [3]),
    ("bad_words_ids", 3),
    ("min_new_tokens", -1),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [3]),
    ("stop", 3),
    ("stop_token_ids", 3),
    ("logit_bias", [1, 2]),
    ("logit_bias", 3),
    ("processors", print),
    ("seed", 1.0),
    ("seed", True),
    ("logprobs", -1),
    ("logprobs", 1.5),
]


@pytest.mark.parametrize(("option", "value"), BAD)
def test_a_bad_option_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        SamplingParams(**{option: value})
    assert caught.value.option == option
    assert option in str(caught.value)
    assert isinstance(caught.value, (HastenError, ValueError))


def test_contradicting_lengths_are_refused() -> None:
    with pytest.raises(OptionError, match="min_new_tokens"):
        SamplingParams(max_new_tokens=3, min_new_tokens=4)


def test_what_is_convenient_to_write_is_accepted() -> None:
    params = SamplingParams(
        stop="END",
        stop_token_ids=[3],
        bad_words_ids=[[1], [2, 3]],
        logit_bias=None,
        processors=None,
    )  # type: ignore[arg-type]
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3,)
    assert params.bad_words_ids == ((1,), (2, 3))
    assert params.logit_bias == {}
    assert params.processors == ()
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]


def test_what_was_given_may_change_afterwards_without_harm() -> None:
    bias, stop = {1: 2.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)  # type: ignore[arg-type]
    bias[1], stop[0] = 5.0, "b"
    assert params.logit_bias == {1: 2.0}
    assert params.stop == ("a",)


def test_temperature_zero_is_greedy() -> None:
    assert SamplingParams().is_greedy
    assert SamplingParams(temperature=0.0, top_p=0.5).is_greedy
    assert not SamplingParams(temperature=1e-3).is_greedy


@pytest.mark.parametrize(
    "edge", [{"top_p": 1}, {"min_p": 0}, {"min_p": 1}, {"presence_penalty": 2}]
)
def test_edges_of_ranges_are_allowed(edge: dict[str, float]) -> None:
    SamplingParams(**edge)  # type: ignore[arg-type]

from __future__ import annotations

import logging
import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from hasten.errors import CapabilityError, OptionError, VocabularyError
from hasten.exits import store
from hasten.methods import MethodContext
from hasten.smc.exit_proposal import ExitProposal
from hasten.smc.options import (
    LEAST_ALPHA,
    MOST_ALPHA,
    SMCOptions,
    check_mix,
    draft_temperature,
    ending_share,
    prepare,
)
from hasten.smc.proposals import ModelProposal
from hasten.smc.weights import powered
from tests.conformance.toy_target import ToyTokenizer
from tests.exits import exit_models as tiny
from tests.exits.exit_requests import EVEN
from tests.smc.requests import near, toy


class Others(ToyTokenizer):
    """The same letters by other ids."""

    letters = ToyTokenizer.letters[::-1]


def context(target: Any = None, other: Any = None, tokenizer: Any = None) -> MethodContext:
    other = other or near()
    loaded = (other, tokenizer or ToyTokenizer())
    return MethodContext(target or toy(), ToyTokenizer(), lambda name: loaded)


@pytest.fixture
def modules(tmp_path: Any) -> str:
    """Modules of the tiny fused target, over half of its vocabulary."""
    made = tiny.config("deep", 0, 32), tiny.config("adapter", 2, 32)
    tensors = [(each, tiny.near_tensors(each)) for each in made]
    store.save(tmp_path, "tiny", list(EVEN), tensors, {})
    return str(tmp_path)


def test_every_option_says_what_it_is_for() -> None:
    assert all(field.metadata["help"] for field in fields(SMCOptions))


@pytest.mark.parametrize(
    "wrong",
    [
        {"particles": 0},
        {"particles": 257},
        {"length": 0},
        {"draft": "eagle"},
        {"draft_temperature": 0.0},
        {"draft_temperature": float("nan")},
        {"mix": 1.0},
        {"ending": 1.0},
        {"alpha": 0.0},
        {"alpha": float("inf")},
        {"alpha": 1e300},
        {"alpha": 1e-300},
        {"threshold": -0.1},
        {"resampler": "coin"},
        {"first_token": "none"},
        {"population": "one"},
        {"vocabulary": "some"},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(OptionError, match=rf"^smc\.{name}: must be"):
        SMCOptions(**wrong)


@pytest.mark.parametrize("option", ["draft_temperature", "threshold"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
def test_a_number_without_end_is_told_to_be_finite(option: str, value: float) -> None:
    with pytest.raises(OptionError, match=rf"^smc\.{option}: must be finite"):
        SMCOptions(**{option: value})


@pytest.mark.parametrize("alpha", [LEAST_ALPHA, MOST_ALPHA])
def test_every_power_allowed_has_a_law(alpha: float) -> None:
    log_p = torch.log_softmax(torch.tensor([[3e4, 0.0, -3e4, -math.inf]]), 1)
    law, totals = powered(log_p, alpha)
    assert float(law.exp().sum()) == pytest.approx(1)
    assert bool(torch.isfinite(totals).all())


def test_its_one_exit_is_told_as_one() -> None:
    told = {field.name: field.metadata["help"] for field in fields(SMCOptions)}["exits"]
    assert "+" not in told


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"draft": "draft-model"}, "smc.model: is missing"),
        ({"draft": "draft-model", "model": "m", "exits": "2"}, "smc.exits: plays no part"),
        ({"draft": "self", "model": "m"}, "smc.model: plays no part"),
        ({"draft": "self", "vocabulary": "reduced"}, "smc.vocabulary: plays no part"),
        ({"head": "own", "vocabulary": "reduced"}, "smc.vocabulary: plays no part"),
    ],
    ids=str,
)
def test_options_that_play_no_part_are_refused_by_name(options: Any, named: str) -> None:
    with pytest.raises(OptionError, match=named):
        prepare(SMCOptions(**options), context())


def test_each_request_gets_a_proposal_of_its_own() -> None:
    for options in (SMCOptions(draft="self"), SMCOptions(draft="draft-model", model="m")):
        make = prepare(options, context())
        assert isinstance(make(), ModelProposal)
        assert make() is not make()


def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(VocabularyError):
        prepare(SMCOptions(draft="draft-model", model="m"), context(tokenizer=Others()))


def test_exits_draft_the_whole_vocabulary_unless_told_otherwise(modules: str) -> None:
    target = tiny.target()
    for changes, layer, full in (
        ({}, 0, True),
        ({"exits": "2"}, 2, True),
        ({"vocabulary": "reduced"}, 0, False),
    ):
        options = SMCOptions(**{"modules": modules, **changes})
        proposal = prepare(options, context(target))()
        assert isinstance(proposal, ExitProposal)
        assert proposal._config.layer == layer
        assert proposal.full_support is full
        assert check_mix(options, proposal) == (0.0 if full else 0.05)
    own = prepare(SMCOptions(head="own", exits="3"), context(target))()
    assert own.full_support


def test_exits_draft_cooler_than_the_request_unless_told_otherwise() -> None:
    exits, other = SMCOptions(), SMCOptions(draft="self")
    assert draft_temperature(exits, 0.8) == pytest.approx(0.48)
    assert draft_temperature(other, 0.8) == 0.8
    assert draft_temperature(replace(exits, draft_temperature=1.3), 0.8) == 1.3
    with pytest.raises(OptionError, match="draft_temperature"):
        draft_temperature(replace(exits, draft_temperature=0.01), 0.8)
    assert draft_temperature(replace(exits, draft_temperature=0.01, mix=0.1), 0.8) == 0.01


def test_exits_draft_ends_now_and_then_unless_told_otherwise() -> None:
    exits, other = SMCOptions(), SMCOptions(draft="self")
    assert (ending_share(exits), ending_share(other)) == (0.1, 0.0)
    assert ending_share(replace(exits, ending=0.0)) == 0.0
    assert ending_share(replace(other, ending=0.3)) == 0.3


def test_a_reduced_vocabulary_without_mixing_is_refused(modules: str) -> None:
    options = SMCOptions(modules=modules, vocabulary="reduced", mix=0.0)
    with pytest.raises(OptionError, match=r"smc\.mix: is 0.*vocabulary=whole"):
        prepare(options, context(tiny.target()))


def test_targets_that_cannot_hold_a_population_are_refused() -> None:
    target = toy()
    target.capabilities = replace(target.capabilities, fork=False)
    with pytest.raises(CapabilityError, match="can't be forked"):
        prepare(SMCOptions(draft="self"), context(target))
    unlayered = toy(layer_ranges=False)
    with pytest.raises(CapabilityError, match="can't exit early"):
        prepare(SMCOptions(), context(unlayered))


def test_a_target_that_packs_nothing_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        prepare(SMCOptions(draft="self"), context(toy(packed=False)))
    assert "take turns" in caplog.text

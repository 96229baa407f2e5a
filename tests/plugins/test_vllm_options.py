"""What ``HASTEN_VLLM`` may say, and what rows are taken to cost in a batch."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest
from tests.plugins.fake_texts import plain, repeating
from tests.plugins.fake_vllm import Engine, config, runner_module

from hasten.errors import OptionError
from hasten.plugins import _vllm_step, session
from hasten.plugins._vllm_options import StepCosts
from hasten.plugins.vllm import Options, Proposer

PROMPT = [1, 5, 9, 12, 7, 31, 22, 40, 18, 2, 5, 9, 12]


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting takes no time: how long drafts are doesn't depend on how busy the machine is."""
    monkeypatch.setattr(session, "perf_counter", lambda: 0.0)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """vLLM's module of the runner, as if it were loaded."""
    made = runner_module()
    monkeypatch.setitem(sys.modules, _vllm_step.RUNNER, made)
    return made


def test_defaults_may_be_given_in_a_subclass_and_the_environment_wins(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Mine(Proposer):
        defaults = Options(method="prompt-lookup", window=99)

    caplog.set_level(logging.INFO, logger="hasten.plugins")
    monkeypatch.delenv("HASTEN_VLLM", raising=False)
    Mine(config())
    monkeypatch.setenv("HASTEN_VLLM", ";logits=off")
    Mine(config())
    monkeypatch.setenv("HASTEN_VLLM", "suffix")
    Mine(config())
    drafts = [r.message for r in caplog.records if "drafts with" in r.message]
    assert [line.split()[3] for line in drafts] == ["prompt-lookup,", "prompt-lookup,", "suffix,"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("suffix;rows=3", "HASTEN_VLLM.rows: no such option"),
        ("suffix;row_cost=dear", "HASTEN_VLLM.row_cost: must be a number"),
        ("suffix;row_cost=0", "HASTEN_VLLM.row_cost: must be a number"),
        ("suffix;window=0", "HASTEN_VLLM.window: must be at least 1"),
        ("suffix;logits=maybe", "HASTEN_VLLM.logits: must be on or off"),
        ("sufix", "unknown method 'sufix'"),
        ("suffix,depth=3", "no such option"),
    ],
)
def test_a_bad_option_stops_the_engine_before_it_starts(
    text: str, says: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_VLLM", text)
    with pytest.raises(OptionError, match=says):
        Proposer(config())


def test_in_a_larger_batch_a_row_costs_a_larger_share() -> None:
    ticks = iter(range(1000))
    costs = StepCosts(0.02, clock=lambda: next(ticks) / 100)
    shares = []
    for batch in (1, 8, 64, 512):
        costs.arrive(batch)
        costs.leave()
        one, two = costs.curve(2, 100)
        shares.append((two - one) / one)
    assert shares[0] == pytest.approx(0.02)
    assert shares == sorted(shares)
    assert shares[-1] < 1


def test_a_step_is_as_long_as_what_passes_between_two_calls() -> None:
    now = [0.0]
    costs = StepCosts(0.02, clock=lambda: now[0])
    for took in [0.05] * 40 + [30.0]:  # the last: nobody asked for anything
        now[0] += took
        costs.arrive(1)
        now[0] += 0.01
        costs.leave()
    assert costs.curve(1, 100) == [pytest.approx(50.0)]


def test_the_device_says_what_rows_cost_unless_the_user_does(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = {}
    for device, options in (("cpu", ""), ("cuda", ""), ("cuda", ";row_cost=5")):
        monkeypatch.setenv("HASTEN_VLLM", f"suffix{options}")
        made = Engine(Proposer(config(device=device)), repeating, module=module)
        made.add("r", PROMPT, 60)
        assert made.run()["r"] == plain(PROMPT, 60, repeating)
        lengths[device, options] = made.drafted
    assert lengths["cuda", ""] >= lengths["cpu", ""] > lengths["cuda", ";row_cost=5"]

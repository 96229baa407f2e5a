"""The proposer keeps vLLM's contract, whatever the batch does and whatever a drafter does.

The engine is a stand-in (`fake_vllm`); scripts/test_vllm.sh runs the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.plugins.fake_texts import (
    VOCAB,
    OutOfVocabulary,
    Raising,
    RaisingAtTheEnd,
    plain,
    register,
    repeating,
    unforeseeable,
)
from tests.plugins.fake_vllm import MAX_LEN, Engine, Make, config, runner_module

from hasten.errors import CapabilityError
from hasten.plugins import _vllm_requests, _vllm_step, session
from hasten.plugins.session import EngineFacts, even_costs, prepare
from hasten.plugins.vllm import Proposer
from hasten.policies.cost_model import CostModel

PROMPTS = {f"r{i}": [i, 5, 9, 12, 7, 31, 22, 40, 18, i + 1, 5, 9, 12] for i in range(12)}
COUNT = 60
CHEAP = "suffix;row_cost=0.001"


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


@pytest.fixture(params=["known", "unknown"])
def engine(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Make:
    """Makes engines, of a vLLM that the plug-in knows and of one that it doesn't."""
    known = request.param == "known"
    loaded = runner_module()
    if known:
        monkeypatch.setitem(sys.modules, _vllm_step.RUNNER, loaded)

    def make(after: Callable[[Sequence[int]], int] = repeating, **options: Any) -> Engine:
        monkeypatch.setenv("HASTEN_VLLM", options.pop("method", CHEAP))
        sizes = {"most": options.get("most", 6), "max_seqs": options.get("max_seqs", 8)}
        return Engine(Proposer(config(**sizes)), after, module=loaded, **options)

    return make


def served(engine: Engine, keys: Sequence[str] = tuple(PROMPTS), count: int = COUNT) -> None:
    """Answer these prompts and compare with plain decoding."""
    for key in keys:
        engine.add(key, PROMPTS[key], count)
    answers = engine.run()
    for key in keys:
        assert answers[key] == plain(PROMPTS[key], count, engine.after), key


# -- the batch -------------------------------------------------------------------------------------


def test_answers_are_plain_decodings_in_fewer_passes(engine: Make) -> None:
    made = engine()
    served(made)
    assert made.passes < 0.5 * COUNT * len(PROMPTS)
    assert made.accepted > 0


def test_drafts_are_ragged_and_some_are_empty(engine: Make) -> None:
    made = engine(method="suffix;row_cost=0.1")
    served(made)
    assert len(set(made.lengths)) > 3
    assert 0 in made.lengths
    assert max(made.lengths) == 6


def test_rows_may_change_places(engine: Make) -> None:
    still, moved = engine(), engine(shuffle=True)
    served(still)
    served(moved)
    assert moved.accepted >= 0.95 * still.accepted


def test_prompts_read_in_parts_have_no_drafts_before_they_are_read(engine: Make) -> None:
    made = engine(part=4)
    served(made)
    assert made.accepted > 0


def test_the_same_prompt_twice_at_once_is_answered_twice(engine: Make) -> None:
    made = engine()
    made.add("one", PROMPTS["r1"], COUNT)
    made.add("two", PROMPTS["r1"], COUNT)
    answers = made.run()
    assert answers["one"] == answers["two"] == plain(PROMPTS["r1"], COUNT, repeating)
    assert made.accepted > COUNT


def test_a_preempted_request_goes_on_where_it_was(engine: Make) -> None:
    made = engine(max_seqs=2, shuffle=True)
    for key in ("r1", "r2", "r3"):
        made.add(key, PROMPTS[key], COUNT)
    for turn in range(12):
        made.run(3)
        if made.running and turn % 2:
            made.preempt(made.running[0].key)
    answers = made.run()
    for key in ("r1", "r2", "r3"):
        assert answers[key] == plain(PROMPTS[key], COUNT, repeating)


@pytest.mark.parametrize("method", [CHEAP, "prompt-lookup,nodes=40", "suffix:paper"])
def test_near_the_context_limit_nothing_is_too_long(engine: Make, method: str) -> None:
    made = engine(method=method)
    prompt = [1, *range(5, 60)] * 4
    made.add("long", prompt, 1000)
    made.add("short", PROMPTS["r2"], 120)
    answers = made.run()
    assert answers["long"] == plain(prompt, MAX_LEN - len(prompt), repeating)
    assert answers["short"] == plain(PROMPTS["r2"], 120, repeating)


@pytest.mark.parametrize("method", [CHEAP, "prompt-lookup,nodes=40"])
def test_the_proposer_itself_keeps_to_the_context_limit(
    method: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_VLLM", method)
    proposer = Proposer(config())
    context = np.array([[1, 2, 3, 4] * 64], dtype=np.int32)
    for length in range(MAX_LEN - 8, MAX_LEN + 1):
        (draft,) = proposer.propose([[1]], np.array([length]), context)
        assert len(draft) <= max(MAX_LEN - length - 1, 0)


def test_a_schedule_of_draft_lengths_is_kept(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_VLLM", CHEAP)
    made = Engine(Proposer(config()), repeating, module=module, dynamic=(6, 2, 0))
    served(made)
    assert made.accepted > 0
    assert {0, 2, 6} <= set(made.lengths)


def test_sampled_looking_text_costs_few_drafts(engine: Make) -> None:
    made = engine(unforeseeable, method="suffix;row_cost=0.1")
    served(made)
    assert made.drafted < 0.1 * COUNT * len(PROMPTS)


# -- state -----------------------------------------------------------------------------------------


def test_128_requests_in_a_row_leave_no_state(engine: Make) -> None:
    made = engine()
    held = []
    for number in range(128):
        made.add(f"n{number}", [number % VOCAB, 5, 9, 12], 20)
        made.run()
        held.append(len(made.runner.drafter.requests))
    assert max(held) <= 8
    assert held[-1] <= held[20]


def test_with_ids_a_finished_request_is_freed_by_the_next_step(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_VLLM", CHEAP)
    made = Engine(Proposer(config()), repeating, module=module)
    for key, count in (("r1", 10), ("r2", 10), ("r3", 200)):
        made.add(key, PROMPTS[key], count)
    made.run(2)
    assert len(made.runner.drafter.requests) == 3
    made.run(12)
    assert len(made.runner.drafter.requests) == 1


def test_an_aborted_request_is_freed_too(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_VLLM", CHEAP)
    made = Engine(Proposer(config()), repeating, module=module)
    served_keys = ("r1", "r2")
    for key in served_keys:
        made.add(key, PROMPTS[key], COUNT)
    made.run(3)
    made.abort("r1")
    made.step()
    assert len(made.runner.drafter.requests) == 1


def test_without_ids_requests_not_seen_for_long_are_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_vllm_requests, "STALE_STEPS", 5)
    monkeypatch.setenv("HASTEN_VLLM", CHEAP)
    made = Engine(Proposer(config()), repeating)
    made.add("r1", PROMPTS["r1"], 10)
    made.add("r2", PROMPTS["r2"], 100)
    made.run(6)
    assert len(made.runner.drafter.requests) == 2
    made.run(8)
    assert len(made.runner.drafter.requests) == 1


def test_more_requests_than_an_engine_has_are_not_held() -> None:
    source = prepare(
        "suffix", EngineFacts("vLLM", VOCAB, MAX_LEN), most=4, costs=CostModel(even_costs(0.1))
    )
    held = _vllm_requests.Requests(source, limit=3)
    for start in range(5):
        held.turn()
        held.find(np.array([start, 1, 2])).catch_up(np.array([start, 1, 2]), 1)
    held.retire()
    assert len(held) == 3
    held.turn()
    assert held.find(np.array([4, 1, 2, 3])).length == 3
    assert held.find(np.array([0, 1, 2, 3])).length == 0


def test_an_id_that_is_used_again_starts_anew(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_VLLM", CHEAP)
    made = Engine(Proposer(config()), repeating, module=module)
    for prompt in (PROMPTS["r1"], PROMPTS["r2"], PROMPTS["r1"]):
        made.add("again", prompt, COUNT)
        assert made.run()["again"] == plain(prompt, COUNT, repeating)


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [Raising, OutOfVocabulary, RaisingAtTheEnd])
def test_a_drafter_that_fails_costs_its_drafts_and_one_line_in_the_log(
    engine: Make,
    drafter: type,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = engine(method=register(monkeypatch, drafter))
    served(made)
    assert made.drafted == 0
    lines = [r for r in caplog.records if "failed, and the engine goes on" in r.message]
    assert len(lines) == 1
    assert drafter.name in lines[0].message


def test_a_drafter_that_fails_later_keeps_what_it_has_won(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Raising, "rounds", 3)
    made = engine(method=register(monkeypatch, Raising))
    served(made)
    assert made.accepted == 3 * len(PROMPTS)


def test_nonsense_from_the_engine_is_logged_and_not_drafted_for(
    module: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    proposer: Any = Proposer(config())
    for tokens in (None, "text", [[1]]):
        assert proposer.propose([[1], []], np.array([4, 0]), tokens) == [[], []]
    assert caplog.text.count("goes on without") >= 1


@pytest.mark.parametrize(
    "break_it",
    [
        lambda runner: delattr(runner, "requests"),
        lambda runner: setattr(runner, "input_batch", SimpleNamespace()),
    ],
)
def test_a_runner_that_has_changed_inside_is_served_without_ids(
    break_it: Callable[[Any], None], module: ModuleType
) -> None:
    proposer = Proposer(config())
    runner = module.GPUModelRunner(proposer, None, 8)  # type: ignore[attr-defined]
    output = SimpleNamespace(num_spec_tokens_to_schedule=6)
    context = np.array([[1, 2, 3, 1, 2, 3, 1, 2]], dtype=np.int32)
    broken = {"input_batch": None}
    break_it(runner)
    runner.input_batch = SimpleNamespace(
        num_tokens_no_spec=np.array([8]), token_ids_cpu=context, **broken
    )
    rest = (None,) * 4
    (draft,) = runner.propose_draft_token_ids(output, [[2]], *rest, None, None, None)
    assert draft[:1] == [3]


@pytest.mark.parametrize(
    "change",
    [
        lambda runner: delattr(runner, "propose_draft_token_ids"),
        lambda runner: setattr(runner, "propose_draft_token_ids", lambda self, batch: []),
    ],
)
def test_a_runner_that_is_not_known_is_left_alone_and_that_is_said(
    change: Callable[[Any], None], module: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    runner = module.GPUModelRunner  # type: ignore[attr-defined]
    change(runner)
    before = getattr(runner, "propose_draft_token_ids", None)
    Proposer(config())
    assert getattr(runner, "propose_draft_token_ids", None) is before
    assert caplog.text.count("isn't one the plug-in knows") == 1


def test_other_drafters_of_the_same_runner_are_not_disturbed(module: ModuleType) -> None:
    Proposer(config())
    Proposer(config())
    told = []
    other = SimpleNamespace(propose=lambda *args, **kwargs: told.append(kwargs) or [[7]])
    runner = module.GPUModelRunner(other, None, 8)  # type: ignore[attr-defined]
    assert runner.propose_draft_token_ids(*(None,) * 8, slot_mappings={}) == [[7]]
    assert len(told) == 1


# -- logits ----------------------------------------------------------------------------------------


def successor(ids: Sequence[int]) -> int:
    """Each word is always followed by the same one, and 32 of them come in turn."""
    return (ids[-1] * 5 + 3) % 32


def test_the_targets_logits_are_drafted_from(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_VLLM", "recycling;row_cost=0.001")
    made = Engine(Proposer(config()), successor, module=module, shuffle=True)
    served(made, count=160)
    assert made.accepted > 0.5 * 160 * len(PROMPTS)


def test_how_many_drafts_were_verified_is_told_by_row(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_VLLM", CHEAP)
    made = Engine(Proposer(config()), repeating, module=module, shuffle=True)
    told, verified = [], []
    see = Proposer.see

    def listening(self: Any, step: Any) -> None:
        told.append(dict(zip(step.keys, step.drafts, strict=True)))
        verified.append({r.key: len(r.scheduled) for r in made.running})  # type: ignore[attr-defined]
        see(self, step)

    monkeypatch.setattr(Proposer, "see", listening)
    served(made)
    assert told == verified
    assert any(sum(each.values()) for each in told)


@pytest.mark.parametrize("why", ["switched off", "no module", "no ids"])
def test_without_logits_a_method_goes_on_without_them(
    why: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_VLLM", "auto;logits=off" if why == "switched off" else "auto")
    if why == "no ids":
        monkeypatch.delitem(sys.modules, _vllm_step.RUNNER)
    proposer = Proposer(config())
    if why == "no module":
        proposer.load_model(object())
        proposer.load_model = lambda target: None  # type: ignore[method-assign, misc]
    made = Engine(proposer, repeating, module=module)
    served(made)
    assert made.accepted > 0


def test_a_method_that_lives_by_logits_is_refused_without_them(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_VLLM", "recycling;logits=off")
    with pytest.raises(CapabilityError, match=r"recycling.*top-k logits"):
        Proposer(config())


def test_no_logits_are_kept_beyond_a_step(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = _vllm_step.LogitsReader(8)
    target = Engine(Proposer(config()), repeating, module=module).target
    assert reader.attach(target)
    logits = target.compute_logits([1, 2, 3])
    kept = reader.take(3)
    assert kept is not None
    assert kept.shape == (3, 8)
    assert kept.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr()
    assert reader.take(3) is None
    target.compute_logits([1, 2, 3])
    assert reader.take(2) is None

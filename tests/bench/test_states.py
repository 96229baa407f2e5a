"""Methods that learn across requests are measured cold and warm, each from a state of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

import hasten
from hasten import methods
from hasten.bench import BenchConfig, Progress
from hasten.bench.runner import run
from hasten.bench.states import Entry, forget, own_state
from hasten.drafters.ar import Plain
from hasten.errors import OptionError
from hasten.policies.base import FixedPolicy

COLD, WARM = "learner,scope=session", "learner,scope=session (warm)"
CONFIG = BenchConfig(methods=(COLD,), suite="mini", limit=3, max_new_tokens=4)


@dataclass(frozen=True)
class Options:
    scope: str = "request"


class Memory:
    """What the requests of one prepared method share: how many there were since it was emptied."""

    def __init__(self, made: list[Memory], seen: int = 0) -> None:
        self.made, self.seen = made, seen
        self.history: list[int] = []
        made.append(self)

    def reset(self) -> None:
        self.seen = 0

    def fork(self) -> Memory:
        return Memory(self.made, self.seen)


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch, tiny: hasten.LLM) -> Iterator[list[Memory]]:
    """Registers the method ``learner``, plain decoding with a memory, and lists the memories."""
    made: list[Memory] = []

    def prepare(options: Options, context: methods.MethodContext) -> methods.RequestMaker:
        counts = {"counts": Memory([])}
        if options.scope == "request":
            return methods.RequestMaker(lambda _: (Plain(), FixedPolicy(nodes=1)), counts)

        def make(shared: Mapping[str, Any]) -> tuple[Plain, FixedPolicy]:
            for memory in shared.values():
                memory.history.append(memory.seen)
                memory.seen += 1
            return Plain(), FixedPolicy(nodes=1)

        return methods.RequestMaker(make, {**counts, options.scope: Memory(made)})

    learner = methods.Method("learner", "remembers requests", prepare, options=Options)
    methods.all_methods()
    monkeypatch.setitem(methods._REGISTRY, "learner", learner)
    yield made
    for spec in [spec for spec in tiny._prepared if spec.name == "learner"]:
        del tiny._prepared[spec]


def history(memory: Memory) -> list[int]:
    """Requests remembered before each prompt, those of a learning pass included."""
    return memory.history[1:]  # the first is the warm-up's


def test_a_cold_method_forgets_before_each_prompt(tiny: hasten.LLM, memories: list[Memory]) -> None:
    report = run(replace(CONFIG, repeats=2), llm=tiny)
    assert report.methods == ("ar", COLD)
    _, memory = memories
    assert history(memory) == [0] * 6


def test_a_warm_method_has_answered_the_whole_suite_before(
    tiny: hasten.LLM, memories: list[Memory]
) -> None:
    steps: list[Progress] = []
    report = run(replace(CONFIG, state="warm"), steps.append, llm=tiny)
    assert report.methods == ("ar", WARM)
    assert report.environment["state"] == "warm"
    _, memory = memories
    assert history(memory) == [1, 2, 3, 4, 5, 6]
    learning = [step for step in steps if step.phase == "learn"]
    assert [step.done for step in learning] == [0, 1, 2, 3]
    assert {step.total for step in learning} == {3}
    assert {step.method for step in learning} == {WARM, ""}


def test_both_states_are_kept_apart_in_one_run(tiny: hasten.LLM, memories: list[Memory]) -> None:
    report = run(replace(CONFIG, state="both"), llm=tiny)
    assert report.methods == ("ar", COLD, WARM)
    _, cold, warm = memories
    assert history(cold) == [0, 0, 0]
    assert history(warm) == [1, 2, 3, 4, 5, 6]
    row = report.row(WARM)
    assert (row.prompts, row.identical, row.extra["faults"]) == (3, 3, 0)


@pytest.mark.parametrize("state", ["cold", "warm", "both"])
@pytest.mark.parametrize("scope", ["session", "global"])
def test_measuring_leaves_the_callers_own_state_alone(
    tiny: hasten.LLM, memories: list[Memory], scope: str, state: str
) -> None:
    spec = tiny.prepare(f"learner,scope={scope}")
    tiny.generate("a", method=spec, max_new_tokens=1)
    run(replace(CONFIG, methods=(spec,), state=state), llm=tiny)
    assert memories[0].seen == 1
    assert [memory.history[0] for memory in memories[1:]] == [0] * len(memories[1:])


def test_counts_are_kept_between_prompts(tiny: hasten.LLM, memories: list[Memory]) -> None:
    spec = tiny.prepare(COLD)
    entry = Entry(spec, "cold")
    twin = own_state(tiny, entry)
    counts = twin._prepared[spec]._shared["counts"]
    for _ in range(2):
        forget(twin, spec)
        twin.generate("a", method=spec, max_new_tokens=1)
    assert counts.seen == 2
    assert memories[-1].seen == 1


def test_later_turns_are_learned_too_after_plain_decodings_answers(
    tiny: hasten.LLM, memories: list[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    real = hasten.LLM.stream

    def stream(self: hasten.LLM, prompt: Any, **options: Any) -> Any:
        if str(options["method"]) == COLD:
            asked.append(list(prompt))
        return real(self, prompt, **options)

    monkeypatch.setattr(hasten.LLM, "stream", stream)
    run(replace(CONFIG, limit=1, state="warm", turns="all"), llm=tiny)
    assert len(asked) == 1 + 2 + 2
    assert asked[1:3] == asked[3:5]


@pytest.mark.parametrize("state", ["cold", "warm", "both"])
def test_methods_that_learn_nothing_have_one_row_whatever_the_state(
    tiny: hasten.LLM, memories: list[Memory], state: str
) -> None:
    steps: list[Progress] = []
    config = replace(CONFIG, methods=("prompt-lookup", "learner"), limit=1, state=state)
    report = run(config, steps.append, llm=tiny)
    assert report.methods == ("ar", "prompt-lookup", "learner")
    assert [step for step in steps if step.phase == "learn"] == []
    assert len([s for s in steps if s.phase == "measure" and s.method]) == 3


def test_an_unknown_state_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match="cold, warm, both") as caught:
        BenchConfig(state="hot")
    assert caught.value.option == "state"

"""Tokens a second of the arms of a table, each at the setting that it has there.

Arms take turns on each problem, so that the machine's mood is shared among them. Needs an idle
machine; accuracies don't, which is why they are measured apart (`hasten.train.arbiter.evaluate`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.arbitration.arbiter import Arbiter
from hasten.arbitration.rules import Always, Learned, Mentored, Random, Rule
from hasten.tasks import Problem
from hasten.tasks.screening import MAX_NEW_TOKENS
from hasten.train.arbiter.arms import OPEN, grid, voters
from hasten.train.arbiter.evaluate import ALONE, STAGES, judge_of

if TYPE_CHECKING:
    from hasten.api import LLM

Runs = dict[str, list[tuple[int, float]]]
"""For each arm and problem: tokens that came from passes after the prompt's, and their seconds."""


@dataclass(frozen=True, slots=True)
class Timed:
    """How an arm is run live: a method, and a rule instead of the method's own."""

    method: str
    rule: Rule | None = None


def timed_arms(llm: LLM, folder: Path, made: Mapping[str, Any]) -> dict[str, Timed]:
    """Every arm of the table `made` that can run without the right answers (all but the oracle),
    by name, `ALONE` first. `folder` holds the arbiters that were measured."""
    options = made["about"]["options"]
    base = f"cospec:target,{options['draft']},length={options['length']}"
    free = f"{base},{OPEN}"
    knobs = voters(grid(judge_of(llm, folder)))
    found = {ALONE: Timed("ar")}
    for arm in made["arms"]:
        name, note = arm["name"], arm["note"]
        rule = knobs.get(f"{name} {note}")
        stage = STAGES.get(name.removesuffix(", no gate"))
        if rule is not None:
            found[name] = Timed(free, rule)
        elif stage is not None:
            arbiter = Arbiter.load(folder / stage)
            # Measured as it decides, whether or not validation made it fall back.
            learned = Learned(replace(arbiter, fallback=False))
            gate = f"gate={arbiter.gate},consecutive={arbiter.consecutive}"
            shut = OPEN if name.endswith(", no gate") else gate
            found[name] = Timed(f"{base},{shut}", learned)
        elif name in _PLAIN:
            found[name] = Timed(f"{free}{_PLAIN[name][0]}", _PLAIN[name][1])
        elif name == "mentored":
            found[name] = Timed(free, Mentored(float(note)))
        elif name == "random, same rate":
            found[name] = Timed(free, Random(float(note)))
    return found


_PLAIN: dict[str, tuple[str, Rule | None]] = {
    "target only": ("", None),
    "draft only": (",bonus=off", Always()),
    "draft always": ("", Always()),
}


def measure(
    llm: LLM,
    arms: Mapping[str, Timed],
    problems: Sequence[Problem],
    repeats: int = 3,
    say: Callable[[str], None] = lambda text: None,
) -> Runs:
    """Answer each problem with each arm, `repeats` times; the run with the median time counts."""
    runs: Runs = {name: [] for name in arms}
    for arm in arms.values():  # once to warm up
        _run(llm, problems[0], arm)
    for number, problem in enumerate(problems, 1):
        say(f"problem {number} of {len(problems)}")
        for name, arm in arms.items():
            some = sorted((_run(llm, problem, arm) for _ in range(repeats)), key=lambda run: run[1])
            runs[name].append(some[len(some) // 2])
    return runs


def _run(llm: LLM, problem: Problem, arm: Timed) -> tuple[int, float]:
    params = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 0.0, "seed": 0}
    answer = llm.generate(problem.prompt, method=arm.method, rule=arm.rule, **params)
    summary = answer.metrics
    # Plain decoding has its first token from the prompt's pass, the others from one of their own.
    return summary.pass_tokens, summary.end_to_end_s - summary.prefill_s

"""Every rule on the same problems: what an arbiter is compared with.

Knobs are chosen on validation problems, by accuracy and then by passes; test problems are only
answered. Rules that decide from a mismatch alone are asked at every mismatch that anybody met
(`GRID`), so that their answers come from what is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hasten.arbitration.rules import (
    KL,
    Always,
    BiLD,
    Cascade,
    Fuzzy,
    LinearJudge,
    Mentored,
    Rule,
    Threshold,
    Typical,
)
from hasten.tasks import Problem
from hasten.train.arbiter.engine import Engine
from hasten.train.arbiter.episodes import (
    Decide,
    Decisions,
    Episode,
    Job,
    Memory,
    Point,
    always,
    never,
)
from hasten.types import Result

OPEN = "gate=0,consecutive=0"
"""Options of the method without a gate."""
RANDOM_SEEDS = 4
"""Answers of the random rule to each problem."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A problem's answer. `tokens` and `passes` are counts; passes after the prompt's."""

    correct: bool
    tokens: int
    passes: int
    mismatches: int
    overrides: int
    text: str

    @classmethod
    def graded(cls, problem: Problem, answer: Result) -> Answered:
        """From an answer of the loop."""
        return cls(
            problem.correct(answer.text),
            len(answer.tokens),
            answer.metrics.target_passes,
            answer.metrics.mismatches,
            answer.metrics.overrides,
            answer.text,
        )

    @classmethod
    def of(cls, episode: Episode) -> Answered:
        """From an episode."""
        return cls(
            episode.correct,
            len(episode.tokens),
            episode.passes,
            len(episode.decisions),
            episode.overrides,
            episode.text,
        )


@dataclass(slots=True)
class Arm:
    """One rule's answers to all problems. `draws`: of a random rule, one list a seed."""

    name: str
    note: str
    answers: list[Answered]
    draws: list[list[Answered]] = field(default_factory=list)

    @property
    def right(self) -> list[float]:
        """For each problem 0 or 1; of a random rule the mean over its seeds."""
        runs = self.draws or [self.answers]
        return [float(np.mean([run[at].correct for run in runs])) for at in range(len(runs[0]))]

    @property
    def every(self) -> list[Answered]:
        """All its answers."""
        return [each for run in self.draws or [self.answers] for each in run]

    @property
    def accuracy(self) -> float:
        """Share that is correct."""
        return float(np.mean(self.right))

    @property
    def tokens_a_pass(self) -> float:
        """Tokens a target pass, those of the prompts left out; plain decoding: 1."""
        return sum(each.tokens for each in self.every) / sum(each.passes for each in self.every)

    @property
    def override_rate(self) -> float:
        """Share of mismatches at which the draft's token was kept."""
        met = sum(each.mismatches for each in self.every)
        return sum(each.overrides for each in self.every) / met if met else 0.0


Knobs = dict[str, Rule]
"""A rule with each of its settings, by the name that votes have."""


def grid(judge: LinearJudge | None = None) -> dict[str, Knobs]:
    """Rules that are asked at every mismatch, with the settings tried; by the arm's name."""
    typical = ((0.03, 0.1), (0.09, 0.3), (0.2, 0.6), (0.02, 1.0), (0.005, 1.0))
    rules: dict[str, Sequence[tuple[str, Rule]]] = {
        "p(d) threshold": [
            (f"{x:g}", Threshold(x)) for x in (0.4, 0.3, 0.2, 0.1, 0.03, 0.01, 0.003)
        ],
        "typical acceptance": [(f"{e:g}/{d:g}", Typical(e, d)) for e, d in typical],
        "fuzzy, JS": [(f"{x:g}", Fuzzy("js", x)) for x in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)],
        "fuzzy, TV": [(f"{x:g}", Fuzzy("tv", x)) for x in (0.2, 0.4, 0.6, 0.8, 0.95)],
        "KL judge": [(f"{x:g}", KL(x)) for x in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)],
        "BiLD, roll back": [(f"{x:g}", BiLD(x)) for x in (1.0, 2.0, 3.0, 5.0, 8.0)],
    }
    for kind, alphas in (
        ("chow", (0.02, 0.1, 0.3, 0.5, 0.7)),
        ("diff", (0.0, 0.1, 0.3, 0.6)),
        ("opt", (0.0, 0.2, 0.5, 1.0)),
        ("token", (0.5, 0.8, 0.9, 0.97)),
    ):
        rules[f"cascade, {kind}"] = [(f"{x:g}", Cascade(kind, x)) for x in alphas]
    if judge is not None:
        rules["linear judge"] = [
            (f"{x:g}", LinearJudge(judge.w, judge.b, x)) for x in (0.3, 0.5, 0.7, 0.8, 0.9, 0.97)
        ]
    return {
        arm: {f"{arm} {label}": rule for label, rule in settings} for arm, settings in rules.items()
    }


MENTORED = (0.1, 0.3, 1.0, 3.0)
"""Budgets tried; too slow to be asked at every mismatch."""


def voters(rules: Mapping[str, Knobs]) -> Knobs:
    """All rules of a grid, by name."""
    return {name: rule for settings in rules.values() for name, rule in settings.items()}


def voting(name: str) -> Decide:
    """Does as a rule voted."""

    def decide(point: Point, before: Decisions) -> bool:
        return point.votes[name]

    return decide


def coin(rate: float, seed: int, problem: int) -> Decide:
    """Keeps a share of the draft's tokens, whatever they are."""
    noise = np.random.default_rng([seed, problem]).random(256)

    def decide(point: Point, before: Decisions) -> bool:
        return bool(noise[len(before)] < rate)

    return decide


@dataclass(slots=True)
class Bench:
    """Validation problems, which knobs are chosen on, and test problems; each with what answers
    them, and the memory of it."""

    validation: Sequence[Problem]
    test: Sequence[Problem]
    chooser: Engine
    engine: Engine
    chosen: Memory
    asked: Memory
    say: Callable[[str], None] = lambda text: None

    def arm(self, name: str, note: str, decide: Decide) -> Arm:
        """A rule on the test problems."""
        self.say(name)
        made = self.asked.run([Job(at, decide) for at in range(len(self.test))])
        return Arm(name, note, [Answered.of(each) for each in made])

    def best(self, names: Sequence[str]) -> str:
        """Of some votes the one with the best accuracy on validation problems, then the fewest
        passes."""

        def reached(name: str) -> tuple[float, int]:
            decide = voting(name)
            made = self.chosen.run([Job(at, decide) for at in range(len(self.validation))])
            return sum(each.correct for each in made), -sum(each.passes for each in made)

        return max(names, key=reached)

    def voted(self, rules: Mapping[str, Knobs]) -> list[Arm]:
        """Every rule of a grid, at its best setting."""
        found = []
        for arm, settings in rules.items():
            best = self.best(list(settings))
            found.append(self.arm(arm, best.removeprefix(arm).strip(), voting(best)))
        return found

    def random(self, rate: float) -> Arm:
        """The random rule at a rate, several times."""
        self.say("random")
        draws = []
        for seed in range(RANDOM_SEEDS):
            jobs = [Job(at, coin(rate, seed, at)) for at in range(len(self.test))]
            draws.append([Answered.of(each) for each in self.asked.run(jobs)])
        return Arm("random, same rate", f"{rate:.2f}", draws[0], draws)

    def live(self, name: str, note: str, rule: Rule, options: str = OPEN) -> Arm:
        """A rule run as it is on the test problems, with these options of the method."""
        self.say(name)
        made = zip(self.test, self.engine.live(rule, options), strict=True)
        return Arm(name, note, [Answered.graded(problem, answer) for problem, answer in made])

    def mentored(self) -> Arm:
        """Mentored decoding at its best budget."""

        def reached(budget: float) -> tuple[float, int]:
            self.say(f"mentored {budget:g} on validation problems")
            made = self.chooser.live(Mentored(budget), OPEN)
            pairs = zip(self.validation, made, strict=True)
            right = sum(problem.correct(answer.text) for problem, answer in pairs)
            return right, -sum(each.metrics.target_passes for each in made)

        best = max(MENTORED, key=reached)
        return self.live("mentored", f"{best:g}", Mentored(best))

    def fixed(self) -> list[Arm]:
        """Target only, the draft alone, and the draft always kept."""
        alone = self.live("draft only", "no bonus", Always(), f"bonus=off,{OPEN}")
        return [
            self.arm("target only", "", never),
            alone,
            self.arm("draft always", "bonus", always),
        ]

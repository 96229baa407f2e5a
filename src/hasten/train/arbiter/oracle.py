"""How much arbitration could gain at most, measured before anything is trained.

The oracle tries every combination of decisions at the first few mismatches (the target's tokens
after them) and is right when any answer is. Part of that is luck: among many different answers one
may be right for no reason. The control counts how often the same answers hold the right answer to
*another* problem of the family, and what that would have gained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hasten.train.arbiter.episodes import Decisions, Episode, Job, Runner, never

DEPTH = 4
"""Mismatches at which both tokens are tried."""
LEAST_GAIN = 0.03
"""Below this, arbitration isn't worth training."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """Accuracy of the target's own answers, and of the best of all branches.

    lucky       gain that an oracle for other problems' answers would show
    mismatches  of a target-only answer, on average; answers: different branches of a problem
    """

    problems: int
    plain: float
    oracle: float
    lucky: float
    mismatches: float
    answers: float

    @property
    def gain(self) -> float:
        """What the oracle adds."""
        return self.oracle - self.plain

    @property
    def enough(self) -> bool:
        """Whether training makes sense: luck is no gain."""
        return self.gain - self.lucky >= LEAST_GAIN

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "gain": self.gain, "enough": self.enough}


def branches(runner: Runner, problems: Sequence[int], depth: int = DEPTH) -> list[list[Episode]]:
    """For each problem its answers under every combination of decisions at its first `depth`
    mismatches, target-only's first."""
    found: list[dict[Decisions, Episode]] = [{} for _ in problems]
    scripts: list[tuple[int, Decisions]] = [(at, ()) for at in range(len(problems))]
    while scripts:
        made = runner.run([Job(problems[at], never, script) for at, script in scripts])
        ahead: list[tuple[int, Decisions]] = []
        for (at, script), episode in zip(scripts, made, strict=True):
            found[at][episode.decisions] = episode
            # Each branch is taken once: where this answer went with the target after its script.
            for place in range(len(script), min(depth, len(episode.points))):
                ahead.append((at, (*episode.decisions[:place], True)))
        scripts = ahead
    return [list(each.values()) for each in found]


def headroom(
    runner: Runner,
    problems: Sequence[int],
    right_for: Callable[[int, int], Callable[[Episode], bool] | None],
    depth: int = DEPTH,
) -> Headroom:
    """Measure it. ``right_for(problem, n)`` says whether an answer is right for the n-th other
    problem that this one is compared with, as a function; None where there is no n-th."""
    answers = branches(runner, problems, depth)
    gains: list[float] = []
    for problem, some in zip(problems, answers, strict=True):
        n = 0
        while (other := right_for(problem, n)) is not None:
            gains.append(float(any(map(other, some))) - float(other(some[0])))
            n += 1
    count = len(problems)
    return Headroom(
        problems=count,
        plain=sum(some[0].correct for some in answers) / count,
        oracle=sum(any(each.correct for each in some) for some in answers) / count,
        lucky=sum(gains) / len(gains) if gains else 0.0,
        mismatches=sum(len(some[0].points) for some in answers) / count,
        answers=sum(len(some) for some in answers) / count,
    )

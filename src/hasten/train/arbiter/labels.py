"""Which branch is right: both continuations of a mismatch, tried (stage A's labels).

The idea of swapping one token and generating again is AutoJudge's; there the question is whether
the target's own answer changes, here it is which branch's answer is *correct*, so a label may
prefer the draft.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hasten.train.arbiter.episodes import Decide, Episode, Job, Point, Runner

TIE_WEIGHT = 0.1
"""Of pairs whose branches are both correct: they speak for the draft, which saves a pass."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A mismatch and whether its two branches' answers were correct.

    before  the answer's tokens up to it; same: both branches have the same text in the end
    """

    point: Point
    problem: int
    draft_right: bool
    target_right: bool
    before: tuple[int, ...] = ()
    same: bool = False

    @property
    def informative(self) -> bool:
        """Exactly one branch is correct."""
        return self.draft_right != self.target_right

    @property
    def weight(self) -> float:
        """In the loss: nothing where both branches are wrong."""
        if self.informative:
            return 1.0
        return TIE_WEIGHT if self.draft_right else 0.0

    @property
    def label(self) -> float:
        """1: keep the draft's token."""
        return float(self.draft_right)


def mine(
    runner: Runner, problems: Sequence[int], decide: Decide, *, each: int = 2, seed: int = 0
) -> list[Pair]:
    """Up to `each` mismatches of each problem's answer under `decide`, drawn uniformly, with the
    answer that the other token leads to (`decide` goes on after it)."""
    source = random.Random(seed)
    answers = runner.run([Job(problem, decide) for problem in problems])
    chosen: list[tuple[Episode, int]] = []
    for answer in answers:
        places = range(len(answer.points))
        chosen += [(answer, at) for at in source.sample(places, min(each, len(places)))]
    others = runner.run(
        [
            Job(answer.problem, decide, (*answer.decisions[:at], not answer.decisions[at]))
            for answer, at in chosen
        ]
    )
    return [_pair(answer, at, other) for (answer, at), other in zip(chosen, others, strict=True)]


def _pair(answer: Episode, at: int, other: Episode) -> Pair:
    kept, swapped = answer.correct, other.correct
    draft, target = (kept, swapped) if answer.decisions[at] else (swapped, kept)
    point = answer.points[at]
    before = answer.tokens[: point.position]
    same = answer.text.strip() == other.text.strip()
    return Pair(point, answer.problem, draft, target, before, same)


def shuffled(pairs: Sequence[Pair], seed: int) -> list[Pair]:
    """The same mismatches with each other's outcomes: a control that has nothing to learn."""
    order = list(range(len(pairs)))
    random.Random(seed).shuffle(order)
    return [
        replace(pair, draft_right=pairs[at].draft_right, target_right=pairs[at].target_right)
        for pair, at in zip(pairs, order, strict=True)
    ]

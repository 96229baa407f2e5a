"""Toy problems for arbiters: answers known from the decisions, without any model.

`Toy` has six mismatches a problem. Each is critical with chance 0.35; a critical one has one right
token, the target's with chance 0.65; an answer is right when every critical mismatch was decided
right. So the target alone is right in (1 - 0.35 * 0.35)^6 = 45.5% of problems and the draft alone
in (1 - 0.35 * 0.65)^6 = 21.3%. One scalar tells a critical mismatch's right token with noise such
that the best rule errs at 16.5% of them, which leaves 0.9423^6 = 70%; the others say nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hasten.train.arbiter.episodes import Decisions, Episode, Job, Point

SCALARS = 18
MISMATCHES = 6
SIGNAL = 0.87
NOISE = 8
"""Scalars from here on are the same everywhere."""


class Toy:
    """A `Runner`; `ran` counts the answers that it gave."""

    def __init__(self, problems: int, seed: int = 0) -> None:
        source = np.random.default_rng(seed)
        shape = (problems, MISMATCHES)
        self.critical = source.random(shape) < 0.35
        self.draft_right = source.random(shape) < 0.35
        self.scalars = source.normal(size=(*shape, SCALARS)).astype(np.float32)
        self.scalars[..., NOISE:] = 0.0
        self.scalars[..., 1] = -1.0  # log p(d): no gate closes
        side = np.where(self.draft_right, SIGNAL, -SIGNAL)
        self.scalars[..., 3] += side.astype(np.float32)
        self.ran = 0

    def point(self, problem: int, at: int) -> Point:
        return Point(tuple(self.scalars[problem, at].tolist()), at, at % 4, 7, 9)

    def run(self, jobs: Sequence[Job]) -> list[Episode]:
        return [self._answer(job) for job in jobs]

    def close(self) -> None:
        pass

    def _answer(self, job: Job) -> Episode:
        self.ran += 1
        decisions: Decisions = ()
        points = []
        for at in range(MISMATCHES):
            point = self.point(job.problem, at)
            points.append(point)
            known = at < len(job.script)
            decisions += (job.script[at] if known else job.decide(point, decisions),)
        wrong = self.critical[job.problem] & (np.array(decisions) != self.draft_right[job.problem])
        passes = 2 + sum(not kept for kept in decisions)
        tokens = tuple(range(2 * MISMATCHES))
        return Episode(job.problem, tuple(points), decisions, not wrong.any(), tokens, passes)


class Agreeing:
    """A `Runner` whose draft is its target: no mismatch ever."""

    def run(self, jobs: Sequence[Job]) -> list[Episode]:
        return [Episode(job.problem, (), (), job.problem % 2 == 0, (1, 2, 3, 4), 1) for job in jobs]

    def close(self) -> None:
        pass

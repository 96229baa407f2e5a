"""Task problems answered by the models: what `Memory` asks for answers that it doesn't know."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hasten.arbitration.features import scalars
from hasten.arbitration.mismatch import Mismatch
from hasten.arbitration.rules import Choice, Rule
from hasten.decode import decode
from hasten.decoding import Decoding
from hasten.methods import MethodSpec
from hasten.streams import Request
from hasten.targets.base import Target
from hasten.tasks import Problem
from hasten.tasks.screening import MAX_NEW_TOKENS
from hasten.train.arbiter.episodes import Decisions, Episode, Job, Point
from hasten.types import Result, RowSignals, SamplingParams

if TYPE_CHECKING:
    from hasten.api import LLM

TOGETHER = 16
"""Answers that share passes."""
KEPT = 600
"""Prompts kept: a few MB each on the embedded model."""


class Recording(Rule):
    """Does what a job says at each mismatch, and keeps what it saw.

    voters  rules that are asked as well and play no part
    """

    def __init__(self, job: Job, voters: Mapping[str, Rule]) -> None:
        self._job, self._voters = job, voters
        self.points: list[Point] = []
        self.decisions: list[bool] = []
        self.needs_hidden = any(rule.needs_hidden for rule in voters.values())

    def choose(self, m: Mismatch) -> Choice:
        """The job's decision."""
        votes = {name: bool(rule.keep(m)) for name, rule in self._voters.items()}
        point = Point(
            tuple(scalars(m).tolist()), m.position, m.place - 1, m.drafted, m.target, votes
        )
        at, before = len(self.decisions), tuple(self.decisions)
        known = at < len(self._job.script)
        kept = self._job.script[at] if known else self._job.decide(point, before)
        self.points.append(point)
        self.decisions.append(kept)
        return Choice(kept)

    def keep(self, m: Mismatch) -> bool:
        """The job's decision."""
        return self.choose(m).kept


class Prompts:
    """Prompts read once and kept for all answers to them, the last `most` of them.

    Answers to short questions cost less than reading the question.
    """

    def __init__(self, target: Target, most: int) -> None:
        self._target, self._most = target, most
        self._kept: OrderedDict[int, tuple[Any, RowSignals]] = OrderedDict()

    def lend(self, key: int, request: Request) -> Any:
        """Let the request go on from its prompt; gives the sequence, which is the caller's."""
        assert isinstance(request.decoding, Decoding)
        if key not in self._kept:
            sequence = self._target.open()
            try:
                _, signals = request.decoding.read(sequence, request.ids[:-1])
            except BaseException:
                self._target.close(sequence)
                raise
            self._kept[key] = (sequence, signals)
            if len(self._kept) > self._most:
                self._target.close(self._kept.popitem(last=False)[1][0])
        self._kept.move_to_end(key)
        base, signals = self._kept[key]
        fork = self._target.open(base)
        request.decoding.lend(fork, signals)
        return fork

    def close(self) -> None:
        """Let them go."""
        while self._kept:
            self._target.close(self._kept.popitem()[1][0])


class Engine:
    """A `hasten.train.arbiter.episodes.Runner` over the real loop, greedy. Close it in the end.

    problems  by number, as jobs name them
    method    the draft and its options, as ``cospec:target,draft=early-exit,exits=0,length=4``;
              gates are the caller's and off here
    voters    rules whose opinions are kept
    report    called with the number of answers made, now and then
    """

    def __init__(
        self,
        llm: LLM,
        problems: Sequence[Problem],
        method: str,
        *,
        voters: Mapping[str, Rule] | None = None,
        report: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._llm, self._problems = llm, problems
        self._draft, self._method = method, llm.prepare(f"{method},gate=0,consecutive=0")
        self._voters, self._report = dict(voters or {}), report
        self._ids: dict[int, list[int]] = {}
        self._prompts = Prompts(llm.target, KEPT)

    def close(self) -> None:
        """Give the prompts back."""
        self._prompts.close()

    def run(self, jobs: Sequence[Job]) -> list[Episode]:
        """The jobs' answers, in order."""
        # Answers to one problem stand together: its prompt is surely kept.
        order = sorted(range(len(jobs)), key=lambda at: jobs[at].problem)
        found: dict[int, Episode] = {}
        for start in range(0, len(order), TOGETHER):
            part = order[start : start + TOGETHER]
            for at, made in zip(part, self._some([jobs[at] for at in part]), strict=True):
                found[at] = made
            self._report(len(part))
        return [found[at] for at in range(len(jobs))]

    def live(self, rule: Rule, options: str) -> list[Result]:
        """Every problem answered once under `rule`, with these options of the method; nothing is
        kept of its mismatches."""
        method = self._llm.prepare(f"{self._draft},{options}")
        numbers, found = range(len(self._problems)), []
        for start in range(0, len(numbers), TOGETHER):
            part = numbers[start : start + TOGETHER]
            found += self._answer(part, [rule] * len(part), method)
        return found

    def _some(self, jobs: Sequence[Job]) -> list[Episode]:
        rules = [Recording(job, self._voters) for job in jobs]
        made = self._answer([job.problem for job in jobs], rules, self._method)
        return [
            self._episode(job.problem, rule, answer)
            for job, rule, answer in zip(jobs, rules, made, strict=True)
        ]

    def _answer(
        self, problems: Sequence[int], rules: Sequence[Rule], method: MethodSpec
    ) -> list[Result]:
        """Problems answered together, each under its rule."""
        params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=0.0, seed=0)
        requests = [
            self._llm._request(self._prompt(problem), method=method, params=params, rule=rule)
            for problem, rule in zip(problems, rules, strict=True)
        ]
        with self._llm._lock, ExitStack() as opened:
            for problem, request in zip(problems, requests, strict=True):
                opened.callback(self._llm.target.close, self._prompts.lend(problem, request))
            for index, made in decode([request.decoding for request in requests]):
                requests[index].take(made)
        return [request.result() for request in requests]

    def _prompt(self, problem: int) -> list[int]:
        if problem not in self._ids:
            self._ids[problem] = self._llm.tokenize(self._problems[problem].prompt)
        return self._ids[problem]

    def _episode(self, problem: int, rule: Recording, answer: Result) -> Episode:
        # A block may go on beyond an answer's end; what was decided there is no part of it.
        kept = [at for at, p in enumerate(rule.points) if p.position < len(answer.tokens)]
        points = tuple(rule.points[at] for at in kept)
        decisions: Decisions = tuple(rule.decisions[at] for at in kept)
        right, passes = self._problems[problem].correct(answer.text), answer.metrics.target_passes
        return Episode(problem, points, decisions, right, answer.tokens, passes, answer.text)


def lucky_for(
    problems: Sequence[Problem], others: int = 8
) -> Callable[[int, int], Callable[[Episode], bool] | None]:
    """For `hasten.train.arbiter.oracle.headroom`: is an answer right for another problem of the
    family, whose answer is another one? Up to so many others of each."""
    families: dict[str, list[int]] = {}
    for number, problem in enumerate(problems):
        families.setdefault(problem.family, []).append(number)

    def right_for(problem: int, n: int) -> Callable[[Episode], bool] | None:
        mine = problems[problem]
        alike = families[mine.family]
        start = alike.index(problem)
        turned = [*alike[start + 1 :], *alike[:start]]
        usable = [at for at in turned if not mine.correct(problems[at].answer)]
        if n >= min(len(usable), others):
            return None
        other = problems[usable[n]]
        return lambda episode: other.correct(episode.text)

    return right_for

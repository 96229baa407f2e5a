"""Which families a model gets right now and then: on the training split, greedily."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hasten.tasks.base import Problem
from hasten.tasks.families import FAMILIES
from hasten.tasks.grading import Grade, grade
from hasten.tasks.problems import available, problems

if TYPE_CHECKING:
    from hasten.api import LLM

MAX_NEW_TOKENS = 16
"""An answer has 12 tokens at most, its end included; what runs on is wrong anyway."""
LEAST, MOST = 0.2, 0.8
"""A family qualifies where the model's accuracy lies between: there is something to lose and to
win."""
BATCH = 20
"""Problems answered together."""

QUALIFYING: tuple[str, ...] = (
    "count_letters",
    "spell",
    "reverse",
    "replace",
    "antonym",
    "plural",
    "past",
    "capital",
)
"""Families on which the embedded model qualifies in bfloat16, by
``python scripts/screen_tasks.py --count 100 --dtype bfloat16``."""


@dataclass(frozen=True, slots=True)
class Screened:
    """One family's answers: all wordings together, and by template."""

    family: str
    grade: Grade
    by_template: dict[str, Grade]
    chance: float

    @property
    def qualifies(self) -> bool:
        """Accuracy lies in the range, and its interval above what blind guesses get."""
        return LEAST <= self.grade.accuracy <= MOST and self.grade.low > self.chance


def screen(
    llm: LLM,
    families: Sequence[str] = tuple(FAMILIES),
    *,
    count: int = 100,
    seed: int = 0,
    answered: Callable[[Problem, str], None] = lambda problem, text: None,
) -> list[Screened]:
    """Answer `count` problems of each family's training split greedily (all, where there are
    fewer); `answered` hears of each answer."""
    found = []
    for name in families:
        asked = problems([name], "train", min(count, available(name, "train")), seed=seed)
        texts = answer(llm, asked)
        for problem, text in zip(asked, texts, strict=True):
            answered(problem, text)
        found.append(_screened(name, asked, texts))
    return found


def answer(llm: LLM, asked: Sequence[Problem]) -> list[str]:
    """Plain greedy answers, a few problems at a time."""
    texts: list[str] = []
    for start in range(0, len(asked), BATCH):
        prompts = [problem.prompt for problem in asked[start : start + BATCH]]
        results = llm.generate_many(prompts, method="ar", max_new_tokens=MAX_NEW_TOKENS)
        texts += [result.text for result in results]
    return texts


def _screened(name: str, asked: Sequence[Problem], texts: Sequence[str]) -> Screened:
    by_template = {}
    for template in dict.fromkeys(problem.template for problem in asked):
        pairs = [(p, t) for p, t in zip(asked, texts, strict=True) if p.template == template]
        by_template[template] = grade([p for p, _ in pairs], [t for _, t in pairs])
    return Screened(name, grade(asked, texts), by_template, FAMILIES[name].chance)

"""Tasks with exact answers, made by program: families, splits, problems and their grading.

    asked = problems(QUALIFYING, "test", 480)
    texts = [result.text for result in llm.generate_many([p.prompt for p in asked], ...)]
    print(grade(asked, texts))

Problems of different splits share no item, and held-out wordings are in the test split only.
"""

from hasten.tasks.base import SPLITS, Problem
from hasten.tasks.families import FAMILIES
from hasten.tasks.grading import Comparison, Grade, compare, grade
from hasten.tasks.problems import available, problems
from hasten.tasks.screening import QUALIFYING, screen

__all__ = [
    "FAMILIES",
    "QUALIFYING",
    "SPLITS",
    "Comparison",
    "Grade",
    "Problem",
    "available",
    "compare",
    "grade",
    "problems",
    "screen",
]

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from hasten.tasks import FAMILIES, QUALIFYING, Problem, available, screen
from hasten.tasks.screening import LEAST, MOST


class Model:
    """Knows the answers to some share of the questions."""

    def __init__(self, share: float) -> None:
        self.share, self.asked = share, 0

    def generate_many(self, prompts: list[Any], **options: Any) -> list[Any]:
        assert options["method"] == "ar"
        found = []
        for prompt in prompts:
            a, b = map(int, re.findall(r"\d+", prompt[-1]["content"]))
            self.asked += 1
            knows = self.asked * self.share % 1 < self.share
            found.append(SimpleNamespace(text=str(a + b) if knows else "I can't say."))
        return found


def screened(share: float) -> Any:
    heard: list[tuple[Problem, str]] = []
    (found,) = screen(
        Model(share),  # type: ignore[arg-type]
        ["sum1"],
        count=50,
        answered=lambda problem, text: heard.append((problem, text)),
    )
    assert len(heard) == found.grade.count == 50
    assert all(problem.split == "train" for problem, _ in heard)
    return found


def test_a_family_qualifies_where_there_is_something_to_lose_and_to_win() -> None:
    assert [screened(share).qualifies for share in (0.0, 0.1, 0.5, 0.9, 1.0)] == [
        False,
        False,
        True,
        False,
        False,
    ]


def test_figures_of_wordings_add_up_to_the_familys() -> None:
    found = screened(0.5)
    assert sum(each.count for each in found.by_template.values()) == found.grade.count
    assert sum(each.correct for each in found.by_template.values()) == found.grade.correct
    assert not any(t.held_out for t in FAMILIES["sum1"].templates if t.name in found.by_template)


def test_blind_guesses_don_t_qualify() -> None:
    from hasten.tasks.grading import Grade, wilson
    from hasten.tasks.screening import Screened

    guessed = Grade((True, False) * 50, *wilson(50, 100))
    assert not Screened("parity", guessed, {}, chance=0.5).qualifies
    assert Screened("sum2", guessed, {}, chance=0.0).qualifies
    assert LEAST < 0.5 < MOST


def test_what_is_said_to_qualify_exists() -> None:
    assert set(QUALIFYING) <= set(FAMILIES)
    assert all(available(name, "test") for name in QUALIFYING)

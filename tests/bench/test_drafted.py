"""Where drafts came from, in figures and on the page."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from hasten.bench.drafted import drafted_from
from hasten.bench.report import render
from hasten.bench.stats import Answer
from hasten.choices import Choice
from tests.bench.test_report import METHODS, Page, report, row

COPY = Choice(("copy",), 4, 4, ("copy",) * 3)
EXIT = Choice(("exit 4",), 2, 2, ("exit 4",))
BOTH = Choice(("copy", "exit 0"), 6, 3, ("copy", "exit 0"))


def answer(*choices: Choice, decided: int = 0) -> Answer:
    return Answer(
        (1, 2, 3), 3, 0.5, 0.1, choices=choices, decided=decided, deciding_s=1e-5 * decided
    )


def test_rounds_are_counted_by_what_they_drafted_from() -> None:
    made = drafted_from([answer(EXIT, EXIT, Choice()), answer(EXIT, BOTH, COPY)], ["a", "b"])
    assert made["choices"] == {
        "exit 4": {"rounds": 3, "drafted": 6, "kept": 3},
        "plain": {"rounds": 1, "drafted": 0, "kept": 0},
        "copy + exit 0": {"rounds": 1, "drafted": 6, "kept": 2},
        "copy": {"rounds": 1, "drafted": 4, "kept": 3},
    }
    assert next(iter(made["choices"])) == "exit 4", "the most frequent first"
    assert made["choices_of_one"] == {
        "row": "b",
        "rounds": [["exit 4", 4, 2, 1], ["copy + exit 0", 0, 3, 2], ["copy", None, 4, 3]],
    }
    assert "decisions" not in made
    json.dumps(made, allow_nan=False)


def test_decisions_are_told_a_round_in_microseconds_and_as_a_share() -> None:
    made = drafted_from([answer(EXIT, EXIT, decided=6), answer(EXIT, EXIT, decided=2)], ["a", "b"])
    assert made["decisions"] == pytest.approx({"per_round": 2.0, "us": 10.0, "share": 8e-5})


def test_methods_without_exits_are_left_out() -> None:
    assert drafted_from([answer(COPY, Choice())], ["a"]) == {}
    assert drafted_from([answer()], ["a"]) == {}


@pytest.fixture
def page() -> Page:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra report)")
    pytest.importorskip("jinja2", reason="needs jinja2 (the extra report)")
    made = row(METHODS[1], "overall")
    extra: dict[str, Any] = {
        **made.extra,
        **drafted_from([answer(EXIT, BOTH, Choice(), COPY, decided=4)], ["qa-<7>"]),
    }
    rows = [
        row(m, c, **({"extra": extra} if (m, c) == (METHODS[1], "overall") else {}))
        for m in METHODS
        for c in ("qa", "overall")
    ]
    return Page(render(report(*rows)))


def test_the_page_shows_exits_lengths_and_what_rounds_drafted_from(page: Page) -> None:
    assert "LEDE: exits and lengths" in page.text
    for words in ("copy + exit 0", "exit 4", "plain", "The answer to qa-<7>", "10 microseconds"):
        assert words in page.text
    titles = page.texts["title"]
    assert sum("round by round" in title for title in titles) == 2, "for a desktop and a phone"
    assert any("Kept: 1 of 2, 2 of 3" in text for text in page.texts["desc"])
    assert "matplotlib" in sys.modules


def test_a_page_of_other_methods_has_no_such_section() -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra report)")
    assert "LEDE" not in Page(render(report())).text

"""Prompts that make a model copy: made of installed files, none of them a measuring suite's."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from hasten.bench.prompts import load_suite
from hasten.train.payoff import prompts as made
from hasten.train.payoff.prompts import KINDS, Task

CODE = '''import os


def size_of_{n}(path, default=4{n}):
    """Bytes of a file."""
    if not os.path.exists(path):
        return default
    total = os.path.getsize(path)
    if total > 10{n}0:
        print("large", path)
    return total


LIMIT = 77{n}
'''


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like that of installed packages."""
    folder = tmp_path_factory.mktemp("site")
    for n in range(60):
        package = folder / f"pkg{n}"
        package.mkdir()
        (package / "sizes.py").write_text(CODE.format(n=n))
        (package / "data.json").write_text(
            "[\n" + ",\n".join(f"  {n + i}" for i in range(12)) + "\n]"
        )
        about = folder / f"pkg{n}-1.{n}.dist-info"
        about.mkdir()
        facts = f"Metadata-Version: 2.1\nName: pkg{n}\nVersion: 1.{n}\nSummary: Does thing {n}.\n"
        (about / "METADATA").write_text(f"{facts}\nLong text.\n")
    own = folder / "hasten-0.1.dist-info"
    own.mkdir()
    (own / "METADATA").write_text("Name: hasten\nVersion: 1\nSummary: Itself.\n")
    (folder / "hasten").mkdir()
    (folder / "hasten" / "own.py").write_text(CODE.format(n=9).replace("size_of", "hasten_own"))
    (folder / "pkg0" / "broken.py").write_bytes(b"\xff\xfe\x00" * 40)
    return folder


@pytest.fixture(scope="module")
def some(root: Path) -> list[Task]:
    return list(islice(made.tasks(0, root), 35))


def test_all_kinds_come_in_turn_the_same_for_a_seed(some: list[Task], root: Path) -> None:
    assert [task.kind for task in some[:10]] == [*KINDS, *KINDS]
    assert list(islice(made.tasks(0, root), 35)) == some
    assert list(islice(made.tasks(1, root), 35)) != some
    assert max(Counter(task.turns for task in some).values()) == 1


def test_only_second_turns_have_a_second_turn(some: list[Task]) -> None:
    assert {task.kind: len(task.turns) for task in some} == {
        kind: 2 if kind == "second-turn" else 1 for kind in KINDS
    }


def of(kind: str, some: list[Task]) -> list[Task]:
    return [task for task in some if task.kind == kind]


def test_a_text_to_be_changed_is_in_the_prompt_with_one_change(some: list[Task]) -> None:
    for task in (*of("rewrite", some), *of("second-turn", some)):
        body = task.turns[0].split("```")[1]
        assert len(body.strip().split("\n")) >= 6
        changes = ("instead, wherever", "must become", "Leave out the line", "Before the line")
        assert sum(words in task.turns[0] for words in changes) == 1
    for task in of("second-turn", some):
        assert "```" not in task.turns[1], "the text is in the model's own answer"


def test_the_other_kinds_hold_what_the_answer_repeats(some: list[Task]) -> None:
    assert all(
        "[NAME]" in task.turns[0] and "pkg" in task.turns[0] for task in of("template", some)
    )
    for task in of("extract", some):
        assert task.turns[0].count("Does thing") >= 3
    for task in of("log", some):
        lines = [line for line in task.turns[0].split("\n") if ".json" in line or ".py" in line]
        assert len(lines) >= 8


def test_nothing_of_hastens_own_files_is_asked(some: list[Task]) -> None:
    assert not any("hasten" in turn for task in some for turn in task.turns)


def test_requests_are_not_those_of_the_suites() -> None:
    """No run of six words of a request is in a prompt of the editing and agent suites."""
    suites = " ".join(
        " ".join(turn.split())
        for name in ("editing", "agent")
        for row in load_suite(name).rows
        for turn in row.turns
    )
    ways = (
        *made._REWRITE_WAYS, *made._SECOND_WAYS, *made._TEMPLATE_WAYS, *made._EXTRACT_WAYS,
        *made._LOG_WAYS, made._FORM,
    )  # fmt: skip
    for way in ways:
        words = way.split()
        runs = [" ".join(words[at : at + 6]) for at in range(len(words) - 5)]
        assert not [run for run in runs if run in suites]


def test_tasks_go_on_until_no_kind_has_more(root: Path) -> None:
    counts = Counter(task.kind for task in made.tasks(0, root))
    assert set(counts) == set(KINDS)
    assert counts["template"] == counts["extract"] == 60, "one a package"
    assert counts["log"] < 60


def test_a_folder_without_texts_has_no_tasks(tmp_path: Path) -> None:
    assert list(made.tasks(0, tmp_path)) == []

"""What a round drafted from, in words."""

from __future__ import annotations

import pytest

from hasten.choices import Choice, choice, exits_drafted, origin
from hasten.types import DraftTree, Round


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("exit-4", "exit 4"), ("module", "exit 0"), ("copied", "copy"), ("checked", "copy"),
        ("lookup", "copy"), ("logits", "stored"), ("start", "stored"), ("mine", "mine"),
    ],
)  # fmt: skip
def test_sources_have_words(source: str, word: str) -> None:
    assert origin(source) == word


def round_of(
    sources: tuple[str, ...], accepted: tuple[int, ...], parents: tuple[int, ...]
) -> Round:
    tree = DraftTree(tuple(range(len(parents))), parents)
    return Round(1, tuple(range(len(accepted))), tree, accepted, ("", *sources))


def test_a_chains_choice_is_its_exit_length_and_what_was_kept() -> None:
    made = choice(round_of(("exit-4",) * 3, (0, 1, 2), (-1, 0, 1, 2)))
    assert made == Choice(("exit 4",), 3, 3, ("exit 4", "exit 4"))
    assert (made.name, made.exit) == ("exit 4", 4)


def test_a_tree_of_several_parts_names_them_and_its_longest_path() -> None:
    sources = ("copied", "copied", "module", "logits")
    made = choice(round_of(sources, (0, 3), (-1, 0, 1, 0, 0)))
    assert made.name == "copy + exit 0", "stored candidates fill what the others leave"
    assert (made.drafted, made.depth, made.kept, made.exit) == (4, 2, ("exit 0",), 0)
    alone = choice(round_of(("logits", "start"), (0,), (-1, 0, 0)))
    assert (alone.name, alone.exit) == ("stored", None)


def test_a_round_without_drafts_is_plain() -> None:
    for made in (Round(0, (3,)), round_of((), (0,), (-1,))):
        assert choice(made) == Choice()
        assert choice(made).name == "plain"
    assert not exits_drafted([Choice(), Choice(("copy",), 2, 2)])
    assert exits_drafted([Choice(), Choice(("copy", "exit 0"), 2, 2)])

"""Families about what a model has to know: looked up in small lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hasten.tasks.base import Family, Item, Template, item
from hasten.tasks.words import ANTONYMS, CAPITALS, KINDS, PAST, PLURALS


def _table(pairs: Sequence[tuple[str, str]]) -> Callable[[], Sequence[Item]]:
    return lambda: [item(answer, word=word) for word, answer in pairs]


def _antonyms() -> list[Item]:
    """Both directions, of words that have one opposite here."""
    words = [word for pair in ANTONYMS for word in pair]
    return [
        item(answer, group=" ".join(sorted(pair)), word=word)
        for pair in ANTONYMS
        for word, answer in (pair, pair[::-1])
        if words.count(word) == 1
    ]


def _kinds() -> list[Item]:
    """A word, and three kinds in turn of which one is its own."""
    names, found = list(KINDS), []
    for at, (kind, words) in enumerate(KINDS.items()):
        for number, word in enumerate(words):
            offered = [names[(at + step) % len(names)] for step in (0, 1 + number % 3, 4)]
            turn = number % 3
            shown = offered[turn:] + offered[:turn]
            found.append(item(kind, word=word, x=shown[0], y=shown[1], z=shown[2]))
    return found


FAMILIES = (
    Family(
        "antonym",
        _antonyms,
        (
            Template("question", 'What is the opposite of "{word}"?'),
            Template("order", "Write the antonym of: {word}"),
            Template("word", '"{word}": its opposite?', held_out=True),
        ),
    ),
    Family(
        "plural",
        _table(PLURALS),
        (
            Template("question", 'What is the plural of "{word}"?'),
            Template("order", "Write the plural form of: {word}"),
            Template("count", "One {word}, two", held_out=True),
        ),
    ),
    Family(
        "past",
        _table(PAST),
        (
            Template("question", 'What is the past tense of "{word}"?'),
            Template("order", "Write the simple past of: {word}"),
            Template("today", "Today I {word}. Yesterday I", held_out=True),
        ),
    ),
    Family(
        "capital",
        _table(CAPITALS),
        (
            Template("question", "What is the capital of {word}?"),
            Template("order", "Name the capital city of {word}."),
            Template("word", "{word}: its capital?", held_out=True),
        ),
    ),
    Family(
        "kind",
        _kinds,
        (
            Template("question", "What is {word}: {x}, {y} or {z}?"),
            Template("order", "Choose what {word} is: {x}, {y}, {z}"),
            Template("word", "{word}: {x}, {y} or {z}?", held_out=True),
        ),
        chance=1 / 3,
    ),
)

"""Families about words, lists and sentences."""

from __future__ import annotations

import random

from hasten.tasks.arithmetic import MOST_ITEMS, drawn
from hasten.tasks.base import Family, Item, Template, item
from hasten.tasks.words import ADJECTIVES, KINDS, NOUNS, OBJECTS, SHORT_WORDS, VERBS

_EVERYTHING = tuple(word for words in KINDS.values() for word in words)
_PLACES = ("first", "second", "third", "last")


def _bag(words: list[str]) -> str:
    """The same for the same words in any order."""
    return " ".join(sorted(words))


def _count_letters() -> list[Item]:
    found = []
    for word in SHORT_WORDS:
        letters = dict.fromkeys(word)
        spare = next(letter for letter in "etaoinshr" if letter not in letters)
        found += [item(word.count(x), group=word, letter=x, word=word) for x in (*letters, spare)]
    return found


def _spell() -> list[Item]:
    ends = (("first", 0), ("last", -1), ("second", 1))
    return [
        item(word[at], group=word, place=place, word=word)
        for word in SHORT_WORDS
        for place, at in ends
    ]


def _reverse() -> list[Item]:
    def one(source: random.Random) -> Item:
        words = source.sample(_EVERYTHING, 3)
        return item(", ".join(reversed(words)), group=_bag(words), shown=", ".join(words))

    return drawn("reverse", MOST_ITEMS, one)


def _sort() -> list[Item]:
    def one(source: random.Random) -> Item:
        words = source.sample(_EVERYTHING, 3)
        return item(", ".join(sorted(words)), group=_bag(words), shown=", ".join(words))

    return drawn("sort", MOST_ITEMS, one)


def _position() -> list[Item]:
    def one(source: random.Random) -> Item:
        words, at = source.sample(_EVERYTHING, 4), source.randrange(4)
        shown = ", ".join(words)
        return item(words[at], group=_bag(words), place=_PLACES[at], shown=shown)

    return drawn("position", MOST_ITEMS, one)


def _odd_one_out() -> list[Item]:
    def one(source: random.Random) -> Item:
        many, few = source.sample(sorted(KINDS), 2)
        odd = source.choice(KINDS[few])
        words = [*source.sample(KINDS[many], 3), odd]
        source.shuffle(words)
        return item(odd, group=_bag(words), shown=", ".join(words))

    return drawn("odd_one_out", MOST_ITEMS, one)


def _sentence(source: random.Random) -> list[str]:
    parts = (ADJECTIVES, NOUNS, VERBS, OBJECTS)
    adjective, noun, verb, thing = (source.choice(part) for part in parts)
    return ["the", adjective, noun, verb, "the", thing]


def _replace() -> list[Item]:
    def one(source: random.Random) -> Item:
        words = _sentence(source)
        at, pool = source.choice(((1, ADJECTIVES), (2, NOUNS), (3, VERBS), (5, OBJECTS)))
        old, new = words[at], source.choice([word for word in pool if word != words[at]])
        answer = " ".join(new if word == old else word for word in words)
        return item(answer, group=" ".join(words), old=old, new=new, shown=" ".join(words))

    return drawn("replace", MOST_ITEMS, one)


def _capitals() -> list[Item]:
    def one(source: random.Random) -> Item:
        words = _sentence(source)[:4]
        at = source.randrange(1, 4)
        answer = " ".join(word.upper() if i == at else word for i, word in enumerate(words))
        return item(answer, group=" ".join(words), word=words[at], shown=" ".join(words))

    return drawn("capitals", MOST_ITEMS, one)


FAMILIES = (
    Family(
        "count_letters",
        _count_letters,
        (
            Template("question", 'How many times is the letter "{letter}" in the word "{word}"?'),
            Template("order", 'Count the letter "{letter}" in "{word}".'),
            Template("word", 'The word "{word}" has how many "{letter}"?', held_out=True),
        ),
    ),
    Family(
        "spell",
        _spell,
        (
            Template("question", 'What is the {place} letter of "{word}"?'),
            Template("order", 'Write the {place} letter of the word "{word}".'),
            Template("word", '"{word}": its {place} letter?', held_out=True),
        ),
    ),
    Family(
        "reverse",
        _reverse,
        (
            Template("order", "Reverse this list: {shown}"),
            Template("backwards", "Write these backwards, the last one first: {shown}"),
            Template("question", "{shown}: what is this list in reverse order?", held_out=True),
        ),
    ),
    Family(
        "sort",
        _sort,
        (
            Template("order", "Sort these words by the alphabet: {shown}"),
            Template("put", "Put into alphabetical order: {shown}"),
            Template("question", "{shown}: how is this list sorted from A to Z?", held_out=True),
        ),
    ),
    Family(
        "position",
        _position,
        (
            Template("question", "What is the {place} word of this list: {shown}?"),
            Template("order", "Write the {place} one of: {shown}"),
            Template("list", "{shown}: which one is {place}?", held_out=True),
        ),
        chance=1 / 4,
    ),
    Family(
        "odd_one_out",
        _odd_one_out,
        (
            Template("question", "Which word doesn't belong: {shown}?"),
            Template("order", "Find the odd one out: {shown}"),
            Template("list", "{shown}: one is of another kind. Which?", held_out=True),
        ),
        chance=1 / 4,
    ),
    Family(
        "replace",
        _replace,
        (
            Template("order", 'Replace "{old}" with "{new}": {shown}'),
            Template("copy", 'Copy this with "{new}" instead of "{old}": {shown}'),
            Template("change", '{shown} - write it again, "{old}" becomes "{new}"', held_out=True),
        ),
    ),
    Family(
        "capitals",
        _capitals,
        (
            Template("order", 'Write "{word}" in capital letters: {shown}'),
            Template("copy", 'Copy this with the word "{word}" in upper case: {shown}'),
            Template("change", '{shown} - write it again with "{word}" in capitals', held_out=True),
        ),
        exact_case=True,
    ),
)

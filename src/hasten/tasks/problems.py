"""Problems of families: which split an item is in, and which ones a caller gets."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from functools import cache

from hasten.errors import OptionError
from hasten.tasks.base import SPLITS, Family, Item, Problem, Template
from hasten.tasks.families import FAMILIES

SHARES = {"train": 0.6, "validation": 0.15, "test": 0.25}
"""Of a family's items, by groups, up to chance."""


def split_of(family: str, group: str) -> str:
    """The split of a family's items of this group: the same everywhere and for good."""
    digest = hashlib.sha256(f"{family}/{group}".encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    for split, share in SHARES.items():
        place -= share
        if place < 0:
            return split
    return SPLITS[-1]


@cache
def items(family: str, split: str) -> tuple[Item, ...]:
    """A family's items of a split, in the order they were made."""
    made = FAMILIES[family].make()
    return tuple(each for each in made if split_of(family, each.group) == split)


def templates(family: Family, split: str) -> list[Template]:
    """The wordings of a split: held-out ones are in the test split only, beside the others."""
    return [each for each in family.templates if split == "test" or not each.held_out]


def available(family: str, split: str) -> int:
    """How many problems there are: every item in every wording."""
    _check([family], split)
    return len(items(family, split)) * len(templates(FAMILIES[family], split))


def problems(
    families: Sequence[str], split: str, count: int, *, seed: int = 0, template: str = ""
) -> list[Problem]:
    """`count` different problems, from the families in turn, as many of each as there are.

    A family gives each of its items once, in wordings that take turns, before any item comes in
    another wording. A family that has no more leaves its share to the others. The same arguments
    give the same problems; `seed` chooses which, never which split one is in.

    template  only that wording

    Raises OptionError for unknown names, and where there aren't `count` of them.
    """
    _check(families, split)
    if count < 1:
        raise OptionError("count", f"must be at least 1, got {count}")
    queues = [_in_order(FAMILIES[name], split, seed, template) for name in dict.fromkeys(families)]
    found: list[Problem] = []
    while queues and len(found) < count:
        going = []
        for queue in queues:
            made = next(queue, None)
            if made is not None:
                found.append(made)
                going.append(queue)
        queues = going
    if len(found) < count:
        raise OptionError(
            "count",
            f"{count} is more than the {len(found)} problems of {', '.join(families)} in the "
            f"{split} split",
            "Ask for fewer, or add families",
        )
    return found[:count]


def _check(families: Sequence[str], split: str) -> None:
    if split not in SPLITS:
        raise OptionError("split", f"no such split: {split!r}", f"Known: {', '.join(SPLITS)}")
    if isinstance(families, str) or not families:
        raise OptionError("families", f"must be a list of names, got {families!r}")
    for name in families:
        if name not in FAMILIES:
            known = f"Known: {', '.join(FAMILIES)}"
            raise OptionError("families", f"no such family: {name!r}", known)


def _in_order(family: Family, split: str, seed: int, template: str) -> Iterator[Problem]:
    """Every problem once, items first, then wordings."""
    wordings = templates(family, split)
    if template:
        wordings = [each for each in wordings if each.name == template]
    if not wordings:
        known = ", ".join(each.name for each in templates(family, split))
        raise OptionError("template", f"{family.name} has no {template!r} there", f"Known: {known}")
    order = list(items(family.name, split))
    random.Random(f"{family.name} {seed}").shuffle(order)
    for turn in range(len(wordings)):
        for at, each in enumerate(order):
            yield _problem(family, wordings[(at + turn) % len(wordings)], split, each)


def _problem(family: Family, template: Template, split: str, asked: Item) -> Problem:
    name = f"{family.name}/{template.name}/{asked.key}"
    return Problem(
        id=name,
        family=family.name,
        template=template.name,
        split=split,
        item=f"{family.name}/{asked.key}",
        question=template.text.format(**asked.values),
        answer=asked.answer,
        examples=tuple(
            (template.text.format(**each.values), each.answer)
            for each in _examples(family, asked, random.Random(name))
        ),
        held_out=template.held_out,
        exact_case=family.exact_case,
    )


def _examples(family: Family, asked: Item, source: random.Random) -> list[Item]:
    """Items of the training split, of other groups than the one asked and than each other."""
    pool = items(family.name, "train")
    found: list[Item] = []
    for each in source.sample(pool, min(len(pool), 20 * family.shots)):
        if len(found) == family.shots:
            break
        if each.group == asked.group or any(each.group == other.group for other in found):
            continue
        found.append(each)
    return found

"""What a family of tasks is made of, and what a problem is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

SPLITS = ("train", "validation", "test")
"""Every item is in one of them; a held-out template is in the last only."""


@dataclass(frozen=True, slots=True)
class Template:
    """One wording of a family's question.

    text      with the items' values as ``{name}``
    held_out  used in the test split only
    """

    name: str
    text: str
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """What is asked, apart from the wording.

    key     names it within its family
    answer  the one right answer
    values  for the templates' names
    group   items that give each other's answers away have one in common: a group is never divided
            between splits
    """

    key: str
    answer: str
    values: Mapping[str, object]
    group: str


def item(answer: object, *, group: str = "", **values: object) -> Item:
    """An item whose key is its values; each is its own group unless said."""
    key = ",".join(str(value) for value in values.values())
    return Item(key, str(answer), values, group or key)


@dataclass(frozen=True, slots=True)
class Family:
    """Tasks of one kind.

    make        all its items, the same each time, every key once
    chance      the share that a blind guess among the answers offered gets right; 0 where the
                question offers none
    exact_case  upper and lower case matter in its answers
    shots       worked examples before the question
    """

    name: str
    make: Callable[[], Sequence[Item]]
    templates: tuple[Template, ...]
    chance: float = 0.0
    exact_case: bool = False
    shots: int = 3


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with worked examples before it, and its one right answer.

    id        ``family/template/item``; the same id is the same prompt, whatever the seed
    item      problems of one item differ in their wording only: they aren't independent
    examples  questions and answers of other items, of the training split, in the same wording
    """

    id: str
    family: str
    template: str
    split: str
    item: str
    question: str
    answer: str
    examples: tuple[tuple[str, str], ...] = ()
    held_out: bool = False
    exact_case: bool = field(default=False, repr=False)

    @property
    def prompt(self) -> list[dict[str, str]]:
        """Chat messages, each example a turn; for `hasten.LLM.generate` and its like."""
        turns = [
            {"role": role, "content": text}
            for example in self.examples
            for role, text in zip(("user", "assistant"), example, strict=True)
        ]
        return [*turns, {"role": "user", "content": self.question}]

    def correct(self, text: str) -> bool:
        """Whether `text` is the answer and nothing else, see `normalise`."""
        return normalise(text, self.exact_case) == normalise(self.answer, self.exact_case)


def normalise(text: str, exact_case: bool = False) -> str:
    """The first line of a text's body: without white space around it and one full stop at its end,
    in lower case unless `exact_case`. Nothing else is forgiven."""
    lines = text.strip().splitlines()
    line = lines[0].rstrip() if lines else ""
    if line.endswith("."):
        line = line[:-1].rstrip()
    return line if exact_case else line.casefold()

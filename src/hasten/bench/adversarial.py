"""The ``adversarial`` suite: prompts on which drafts should fail, made by rule.

A method that is never slower than plain decoding shows it here. Each prompt ends in an open task,
picked so that the embedded model's answer doesn't loop: small models answer mere noise with loops,
which any lookup drafts perfectly. Three groups of eight:

random_ids   random token ids come first: statistics of the prompt mislead
no_repeats   the task alone: its answer has little to copy from the prompt or from itself
decoys       random ids of nine kinds come first: every pair of them recurs and goes on differently,
             so lookups find much, and it is wrong
"""

from __future__ import annotations

import random
from collections.abc import Collection

from hasten.bench.prompts import SuiteRow

_LENGTHS = (16, 32, 64, 96, 128, 192, 256, 384)
_DECOY_KINDS = 9
_DECOY_LENGTH = 160
_TASKS = {
    "random_ids": (
        "Write a short story about a blacksmith who is afraid of fire.",
        "Write a letter from a retired sailor to his granddaughter about the best day of his life.",
        "Describe an imaginary city at the bottom of a lake, its people and its weather.",
        "Tell how two brothers built a flying machine from kitchen tools.",
        "Describe the smells and sounds of a harbour on a foggy evening.",
        "Write a fairy tale in which a tailor sews a coat for the moon.",
        "Write a short story about a clock that runs backwards on Sundays.",
        "Describe a painting that shows a winter wedding in the mountains.",
    ),
    "no_repeats": (
        "Write a diary entry of a violin that has been left in an attic for fifty years.",
        "Write the opening of a detective story that is set in a bakery.",
        "Describe a market at dawn for somebody who has never seen one.",
        "Tell the legend of how the desert lost its river.",
        "Write a short story about a postman who reads every letter before it is sent.",
        "Describe the journey of a single raindrop from a cloud to the sea.",
        "Write a scene in which a queen meets a beekeeper in the rain.",
        "Tell the story of a stolen bell and the child who found it.",
    ),
    "decoys": (
        "Write a short story about a night watchman in a museum of toys.",
        "Write a short story about a pilot who lands on a cloud.",
        "Write a short story about a baker whose bread tells the truth.",
        "Describe an old library that is only open when it snows.",
        "Describe the workshop of a man who repairs broken umbrellas.",
        "Write a letter to a neighbour whose dog sings at night.",
        "Write a short story about two spies who share an umbrella stand.",
        "Write a short story about a gardener who grows glass flowers.",
    ),
}


def adversarial_rows() -> list[SuiteRow]:
    """The suite's rows, the same each time."""
    rows = []
    for group, tasks in _TASKS.items():
        for at, task in enumerate(tasks):
            length = {"random_ids": _LENGTHS[at], "decoys": _DECOY_LENGTH}.get(group, 0)
            kinds = _DECOY_KINDS if group == "decoys" else 0
            rows.append(SuiteRow(f"{group}-{at + 1}", group, (task,), length, kinds))
    return rows


def random_ids(row: SuiteRow, vocab_size: int, excluded: Collection[int] = ()) -> list[int]:
    """The noise before a row's prompt, the same each time for the same vocabulary.

    Ids of ``0..vocab_size-1`` without `excluded` (special tokens), all equally likely; or with
    `row.random_kinds`, that many of them.
    """
    allowed = [token for token in range(vocab_size) if token not in excluded]
    draw = random.Random(row.id)
    if row.random_kinds:
        allowed = draw.sample(allowed, min(row.random_kinds, len(allowed)))
    return draw.choices(allowed, k=row.random_tokens)

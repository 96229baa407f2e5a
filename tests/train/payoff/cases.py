"""Texts that copy, as rows: a stand-in of what a model says when it edits a text."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from hasten.payoff.features import Classes
from hasten.train.rows import SPLITS, Row

EOS = 1
VOCAB = 60
FIRST = 10


def table(vocab: int = VOCAB) -> Classes:
    """Kinds by the id alone."""
    made = np.zeros((vocab, 5), np.uint8)
    for kind in range(5):
        made[kind :: 5 + kind, kind] = 1
    return made


def copying(seed: int, length: int = 90, every: int = 30) -> tuple[list[int], list[int]]:
    """A prompt, and an answer that repeats it but for a token now and then, and ends."""
    dice = random.Random(seed)
    prompt = [dice.randrange(FIRST, VOCAB) for _ in range(length)]
    answer = [
        dice.randrange(FIRST, VOCAB) if place % every == every - 1 else token
        for place, token in enumerate(prompt)
    ]
    return prompt, [*answer, EOS]


def babbling(seed: int, length: int = 90) -> tuple[list[int], list[int]]:
    """A prompt and an answer of few different tokens: short copies everywhere, none of which goes
    on for long."""
    dice = random.Random(seed)
    prompt = [dice.randrange(FIRST, FIRST + 6) for _ in range(length)]
    return prompt, [*(dice.randrange(FIRST, FIRST + 6) for _ in range(length)), EOS]


def rows(count: int = 36, temperature: float = 0.0) -> list[Row]:
    """Both kinds, over all splits."""
    found = []
    for seed in range(count):
        kind = (copying, babbling)[seed % 2]
        prompt, output = kind(seed)
        split = SPLITS[seed // 2 % 3]
        source = f"rewrite/{seed}" if kind is copying else "somewhere"
        found.append(Row("chat", source, split, temperature, prompt, output))
    return found


def save(path: Path, some: Sequence[Row]) -> str:
    """A file of rows."""
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in some))
    return str(path)

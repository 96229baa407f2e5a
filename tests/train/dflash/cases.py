"""A toy target whose text repeats itself, and rows of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hasten.api import LLM
from hasten.dflash import store
from hasten.targets.catalog import ModelSource
from hasten.targets.fused import FusedTarget
from hasten.targets.load import Loaded
from hasten.train.dflash import run as training
from hasten.train.dflash.options import SFT, Head, Options, Rounds, Shape
from hasten.train.features import Text
from tests.exits.exit_models import LAYERS as LAYERS
from tests.exits.exit_models import target as target

MASK, BLOCK = 198, 4
PROMPT, LENGTH = 3, 40


@cache
def answers(count: int = 40) -> tuple[tuple[int, ...], ...]:
    """Greedy text after three random tokens."""
    generator = torch.Generator().manual_seed(0)
    model, out = target(), []
    for _ in range(count):
        ids = torch.randint(3, MASK, (PROMPT,), generator=generator).tolist()
        sequence = model.open()
        passed = model.prefill(sequence, ids)
        while len(ids) < LENGTH:
            assert passed.logits is not None
            ids.append(int(passed.logits[-1].argmax()))
            passed = model.prefill(sequence, ids[-1:])
        model.close(sequence)
        out.append(tuple(ids))
    return tuple(out)


def texts(count: int = 40) -> list[Text]:
    """The answers as texts of unlike length."""
    return [
        Text(ids[:PROMPT], ids[PROMPT : LENGTH - 3 * (at % 5)], "math" if at % 2 else "chat")
        for at, ids in enumerate(answers(count))
    ]


def ruled(count: int = 40) -> list[Text]:
    """Texts of 17 tokens in which each fixes the next: easy to learn, whatever the target says."""
    out = []
    for at in range(count):
        ids = [10 + at % 17]
        while len(ids) < 30:
            ids.append(10 + (3 * (ids[-1] - 10) + 1) % 17)
        out.append(Text(tuple(ids[: 3 + at // 17]), tuple(ids[3 + at // 17 :])))
    return out


def write_rows(path: Path, made: Sequence[Text] | None = None) -> Path:
    """Rows of three splits in two domains; texts of the target's own where none are given."""
    with path.open("w") as file:
        for at, text in enumerate(texts() if made is None else made):
            split = {0: "test", 1: "policy"}.get(at % 8, "modules")
            domain = "math" if at // 8 % 2 else "chat"
            row: dict[str, Any] = {"domain": domain, "source": "toy", "split": split}
            row |= {"temperature": 0.0, "prompt": text.prompt, "output": text.output}
            file.write(json.dumps(row) + "\n")
    return path


def llm(model: FusedTarget | None = None) -> LLM:
    """The toy target behind the public surface."""
    source = ModelSource("folder", "toy", "toy")
    return LLM(Loaded(model or target(), None, source), method="ar")


def options(**changes: Any) -> Options:
    """A drafter of one layer that learns in seconds."""
    usual: dict[str, Any] = {
        "shape": Shape(1, BLOCK, (1, 2, 4), vocabulary=60, mask_token=MASK, head=8),
        "sft": SFT(steps=40, texts=4, anchors=8, lr=5e-3, minutes=10.0),
        "head": Head(blocks=0),
        "rounds": Rounds(writer="rows", prompts=8, minutes=10.0),
    }
    return Options(**{**usual, **changes})


def everything(**changes: Any) -> Options:
    """All three stages, short."""
    usual: dict[str, Any] = {
        "sft": SFT(steps=20, texts=4, anchors=6, lr=5e-3, minutes=10.0),
        "head": Head(blocks=300, lr=1e-2),
        "rounds": Rounds(2, writer="rows", prompts=6, minutes=10.0),
    }
    return options(**{**usual, **changes})


def train(data: Path, out: Path, chosen: Options, **more: Any) -> dict[str, Any]:
    """What a run on the rows of a file reached."""
    return training.run(llm(), [data], out, chosen, **more)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors that a run has written."""
    return load_file(folder / store.WEIGHTS)

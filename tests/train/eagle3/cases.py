"""A drafter that learns in seconds, over the toy target and rows of the DFlash trainer's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hasten.dflash.store import WEIGHTS
from hasten.eagle3.net import Eagle3Net
from hasten.train.dflash.feed import Batch, Feed, FreshStates
from hasten.train.eagle3 import run as training
from hasten.train.eagle3 import start
from hasten.train.eagle3.objective import Objective
from hasten.train.eagle3.options import SFT, Options, Shape
from hasten.train.exits import Teacher
from tests.exits.exit_models import LAYERS
from tests.train.dflash.cases import llm, target, texts

TAPS = (2, 3, 5)
IDS = sorted({token for text in texts() for token in text.output})[:60]


def options(**changes: Any) -> Options:
    usual: dict[str, Any] = {
        "shape": Shape((1, 2, 4), vocabulary=60),
        "sft": SFT(steps=40, texts=4, lr=5e-3, minutes=10.0),
        "length": 3,
    }
    return Options(**{**usual, **changes})


def pupil(chosen: Options | None = None, seed: int = 0) -> Eagle3Net:
    """Random weights, large enough that every row bears on every other."""
    made = chosen or options(init="random", seed=seed)
    config = start.make_config(target(), made.shape, len(IDS))
    net = start.new_net(target(), config, IDS, made)
    with torch.no_grad():
        for value in net.parameters():
            value.mul_(6.0 if value.dim() > 1 else 1.0)
    return net


def feed(count: int = 3, size: int = 3, *, last: bool = True) -> Feed:
    return Feed(
        FreshStates(target(), texts()),
        range(count),
        TAPS,
        last=LAYERS if last else 0,
        device=torch.device("cpu"),
        size=size,
    )


def batch(count: int = 3) -> Batch:
    return feed(count, count).load(range(count))


def objective(net: Eagle3Net, chosen: Options | None = None) -> Objective:
    teacher = Teacher.of(target(), IDS, torch.float32)
    return Objective(net, teacher, target().torch_decoder.embeddings, chosen or options())


def train(data: Path, out: Path, chosen: Options, **more: Any) -> dict[str, Any]:
    """What a run on the rows of a file reached."""
    return training.run(llm(), [data], out, chosen, **more)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors that a run has written."""
    return load_file(folder / WEIGHTS)

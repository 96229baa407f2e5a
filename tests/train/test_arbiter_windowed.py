"""Outputs at a few rows are those that the whole texts give."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hasten.exits.config import ExitConfig
from hasten.train.arbiter.windowed import Window, outputs
from hasten.train.exit_nets import ExitNet

SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 8, "inner": 24}
HIDDEN = 32


def a_net(kind: str) -> ExitNet:
    if kind == "affine":
        return ExitNet(ExitConfig("affine", 2, HIDDEN, rank=4), seed=1)
    deep = (1, 3) if kind == "deep" else ()
    net = ExitNet(ExitConfig(kind, 2, HIDDEN, deep=deep, **SIZES), seed=1)  # type: ignore[arg-type]
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():  # maps that start at nothing would hide mistakes
        for parameter in net.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=source)
    return net


def runs(
    some: list[list[tuple[int, int]]], state: torch.Tensor, deep: list[torch.Tensor]
) -> Window:
    """Runs of rows of each text, by first row and length; the last row stands in for padding."""
    rows = [[first + at for first, count in text for at in range(count)] for text in some]
    places = [[at for _, count in text for at in range(count)] for text in some]
    width = max(map(len, rows))
    return Window(
        state,
        deep,
        torch.tensor([each + [0] * (width - len(each)) for each in rows]),
        torch.tensor([each + [-1] * (width - len(each)) for each in places]),
    )


@pytest.mark.parametrize("kind", ["affine", "adapter", "deep"])
def test_a_windows_outputs_are_those_of_the_whole_text(kind: str) -> None:
    net, source = a_net(kind), torch.Generator().manual_seed(2)
    texts, rows, steps = 3, 17, 4
    state = torch.randn(texts, rows, HIDDEN, generator=source)
    deep = [torch.randn(texts, rows, HIDDEN, generator=source) for _ in net.config.deep]
    window = runs([[(4, 6)], [(2, 3), (10, 5)], [(7, 4), (12, 2)]], state, deep)
    with torch.no_grad():
        found = outputs(net, window, steps)
        feature = None
        if net.config.deep:
            feature = F.pad(net.fused(deep), (0, 0, 1, 0))[:, :-1]
        whole = [net.affine(state)] if kind == "affine" else net.steps(state, feature, steps)
    assert len(found) == len(whole) == (steps if kind == "deep" else 1)
    for step, (mine, theirs) in enumerate(zip(found, whole, strict=True)):
        wanted = window.of(theirs)
        meant = window.places >= step
        torch.testing.assert_close(mine[meant], wanted[meant], rtol=1e-4, atol=1e-5)


def test_rows_past_a_text_change_nothing_before_them() -> None:
    net, source = a_net("deep"), torch.Generator().manual_seed(2)
    state = torch.randn(1, 9, HIDDEN, generator=source)
    deep = [torch.randn(1, 9, HIDDEN, generator=source) for _ in net.config.deep]
    with torch.no_grad():
        short = outputs(net, runs([[(4, 5)]], state, deep), 3)
        deeper = [F.pad(x, (0, 0, 0, 4)) for x in deep]
        long = outputs(net, runs([[(4, 5)]], F.pad(state, (0, 0, 0, 4)), deeper), 3)
    for mine, theirs in zip(short, long, strict=True):
        torch.testing.assert_close(mine, theirs)

"""The length head on the host says what the network's own says."""

from __future__ import annotations

import math

import pytest
import torch

from hasten.dflash.length_head import HostLengthHead
from hasten.dflash.net import LengthHead


@pytest.fixture
def head() -> LengthHead:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return LengthHead(24, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_says_what_torch_says(head: LengthHead, dtype: torch.dtype) -> None:
    host = HostLengthHead(head)
    for seed in range(5):
        states = torch.randn(1, 6, 24, generator=torch.Generator().manual_seed(seed)).to(dtype)
        with torch.no_grad():
            wanted = float(head(states.float()))
        assert host(states) == pytest.approx(wanted, abs=1e-6)


def test_states_that_are_no_numbers_give_none(head: LengthHead) -> None:
    assert math.isnan(HostLengthHead(head)(torch.full((1, 6, 24), torch.nan)))


def test_extreme_states_give_no_warning(head: LengthHead) -> None:
    said = HostLengthHead(head)(torch.full((1, 6, 24), 1e30))
    assert 0.0 <= said <= 1.0 or math.isnan(said)


def test_weights_are_copied(head: LengthHead) -> None:
    host, states = HostLengthHead(head), torch.ones(1, 6, 24)
    before = host(states)
    with torch.no_grad():
        head.down.weight.zero_()
    assert host(states) == before

"""A drafter meets its target: whose embeddings it reads, and which targets can't have one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hasten.eagle3.bank import assemble
from hasten.errors import CapabilityError
from hasten.targets.fused_weights import make_linear
from tests.conformance.toy_target import ToyTarget
from tests.eagle3.eagle3_models import bank, config, loaded
from tests.exits import exit_models as tiny


def test_embeddings_are_the_targets_or_the_drafters_own() -> None:
    tokens = [4, 9, 4]
    with torch.inference_mode():
        assert torch.equal(bank().embed(tokens), tiny.target().embed(tokens))
        table = torch.randn(tiny.VOCAB, 32, generator=torch.Generator().manual_seed(5))
        own = assemble(tiny.target(), loaded(config(), embeddings=table), make_linear)
        assert torch.equal(own.embed(tokens), table[tokens])


def test_logits_of_some_ids_are_spread_over_all() -> None:
    made = bank(ids=(4, 9, 100))
    wide = made.spread(torch.tensor([1.0, 2.0, 3.0]))
    assert wide.isfinite().nonzero().flatten().tolist() == [4, 9, 100]
    assert wide[[4, 9, 100]].tolist() == [1.0, 2.0, 3.0]
    assert made.numbers == [4, 9, 100]
    assert made.places == {4: 0, 9: 1, 100: 2}
    assert bank().spread(torch.arange(float(tiny.VOCAB))).tolist() == list(range(tiny.VOCAB))


def test_a_target_without_states_is_refused() -> None:
    toy: Any = ToyTarget()
    toy.capabilities = replace(toy.capabilities, taps=False)
    made = config(hidden_size=24, vocab_size=24, taps=(1, 3))
    with pytest.raises(CapabilityError, match="doesn't show the states of its layers"):
        assemble(toy, loaded(made), make_linear)

"""A drafter meets its target: whose head it uses, and which targets can't have one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hasten.dflash.bank import assemble
from hasten.errors import CapabilityError
from hasten.targets.fused_native import draft_linear
from hasten.targets.fused_weights import make_linear
from hasten.targets.transformers import TransformersTarget
from tests.conformance.toy_target import ToyTarget
from tests.dflash.dflash_models import bank, config, loaded
from tests.exits import exit_models as tiny
from tests.targets import tiny_models

STATES = torch.randn(3, 32, generator=torch.Generator().manual_seed(4))


def test_the_head_is_the_targets_rows_of_the_draft_vocabulary() -> None:
    made, ends = bank(ids=(4, 9, 100)), tiny.target().ends()
    with torch.inference_mode():
        got = made.head.local(())(STATES)
        torch.testing.assert_close(got, STATES @ ends.head[[4, 9, 100]].T)
    assert torch.equal(made.mask, ends.embeddings[3:4])


def test_a_request_may_draft_the_ids_of_its_prompt_too() -> None:
    with torch.inference_mode():
        local = bank(ids=(4, 9, 100)).head.local([9, 7, 8, 7])
        wide = local.spread(local(STATES)[0])
    assert wide.isfinite().nonzero().flatten().tolist() == [4, 7, 8, 9, 100]


def test_a_head_that_a_folder_brings_is_used_instead() -> None:
    own = torch.randn(3, 32, generator=torch.Generator().manual_seed(5))
    made = replace(loaded(config(draft_vocab_size=3), ids=(4, 9, 100)), head=own)
    with torch.inference_mode():
        got = assemble(tiny.target(), made, make_linear).head.local(())(STATES)
        torch.testing.assert_close(got, STATES @ own.T)


def test_products_laid_out_for_this_machine_say_nearly_the_same() -> None:
    block = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(6))
    context, positions = block.flip(1), torch.arange(10).unsqueeze(0)
    with torch.inference_mode():
        want = bank().net(block, context, positions)
        quick = assemble(tiny.target(), loaded(config()), draft_linear)
        got = quick.net(block, context, positions)
    assert (got - want).norm() < 0.05 * want.norm()


def test_a_transformers_model_shows_its_own_head() -> None:
    model = tiny_models.build(tiny_models.llama)
    target = TransformersTarget(model, name="tiny", eos_ids=frozenset())
    made = assemble(
        target, loaded(config(num_target_layers=3, target_layer_ids=(0, 2))), make_linear
    )
    with torch.inference_mode():
        got = made.head.local(())(STATES)
    torch.testing.assert_close(got, STATES @ model.lm_head.weight.detach().T)


def test_a_target_without_states_or_a_head_is_refused() -> None:
    toy: Any = ToyTarget()
    toy.capabilities = replace(toy.capabilities, taps=False)
    sizes = {"hidden_size": 24, "vocab_size": 24, "num_target_layers": 4}
    with pytest.raises(CapabilityError, match="doesn't show the states of its layers"):
        assemble(toy, loaded(config(**sizes, target_layer_ids=(1, 3))), make_linear)
    model = tiny_models.build(tiny_models.llama)
    target = TransformersTarget(model, name="tiny", eos_ids=frozenset())
    target.facts = replace(target.facts, quantized=True)
    with pytest.raises(CapabilityError, match="shows none that can be read"):
        assemble(target, loaded(config(num_target_layers=3, target_layer_ids=(0, 2))), make_linear)

"""What a model can do is found by running it, and the user's model stays as it was."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.targets import hf_cases
from tests.targets import tiny_models as tiny
from tests.targets.hf_cases import PROMPT, make, use

from hasten.errors import CapabilityError
from hasten.targets.capabilities import structural_doubt
from hasten.targets.hf_cache import LayerCache
from hasten.targets.hf_model import inspect_model
from hasten.targets.masks import MaskKind
from hasten.types import Rows

one_thread = hf_cases.one_thread
FOUR = (5, 6, 7, 8)
BRANCHED = (-1, 0, 0, 2)


def rewired(model: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    """The model with a forward that changes its keyword arguments first."""
    forward = model.forward

    @functools.wraps(forward)
    def changed(*args: Any, **kwargs: Any) -> Any:
        change(kwargs)
        return forward(*args, **kwargs)

    model.forward = changed
    return model


def portrait(model: Any) -> dict[str, Any]:
    """Everything of the user's that must stay as it was."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "generation": model.generation_config.to_dict(),
        "training": [module.training for module in model.modules()],
        "hooks": [[len(getattr(module, name)) for name in hooks] for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "weights": [(n, p.data_ptr(), p._version, p.grad) for n, p in model.named_parameters()],
        "grad": torch.is_grad_enabled(),
    }


def break_in(model: Any, layer: int) -> Any:
    """A hook that raises in a decoder layer, when the layers before it have grown their cache."""

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("out of memory, say")

    return inspect_model(model).layers[layer].register_forward_hook(broken)  # type: ignore[index]


@pytest.mark.parametrize("kind", [tiny.llama, tiny.gemma3, tiny.gpt2, tiny.mpt, tiny.mamba2])
def test_the_model_is_as_before(kind: Any) -> None:
    model = tiny.build(kind)
    before = portrait(model)
    target = make(model)
    use(target)
    assert portrait(model) == before


def test_the_model_is_as_before_after_an_error_in_a_pass() -> None:
    model = tiny.build(tiny.llama)
    target = make(model)
    sequence = target.open()
    before = portrait(model)
    handle = break_in(model, 1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            target.prefill(sequence, PROMPT, taps=(0, 2, 3))
    handle.remove()
    assert portrait(model) == before


@pytest.mark.parametrize("kind", [tiny.llama, tiny.mistral, tiny.gemma3])
def test_a_pass_that_fails_leaves_the_sequence_as_it_was(kind: Any) -> None:
    model = tiny.build(kind)
    target = make(model)
    sequence = target.open()
    handle = break_in(model, 1)
    with pytest.raises(ZeroDivisionError):
        target.prefill(sequence, PROMPT)
    handle.remove()
    target.prefill(sequence, PROMPT)
    target.forward([Rows(sequence, FOUR[:3], BRANCHED[:3])])
    handle = break_in(model, 1)
    with pytest.raises(ZeroDivisionError):
        target.forward([Rows(sequence, FOUR[3:], BRANCHED[3:])])
    handle.remove()
    assert (sequence.length, sequence.pending) == (20, 3)
    (passed,) = target.forward([Rows(sequence, FOUR[3:], BRANCHED[3:])])
    right = tiny.fresh_logits(model, [*PROMPT, 5, 7, 8])[-1]
    torch.testing.assert_close(passed.logits[0], right, rtol=1e-4, atol=1e-4)
    target.rollback(sequence)
    assert sequence.tokens == PROMPT


def test_a_state_lost_in_a_failed_pass_is_never_used_again() -> None:
    model = tiny.build(tiny.falcon_mamba)
    target = make(model)
    sequence = target.open()
    target.prefill(sequence, PROMPT)
    handle = break_in(model, 1)
    with pytest.raises(ZeroDivisionError):
        target.forward([Rows(sequence, (5,), (-1,))])
    handle.remove()
    with pytest.raises(CapabilityError, match="open a new one"):
        target.forward([Rows(sequence, (5,), (-1,))])
    target.close(sequence)


def test_the_global_generators_stay_as_they_were() -> None:
    model = tiny.build(tiny.mixtral)
    random.seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    use(make(model))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2][1])


@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_ignores_the_tree_gets_chains(name: str, dtype: torch.dtype) -> None:
    model = rewired(tiny.build(tiny.llama, dtype=dtype), lambda kwargs: kwargs.pop(name, None))
    target = make(model)
    assert not target.capabilities.tree
    assert target.capabilities.rollback
    assert any("trees are off" in note and "differed" in note for note in target.capabilities.notes)
    sequence = target.open()
    target.prefill(sequence, PROMPT)
    with pytest.raises(CapabilityError, match="trees are off"):
        target.forward([Rows(sequence, FOUR, BRANCHED)])
    (passed,) = target.forward([Rows(sequence, FOUR, (-1, 0, 1, 2))])
    right = tiny.fresh_logits(model, [*PROMPT, *FOUR])[-4:]
    tolerance = 1e-4 if dtype == torch.float32 else 0.1 * float(right.abs().max())
    torch.testing.assert_close(passed.logits, right, rtol=0, atol=tolerance)


def test_a_model_that_raises_on_tree_masks_gets_chains() -> None:
    def refuse(kwargs: dict[str, Any]) -> None:
        if kwargs.get("attention_mask") is not None:
            raise ValueError("no 4-D masks here")

    target = make(rewired(tiny.build(tiny.llama), refuse))
    assert (target.capabilities.tree, target.capabilities.rollback) == (False, True)
    assert any("no 4-D masks here" in note for note in target.capabilities.notes)


def test_a_model_wrong_on_several_rows_decodes_plainly_and_right() -> None:
    """As some recurrent models: rows run together forget what the cache holds."""

    def forget(kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[1] > 1:
            kwargs["attention_mask"] = torch.eye(kwargs["input_ids"].shape[1])[None, None].bool()

    def forgetful(kwargs: dict[str, Any]) -> None:
        cache = kwargs[tiny.CACHE_NAME]
        if cache is not None and cache.get_seq_length():
            forget(kwargs)

    model = tiny.build(tiny.llama)
    right = tiny.fresh_logits(model, [*PROMPT, 5, 6])
    target = make(rewired(model, forgetful))
    assert (target.capabilities.tree, target.capabilities.rollback) == (False, False)
    sequence = target.open()
    target.prefill(sequence, PROMPT[:10])
    passed = target.prefill(sequence, [*PROMPT[10:], 5], all_logits=True)
    torch.testing.assert_close(passed.logits, right[10:-1], rtol=0, atol=1e-4)
    (passed,) = target.forward([Rows(sequence, (6,), (-1,))])
    torch.testing.assert_close(passed.logits, right[-1:], rtol=0, atol=1e-4)


def test_a_model_whose_cache_gives_other_logits_is_refused() -> None:
    def scramble(kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[1] == 1:
            kwargs[tiny.CACHE_NAME] = None

    with pytest.raises(CapabilityError, match="with its cache"):
        make(rewired(tiny.build(tiny.llama), scramble))


def test_a_model_with_a_cache_class_of_its_own_is_refused_with_the_reason() -> None:
    with pytest.raises(
        CapabilityError, match=r"MiniMaxForCausalLM can't run a pass .*cache of its own"
    ):
        make(tiny.build(tiny.minimax))


def test_prompts_of_a_model_that_forgets_its_state_continue_row_by_row() -> None:
    """Both drop their state when several rows come; small weights hardly let it show in logits."""
    for model in (tiny.build(tiny.falcon_mamba), tiny.build(tiny.jamba, initializer_range=0.02)):
        target = make(model)
        assert not target.multi_row
        assert any("row by row" in note for note in target.capabilities.notes)
    assert make(tiny.build(tiny.qwen3_next)).multi_row


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention", "my_own_kernel"])
def test_attention_without_tree_masks_is_told_by_structure(attention: str) -> None:
    facts = dataclasses.replace(inspect_model(tiny.build(tiny.llama)), attention=attention)
    cache = LayerCache(facts.config)
    kinds = {"full_attention": MaskKind(0)}
    assert structural_doubt(dataclasses.replace(facts, attention="sdpa"), cache, kinds) == ""
    assert attention in structural_doubt(facts, cache, kinds)
    assert "attn_implementation='sdpa'" in structural_doubt(facts, cache, kinds)


def test_a_window_inside_the_attention_is_told_by_structure() -> None:
    facts = inspect_model(tiny.build(tiny.llama, window_size=256))
    assert "window" in structural_doubt(facts, LayerCache(facts.config), {"full": MaskKind(0)})


def test_bfloat16_and_float16_keep_their_trees() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for kind in (tiny.llama, tiny.gemma3, tiny.gpt2):
            target = make(tiny.build(kind, dtype=dtype))
            assert target.capabilities.tree
            assert target.info.dtype == dtype
            use(target)

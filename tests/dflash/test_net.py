"""The drafter's network: cached, packed and reference arithmetic agree, whatever it runs on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hasten.dflash.config import DFlashConfig
from hasten.dflash.net import DFlashNet, DraftCache, RMSNorm, check_frontier, pack
from hasten.errors import CacheStateError
from hasten.targets.fused_weights import make_linear
from tests.dflash.dflash_models import BLOCK, config, net

SLIDING = {
    "layer_types": ("sliding_attention", "full_attention"),
    "sliding_window": 3,
    "sliding_window_non_causal": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True},
    "sliding": SLIDING,
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32
        },
    },
}  # fmt: skip


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def alone(made: DFlashNet, block: torch.Tensor, context: torch.Tensor, first: int = 0) -> Any:
    """One block behind all of its context, without a cache."""
    count = context.shape[1] + block.shape[1]
    return made(block, context, torch.arange(first, first + count).unsqueeze(0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_filled_bit_by_bit_gives_what_one_pass_over_the_whole_context_gives(
    kind: str,
) -> None:
    made = net(config(**KINDS[kind]))
    context, cache, at = made.context(noise(1, 200, 64)), DraftCache(), 0
    for number, more in enumerate((7, 1, 0, 3, 140, 2)):
        block = noise(1, BLOCK, 32, seed=number)
        positions = torch.arange(at, at + more + BLOCK).unsqueeze(0)
        got = made(block, context[:, at : at + more], positions, cache)
        at += more
        assert cache.length == at, "block slots never stay in the cache"
        torch.testing.assert_close(got, alone(made, block, context[:, :at]), atol=1e-5, rtol=1e-4)


def test_rows_put_into_the_cache_without_a_block_are_the_same() -> None:
    made, context = net(config()), noise(1, 9, 32)
    cache, block = DraftCache(), noise(1, BLOCK, 32)
    made.remember(context[:, :6], torch.arange(6).unsqueeze(0), cache)
    got = made(block, context[:, 6:], torch.arange(6, 9 + BLOCK).unsqueeze(0), cache)
    torch.testing.assert_close(got, alone(made, block, context), atol=1e-5, rtol=1e-4)


def test_a_context_that_starts_late_is_only_shorter() -> None:
    made, context, block = net(config()), noise(1, 9, 32), noise(1, BLOCK, 32)
    cache = DraftCache(start=4)
    made.remember(context[:, 4:8], torch.arange(4, 8).unsqueeze(0), cache)
    got = made(block, context[:, 8:], torch.arange(8, 9 + BLOCK).unsqueeze(0), cache)
    want = alone(made, block, context[:, 4:], first=4)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(got, alone(made, block, context), atol=1e-3)


def test_only_distances_between_positions_matter() -> None:
    made, context, block = net(config()), noise(1, 9, 32), noise(1, BLOCK, 32)
    got, want = alone(made, block, context, 100), alone(made, block, context)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["plain", "sliding"])
def test_blocks_packed_under_a_mask_are_what_each_is_alone(kind: str) -> None:
    made = net(config(**KINDS[kind]))
    anchors, length = (1, 4, 5, 11), 12
    context, blocks = made.context(noise(1, length, 64)), noise(1, len(anchors) * BLOCK, 32)
    slots = torch.cat([torch.arange(a, a + BLOCK) for a in anchors])
    number = torch.arange(len(slots)) // BLOCK
    before = torch.arange(length) < torch.tensor(anchors)[number].unsqueeze(1)
    mask = torch.cat([before, number.unsqueeze(1) == number], 1).unsqueeze(0)
    positions = torch.cat([torch.arange(length), slots]).unsqueeze(0)
    got = made(blocks, context, positions, None, mask)
    for n, anchor in enumerate(anchors):
        rows = slice(n * BLOCK, (n + 1) * BLOCK)
        want = alone(made, blocks[:, rows], context[:, :anchor])
        torch.testing.assert_close(got[:, rows], want, atol=1e-5, rtol=1e-4)


def test_every_slot_sees_every_other_and_the_whole_context() -> None:
    made, context, block = net(config()), noise(1, 6, 32), noise(1, BLOCK, 32)
    plain = alone(made, block, context)
    for slot in range(BLOCK):
        moved = block.clone()
        moved[0, slot] += 1.0
        assert ((alone(made, moved, context) - plain).abs().amax(2) > 1e-6).all()
    for row in range(6):
        moved = context.clone()
        moved[0, row] += 1.0
        assert ((alone(made, block, moved) - plain).abs().amax(2) > 1e-6).all()


def test_a_sliding_layer_sees_the_window_before_the_anchor_and_no_later_slot() -> None:
    both = {**SLIDING, "layer_types": ("sliding_attention",) * 2}
    made, context, block = net(config(**both)), noise(1, 8, 32), noise(1, BLOCK, 32)
    plain = alone(made, block, context)

    def change(of: str, at: int) -> torch.Tensor:
        moved = {"context": context.clone(), "block": block.clone()}
        moved[of][0, at] += 1.0
        after = alone(made, moved["block"], moved["context"])
        return (after - plain).abs().amax(2)[0] > 1e-6

    assert not change("context", 4).any()
    assert change("context", 5).all()
    assert change("block", 2).tolist() == [False, False, True, True, True]
    wide = net(config(**{**both, "sliding_window_non_causal": True}))
    moved = block.clone()
    moved[0, 4] += 1.0
    assert ((alone(wide, moved, context) - alone(wide, block, context)).abs().amax(2) > 1e-6).all()


def test_in_bfloat16_norms_and_angles_stay_in_float32() -> None:
    norm = RMSNorm(8, 1e-6).to(torch.bfloat16)
    row = torch.full((8,), 300.0, dtype=torch.bfloat16)
    assert norm(row).tolist() == [1.0] * 8
    made, low = net(config()), net(config()).to(torch.bfloat16)
    context, block = noise(1, 9, 32), noise(1, BLOCK, 32)
    got = alone(low, block.bfloat16(), context.bfloat16(), first=9000)
    assert got.dtype == torch.bfloat16
    assert (got.float() - alone(made, block, context, first=9000)).abs().mean() < 0.05


def test_packed_for_serving_it_says_the_same() -> None:
    made, packed = (
        net(config(attention_bias=True)),
        pack(net(config(attention_bias=True)), make_linear),
    )
    with torch.inference_mode():
        features, block = noise(1, 9, 64), noise(1, BLOCK, 32)
        want = alone(made, block, made.context(features))
        got = alone(packed, block, packed.context(features))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert not list(packed.layers.parameters()) or all(
        "norm" in name for name, _ in packed.layers.named_parameters()
    )


def test_the_length_head_is_the_published_formula() -> None:
    made = net(config(length_head=6))
    hidden, tensors = noise(3, BLOCK, 32), made.thresh_head_two_model.state_dict()
    f = torch.cat([hidden.mean(1), hidden[:, -1]], 1)
    u = torch.nn.functional.silu(f @ tensors["down.weight"].T + tensors["down.bias"])
    u = u + torch.nn.functional.silu(u @ tensors["res.0.weight"].T + tensors["res.0.bias"])
    want = torch.sigmoid(u @ tensors["out.weight"].T + tensors["out.bias"])[:, 0]
    torch.testing.assert_close(made.worth(hidden), want)
    assert made.worth(hidden).shape == (3,)


def test_gradients_reach_every_parameter_of_the_body() -> None:
    made = DFlashNet(config(length_head=6))
    alone(made, noise(1, BLOCK, 32), made.context(noise(1, 6, 64))).square().sum().backward()
    for name, value in made.named_parameters():
        is_head = name.startswith("thresh_head")
        assert (value.grad is None) == is_head, name
        assert is_head or value.grad.abs().sum() > 0, name


def test_a_context_that_does_not_end_at_the_anchor_is_refused() -> None:
    cache = DraftCache(start=2)
    cache.keep(3)
    check_frontier(cache, 4, 9)
    for committed in (8, 10):
        with pytest.raises(CacheStateError, match="3 rows from 2 on and 4 wait"):
            check_frontier(cache, 4, committed)


def reference(made: DFlashConfig, tensors: dict[str, torch.Tensor]) -> Any:
    """transformers' one model of this architecture, with these tensors; its names for two of them
    differ."""
    glimmer = pytest.importorskip(
        "transformers.models.muse_glimmer_assistant", reason="needs transformers with that model"
    )
    described = glimmer.MuseGlimmerAssistantConfig(
        hidden_size=made.hidden_size,
        intermediate_size=made.intermediate_size,
        num_hidden_layers=made.num_layers,
        num_attention_heads=made.num_heads,
        num_key_value_heads=made.num_kv_heads,
        head_dim=made.head_dim,
        rms_norm_eps=made.eps,
        rope_parameters={"rope_type": "default", "rope_theta": made.rope_theta},
        layer_types=list(made.layer_types),
        block_size=made.block_size,
        mask_token_id=made.mask_token_id,
        target_layer_ids=list(made.target_layer_ids),
    )
    model = glimmer.MuseGlimmerAssistantModel(described).eval()
    renamed = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
    model.load_state_dict({renamed.get(k, k): v for k, v in tensors.items()}, strict=True)
    return model


def test_the_arithmetic_is_that_of_transformers_own_model_of_this_architecture() -> None:
    from transformers.cache_utils import DFlashCache

    made = net(config())
    with torch.random.fork_rng():
        other = reference(made.config, made.state_dict())
    features, block = noise(1, 9, 64), noise(1, BLOCK, 32)
    cache = DFlashCache(config=other.config)
    cache.set_previous_accepted_tokens(9)
    with torch.no_grad():
        want = other(block, features, position_ids=torch.arange(9 + BLOCK)[None], cache=cache)
        got = alone(made, block, made.context(features))
    torch.testing.assert_close(got, want.last_hidden_state, atol=1e-5, rtol=1e-4)

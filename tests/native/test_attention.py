"""What the native kernels keep of keys and values, and what attention makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from tests.targets import tiny_models as tiny
from tests.targets.fused_models import PATHS, TREE, chain, fused, llama, random_model

from hasten.native.library import LANES, why_not_native
from hasten.targets.base import Rows
from hasten.targets.cache import CachedSequence
from hasten.targets.fused import FusedTarget

if (missing := why_not_native(torch.float32, torch.device("cpu"), 16)) is not None:
    pytest.skip(f"no CPU kernels here: {missing}", allow_module_level=True)

STORED = (torch.float32, torch.bfloat16, torch.int8)
SHAPES = {"pairs": (16, 4, 2), "threes": (48, 6, 2), "sixes": (80, 6, 1)}
"""Features of a head, query heads, key heads."""
IDS = tiny.random_ids(45)
ROUNDED = 0.5 + 1e-4
"""Of a scale: what rounding to the nearest costs, and a float's own rounding of some 127ths."""


@cache
def transparent(name: str) -> Any:
    """A layer that adds what attention gathers to the embeddings and does nothing else.

    Head h asks with its own key times 2^(h % 3), so that queries can be read off a cache.
    """
    dim, heads, kv_heads = SHAPES[name]
    model = random_model(
        llama(
            head_dim=dim,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            hidden_size=heads * dim,
            num_hidden_layers=1,
            initializer_range=1 / (heads * dim) ** 0.5,
        )
    )
    layer = model.model.layers[0]
    group = heads // kv_heads
    with torch.no_grad():
        keys = layer.self_attn.k_proj.weight.view(kv_heads, dim, -1)
        asking = [keys[head // group] * 2.0 ** (head % 3) for head in range(heads)]
        layer.self_attn.q_proj.weight.copy_(torch.cat(asking))
        layer.self_attn.o_proj.weight.copy_(torch.eye(heads * dim))
        layer.mlp.down_proj.weight.zero_()
    return model


@dataclass
class Held:
    """A sequence's committed keys and values, (layers, key heads, slots, dim): numbers of the dtype
    they are stored as, and what 1 is worth, (layers, key heads, slots, 1). Features are in the
    kernels' order, in which those that turn together are neighbours."""

    keys: torch.Tensor
    key_scales: torch.Tensor
    values: torch.Tensor
    value_scales: torch.Tensor

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, float64."""
        keys, values = self.keys.double(), self.values.double()
        return keys * self.key_scales.double(), values * self.value_scales.double()


def held(target: FusedTarget, sequence: CachedSequence) -> Held:
    assert sequence.tail is not None
    assert not sequence.segments
    count, dim, kv = sequence.tail_length, target.shape.head_dim, sequence.tail.kv
    keys, values = kv.chunk(2, 1)
    scales = (torch.ones(*keys.shape[:3], 1),) * 2
    tiles = keys.unflatten(2, (-1, LANES)).flatten(3)
    if kv.dtype == torch.int8:
        bytes_of_scales = tiles[..., dim * LANES :].contiguous()
        scales = (
            bytes_of_scales.view(torch.float32).flatten(2).unsqueeze(-1),
            values[..., dim:].contiguous().view(torch.float32),
        )
        tiles, values = tiles[..., : dim * LANES], values[..., :dim]
    pair = 2 if kv.dtype == torch.bfloat16 else 1
    lanes = tiles.unflatten(-1, (dim // pair, LANES, pair)).transpose(-3, -2)
    keys = lanes.flatten(-2).flatten(2, 3)
    return Held(*(x[:, :, :count].clone() for x in (keys, scales[0], values, scales[1])))


def run(target: FusedTarget, ids: Sequence[int]) -> tuple[Held, torch.Tensor]:
    """The cache of a prompt, and what attention gathered in layer 0: float64 (rows, hidden)."""
    sequence = target.open()
    hidden = target.prefill(sequence, ids, taps=(0, 1)).hidden
    cache = held(target, sequence)
    target.close(sequence)
    return cache, hidden[1].double() - hidden[0].double()


def queries(name: str, keys: torch.Tensor) -> torch.Tensor:
    """What `transparent` asks, (heads, rows, dim), of its unrounded keys (kv_heads, rows, dim)."""
    dim, heads, kv_heads = SHAPES[name]
    sizes = torch.tensor([2.0 ** (head % 3) for head in range(heads)]).double()
    return keys.repeat_interleave(heads // kv_heads, 0) * sizes.view(-1, 1, 1) / dim**0.5


def attention(
    asked: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (heads, rows, rows) and what is gathered (rows, heads * dim), in float64."""
    rows = asked.shape[1]
    scores = asked @ keys.repeat_interleave(group, 0).mT
    scores.masked_fill_(torch.ones(rows, rows).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1)
    return weights, joined(weights @ values.repeat_interleave(group, 0))


def joined(by_head: torch.Tensor) -> torch.Tensor:
    return by_head.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_attention_is_that_of_the_numbers_held(name: str, stored: torch.dtype) -> None:
    exact, _ = run(fused(transparent(name), kernels="native"), IDS)
    cache, found = run(fused(transparent(name), kernels="native", kv_dtype=stored), IDS)
    asked = queries(name, exact.whole()[0][0])
    if stored == torch.bfloat16:
        asked = asked.bfloat16().double()
    keys, values = (x[0] for x in cache.whole())
    _, want = attention(asked, keys, values, SHAPES[name][1] // SHAPES[name][2])
    # bfloat16: a query just between two of its numbers may be rounded the other way here
    tolerance = 2e-2 if stored == torch.bfloat16 else 1e-4
    torch.testing.assert_close(found, want, atol=tolerance, rtol=0)
    assert (found - want).norm() <= 0.05 * tolerance * (1 + want.norm())
    assert want.abs().max() > 0.5


@pytest.mark.parametrize("name", SHAPES)
def test_8_bits_are_off_by_no_more_than_their_scales_allow(name: str) -> None:
    exact, true = run(fused(transparent(name), kernels="native"), IDS)
    cache, found = run(fused(transparent(name), kernels="native", kv_dtype=torch.int8), IDS)
    (keys, values), group = (x[0] for x in exact.whole()), SHAPES[name][1] // SHAPES[name][2]
    own_keys, own_values = (x[0] for x in cache.whole())
    key_scales, value_scales = cache.key_scales[0].double(), cache.value_scales[0].double()
    for numbers, rounded, scales in (
        (keys, own_keys, key_scales),
        (values, own_values, value_scales),
    ):
        torch.testing.assert_close(scales, numbers.abs().amax(-1, keepdim=True) / 127)
        assert ((numbers - rounded).abs() <= ROUNDED * scales).all()

    asked = queries(name, keys)
    sizes = asked.abs().sum(-1, keepdim=True)
    off = ROUNDED * sizes * key_scales.repeat_interleave(group, 0).mT  # (heads, rows, slots)
    gaps = asked @ (keys - own_keys).repeat_interleave(group, 0).mT
    assert (gaps.abs() <= off).all()

    # Weights are off by a factor of at most e^(2 off), values by half a scale.
    weights, _ = attention(asked, keys, values, group)
    seen = torch.ones(len(IDS), len(IDS)).tril().bool()
    most = (2 * off.masked_fill(~seen, 0).amax(-1, keepdim=True)).exp()
    by_weights = (most - 1) * (weights @ values.abs().repeat_interleave(group, 0))
    by_values = ROUNDED * most * (weights @ value_scales.repeat_interleave(group, 0))
    assert ((found - true).abs() <= joined(by_weights + by_values) + 1e-4).all()
    assert (found - true).abs().max() > 1e-3, "nothing was rounded"


def test_a_vector_of_zeros_stays_one() -> None:
    model = random_model(llama(head_dim=16))
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = 0
    target = fused(model, kernels="native", kv_dtype=torch.int8)
    sequence = target.open()
    logits = target.prefill(sequence, [4, 9, 9, 5], all_logits=True).logits
    cache = held(target, sequence)
    for numbers, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales)):
        assert not numbers[0, :, 1:3].any()
        assert not scales[0, :, 1:3].any()
        assert (numbers[0, :, 0].int().abs().amax(-1) == 127).all()
    assert logits is not None
    assert logits.isfinite().all()


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_what_is_held_is_what_plain_decoding_holds(stored: torch.dtype) -> None:
    """After a tree's path moved, a rollback, growth, and in forks that share or copy."""
    target = fused(random_model(llama(head_dim=16)), kernels="native", kv_dtype=stored)

    def holds(sequence: CachedSequence, ids: Sequence[int]) -> None:
        plain = target.open()
        for token in ids:
            target.forward([chain(plain, [token])])
            target.commit(plain, [0])
        got, want = held(target, sequence), held(target, plain)
        for name in ("keys", "key_scales", "values", "value_scales"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        target.close(plain)

    for prompt in (14, 19, 60):  # the tree lies across tiles; or across the block's end
        ids = tiny.random_ids(prompt)
        sequence = target.open()
        target.prefill(sequence, ids)
        target.forward([Rows(sequence, *TREE)])
        target.rollback(sequence)
        holds(sequence, ids)
        for path in PATHS[3:]:
            target.forward([Rows(sequence, *TREE)])
            target.commit(sequence, path)
            ids += [TREE[0][row] for row in path]
            holds(sequence, ids)
        for copy_below in (0, 64):
            target._store.copy_below = copy_below
            fork = target.open(sequence, 13)
            assert bool(fork.segments) == (copy_below == 0)
            target.prefill(fork, [5, 6])
            target.close(fork)
            holds(sequence, ids)
        fork = target.open(sequence, 13)  # copied
        target.close(sequence)
        target.prefill(fork, [5, 6])
        holds(fork, [*ids[:13], 5, 6])
        target.close(fork)
    assert target.bytes_in_use == 0


@pytest.mark.parametrize("name", SHAPES)
def test_a_token_takes_a_byte_for_a_number_and_a_float_for_a_vector(name: str) -> None:
    dim, _, kv_heads = SHAPES[name]
    found = []
    for stored in STORED:
        target = fused(transparent(name), kernels="native", kv_dtype=stored)
        sequence = target.open()
        target.prefill(sequence, IDS)
        assert sequence.tail is not None
        found.append(target.bytes_in_use // sequence.tail.capacity)
        target.close(sequence)
    assert found == [2 * kv_heads * size for size in (4 * dim, 2 * dim, dim + 4)]

"""A packed pass sees, says and weighs what a block in serving would."""

from __future__ import annotations

import math

import pytest
import torch

from hasten.dflash.net import DFlashNet
from hasten.train.dflash.blocks import Blocks, all_anchors, draw_anchors, packed_mask
from hasten.train.dflash.feed import Batch, Feed, FreshStates
from hasten.train.dflash.start import make_config, new_net
from tests.train.dflash.cases import BLOCK, LAYERS, MASK, options, target, texts


def net(seed: int = 0, **changes: object) -> DFlashNet:
    """Random weights, large enough that every row bears on every slot."""
    made = options(seed=seed, init="random")
    config = make_config(target(), made.shape, mask_token=MASK, vocabulary=60, lookahead=1)
    out = new_net(target(), config, made)
    with torch.no_grad():
        for value in out.parameters():
            value.mul_(6.0 if value.dim() > 1 else 1.0)
    return out


def batch(count: int = 3) -> Batch:
    feed = Feed(
        FreshStates(target(), texts()),
        range(count),
        (2, 3, 5),
        last=LAYERS,
        device=torch.device("cpu"),
        size=count,
    )
    return feed.load(range(count))


def blocks(made: Batch, anchors: list[list[int]], keep: list[list[bool]] | None = None) -> Blocks:
    at = torch.tensor(anchors)
    kept = torch.ones_like(at, dtype=torch.bool) if keep is None else torch.tensor(keep)
    return Blocks.at(at, kept, made.ids, made.starts, made.lengths, block=BLOCK, mask_token=MASK)


def test_a_block_of_the_packed_pass_is_the_block_of_serving() -> None:
    made, drafter = batch(), net()
    anchors = [[3, 4, 9, 20], [5, 6, 7, 30], [8, 12, 16, 24]]
    packed = blocks(made, anchors)
    context = drafter.context(made.features)
    embeddings = target().torch_decoder.embeddings

    def slots(tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens, embeddings)

    with torch.no_grad():
        whole = drafter(slots(packed.tokens), context, packed.positions, mask=packed.mask)
        whole = whole.view(3, 4, BLOCK, -1)
        for row, line in enumerate(anchors):
            for at, anchor in enumerate(line):
                tokens = torch.tensor([[int(made.ids[row, anchor]), *[MASK] * (BLOCK - 1)]])
                positions = torch.arange(anchor + BLOCK).unsqueeze(0)
                before = drafter.context(made.features[row : row + 1, :anchor])
                alone = drafter(slots(tokens), before, positions)
                torch.testing.assert_close(whole[row, at], alone[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changed", ["anchor", "before"])
def test_a_block_sees_what_stands_before_its_anchor_and_nothing_from_there_on(changed: str) -> None:
    made, drafter = batch(1), net()
    packed = blocks(made, [[6, 12]])
    slots = torch.nn.functional.embedding(packed.tokens, target().torch_decoder.embeddings)

    def run(features: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = drafter(
                slots, drafter.context(features), packed.positions, mask=packed.mask
            )
        return out.view(2, BLOCK, -1)

    other = made.features.clone()
    other[:, 6 if changed == "anchor" else 5] += 1.0
    first, second = (run(other) - run(made.features)).abs().amax((1, 2)).tolist()
    assert (first > 1e-4) == (changed == "before")
    assert second > 1e-4


def test_the_mask_is_strict_and_keeps_blocks_apart() -> None:
    mask = packed_mask(torch.tensor([[1, 3]]), 4, 2)[0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 1, 1, 0, 0],
        [1, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 1],
        [1, 1, 1, 0, 0, 0, 1, 1],
    ]


def test_slot_k_is_taught_the_token_at_the_anchor_plus_k_as_long_as_the_answer_goes() -> None:
    made = batch(2)
    length = int(made.lengths[0])
    packed = blocks(made, [[3, length - 2], [3, 4]], [[True, True], [True, False]])
    assert packed.labels[0, 0].tolist() == made.ids[0, 3 : 3 + BLOCK].tolist()
    assert packed.inside[0].tolist() == [[False, True, True, True], [False, True, False, False]]
    assert packed.inside[1].tolist() == [[False, True, True, True], [False] * 4]
    assert packed.whole(made.lengths).tolist() == [[True, False], [True, False]]
    weights = packed.weights(4.0)[0, 0].tolist()
    assert weights == pytest.approx([0.0, 1.0, math.exp(-0.25), math.exp(-0.5)])


def test_prompt_tokens_are_not_taught() -> None:
    made = batch(1)
    packed = blocks(made, [[1]])  # slot 1 stands in the prompt, whose tokens are 0 to 2
    assert packed.inside[0, 0].tolist() == [False, False, True, True]


def test_anchors_are_drawn_without_replacement_in_order_and_by_the_generator_alone() -> None:
    def draw(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return draw_anchors([3, 3, 9], [40, 7, 8], 6, torch.Generator().manual_seed(seed))

    anchors, keep = draw(0)
    assert keep.sum(1).tolist() == [6, 5, 0]
    assert anchors[1, :5].tolist() == [3, 4, 5, 6, 7]
    first = anchors[0].tolist()
    assert first == sorted(set(first))
    assert first[0] >= 3
    assert first[-1] <= 40
    assert torch.equal(draw(0)[0], anchors)
    assert not torch.equal(draw(1)[0], anchors)


def test_measuring_visits_every_anchor_once() -> None:
    seen: list[list[int]] = [[], []]
    for anchors, keep in all_anchors([3, 5], [12, 6], 4):
        for row in range(2):
            seen[row] += anchors[row][keep[row]].tolist()
    assert seen == [list(range(3, 13)), [5, 6]]

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.targets import tiny_models as tiny

from hasten.targets.hf_cache import LayerCache, is_plain
from hasten.targets.masks import MaskKind, ancestors, depths_of, mask_kinds, tree_masks, visible

TREE = (-1, 0, 0, 1, 2, 4)
"""A root with the branches 1-3 and 2-4-5."""
PATHS = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 2, 4}, {0, 2, 4, 5}]


def filled_cache(kind: Any, length: int) -> tuple[Any, LayerCache]:
    model = tiny.build(kind)
    cache = LayerCache(model.config)
    with torch.no_grad():
        ids = torch.tensor([tiny.random_ids(length)])
        model(ids, use_cache=True, **{tiny.CACHE_NAME: cache.raw})
    if all(is_plain(layer) for layer in cache.layers):
        cache.record()
    return model.config, cache


def test_each_row_descends_from_its_path_only() -> None:
    assert [set(row.nonzero()[0].tolist()) for row in ancestors(TREE)] == PATHS


def test_a_forest_has_a_root_for_every_parent_minus_one() -> None:
    assert depths_of((-1, -1, 0, 1, 3)) == [0, 0, 1, 1, 2]
    assert ancestors((-1, -1, 0)).tolist() == [
        [True, False, False],
        [False, True, False],
        [True, False, True],
    ]


def look(kind: MaskKind, slots: int, committed: int, parents: tuple[int, ...], rows: int) -> Any:
    """Slots each of the last `rows` rows sees, as sets."""
    depths = torch.tensor(depths_of(parents))
    tree = torch.from_numpy(ancestors(parents))[-rows:]
    mask = visible(kind, slots, committed, depths, tree)
    return [set(row.nonzero().flatten().tolist()) for row in mask]


def test_full_attention_sees_all_committed_tokens_and_the_path() -> None:
    seen = look(MaskKind(0), 4 + 6, 4, TREE, 6)
    assert seen == [{0, 1, 2, 3} | {4 + node for node in path} for path in PATHS]


def test_a_window_counts_depths_and_not_slots() -> None:
    # 20 tokens are committed and a window of 5 keeps the last 4, at positions 16..19.
    seen = look(MaskKind(0, window=5), 4 + 6, 20, TREE, 6)
    for row, path in enumerate(PATHS):
        position = 20 + depths_of(TREE)[row]
        committed = {slot for slot in range(4) if position - (16 + slot) < 5}
        assert seen[row] == committed | {4 + node for node in path}
    assert seen[1] == seen[2] - {6} | {5}, "siblings see equally far back"


def test_a_window_shorter_than_the_path_hides_the_root() -> None:
    seen = look(MaskKind(0, window=2), 1 + 4, 9, (-1, 0, 1, 2), 4)
    assert seen == [{0, 1}, {1, 2}, {2, 3}, {3, 4}]


def test_a_chunk_ends_at_its_border_whatever_the_slot() -> None:
    # Chunks of 8: position 23 is the last of its chunk, its children start the next one.
    seen = look(MaskKind(0, window=8, chunked=True), 7 + 3, 23, (-1, 0, 0), 3)
    assert seen == [{0, 1, 2, 3, 4, 5, 6, 7}, {8}, {9}]


def test_rows_that_are_pending_already_are_seen_by_their_descendants_only() -> None:
    assert look(MaskKind(0), 2 + 6, 2, TREE, 2) == [
        {0, 1} | {2 + node for node in path} for path in PATHS[4:]
    ]


@pytest.mark.parametrize("kind", [tiny.llama, tiny.mistral, tiny.gpt2, tiny.qwen3])
def test_one_mask_serves_a_model_whose_layers_are_alike(kind: Any) -> None:
    config, cache = filled_cache(kind, 20)
    kinds = mask_kinds(config, cache.layers)
    assert kinds is not None
    assert len(kinds) == 1
    (only,) = kinds.values()
    assert only.window == (tiny.WINDOW if kind is tiny.mistral else None)


def test_mixed_layers_get_a_mask_for_each_type_with_a_size_of_its_own() -> None:
    config, cache = filled_cache(tiny.gemma3, 20)
    kinds = mask_kinds(config, cache.layers)
    assert kinds is not None
    masks = tree_masks(
        kinds,
        cache,
        committed=20,
        parents=TREE,
        rows=6,
        device=torch.device("cpu"),
        additive=None,
    )
    assert isinstance(masks, dict)
    assert {name: tuple(mask.shape) for name, mask in masks.items()} == {
        "sliding_attention": (1, 1, 6, tiny.WINDOW - 1 + 6),
        "full_attention": (1, 1, 6, 26),
    }


def test_chunked_layers_are_told_from_sliding_ones() -> None:
    config, cache = filled_cache(tiny.llama4, 20)
    kinds = mask_kinds(config, cache.layers)
    assert kinds is not None
    assert kinds["chunked_attention"].chunked
    assert not kinds["full_attention"].chunked


@pytest.mark.parametrize("kind", [tiny.lfm2, tiny.mamba2, tiny.qwen3_next])
def test_no_mask_serves_a_model_with_states(kind: Any) -> None:
    config, cache = filled_cache(kind, 6)
    assert mask_kinds(config, cache.layers) is None


def test_no_mask_serves_layers_of_one_type_with_different_windows() -> None:
    def layer(window: int) -> Any:
        return SimpleNamespace(keys=torch.zeros(1, 1, 1, 1), is_sliding=True, sliding_window=window)

    config = SimpleNamespace(layer_types=["sliding_attention"] * 2)
    assert mask_kinds(config, [layer(4), layer(8)]) is None
    assert mask_kinds(config, [layer(4), layer(4)]) is not None


def test_an_additive_mask_is_zero_where_a_row_may_look_and_the_least_value_elsewhere() -> None:
    config, cache = filled_cache(tiny.llama, 5)
    kinds = mask_kinds(config, cache.layers)
    assert kinds is not None
    common = {"committed": 5, "parents": TREE, "rows": 6, "device": torch.device("cpu")}
    bools = tree_masks(kinds, cache, additive=None, **common)
    floats = tree_masks(kinds, cache, additive=torch.bfloat16, **common)
    assert isinstance(bools, torch.Tensor)
    assert isinstance(floats, torch.Tensor)
    assert floats.dtype == torch.bfloat16
    assert torch.equal(floats == 0, bools)
    assert bool((floats[~bools] == torch.finfo(torch.bfloat16).min).all())

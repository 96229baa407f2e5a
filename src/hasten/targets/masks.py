"""Attention masks for trees of rows, as transformers' models take them.

A row sees every committed token, its ancestors and itself. A window or a chunk is tested on
*positions* (committed tokens + depth), never on cache slots: rows on other branches don't count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hasten.targets.hf_cache import LayerCache, is_empty, is_linear, window_of


@dataclass(frozen=True, slots=True)
class MaskKind:
    """What the layers of one type see.

    layer    index of a cache layer of this type, which sizes the mask
    window   tokens in reach, None for all
    chunked  True when `window` is the length of fixed chunks instead of a distance
    """

    layer: int
    window: int | None = None
    chunked: bool = False


def mask_kinds(config: Any, layers: Sequence[Any]) -> dict[str, MaskKind] | None:
    """The kinds of mask a model's layers need, by layer type; None when none can serve it.

    `layers` are the layers of a cache that has seen a pass. A single entry means that one mask
    serves all layers, whatever their types are called.
    """
    names = getattr(config, "layer_types", None) or [None] * len(layers)
    kinds: dict[str, MaskKind] = {}
    for index, (layer, name) in enumerate(zip(layers, names, strict=False)):
        if is_empty(layer):
            continue
        if is_linear(layer):
            return None
        window = window_of(layer)
        chunk = getattr(config, "attention_chunk_size", None)
        chunked = window is not None and (
            name == "chunked_attention" or (name is None and chunk == window)
        )
        kind = MaskKind(index, window, chunked)
        kind_name = name or ("full_attention" if window is None else "sliding_attention")
        known = kinds.setdefault(kind_name, kind)
        if (known.window, known.chunked) != (window, chunked):
            return None
    if len({(kind.window, kind.chunked) for kind in kinds.values()}) == 1:
        return dict([next(iter(kinds.items()))])
    return kinds or None


def depths_of(parents: Sequence[int]) -> list[int]:
    """Depth of each row below the last committed token: 0 where the parent is -1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def ancestors(parents: Sequence[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """``(rows, rows)`` bool: entry (i, j) is True when j is i or an ancestor of i."""
    seen = np.zeros((len(parents), len(parents)), dtype=np.bool_)
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen[row] = seen[parent]
        seen[row, row] = True
    return seen


def visible(
    kind: MaskKind,
    slots: int,
    committed: int,
    depths: torch.Tensor,
    tree: torch.Tensor,
) -> torch.Tensor:
    """``(rows, slots)`` bool: what the last rows of a tree may see in one kind of layer.

    `slots` cache slots are on view, the last ``len(depths)`` of them being pending rows. `depths`
    ``(pending,)`` int64 are the depths of all pending rows; `tree` ``(rows, pending)`` bool their
    ancestry, for the rows of this pass (the last ones).
    """
    rows, pending = tree.shape
    mask = torch.ones((rows, slots), dtype=torch.bool, device=tree.device)
    mask[:, slots - pending :] = tree
    if kind.window is None:
        return mask
    first = committed - (slots - pending)
    past = torch.arange(first, committed, device=tree.device)
    keys = torch.cat([past, depths + committed])[None, :]
    queries = (depths[pending - rows :] + committed)[:, None]
    if kind.chunked:
        return mask & (queries // kind.window == keys // kind.window)
    return mask & (queries - keys < kind.window)


def tree_masks(
    kinds: Mapping[str, MaskKind],
    cache: LayerCache,
    *,
    committed: int,
    parents: Sequence[int],
    rows: int,
    device: torch.device,
    additive: torch.dtype | None,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """The mask of a pass over the last `rows` pending rows, or a dict of masks by layer type.

    Each mask is ``(1, 1, rows, slots)``: bool, True where a row may look; or, with `additive`, a
    float of that dtype, 0 where it may look and the dtype's least value elsewhere. `parents` are
    those of all pending rows. `cache` must stand before the pass, its windows widened by the rows
    that are pending already.
    """
    depths = torch.tensor(depths_of(parents), device=device)
    tree = torch.from_numpy(ancestors(parents)[len(parents) - rows :]).to(device)

    def build(kind: MaskKind) -> torch.Tensor:
        slots = int(cache.raw.get_mask_sizes(rows, kind.layer)[0])
        mask = visible(kind, slots, committed, depths, tree)[None, None]
        if additive is None:
            return mask
        floor = torch.full((), torch.finfo(additive).min, dtype=additive, device=device)
        return torch.where(mask, torch.zeros_like(floor), floor)

    if len(kinds) == 1:
        return build(next(iter(kinds.values())))
    return {name: build(kind) for name, kind in kinds.items()}

"""Cutting, gathering and forking a transformers cache.

This module knows layers of keys and values; it knows nothing of tokens or models. Everything here
acts on the library's own cache objects, never on the user's model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

Frontier = list[tuple[int, int]]
"""For each layer: slots held, and tokens seen (more than the slots once a window has slid)."""


def is_linear(layer: Any) -> bool:
    """True when the layer holds a convolution or recurrent state."""
    return hasattr(layer, "conv_states") or hasattr(layer, "recurrent_states")


def is_recurrent(layer: Any) -> bool:
    """True when the layer holds a recurrent state, which no cut can bring back."""
    states = getattr(layer, "recurrent_states", None) or {}
    return any(state is not None for state in states.values())


def is_empty(layer: Any) -> bool:
    """True when the layer stores nothing: it has no attention, or uses another layer's KV."""
    return not is_linear(layer) and getattr(layer, "keys", None) is None


def is_plain(layer: Any) -> bool:
    """True when all the layer holds is a key and a value per slot: slots may be gathered."""
    return is_empty(layer) or type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


def window_of(layer: Any) -> int | None:
    """The sliding window of a layer, in tokens; None for full attention."""
    return int(layer.sliding_window) if getattr(layer, "is_sliding", False) else None


class LayerCache:
    """One sequence's cache, whose last slots can be gathered or dropped.

    Sliding layers *record*: from `record` on, slots that leave the window stay until the next
    `keep`, so that a pass can be undone.
    """

    def __init__(self, config: Any) -> None:
        self.raw: Any = DynamicCache(config=config)
        self.recording = False

    @property
    def layers(self) -> list[Any]:
        """The layers of the underlying cache."""
        layers: list[Any] = self.raw.layers
        return layers

    def fork(self) -> LayerCache:
        """An independent copy; plain layers share their tensors, which aren't written any more.

        (An update makes new tensors; `keep` writes only behind the committed slots, into tensors
        that the pass just made.)
        """
        twin = copy.copy(self)
        twin.raw = copy.copy(self.raw)
        twin.raw.layers = [copy.copy(x) if is_plain(x) else copy.deepcopy(x) for x in self.layers]
        return twin

    def record(self) -> None:
        """Keep what slides out of a window until the next `keep`."""
        if not self.recording:
            self.raw.activate_past_recording()
            self.recording = True

    def keep(self, rows: Sequence[int], pending: int) -> None:
        """Of the last `pending` slots keep those at `rows` (increasing), and drop the others.

        With layers that aren't plain, `rows` must be the first ones. ``keep((), n)`` cuts n slots,
        ``keep((), 0)`` only lets go of what slid out of a window.
        """
        scattered = list(rows) != list(range(len(rows)))
        for layer in self.layers:
            if is_empty(layer):
                continue
            if is_plain(layer):
                _keep_plain(layer, rows, pending, scattered)
            elif pending > len(rows) or self.recording:
                layer.crop(len(rows) - pending)

    def can_cut(self, count: int) -> bool:
        """True when the last `count` slots can be dropped and nothing is missing afterwards."""
        return count == 0 or all(_can_cut(layer, count) for layer in self.layers)

    @contextmanager
    def widened(self, pending: int) -> Iterator[None]:
        """Let windows hold `pending` slots more: rows on other branches take up no room in them.

        A stock layer shows the last ``window - 1`` slots; with `pending` tree rows among them the
        oldest committed tokens that a shallow row must see would be left out.
        """
        sliding = [layer for layer in self.layers if pending and window_of(layer) is not None]
        for layer in sliding:
            layer.sliding_window += pending
        try:
            yield
        finally:
            for layer in sliding:
                layer.sliding_window -= pending

    def frontier(self) -> Frontier:
        """Where each layer stands, to be handed to `restore`."""
        return [(_slots(layer), getattr(layer, "cumulative_length", 0)) for layer in self.layers]

    def restore(self, frontier: Frontier) -> bool:
        """Undo a pass that broke off somewhere; False when that can't be done."""
        return len(frontier) == len(self.layers) and all(
            _restore(layer, slots, seen)
            for layer, (slots, seen) in zip(self.layers, frontier, strict=True)
        )

    def states(self) -> list[torch.Tensor]:
        """Every tensor held, layer by layer (for comparing two caches)."""
        held: list[Any] = []
        for layer in self.layers:
            held += [getattr(layer, "keys", None), getattr(layer, "values", None)]
            for name in ("conv_states", "recurrent_states"):
                held += (getattr(layer, name, None) or {}).values()
        return [state for state in held if state is not None]


def _slots(layer: Any) -> int:
    keys = getattr(layer, "keys", None)
    return int(keys.shape[-2]) if keys is not None and keys.dim() > 1 else 0


def _keep_plain(layer: Any, rows: Sequence[int], pending: int, scattered: bool) -> None:
    window = window_of(layer)
    if window is None and pending == len(rows) and not scattered:
        return
    slots = _slots(layer)
    first = slots - pending
    end = first + len(rows)
    if scattered:
        index = torch.tensor(rows, device=layer.keys.device) + first
        for held in (layer.keys, layer.values):
            held[..., first:end, :] = held.index_select(-2, index.to(held.device))
    start = max(end - window + 1, 0) if window is not None else 0
    layer.keys = layer.keys[..., start:end, :]
    layer.values = layer.values[..., start:end, :]
    if window is not None:
        layer.cumulative_length -= pending - len(rows)


def _can_cut(layer: Any, count: int) -> bool:
    if is_empty(layer):
        return True
    if is_recurrent(layer) or not getattr(layer, "is_croppable", hasattr(layer, "crop")):
        return False
    for index, state in (getattr(layer, "conv_states", None) or {}).items():
        if state is not None and state.shape[-1] - count < layer.conv_kernel_size[index]:
            return False
    window = window_of(layer)
    if window is not None:
        return bool(_slots(layer) - count >= min(layer.cumulative_length - count, window - 1))
    return True


def _restore(layer: Any, slots: int, seen: int) -> bool:
    if is_empty(layer):
        return True
    if not is_plain(layer) or _slots(layer) < slots:
        return False
    if window_of(layer) is not None:
        if layer.cumulative_length != seen and not layer.record_past:
            return False
        layer.cumulative_length = seen
    if _slots(layer) > slots:
        layer.keys = layer.keys[..., :slots, :]
        layer.values = layer.values[..., :slots, :]
    return True

"""Texts and the target's states on them, in padded batches whose order the seed fixes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from hasten.errors import OptionError
from hasten.targets.fused import FusedTarget
from hasten.train.dflash.files import writing
from hasten.train.features import Features, Text, layer_file, run_batch
from hasten.train.run_exits import kept_states
from hasten.train.run_exits import states as compute_states

POOL = 16
"""Batches' worth of texts that are sorted by length together: little padding, much chance."""

Log = Callable[[dict[str, Any]], None]


class States(Protocol):
    """Outputs of the target's layers (1 to the last) on numbered texts."""

    texts: Sequence[Text]

    def read(self, layers: Sequence[int], group: Sequence[int]) -> list[torch.Tensor]:
        """For each layer bfloat16 ``(len(group), longest, hidden)``; what stands behind a text's
        end is of no use."""
        ...


class StoredStates:
    """Read from disk."""

    def __init__(self, features: Features, texts: Sequence[Text]) -> None:
        self.texts, self._features = texts, features

    def read(self, layers: Sequence[int], group: Sequence[int]) -> list[torch.Tensor]:
        """See `States`; on the CPU."""
        width, found = max(len(self.texts[i]) for i in group), []
        for layer in layers:
            out = torch.zeros(len(group), width, self._features.hidden_size, dtype=torch.bfloat16)
            for row, i in enumerate(group):
                out[row, : len(self.texts[i])] = self._features.states(layer, i)
            found.append(out)
        return found


class FreshStates:
    """Computed when asked for."""

    def __init__(self, target: FusedTarget, texts: Sequence[Text]) -> None:
        self.texts, self._target = texts, target

    def read(self, layers: Sequence[int], group: Sequence[int]) -> list[torch.Tensor]:
        """See `States`; on the target's device."""
        ids = [[*self.texts[i].prompt, *self.texts[i].output] for i in group]
        kept = run_batch(self._target, ids, layers)
        # Cloned: what inference mode has made can't be part of a graph.
        return [kept[layer].to(torch.bfloat16).clone() for layer in layers]


def open_states(
    target: FusedTarget,
    texts: Sequence[Text],
    layers: Sequence[int],
    folder: Path | None,
    log: Log,
) -> States:
    """Kept in `folder`, computed there unless they are (for these texts and more, if these come
    first: those of a smaller `share` do); without one, computed batch by batch.

    Raises OptionError where the folder can't be written to, or hasn't the room.
    """
    if folder is None:
        return FreshStates(target, texts)
    if (kept := kept_states(target, texts, layers, folder)) is not None:
        return StoredStates(kept, texts)
    with writing(folder, "work"):
        folder.mkdir(parents=True, exist_ok=True)
    each = 2 * target.info.hidden_size * sum(map(len, texts))
    _check_room(folder, layers, each)
    return StoredStates(compute_states(target, texts, layers, folder, log), texts)


def _check_room(folder: Path, layers: Sequence[int], each: int) -> None:
    """Raise OptionError unless the disk takes so many bytes a layer, those it holds already counted
    as room: a map of a file that the disk has no room for ends the process without a word."""
    wanted = each * len(layers)
    held = sum(min(_blocks(layer_file(folder, layer)), each) for layer in layers)
    if wanted > held + shutil.disk_usage(folder).free:
        raise OptionError(
            "work",
            f"{wanted / 1e9:.1f} GB of the target's states don't fit on the disk of {folder}",
            "Name a folder elsewhere, learn from fewer texts (share), or compute states every "
            "time: states=fly",
        )


def _blocks(path: Path) -> int:
    """Bytes of a file that the disk has room for; a file mapped and not yet written has none."""
    if not path.is_file():
        return 0
    found = path.stat()
    return 512 * found.st_blocks if hasattr(found, "st_blocks") else found.st_size


@dataclass(frozen=True, slots=True)
class Batch:
    """b padded texts on the device.

    ids              int64 ``(b, S)``; starts, lengths int64 ``(b,)``: of answers, of texts
    features         float32 ``(b, S, K * H)``: the tapped states side by side
    final            float32 ``(b, S, H)``: the last layer's, before the last norm; None unless
                     asked for
    numbers          the texts', as the feed counts them
    """

    ids: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    features: torch.Tensor
    final: torch.Tensor | None
    numbers: tuple[int, ...]


class Feed:
    """Batches of some of the texts.

    taps    layers (1 to the last) whose states are fused, in this order
    last    the last layer, where its states are wanted too; 0: not
    """

    def __init__(
        self,
        states: States,
        numbers: Sequence[int],
        taps: Sequence[int],
        *,
        last: int,
        device: torch.device,
        size: int,
        seed: int = 0,
    ) -> None:
        self.states, self.numbers = states, list(numbers)
        self._taps, self._last, self._device = list(taps), last, device
        self._size, self._seed = size, seed

    def groups(self, epoch: int) -> list[list[int]]:
        """All texts once, in groups of like length, in an order that the epoch and seed fix."""
        rng = random.Random(f"{self._seed}-{epoch}")
        order = rng.sample(self.numbers, len(self.numbers))
        groups: list[list[int]] = []
        for at in range(0, len(order), POOL * self._size):
            pool = sorted(order[at : at + POOL * self._size], key=self._length)
            groups += [pool[i : i + self._size] for i in range(0, len(pool), self._size)]
        rng.shuffle(groups)
        return groups

    def in_order(self) -> list[list[int]]:
        """All texts once, by length: for measuring."""
        order = sorted(self.numbers, key=self._length)
        return [order[i : i + self._size] for i in range(0, len(order), self._size)]

    def _length(self, number: int) -> int:
        return len(self.states.texts[number])

    def load(self, group: Sequence[int]) -> Batch:
        """A group as a batch."""
        texts = [self.states.texts[i] for i in group]
        width = max(map(len, texts))
        ids = torch.zeros(len(texts), width, dtype=torch.int64)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor([*text.prompt, *text.output])
        layers = [*self._taps, self._last] if self._last else self._taps
        read = [each.to(self._device) for each in self.states.read(layers, group)]
        final = read.pop().float() if self._last else None
        return Batch(
            ids.to(self._device),
            torch.tensor([len(text.prompt) for text in texts], device=self._device),
            torch.tensor([len(text) for text in texts], device=self._device),
            torch.cat(read, 2).float(),
            final,
            tuple(group),
        )

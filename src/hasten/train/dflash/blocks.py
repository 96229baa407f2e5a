"""Blocks drawn from texts: where they stand, what they see, what their slots should say.

Many blocks run in one packed pass: keys are the text's context rows and then all blocks' slots, and
a block sees the rows *before* its anchor (the anchor's own states don't exist yet when it is
drafted from) and its own slots, nothing else. Slot k stands at position anchor + k and says that
token; slot 0 is the anchor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Blocks:
    """N blocks of B slots in each of b texts of S rows.

    anchors    int64 ``(b, N)``: their positions; keep: bool ``(b, N)``, False pads
    tokens     int64 ``(b, N * B)``: the anchor's token and mask tokens
    positions  int64 ``(b, S + N * B)``: of the context rows and of all slots
    mask       bool ``(b, N * B, S + N * B)``: what each slot sees
    labels     int64 ``(b, N, B)``: the token at each slot's position
    inside     bool ``(b, N, B)``: slots that should say a token of the answer, slot 0 never
    """

    anchors: torch.Tensor
    keep: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor
    inside: torch.Tensor

    @classmethod
    def at(
        cls,
        anchors: torch.Tensor,
        keep: torch.Tensor,
        ids: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        *,
        block: int,
        mask_token: int,
    ) -> Blocks:
        """Blocks at these anchors of texts `ids` ``(b, S)``, whose answers are the positions from
        `starts` to `lengths` - 1, both ``(b,)``."""
        texts, width = ids.shape
        slots = torch.arange(block, device=ids.device)
        at = anchors.unsqueeze(2) + slots
        tokens = torch.full_like(at, mask_token)
        tokens[..., 0] = ids.gather(1, anchors)
        labels = ids.gather(1, at.clamp(max=width - 1).view(texts, -1)).view_as(at)
        answer = (at >= starts.view(-1, 1, 1)) & (at < lengths.view(-1, 1, 1))
        context = torch.arange(width, device=ids.device).expand(texts, -1)
        return cls(
            anchors,
            keep,
            tokens.view(texts, -1),
            torch.cat([context, at.view(texts, -1)], 1),
            packed_mask(anchors, width, block),
            labels,
            answer & (slots > 0) & keep.unsqueeze(2),
        )

    @property
    def size(self) -> int:
        """Slots of a block."""
        return self.labels.shape[2]

    def whole(self, lengths: torch.Tensor) -> torch.Tensor:
        """Which blocks lie within their text, bool ``(b, N)``."""
        return self.keep & (self.anchors + self.size <= lengths.unsqueeze(1))

    def weights(self, gamma: float) -> torch.Tensor:
        """Float32 ``(b, N, B)``: exp(-(k-1)/gamma) for slot k where it is inside, else 0."""
        slots = torch.arange(self.size, device=self.inside.device)
        return self.inside * torch.exp((1.0 - slots) / gamma)


def packed_mask(anchors: torch.Tensor, width: int, block: int) -> torch.Tensor:
    """Bool ``(b, N * B, width + N * B)``: context rows before the anchor, and the own block.

    Padding blocks see what their anchor says, too: a row that sees nothing would give NaN, and
    nobody reads theirs.
    """
    texts, count = anchors.shape
    before = torch.arange(width, device=anchors.device) < anchors.unsqueeze(2)
    own = torch.eye(count, dtype=torch.bool, device=anchors.device)
    rows = torch.cat([before, own.repeat_interleave(block, 1).expand(texts, -1, -1)], 2)
    return rows.repeat_interleave(block, 1)


def draw_anchors(
    first: Sequence[int], last: Sequence[int], count: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` anchors at most a text, from first[i] to last[i], without replacement, increasing;
    padded to the longest list, to one at least. Int64 and bool ``(b, N)``, on the CPU."""
    drawn = []
    for low, high in zip(first, last, strict=True):
        order = torch.randperm(max(high - low + 1, 0), generator=generator)
        drawn.append(order[:count].sort().values + low)
    return _padded(drawn)


def all_anchors(
    first: Sequence[int], last: Sequence[int], count: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Every anchor from first[i] to last[i], `count` a text at a time; as `draw_anchors` gives
    them."""
    longest = max((high - low + 1 for low, high in zip(first, last, strict=True)), default=0)
    for done in range(0, longest, count):
        yield _padded(
            [
                torch.arange(low + done, max(min(high + 1, low + done + count), low + done))
                for low, high in zip(first, last, strict=True)
            ]
        )


def _padded(drawn: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(1, *map(len, drawn))
    anchors = torch.zeros(len(drawn), width, dtype=torch.int64)
    keep = torch.zeros(len(drawn), width, dtype=torch.bool)
    for row, each in enumerate(drawn):
        anchors[row, : len(each)] = each
        keep[row, : len(each)] = True
    return anchors, keep

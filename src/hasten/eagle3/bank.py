"""An EAGLE-3 drafter on a loaded target: its network, its head's ids, the embeddings it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.nn.functional as F

from hasten.dflash.net import pack
from hasten.eagle3.config import Eagle3Config
from hasten.eagle3.net import Eagle3Net
from hasten.eagle3.store import Loaded
from hasten.errors import CapabilityError
from hasten.exits.modules import MakeProduct
from hasten.targets.base import Target


@dataclass(frozen=True)
class Eagle3Bank:
    """What the requests of a method share; nothing in it changes.

    net         packed for the device at hand, in the target's dtype
    ids         int64 ``(draft_vocab_size,)`` on the target's device: the ids of its head
    embed       embeddings of ids ``(n, hidden_size)``
    dtype, device  of the network
    """

    config: Eagle3Config
    net: Eagle3Net
    ids: torch.Tensor
    embed: Callable[[Sequence[int]], torch.Tensor]
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def numbers(self) -> list[int]:
        """`ids` as plain numbers."""
        out: list[int] = self.ids.tolist()
        return out

    @cached_property
    def places(self) -> dict[int, int]:
        """Where an id stands in `ids`."""
        return {each: place for place, each in enumerate(self.numbers)}

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits ``(..., draft_vocab_size)`` as logits over all ids ``(..., vocab_size)``, -inf
        elsewhere."""
        wide = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return wide.index_copy_(-1, self.ids, logits)


def assemble(target: Target, loaded: Loaded, make: MakeProduct) -> Eagle3Bank:
    """The drafter ready to work; `loaded` is used up: its network is packed in place.

    Raises CapabilityError when the target shows no states of its layers.
    """
    info, config = target.info, loaded.config
    if not target.capabilities.taps:
        raise CapabilityError(
            f"{info.name} doesn't show the states of its layers, which an EAGLE-3 drafter reads "
            "(see `hasten info`). Choose another method"
        )
    ids = loaded.draft_ids
    if ids is None:
        ids = torch.arange(config.vocab_size)
    embed: Callable[[Sequence[int]], torch.Tensor] = target.embed
    if loaded.embeddings is not None:
        embed = partial(_look_up, loaded.embeddings)
    with torch.inference_mode():
        # `pack` takes any network with `layers`; only its annotation says DFlash.
        net = cast(Any, pack)(loaded.net, make)
    return Eagle3Bank(config, net, ids.to(info.device), embed, info.dtype, info.device)


def _look_up(rows: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Embeddings of a drafter's own ``(n, hidden_size)``."""
    return F.embedding(torch.tensor(list(tokens), device=rows.device), rows)

"""A DFlash drafter on a loaded target: its network beside the target's own head and embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hasten.dflash.config import DFlashConfig
from hasten.dflash.net import DFlashNet, pack
from hasten.dflash.store import Loaded
from hasten.errors import CapabilityError
from hasten.exits.bank import DraftHead, HasEnds
from hasten.exits.modules import MakeProduct
from hasten.targets.base import Target


@dataclass(frozen=True, slots=True)
class DFlashBank:
    """What the requests of a method share; nothing in it changes.

    net   packed for the device at hand, in the target's dtype
    head  of the draft vocabulary; a request adds ids of its prompt
    mask  embedding of the mask token ``(1, hidden_size)``
    """

    config: DFlashConfig
    net: DFlashNet
    head: DraftHead
    mask: torch.Tensor


def assemble(target: Target, loaded: Loaded, make: MakeProduct) -> DFlashBank:
    """The drafter ready to work; `loaded` is used up: its network is packed in place.

    Raises CapabilityError when the target shows no head, or no states of its layers.
    """
    if not target.capabilities.taps:
        raise CapabilityError(
            f"{target.info.name} doesn't show the states of its layers, which a DFlash drafter "
            "reads (see `hasten info`). Choose another method"
        )
    device = target.info.device
    with torch.inference_mode():
        rows = _head_rows(target).to(target.info.dtype)
        ids = None if loaded.draft_ids is None else loaded.draft_ids.to(device)
        head = DraftHead(ids, rows, make)
        if loaded.head is not None:
            head.product = make(loaded.head.to(device=device, dtype=target.info.dtype))
        mask = target.embed([loaded.config.mask_token_id])
        return DFlashBank(loaded.config, pack(loaded.net, make), head, mask)


def _head_rows(target: Target) -> torch.Tensor:
    """The target's head ``(vocab, hidden_size)``; nobody changes it."""
    if isinstance(target, HasEnds):
        return target.ends().head
    from hasten.targets.transformers import TransformersTarget  # slow: only where it's needed

    if isinstance(target, TransformersTarget) and not target.facts.quantized:
        layer = target.facts.base.get_output_embeddings()
        weight: torch.Tensor | None = getattr(layer, "weight", None)
        if weight is not None and not weight.is_meta:
            return weight.detach().to(target.info.device)
    raise CapabilityError(
        f"a DFlash drafter shares its target's head, and {target.info.name} shows none that can be "
        "read (it is quantized, or lies on disk). Load it without quantization, or choose another "
        "method"
    )

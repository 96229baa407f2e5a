"""AdaPLD, with PLD+ and plain lookup as variants: options and how it is put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hasten.builtin.common import MOST, NODES, Policies, need, opt
from hasten.drafters.adapld import AdaPLD
from hasten.drafters.base import Drafter
from hasten.methods import Method, MethodContext, RequestMaker
from hasten.policies.base import Policy
from hasten.policies.budget import AcceptanceBook


@dataclass(frozen=True, slots=True)
class AdaPLDOptions:
    """Options of ``adapld``."""

    nodes: int = opt(0, NODES + "; 47 hold the paper's whole tree")
    most: int = opt(16, MOST)
    breadth: int = opt(8, "branches at an anchor, from the target's stored candidates")
    copy: int = opt(30, "longest copied span")
    semantic: bool = opt(True, "look for resembling tokens when the last one never occurred")
    branches: bool = opt(True, "draft stored candidates beside the copy")
    successors: bool = opt(True, "draft what followed each branch elsewhere")
    successor_length: int = opt(30, "tokens copied after a branch (the paper's: 1)")
    succ_semantic: bool = opt(
        False, "branches that never occurred get a resembling token's successor (the paper's: on)"
    )
    succ_query: str = opt(
        "anchor", "state a branch's anchors are compared with: anchor (its own) or previous"
    )
    tau: float = opt(0.1, "least cosine of input embeddings of a resembling token")
    blend: float = opt(
        1.0, "weight of that cosine beside the hidden states' (ours; the paper's: 0)"
    )
    rerank: str = opt("hidden", "which anchor is best: hidden (nearest state) or latest")
    layer: int = opt(0, "whose outputs are compared; 0: chosen by layer_share")
    layer_share: float = opt(
        0.67, "the layer, as a share of the model's depth (the paper's: about 0.28)"
    )
    max_cand: int = opt(32, "most anchors compared (256 in the paper variant)")
    deep: bool = opt(True, "branch off below drafted tokens too, and repeat what repeats (ours)")


def _layer(options: AdaPLDOptions, layers: int) -> int:
    """The layer whose outputs are compared, of 1..layers."""
    need(
        "adapld.layer",
        0 <= options.layer <= layers,
        f"at most {layers}, the model's layers (or 0: chosen by layer_share)",
        options.layer,
    )
    share = options.layer_share
    need("adapld.layer_share", 0 < share <= 1, "above 0 and at most 1", share)
    return options.layer or max(round(share * layers), 1)


def _adapld(options: AdaPLDOptions, context: MethodContext) -> RequestMaker:
    for name, least in (("breadth", 1), ("copy", 1), ("successor_length", 1), ("max_cand", 1)):
        value = getattr(options, name)
        need(f"adapld.{name}", value >= least, f"at least {least}", value)
    need("adapld.tau", -1 <= options.tau <= 1, "a cosine, -1 to 1", options.tau)
    need("adapld.blend", 0 <= options.blend < float("inf"), "at least 0, finite", options.blend)
    info = context.target.info
    layer = _layer(options, info.num_layers)

    def drafter() -> AdaPLD:
        return AdaPLD(
            layer,
            breadth=options.breadth,
            copy=options.copy,
            tau=options.tau,
            blend=options.blend,
            max_cand=options.max_cand,
            rerank=options.rerank,
            semantic=options.semantic,
            branches=options.branches,
            successors=options.successors,
            successor_length=options.successor_length,
            succ_semantic=options.succ_semantic,
            succ_query=options.succ_query,
            deep=options.deep,
            eos_ids=info.eos_ids,
        )

    drafter()  # bad options are refused now, not at the first request
    policy = Policies("adapld", options.nodes, options.most, context)

    def make(shared: Mapping[str, Any]) -> tuple[Drafter, Policy]:
        return drafter(), policy(shared)

    return RequestMaker(make, {"counts": AcceptanceBook()})


_PAPER: dict[str, Any] = {
    "nodes": 47,
    "successor_length": 1,
    "succ_semantic": True,
    "blend": 0.0,
    "layer_share": 0.28,
    "max_cand": 256,
    "deep": False,
}
_COPY_ALONE = {"nodes": 31, "semantic": False, "branches": False}

METHODS = (
    Method(
        name="adapld",
        summary="copies from the most similar earlier place, with branches the target stored there",
        prepare=_adapld,
        options=AdaPLDOptions,
        requires=("rollback", "taps"),
        needs="hidden states, embeddings, top-k logits",
        trees=True,
        variants={
            "paper": _PAPER,
            "pld-plus": {**_PAPER, **_COPY_ALONE},
            "pld": {**_PAPER, **_COPY_ALONE, "rerank": "latest"},
        },
    ),
)

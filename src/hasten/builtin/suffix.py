"""Suffix decoding: options and how it is put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hasten.builtin.common import MOST, NODES, SCOPE, Policies, learned, need, opt, shared_state
from hasten.drafters.base import Drafter
from hasten.drafters.suffix import SharedAnswers, Suffix
from hasten.methods import Method, MethodContext, RequestMaker
from hasten.policies.base import Policy
from hasten.policies.budget import AcceptanceBook


@dataclass(frozen=True, slots=True)
class SuffixOptions:
    """Options of ``suffix``."""

    nodes: int = opt(0, NODES)
    most: int = opt(0, MOST)
    mode: str = opt("blend", "blend (ours), or as published: path (the majority) or tree")
    max_tree_depth: int = opt(64, "longest string counted: a match and its draft together")
    max_spec_factor: float = opt(
        0.0,
        "path, tree: tokens drafted per token matched (the paper's: 1); 0: only the budget ends it",
    )
    max_spec_offset: float = opt(
        0.0, "path, tree: tokens drafted beyond that; no effect with factor 0"
    )
    min_token_prob: float = opt(0.05, "least estimated probability of a path (the paper's: 0.1)")
    scope: str = opt("request", SCOPE)
    cached: int = opt(1000, "answers kept where they are shared; the oldest go first")
    capacity: int = opt(100_000, "tree nodes kept where answers are shared")


def _suffix(options: SuffixOptions, context: MethodContext) -> RequestMaker:
    depth, least = options.max_tree_depth, options.min_token_prob
    factor, offset = options.max_spec_factor, options.max_spec_offset
    need("suffix.max_tree_depth", depth >= 2, "at least 2", depth)
    need("suffix.max_spec_factor", 0 <= factor < float("inf"), "at least 0 and finite", factor)
    need("suffix.max_spec_offset", abs(offset) < float("inf"), "finite", offset)
    need("suffix.min_token_prob", 0 < least <= 1, "in (0, 1]", least)
    need("suffix.cached", options.cached >= 2, "at least 2", options.cached)
    need("suffix.capacity", options.capacity >= 256, "at least 256", options.capacity)
    shared = shared_state(
        "suffix",
        options.scope,
        (depth, options.cached, options.capacity),
        context,
        lambda: SharedAnswers(depth, options.cached, options.capacity),
    )
    policy = Policies("suffix", options.nodes, options.most, context, stretch=2)

    def make(shared: Mapping[str, Any]) -> tuple[Drafter, Policy]:
        drafter = Suffix(
            mode=options.mode,
            depth=depth,
            factor=factor,
            offset=offset,
            least=least,
            shared=learned(shared),
            eos_ids=context.target.info.eos_ids,
        )
        return drafter, policy(shared)

    maker = RequestMaker(make, {"counts": AcceptanceBook(), **shared})
    maker()  # a bad mode is refused now, not at the first request
    return maker


_PUBLISHED = {"max_spec_factor": 1.0, "min_token_prob": 0.1}

METHODS = (
    Method(
        name="suffix",
        summary="copies what followed earlier occurrences of the text's end, weighed by counts",
        prepare=_suffix,
        options=SuffixOptions,
        trees=True,
        variants={
            "paper": {"nodes": 65, "mode": "path", "scope": "session", **_PUBLISHED},
            "path": {"mode": "path", **_PUBLISHED},
            "tree": {"mode": "tree", **_PUBLISHED},
        },
    ),
)

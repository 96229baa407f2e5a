"""`auto`: options and how it is put together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hasten.builtin.common import MOST, PHRASES, START, Policies, opt, phrases_for, start_for
from hasten.builtin.exit_sources import question_share
from hasten.drafters.ar import Plain
from hasten.drafters.auto import GROWTH, Auto, Worth
from hasten.drafters.base import Drafter
from hasten.exits import store
from hasten.exits.bank import ExitBank
from hasten.methods import Method, MethodContext, RequestMaker
from hasten.policies.base import FixedPolicy, Policy
from hasten.policies.budget import AcceptanceBook
from hasten.targets.base import Target
from hasten.targets.fused_native import draft_linear

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AutoOptions:
    """Options of ``auto``."""

    most: int = opt(0, MOST)
    start: bool = opt(True, START)
    phrases: bool = opt(True, PHRASES)
    exits: bool = opt(
        True,
        "ask the exit module shipped for these weights where copies aren't sure, and a question "
        "costs little here",
    )


_TOO_DEAR = 0.2
"""A question that costs this share of a plain pass never pays: the module is left out."""


def _module_at_zero(target: Target) -> ExitBank | None:
    """The shipped module that drafts before the trunk runs; None where there is none."""
    if not target.capabilities.layer_ranges:
        return None
    stored = store.shipped(target.info)
    if stored is None or all(config.layer for config in stored.configs):
        return None
    with torch.inference_mode():
        return store.build(target, stored, draft_linear).pick((0,), "auto.exits")


def _auto(options: AutoOptions, context: MethodContext) -> RequestMaker:
    if not context.target.capabilities.rollback:
        info = context.target.info
        logger.warning("%s: auto is plain decoding here: its cache can't be cut back", info.name)
        return RequestMaker(lambda shared: (Plain(), FixedPolicy(nodes=1)))
    policy = Policies("auto", 0, options.most, context, stretch=2)
    start = start_for(options.start, context)
    phrases = phrases_for(options.phrases, context)
    exits = _module_at_zero(context.target) if options.exits else None

    least = Worth.LEAST
    if exits is not None:  # a question must help as often as it costs a pass
        least = question_share(context.target, exits, GROWTH)
        exits = exits if least <= _TOO_DEAR else None

    eos = context.target.info.eos_ids

    def make(shared: Mapping[str, Any]) -> tuple[Drafter, Policy]:
        drafter = Auto(start=start, phrases=phrases, exits=exits, least=least, eos_ids=eos)
        return drafter, policy(shared)

    return RequestMaker(make, {"counts": AcceptanceBook()})


METHODS = (
    Method(
        name="auto",
        summary="copies, a module, phrases and stored logits; verifies what pays here, or nothing",
        prepare=_auto,
        options=AutoOptions,
        requires=(),
        needs="top-k logits",
        trees=True,
    ),
)

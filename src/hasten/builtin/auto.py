"""`auto`: options and how it is put together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hasten.builtin.common import MOST, START, Policies, opt, start_for
from hasten.drafters.ar import Plain
from hasten.drafters.auto import Auto
from hasten.drafters.base import Drafter
from hasten.methods import Method, MethodContext, RequestMaker
from hasten.policies.base import FixedPolicy, Policy
from hasten.policies.budget import AcceptanceBook

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AutoOptions:
    """Options of ``auto``."""

    most: int = opt(0, MOST)
    start: bool = opt(True, START)


def _auto(options: AutoOptions, context: MethodContext) -> RequestMaker:
    if not context.target.capabilities.rollback:
        info = context.target.info
        logger.warning("%s: auto is plain decoding here: its cache can't be cut back", info.name)
        return RequestMaker(lambda shared: (Plain(), FixedPolicy(nodes=1)))
    policy = Policies("auto", 0, options.most, context, stretch=2)
    start = start_for(options.start, context)

    def make(shared: Mapping[str, Any]) -> tuple[Drafter, Policy]:
        return Auto(start=start, eos_ids=context.target.info.eos_ids), policy(shared)

    return RequestMaker(make, {"counts": AcceptanceBook()})


METHODS = (
    Method(
        name="auto",
        summary="copies and stored logits; verifies per round what pays here, or nothing",
        prepare=_auto,
        options=AutoOptions,
        requires=(),
        needs="top-k logits",
        trees=True,
    ),
)

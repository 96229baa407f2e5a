"""`auto`: options and how it is put together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hasten.builtin.common import MOST, opt, policies, start_for
from hasten.drafters.ar import Plain
from hasten.drafters.base import Drafter
from hasten.drafters.combined import Combined
from hasten.drafters.prompt_lookup import PromptLookup
from hasten.drafters.racer import Racer
from hasten.methods import Method, MethodContext, RequestMaker
from hasten.policies.base import FixedPolicy, Policy
from hasten.policies.budget import AcceptanceBook

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AutoOptions:
    """Options of ``auto``."""

    most: int = opt(16, MOST)


def _auto(options: AutoOptions, context: MethodContext) -> RequestMaker:
    if not context.target.capabilities.rollback:
        info = context.target.info
        logger.warning("%s: auto is plain decoding here: its cache can't be cut back", info.name)
        return RequestMaker(lambda shared: (Plain(), FixedPolicy(nodes=1)))
    policy = policies("auto", 0, options.most, context)
    start = start_for(True, context)

    def make(shared: Mapping[str, Any]) -> tuple[Drafter, Policy]:
        # Lookup lengthens what RACER retrieves, whose n-grams are short; RACER's nodes come first,
        # because it knows where its two sources agree.
        lookup = PromptLookup(num_tokens=max(options.most - 1, 1), max_ngram=4, min_ngram=2)
        return Combined([Racer(start=start), lookup], name="auto", shares=(0.6, 1.0)), policy(
            shared
        )

    return RequestMaker(make, {"counts": AcceptanceBook()})


METHODS = (
    Method(
        name="auto",
        summary="RACER and prompt lookup; verifies per round what pays on this machine, or nothing",
        prepare=_auto,
        options=AutoOptions,
        requires=(),
        needs="top-k logits",
        trees=True,
    ),
)

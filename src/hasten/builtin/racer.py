"""RACER and token recycling: options and how each is put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hasten.builtin import common
from hasten.builtin.common import (
    MOST,
    NODES,
    PHRASES,
    SCOPE,
    START,
    Policies,
    learned,
    need,
    opt,
    phrases_for,
    shared_state,
    start_for,
)
from hasten.drafters.base import Drafter
from hasten.drafters.logits_tree import SCHEDULES
from hasten.drafters.ngrams import NGramStore
from hasten.drafters.racer import Racer, RacerState
from hasten.drafters.recycling import TokenRecycling
from hasten.drafters.successors import SuccessorTable
from hasten.errors import OptionError
from hasten.methods import Method, MethodContext, RequestMaker
from hasten.policies.base import Policy
from hasten.policies.budget import AcceptanceBook


@dataclass(frozen=True, slots=True)
class RacerOptions:
    """Options of ``racer``."""

    nodes: int = opt(0, NODES)
    most: int = opt(0, MOST)
    breadth: int = opt(8, "successors kept per token; 0 switches the logits tree off")
    ngram: int = opt(10, "longest n-gram kept; 0 switches retrieval off")
    min_match: int = opt(1, "shortest suffix whose continuations are drafted (the paper's: 2)")
    schedule: str = opt(
        "deep", "breadths of the logits tree: deep (the authors' code) or wide (as published)"
    )
    capacity: int = opt(10_000, "most trie nodes")
    retrieved: float = opt(
        0.4, "share of the budget for retrieved nodes, 8 at least (the paper's: 1)"
    )
    fuse: bool = opt(True, "weigh borders by share and length instead of raw counts (ours)")
    refill: bool = opt(True, "let the logits tree grow until the budget is full (ours)")
    graft: bool = opt(True, "start logits branches from retrieved leaves too (ours)")
    start: bool = opt(True, START)
    phrases: bool = opt(True, PHRASES)
    scope: str = opt("request", SCOPE)


@dataclass(frozen=True, slots=True)
class RecyclingOptions:
    """Options of ``recycling``."""

    nodes: int = opt(0, NODES + "; 81 is the paper's template")
    most: int = opt(0, MOST)
    warm_up: bool = opt(True, "learn from the prompt's rows too (ours)")
    start: bool = opt(True, START)
    scope: str = opt("request", SCOPE)


def _racer(options: RacerOptions, context: MethodContext) -> RequestMaker:
    need("racer.breadth", options.breadth >= 0, "at least 0", options.breadth)
    need("racer.ngram", options.ngram >= 0, "at least 0", options.ngram)
    need("racer.ngram", options.breadth + options.ngram > 0, "at least 1 when breadth is 0", 0)
    need("racer.min_match", options.min_match >= 1, "at least 1", options.min_match)
    need("racer.ngram", options.ngram != 1, "at least 2 (or 0 for no retrieval)", options.ngram)
    if options.ngram:
        fits = options.min_match < options.ngram
        need("racer.min_match", fits, f"below ngram ({options.ngram})", options.min_match)
    need("racer.retrieved", 0 < options.retrieved <= 1, "in (0, 1]", options.retrieved)
    least = 4 * options.ngram + 4
    need("racer.capacity", options.capacity >= least, f"at least {least}", options.capacity)
    if options.schedule not in SCHEDULES:
        raise OptionError(
            "racer.schedule",
            f"unknown schedule {options.schedule!r}",
            f"Choose one of {', '.join(SCHEDULES)}",
        )

    start = start_for(options.start, context)
    phrases = phrases_for(options.phrases, context)

    def state() -> RacerState:
        ngrams = NGramStore(max(options.ngram, 1), options.capacity)
        return RacerState(ngrams, SuccessorTable(common.SHARED_ROWS, start))

    shape = (options.ngram, options.capacity, options.breadth, options.start)
    shared = shared_state("racer", options.scope, shape, context, state)
    policy = Policies("racer", options.nodes, options.most, context)

    eos = context.target.info.eos_ids

    def make(shared: Mapping[str, Any]) -> tuple[Drafter, Policy]:
        drafter = Racer(
            breadth=options.breadth,
            ngram=options.ngram,
            min_match=options.min_match,
            schedule=options.schedule,
            capacity=options.capacity,
            retrieved=options.retrieved,
            decay=0.5 if options.fuse else None,
            refill=options.refill,
            graft=options.graft,
            start=start,
            phrases=phrases,
            state=learned(shared),
            eos_ids=eos,
        )
        return drafter, policy(shared)

    return RequestMaker(make, {"counts": AcceptanceBook(), **shared})


def _recycling(options: RecyclingOptions, context: MethodContext) -> RequestMaker:
    start = start_for(options.start, context)
    shared = shared_state(
        "recycling",
        options.scope,
        (options.start,),
        context,
        lambda: SuccessorTable(common.SHARED_ROWS, start),
    )
    policy = Policies("recycling", options.nodes, options.most, context)
    eos = context.target.info.eos_ids

    def make(shared: Mapping[str, Any]) -> tuple[Drafter, Policy]:
        drafter = TokenRecycling(
            warm_up=options.warm_up, start=start, table=learned(shared), eos_ids=eos
        )
        return drafter, policy(shared)

    return RequestMaker(make, {"counts": AcceptanceBook(), **shared})


METHODS = (
    Method(
        name="racer",
        summary="retrieved n-grams, usual phrases and copied logits in one draft tree",
        prepare=_racer,
        options=RacerOptions,
        needs="top-k logits",
        trees=True,
        variants={
            "paper": {
                "nodes": 64,
                "min_match": 2,
                "retrieved": 1.0,
                "fuse": False,
                "refill": False,
                "graft": False,
                "start": False,
                "phrases": False,
            },
            "retrieval": {"breadth": 0, "retrieved": 1.0, "phrases": False},
            "logits": {"ngram": 0, "phrases": False},
        },
    ),
    Method(
        name="recycling",
        summary="token recycling: a tree of the latest successors of each token",
        prepare=_recycling,
        options=RecyclingOptions,
        needs="top-k logits",
        trees=True,
        variants={"paper": {"nodes": 81, "warm_up": False, "start": False, "scope": "session"}},
    ),
)

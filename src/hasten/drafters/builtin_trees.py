"""RACER, token recycling and `auto`: options and how each is put together."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hasten import start_rows
from hasten.drafters.ar import Plain
from hasten.drafters.base import Drafter
from hasten.drafters.combined import Combined
from hasten.drafters.ngrams import NGramStore
from hasten.drafters.prompt_lookup import PromptLookup
from hasten.drafters.racer import SCHEDULES, Racer, RacerState
from hasten.drafters.recycling import TokenRecycling
from hasten.drafters.successors import SuccessorTable
from hasten.errors import OptionError
from hasten.methods import Method, MethodContext, RequestMaker, Shared
from hasten.policies import cost
from hasten.policies.base import FixedPolicy, Policy
from hasten.policies.budget import AcceptanceBook, BudgetPolicy

logger = logging.getLogger(__name__)

SCOPES = ("request", "session", "global")

SHARED_ROWS = 32_768
"""Successor rows that a shared state holds at most: about 13 MB."""

_GLOBAL: OrderedDict[tuple[Any, ...], Shared] = OrderedDict()
_GLOBAL_LOCK = threading.Lock()
_GLOBAL_STATES = 8
"""Process-wide states held at most; the one asked for longest ago goes."""


def _opt(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


_NODES = "rows per pass, the root included; 0: the budget policy chooses each round"
_MOST = "most rows the budget policy considers"
_SCOPE = "who shares what is learned: request (nobody), session (this model), global (process)"
_START = "draft for tokens not seen yet by start rows, where the model has some (ours)"


@dataclass(frozen=True, slots=True)
class RacerOptions:
    """Options of ``racer``."""

    nodes: int = _opt(0, _NODES)
    most: int = _opt(16, _MOST)
    breadth: int = _opt(8, "successors kept per token; 0 switches the logits tree off")
    ngram: int = _opt(10, "longest n-gram kept; 0 switches retrieval off")
    min_match: int = _opt(1, "shortest suffix whose continuations are drafted (the paper's: 2)")
    schedule: str = _opt(
        "deep", "breadths of the logits tree: deep (the authors' code) or wide (as published)"
    )
    capacity: int = _opt(10_000, "most trie nodes")
    retrieved: float = _opt(
        0.4, "share of the budget for retrieved nodes, 8 at least (the paper's: 1)"
    )
    fuse: bool = _opt(True, "weigh borders by share and length instead of raw counts (ours)")
    refill: bool = _opt(True, "let the logits tree grow until the budget is full (ours)")
    graft: bool = _opt(True, "start logits branches from retrieved leaves too (ours)")
    start: bool = _opt(True, _START)
    scope: str = _opt("request", _SCOPE)


@dataclass(frozen=True, slots=True)
class RecyclingOptions:
    """Options of ``recycling``."""

    nodes: int = _opt(0, _NODES + "; 81 is the paper's template")
    most: int = _opt(16, _MOST)
    warm_up: bool = _opt(True, "learn from the prompt's rows too (ours)")
    start: bool = _opt(True, _START)
    scope: str = _opt("request", _SCOPE)


@dataclass(frozen=True, slots=True)
class AutoOptions:
    """Options of ``auto``."""

    most: int = _opt(16, _MOST)


def _need(option: str, ok: bool, rule: str, value: Any) -> None:
    if not ok:
        raise OptionError(option, f"must be {rule}, got {value!r}")


def _shared(
    name: str,
    scope: str,
    shape: tuple[Any, ...],
    context: MethodContext,
    make: Callable[[], Shared],
) -> dict[str, Shared]:
    """The state that requests share in this scope, by kind; states of another `shape` are apart."""
    if scope not in SCOPES:
        raise OptionError(
            f"{name}.scope", f"unknown scope {scope!r}", f"Choose one of {', '.join(SCOPES)}"
        )
    if scope == "request":
        return {}
    if scope == "session":
        return {scope: make()}
    info = context.target.info
    key = (name, info.fingerprint or info.name, *shape)
    with _GLOBAL_LOCK:
        if key not in _GLOBAL:
            _GLOBAL[key] = make()
        state = _GLOBAL[key]
        _GLOBAL.move_to_end(key)
        while len(_GLOBAL) > _GLOBAL_STATES:
            _GLOBAL.popitem(last=False)
    return {scope: state}


def _start(wanted: bool, context: MethodContext) -> Any:
    return start_rows.load(context.target.info) if wanted else None


def _learned(shared: Mapping[str, Any]) -> Any:
    """What was learned by other requests; None where each has its own."""
    return shared.get("session", shared.get("global"))


def _policies(
    name: str, nodes: int, most: int, context: MethodContext
) -> Callable[[Mapping[str, Any]], Policy]:
    """Makes each request's policy: the fixed budget asked for, or the budget policy on this
    machine's costs."""
    _need(f"{name}.nodes", nodes >= 0, "at least 1 (or 0 for the budget policy)", nodes)
    _need(f"{name}.most", most >= 1, "at least 1", most)
    if nodes:
        return lambda shared: FixedPolicy(nodes=nodes)
    table = context.costs or cost.load_or_measure(context.target)
    costs = cost.CostModel(table)
    return lambda shared: BudgetPolicy(costs, shared["counts"], most=most)


def _racer(options: RacerOptions, context: MethodContext) -> RequestMaker:
    _need("racer.breadth", options.breadth >= 0, "at least 0", options.breadth)
    _need("racer.ngram", options.ngram >= 0, "at least 0", options.ngram)
    _need("racer.ngram", options.breadth + options.ngram > 0, "at least 1 when breadth is 0", 0)
    _need("racer.min_match", options.min_match >= 1, "at least 1", options.min_match)
    _need("racer.retrieved", 0 < options.retrieved <= 1, "in (0, 1]", options.retrieved)
    least = 4 * options.ngram + 4
    _need("racer.capacity", options.capacity >= least, f"at least {least}", options.capacity)
    if options.schedule not in SCHEDULES:
        raise OptionError(
            "racer.schedule",
            f"unknown schedule {options.schedule!r}",
            f"Choose one of {', '.join(SCHEDULES)}",
        )

    start = _start(options.start, context)

    def state() -> RacerState:
        ngrams = NGramStore(max(options.ngram, 1), options.capacity)
        return RacerState(ngrams, SuccessorTable(SHARED_ROWS, start))

    shape = (options.ngram, options.capacity, options.breadth, options.start)
    shared = _shared("racer", options.scope, shape, context, state)
    policy = _policies("racer", options.nodes, options.most, context)

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
            state=_learned(shared),
        )
        return drafter, policy(shared)

    return RequestMaker(make, {"counts": AcceptanceBook(), **shared})


def _recycling(options: RecyclingOptions, context: MethodContext) -> RequestMaker:
    start = _start(options.start, context)
    shared = _shared(
        "recycling",
        options.scope,
        (options.start,),
        context,
        lambda: SuccessorTable(SHARED_ROWS, start),
    )
    policy = _policies("recycling", options.nodes, options.most, context)
    return RequestMaker(
        lambda shared: (
            TokenRecycling(warm_up=options.warm_up, start=start, table=_learned(shared)),
            policy(shared),
        ),
        {"counts": AcceptanceBook(), **shared},
    )


def _auto(options: AutoOptions, context: MethodContext) -> RequestMaker:
    if not context.target.capabilities.rollback:
        info = context.target.info
        logger.warning("%s: auto is plain decoding here: its cache can't be cut back", info.name)
        return RequestMaker(lambda shared: (Plain(), FixedPolicy(nodes=1)))
    policy = _policies("auto", 0, options.most, context)
    start = _start(True, context)

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
        name="racer",
        summary="retrieved n-grams and copied logits in one draft tree",
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
            },
            "retrieval": {"breadth": 0, "retrieved": 1.0},
            "logits": {"ngram": 0},
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

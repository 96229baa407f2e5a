"""RACER, token recycling and `auto`: options and how each is put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hasten.drafters.base import Drafter
from hasten.drafters.combined import Combined
from hasten.drafters.prompt_lookup import PromptLookup
from hasten.drafters.racer import Racer, RacerState
from hasten.drafters.recycling import TokenRecycling
from hasten.drafters.successors import SuccessorTable
from hasten.errors import OptionError
from hasten.methods import MakeRequest, Method, MethodContext
from hasten.policies import cost
from hasten.policies.base import FixedPolicy, Policy
from hasten.policies.budget import AcceptanceBook, BudgetPolicy

SCOPES = ("request", "session", "global")
_GLOBAL: dict[tuple[str, str], Any] = {}
_GLOBAL_ROWS = 65_536


def _opt(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


_NODES = "rows per pass, the root included; 0: the budget policy chooses each round"
_MOST = "most rows the budget policy considers"
_SCOPE = "who shares what is learned: request (nobody), session (this model), global (process)"


@dataclass(frozen=True, slots=True)
class RacerOptions:
    """Options of ``racer``."""

    nodes: int = _opt(0, _NODES)
    most: int = _opt(24, _MOST)
    breadth: int = _opt(8, "successors kept per token; 0 switches the logits tree off")
    ngram: int = _opt(10, "longest n-gram kept; 0 switches retrieval off")
    min_match: int = _opt(2, "shortest suffix whose continuations are drafted")
    schedule: str = _opt(
        "deep", "breadths of the logits tree: deep (the authors' code) or wide (as published)"
    )
    capacity: int = _opt(10_000, "most trie nodes")
    fuse: bool = _opt(True, "weigh borders by share and length instead of raw counts (ours)")
    refill: bool = _opt(True, "let the logits tree grow until the budget is full (ours)")
    graft: bool = _opt(True, "start logits branches from retrieved leaves too (ours)")
    scope: str = _opt("request", _SCOPE)


@dataclass(frozen=True, slots=True)
class RecyclingOptions:
    """Options of ``recycling``."""

    nodes: int = _opt(0, _NODES + "; 81 is the paper's template")
    most: int = _opt(24, _MOST)
    warm_up: bool = _opt(True, "learn from the prompt's rows too (ours)")
    scope: str = _opt("request", _SCOPE)


@dataclass(frozen=True, slots=True)
class AutoOptions:
    """Options of ``auto``."""

    most: int = _opt(24, _MOST)


def _state(name: str, scope: str, context: MethodContext, make: Callable[[], Any]) -> Any:
    """The shared state for a scope; None when each request has its own."""
    if scope not in SCOPES:
        raise OptionError(
            f"{name}.scope", f"unknown scope {scope!r}", f"Choose one of {', '.join(SCOPES)}"
        )
    if scope == "request":
        return None
    if scope == "session":
        return make()
    info = context.target.info
    return _GLOBAL.setdefault((name, info.fingerprint or info.name), make())


def _policy(name: str, nodes: int, most: int, context: MethodContext) -> Callable[[], Policy]:
    """The fixed budget asked for, or the budget policy on this machine's cost table."""
    if nodes < 0 or most < 1:
        raise OptionError(
            f"{name}.nodes", f"must be at least 1 (or 0 for the budget policy), got {nodes}"
        )
    if nodes:
        return lambda: FixedPolicy(nodes=nodes)
    table = cost.load_or_measure(context.target)
    book = AcceptanceBook()
    return lambda: BudgetPolicy(table, book, most=most)


def _racer(options: RacerOptions, context: MethodContext) -> MakeRequest:
    if options.breadth < 0 or options.ngram < 0 or options.breadth + options.ngram == 0:
        raise OptionError("racer.breadth", "breadth and ngram must be >= 0, and not both 0")
    if options.capacity < 4 * options.ngram + 4:
        raise OptionError(
            "racer.capacity", f"must be at least {4 * options.ngram + 4} for ngram={options.ngram}"
        )
    state = _state("racer", options.scope, context, lambda: _racer_state(options))

    def drafter() -> Drafter:
        return Racer(
            breadth=options.breadth,
            ngram=options.ngram,
            min_match=options.min_match,
            schedule=options.schedule,
            capacity=options.capacity,
            decay=0.5 if options.fuse else None,
            refill=options.refill,
            graft=options.graft,
            state=state,
        )

    drafter()
    policy = _policy("racer", options.nodes, options.most, context)
    return lambda: (drafter(), policy())


def _racer_state(options: RacerOptions) -> RacerState:
    from hasten.drafters.ngrams import NGramStore

    return RacerState(
        NGramStore(max(options.ngram, 1), options.capacity), SuccessorTable(_GLOBAL_ROWS)
    )


def _recycling(options: RecyclingOptions, context: MethodContext) -> MakeRequest:
    table = _state("recycling", options.scope, context, lambda: SuccessorTable(_GLOBAL_ROWS))
    policy = _policy("recycling", options.nodes, options.most, context)
    return lambda: (TokenRecycling(warm_up=options.warm_up, table=table), policy())


def _auto(options: AutoOptions, context: MethodContext) -> MakeRequest:
    policy = _policy("auto", 0, options.most, context)

    def make() -> tuple[Drafter, Policy]:
        lookup = PromptLookup(num_tokens=max(options.most - 1, 1), max_ngram=4, min_ngram=1)
        return Combined([lookup, Racer()], name="auto", shares=[1.0, 1.0]), policy()

    return make


METHODS = (
    Method(
        name="racer",
        summary="retrieved n-grams and copied logits in one draft tree",
        prepare=_racer,
        options=RacerOptions,
        needs="top-k logits",
        trees=True,
        variants={
            "paper": {"nodes": 64, "fuse": False, "refill": False, "graft": False},
            "retrieval": {"breadth": 0},
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
        variants={"paper": {"nodes": 81, "warm_up": False, "scope": "session"}},
    ),
    Method(
        name="auto",
        summary="RACER and prompt lookup; verifies per round what pays on this machine, or nothing",
        prepare=_auto,
        options=AutoOptions,
        needs="top-k logits",
        trees=True,
    ),
)

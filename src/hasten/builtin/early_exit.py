"""Self-speculation with early exits: options and how it is put together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hasten.builtin.common import MOST, Policies, need, opt
from hasten.builtin.exit_sources import EXITS, HEAD, MODULES, Exits, exit_costs, find_exits
from hasten.drafters.base import Drafter
from hasten.drafters.early_exit import MAX_LENGTH, EarlyExit
from hasten.drafters.exit_lookup import ExitTree
from hasten.drafters.exit_tree import Growth
from hasten.errors import OptionError
from hasten.exits.bank import ExitBank
from hasten.methods import Method, MethodContext, RequestMaker
from hasten.policies import cost, exit_adaptive, exit_rules
from hasten.policies.base import FixedPolicy, Policy
from hasten.policies.budget import AcceptanceBook
from hasten.policies.exit_calibration import Calibration
from hasten.policies.exits import ExitCosts, ExitPolicy

DRAW = "draw drafts in sampled requests; off: take the likeliest"
KEEP = "draft the first unsure token still, then stop, as the published code does"
STEPS = 3


@dataclass(frozen=True, slots=True)
class EarlyExitOptions:
    """Options of ``early-exit``."""

    exits: str = opt("", EXITS)
    rule: str = opt(
        "fixed",
        "when to stop: fixed, kangaroo, adaedl, svip, draft-verify; and where: lite, myopic",
    )
    length: int = opt(-1, f"longest draft, 1 to {MAX_LENGTH}; negative: the rule's own (fixed: 2)")
    threshold: float = opt(-1.0, "the rule's threshold; negative: its own")
    keep: bool = opt(False, KEEP)
    modules: str = opt("", MODULES)
    head: str = opt("modules", HEAD)
    draw: bool = opt(True, DRAW)
    tree: bool = opt(False, "small trees from exit 0 instead of chains; rows by the budget policy")
    lookup: bool = opt(False, "with tree: copy first, ask the module where nothing was found")
    steps: int = opt(STEPS, "with tree: rows below each other that the module drafts")
    most: int = opt(0, f"with tree: {MOST}")


@dataclass(frozen=True, slots=True)
class DelOptions:
    """Options of ``del``."""

    exits: str = opt("", EXITS)
    length: int = opt(MAX_LENGTH, f"longest draft, 1 to {MAX_LENGTH}")
    ending: str = opt("confidence", "what ends a draft: confidence, length (as planned) or both")
    keep: bool = opt(False, KEEP)
    modules: str = opt("", MODULES)
    head: str = opt("modules", HEAD)
    draw: bool = opt(True, DRAW)


# -- rules -----------------------------------------------------------------------------------------

MakeRule = Callable[[], ExitPolicy]


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule of ``early-exit``.

    length     its longest draft where the user names none
    several    it chooses among candidate exits; else it drafts from one
    threshold  it has one; keep: it can draft the unsure token still
    """

    length: int
    make: Callable[[EarlyExitOptions, int, Exits, MethodContext], MakeRule]
    several: bool = False
    threshold: bool = False
    keep: bool = False


def _stopping(kind: Callable[..., ExitPolicy], length: int) -> _Rule:
    """A rule that drafts from one exit until a threshold ends the draft."""

    def make(
        options: EarlyExitOptions, length: int, exits: Exits, context: MethodContext
    ) -> MakeRule:
        chosen = {} if options.threshold < 0 else {"threshold": options.threshold}
        return lambda: kind(0, steps=length, keep=options.keep, **chosen)

    return _Rule(length, make, threshold=True, keep=True)


def _fixed(
    options: EarlyExitOptions, length: int, exits: Exits, context: MethodContext
) -> MakeRule:
    return lambda: exit_rules.Static(0, length)


def _lite(options: EarlyExitOptions, length: int, exits: Exits, context: MethodContext) -> MakeRule:
    """Thresholds fall by a tenth from exit to exit (ours; the paper's fall with depth too)."""
    first = 0.6 if options.threshold < 0 else options.threshold
    falling = tuple(first * 0.9**number for number in range(len(exits.bank.layers)))
    return lambda: exit_rules.Thresholds(falling, stop=falling, steps=length)


def _myopic(
    options: EarlyExitOptions, length: int, exits: Exits, context: MethodContext
) -> MakeRule:
    calibration = calibration_for(exits)
    costs, at = _costs(exits, length, context), exits.bank.layers
    return lambda: exit_adaptive.Myopic(costs, at, calibration, steps=length)


def _costs(exits: Exits, length: int, context: MethodContext) -> ExitCosts:
    table = context.costs or cost.load_or_measure(context.target)
    return exit_costs(context.target, exits.bank, table, length)


RULES: dict[str, _Rule] = {
    "fixed": _Rule(2, _fixed),
    "kangaroo": _stopping(exit_rules.Kangaroo, 6),
    "adaedl": _stopping(exit_rules.AdaEDL, MAX_LENGTH),
    "svip": _stopping(exit_rules.SVIP, MAX_LENGTH),
    "draft-verify": _stopping(exit_rules.DraftVerify, 8),
    "lite": _Rule(MAX_LENGTH, _lite, several=True, threshold=True),
    "myopic": _Rule(MAX_LENGTH, _myopic, several=True),
}


def calibration_for(exits: Exits) -> Calibration:
    """The calibration stored with the modules, for the candidates chosen: ``facts["calibration"]``
    is `Calibration.to_json`'s data and ``layers``, the exits it was fitted for. Raises OptionError.
    """
    stored, layers = exits.facts.get("calibration"), exits.bank.layers
    if not isinstance(stored, Mapping) or not set(layers) <= set(stored.get("layers", ())):
        raise OptionError(
            "early-exit.rule",
            f"myopic needs a calibration, and none is stored for exits at {layers}",
            "Take modules that have one, or another rule",
        )
    whole = Calibration.from_json(json.dumps(stored))
    places = [list(stored["layers"]).index(layer) for layer in layers]

    def pick(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[place] for place in places)

    return Calibration(pick(whole.weights), pick(whole.first), pick(whole.later), whole.features)


# -- methods ---------------------------------------------------------------------------------------


def _early_exit(options: EarlyExitOptions, context: MethodContext) -> RequestMaker:
    need("early-exit.rule", options.rule in RULES, f"one of {', '.join(RULES)}", options.rule)
    rule = RULES[options.rule]
    length = rule.length if options.length < 0 else options.length
    _check_length("early-exit", length)
    _refuse_contradictions(options, rule)
    exits = find_exits(
        context.target,
        options.exits,
        options.modules,
        options.head,
        method="early-exit",
        several=rule.several or options.tree,
    )
    if options.tree:
        return _tree(options, exits.bank, context)
    return _chains(exits, rule.make(options, length, exits, context), length, options.draw, context)


def _check_length(method: str, length: int) -> None:
    need(f"{method}.length", 1 <= length <= MAX_LENGTH, f"1 to {MAX_LENGTH}", length)


def _refuse_contradictions(options: EarlyExitOptions, rule: _Rule) -> None:
    """Raise OptionError for options that play no part beside others."""
    idle: list[tuple[str, bool, str]] = [
        (
            "threshold",
            options.threshold >= 0 and not rule.threshold,
            f"rule={options.rule} has none",
        ),
        ("keep", options.keep and not rule.keep, f"rule={options.rule} knows no unsure token"),
    ]
    if options.tree:
        chains = "is for chains, and tree=on drafts trees"
        idle += [
            ("rule", options.rule != "fixed", chains),
            ("length", options.length >= 0, f"{chains}: see steps and most"),
        ]
    else:
        trees = "goes with tree=on only"
        idle += [
            ("lookup", options.lookup, trees),
            ("steps", options.steps != STEPS, trees),
            ("most", options.most != 0, trees),
        ]
    for option, given, problem in idle:
        if given:
            raise OptionError(f"early-exit.{option}", problem, f"Leave {option} out")


def _chains(
    exits: Exits, rule: MakeRule, length: int, draw: bool, context: MethodContext
) -> RequestMaker:
    eos = context.target.info.eos_ids

    def make(shared: Mapping[str, Any]) -> tuple[Drafter, Policy]:
        drafter = EarlyExit(exits.bank, rule(), length=length, draw=draw, eos_ids=eos)
        return drafter, FixedPolicy(nodes=length + 1)

    make({})  # bad options are refused now, not at the first request
    return RequestMaker(make)


def _tree(options: EarlyExitOptions, bank: ExitBank, context: MethodContext) -> RequestMaker:
    need("early-exit.steps", 1 <= options.steps <= 8, "1 to 8", options.steps)
    if bank.layers[0] != 0 or (options.exits and len(bank.layers) > 1):
        raise OptionError(
            "early-exit.exits",
            f"trees are drafted from exit 0, got {options.exits or bank.layers}",
            "Say exits=0, and name modules that have one",
        )
    first = bank.pick((0,), "early-exit.exits")
    policy = Policies("early-exit", 0, options.most, context)
    growth, eos = Growth(steps=options.steps), context.target.info.eos_ids

    def make(shared: Mapping[str, Any]) -> tuple[Drafter, Policy]:
        return ExitTree(first, growth, lookup=options.lookup, eos_ids=eos), policy(shared)

    return RequestMaker(make, {"counts": AcceptanceBook()})


def _del(options: DelOptions, context: MethodContext) -> RequestMaker:
    _check_length("del", options.length)
    known = ", ".join(exit_adaptive.ENDINGS)
    need("del.ending", options.ending in exit_adaptive.ENDINGS, f"one of {known}", options.ending)
    exits = find_exits(
        context.target, options.exits, options.modules, options.head, method="del", several=True
    )
    costs = _costs(exits, options.length, context)

    def rule() -> ExitPolicy:
        return exit_adaptive.DEL(
            costs,
            exits.bank.layers,
            steps=options.length,
            ending=options.ending,
            keep=options.keep,
        )

    return _chains(exits, rule, options.length, options.draw, context)


NEEDS = "layer ranges, hidden states; exit modules or a LayerSkip checkpoint"

METHODS = (
    Method(
        name="early-exit",
        summary="the model's own lower layers draft (self-speculation), with exit modules",
        prepare=_early_exit,
        options=EarlyExitOptions,
        requires=("rollback", "layer_ranges"),
        needs=NEEDS,
        variants={
            "tree": {"exits": "0", "tree": True},
            "lookup": {"exits": "0", "tree": True, "lookup": True},
            "kangaroo": {"exits": "2", "rule": "kangaroo", "keep": True},
            "layerskip": {"head": "own", "length": 6},
        },
        trees=True,
    ),
    Method(
        name="del",
        summary="early exits chosen round by round from shadows of verified rows (DEL)",
        prepare=_del,
        options=DelOptions,
        requires=("rollback", "layer_ranges"),
        needs=NEEDS,
    ),
)

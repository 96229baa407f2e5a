"""LEDE: options and how it is put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from hasten.builtin.common import MOST, START, need, opt, start_for
from hasten.builtin.early_exit import NEEDS
from hasten.builtin.exit_sources import (
    HEAD,
    MODULES,
    exit_costs,
    find_exits,
    question_share,
)
from hasten.drafters.base import Drafter
from hasten.drafters.early_exit import MAX_LENGTH
from hasten.drafters.lede import Lede
from hasten.drafters.lede_chain import LedeChain
from hasten.errors import ModelError, OptionError
from hasten.exits import store
from hasten.exits.bank import ExitBank
from hasten.methods import Method, MethodContext, RequestMaker
from hasten.policies import cost, lede_agent, lede_arms
from hasten.policies.base import FixedPolicy, Policy
from hasten.policies.budget import AcceptanceBook
from hasten.policies.cost_model import CostModel, affordable_rows
from hasten.policies.lede import ArmBudget, LedePolicy
from hasten.policies.lede_agent import LedeAgent
from hasten.policies.lede_arms import TREES, WALK, ArmCosts, ArmFile
from hasten.policies.lede_chooser import Chooser
from hasten.policies.lede_guard import Guard
from hasten.targets.base import Target

SHIPPED_ARMS = "lede_arms.npz"
"""Name of a file of arms in the package's assets."""
_CONTEXT = 256


@dataclass(frozen=True, slots=True)
class LedeOptions:
    """Options of ``lede``."""

    chains: bool = opt(
        False, "the paper's two actions alone: chains from exits above 0, by the agent"
    )
    breadth: bool = opt(True, "small trees from exit 0; off: chains from there")
    retrieval: bool = opt(True, "copies of the text and stored candidates among the choices")
    plain: bool = opt(True, "plain decoding among the choices")
    online: bool = opt(True, "correct what choices are worth by the request's own rounds")
    walk: bool = opt(False, "the agent's chains among the choices")
    guard: bool = opt(True, "rounds are plain for a while where drafting doesn't pay")
    agent: str = opt("", "file of the two-action agent; empty: the one shipped for these weights")
    arms: str = opt("", "file that says what choices do; empty: the one shipped for these weights")
    length: int = opt(-1, "longest chain of the agent; negative: what it was trained for")
    modules: str = opt("", MODULES)
    head: str = opt("modules", HEAD)
    draw: bool = opt(True, "with chains or walk: draw drafts in sampled requests")
    start: bool = opt(True, START)
    most: int = opt(0, MOST)


def _lede(options: LedeOptions, context: MethodContext) -> RequestMaker:
    _refuse_contradictions(options)
    return _chains(options, context) if options.chains else _arms(options, context)


def _refuse_contradictions(options: LedeOptions) -> None:
    """Raise OptionError for options that play no part beside others."""
    default = LedeOptions()
    names: tuple[str, ...] = ()
    problem = ""
    if options.chains:
        names = ("breadth", "retrieval", "plain", "online", "walk", "arms", "start", "most")
        problem = "plays no part beside chains=on (lede:paper), which has two actions"
    elif not options.walk:
        names = ("agent", "length", "draw")
        problem = "is for the agent's chains: they need chains=on (lede:paper) or walk=on"
    for name in names:
        if getattr(options, name) != getattr(default, name):
            raise OptionError(f"lede.{name}", problem, f"Leave {name} out")
    if options.head != "modules" and not options.chains:
        problem = "own is for lede:paper: the choices start from the module at exit 0"
        raise OptionError("lede.head", problem, "Leave head out")
    need("lede.most", options.most >= 0, "at least 1 (or 0 for what is cheap here)", options.most)


# -- the two-action agent --------------------------------------------------------------------------

MakeAgent = Callable[[], LedePolicy]


def find_agent(options: LedeOptions, context: MethodContext) -> tuple[ExitBank, MakeAgent, int]:
    """The agent that the options name, checked against the target and its exits: these, what makes
    its policy for a request, and its longest draft. Raises OptionError or ModelError."""
    target = context.target
    where = options.agent or "the package"
    agent = LedeAgent.load(options.agent) if options.agent else lede_agent.shipped(target.info)
    if agent is None:
        raise OptionError(
            "lede.agent",
            f"no agent is shipped for {target.info.name}",
            "Train one (`hasten train lede collect`, then `hasten train lede fit`) and name its "
            "file: agent=FILE. Methods del and early-exit need none",
        )
    _check_weights(agent.facts.fingerprint, target, where)
    length = agent.facts.steps if options.length < 0 else options.length
    need("lede.length", 1 <= length <= MAX_LENGTH, f"1 to {MAX_LENGTH}", length)
    layers = "+".join(map(str, agent.facts.layers))
    exits = find_exits(target, layers, options.modules, options.head, method="lede", several=True)
    stored = None if options.head == "own" else _stored(target, options.modules)
    agent.check(
        target.info,
        modules=lede_agent.modules_digest(stored, exits.bank.layers),
        layers=exits.bank.layers,
        steps=length,
        where=where,
    )
    # Measuring costs runs passes: after all that may be refused.
    table = context.costs or cost.load_or_measure(target)
    costs = exit_costs(target, exits.bank, table, agent.facts.steps)
    facts, rho = agent.feature_facts(costs), agent.facts.rho

    def make() -> LedePolicy:
        guard = Guard(max(rho, 1.0)) if options.guard else None
        return LedePolicy(agent, facts, steps=length, guard=guard)

    make()
    return exits.bank, make, length


def _check_weights(fingerprint: str, target: Target, where: str) -> None:
    """Before anything else is read: an agent of another model knows other exits."""
    if fingerprint != target.info.fingerprint or not fingerprint:
        raise ModelError(
            f"the part of lede in {where} belongs to other weights than {target.info.name}'s. "
            "Train one for these (see `hasten train lede --help`), or name the file that belongs "
            "to them"
        )


def _stored(target: Target, modules: str) -> store.Stored | None:
    """The modules again, as data: what an agent or a file of arms belongs to."""
    return store.read(modules) if modules else store.shipped(target.info)


def _chains(options: LedeOptions, context: MethodContext) -> RequestMaker:
    bank, policy, length = find_agent(options, context)
    eos = context.target.info.eos_ids

    def make(shared: Mapping[str, Any]) -> tuple[Drafter, Policy]:
        drafter = LedeChain(bank, policy(), length=length, draw=options.draw, eos_ids=eos)
        return drafter, FixedPolicy(nodes=length + 1)

    return RequestMaker(make)


# -- arms ------------------------------------------------------------------------------------------


def find_arms(options: LedeOptions, target: Target) -> ArmFile:
    """The file of arms that the options name, checked. Raises OptionError or ModelError."""
    where = options.arms or "the package"
    file = lede_arms.read(options.arms, options.arms) if options.arms else shipped_arms(target)
    if file is None:
        raise OptionError(
            "lede.arms",
            f"no file of arms is shipped for {target.info.name}",
            "Make one (`hasten train lede arms`) and name it: arms=FILE. Methods auto and "
            "early-exit:lookup have the same parts and need none",
        )
    _check_weights(str(file.facts.get("target", "")), target, where)
    digest = lede_agent.modules_digest(_stored(target, options.modules), (0,))
    if file.facts.get("exits") != digest:
        raise ModelError(
            f"the file of arms in {where} was fitted with another module at exit 0. Fit it again "
            "(`hasten train lede arms`), or name the modules it belongs to"
        )
    return file


def shipped_arms(target: Target) -> ArmFile | None:
    """The file of arms that came with the package for these weights; None when there is none."""
    root = files("hasten") / "assets"
    if not target.info.fingerprint or not root.is_dir():
        return None
    for folder in root.iterdir():
        if (folder / SHIPPED_ARMS).is_file():
            with as_file(folder / SHIPPED_ARMS) as path:
                file = lede_arms.read(Path(path), str(folder))
            if file.facts.get("target") == target.info.fingerprint:
                return file
    return None


def exit_zero(options: LedeOptions, target: Target) -> ExitBank:
    """The module that arms start from. Raises OptionError, ModelError or CapabilityError."""
    return find_exits(target, "0", options.modules, "modules", method="lede", several=True).bank


def arm_costs(context: MethodContext, bank: ExitBank) -> ArmCosts:
    """What arms cost here, in plain steps: passes from the cost table, questions timed now."""
    table = context.costs or cost.load_or_measure(context.target)
    curve = table.curve(cost.ROWS[-1], _CONTEXT)
    one = question_share(context.target, bank, TREES[1])
    three = question_share(context.target, bank, TREES[3])
    verify = (0.0, *(ms / curve[0] for ms in curve))
    return ArmCosts(verify, one, max(three - one, 0.0) / 2)


def most_rows(options: LedeOptions, context: MethodContext) -> int:
    """Rows that are considered at most, the root included."""
    table = context.costs or cost.load_or_measure(context.target)
    return options.most or min(2 * affordable_rows(table), cost.ROWS[-1])


def _arms(options: LedeOptions, context: MethodContext) -> RequestMaker:
    target = context.target
    bank = exit_zero(options, target)
    file = find_arms(options, target)
    chosen = lede_arms.offered(
        file.arms,
        breadth=options.breadth,
        retrieval=options.retrieval,
        plain=options.plain,
        walk=options.walk,
    )
    if not any(arm.growth or arm.copies for arm in chosen) or (options.walk and WALK not in chosen):
        missing = "the walk" if options.walk else "these choices"
        raise OptionError(
            "lede.arms", f"knows nothing of {missing}", "Fit it again with them, or change them"
        )
    walk = find_agent(options, context) if options.walk else None
    costs, most = arm_costs(context, bank), most_rows(options, context)
    passes = CostModel(context.costs or cost.load_or_measure(target))
    start = start_for(options.start and options.retrieval, context)
    eos = target.info.eos_ids

    def make(shared: Mapping[str, Any]) -> tuple[Drafter, Policy]:
        guard = Guard(max(file.rho, 1.0)) if options.guard else None
        chooser = Chooser(file, costs, chosen, online=options.online, guard=guard)
        chain = policy = None
        if walk is not None:
            walk_bank, make_policy, length = walk
            policy = make_policy()
            chain = LedeChain(walk_bank, policy, length=length, draw=options.draw, eos_ids=eos)
        drafter = Lede(bank, chooser, start=start, walk=chain, eos_ids=eos)
        return drafter, ArmBudget(passes, shared["counts"], chooser, most=most, walk=policy)

    return RequestMaker(make, {"counts": AcceptanceBook()})


METHODS = (
    Method(
        name="lede",
        summary="what to draft from is chosen by values learned off line (LEDE)",
        prepare=_lede,
        options=LedeOptions,
        requires=("rollback", "layer_ranges"),
        needs=f"{NEEDS}; files of `hasten train lede`",
        variants={"paper": {"chains": True}},
        trees=True,
    ),
)

"""Block-diffusion drafting (DFlash, AdaFlash): options and how it is put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hasten.builtin.common import MOST, NODES, Policies, drafter_folder, need, opt
from hasten.dflash import store
from hasten.dflash.bank import DFlashBank, assemble
from hasten.dflash.lengths import BlockLength, CostedLength
from hasten.drafters.base import Drafter
from hasten.drafters.dflash import DFlash
from hasten.drafters.dflash_tree import DFlashTree
from hasten.errors import OptionError
from hasten.methods import Method, MethodContext, RequestMaker
from hasten.policies import cost
from hasten.policies.base import Policy
from hasten.policies.budget import AcceptanceBook
from hasten.policies.cost_model import CostModel
from hasten.policies.length import POLICIES, LengthPolicy, SurvivalBook
from hasten.targets.base import Target
from hasten.targets.fused_native import draft_linear

WITH_TREE = "goes with tree=on only"
DRAFTS = ("argmax", "sample")


@dataclass(frozen=True, slots=True)
class DFlashOptions:
    """Options of ``dflash``."""

    model: str = opt("", "folder of the drafter; empty: the one shipped for these weights")
    draft: str = opt("argmax", "a slot's token: argmax (the likeliest) or sample (drawn)")
    length: int = opt(0, "draft tokens verified at most; 0: the block's slots but one")
    policy: str = opt(
        "fixed", "rows verified: fixed, ratio (by the length head) or cost (by time, too)"
    )
    rate: float = opt(1.0, "with policy=ratio: verify so many times what the head asks for")
    least: int = opt(
        1, "with policy=ratio or cost: rows verified at least, the pending token's included"
    )
    draft_temperature: float = opt(1.0, "with draft=sample: of the drafter's own logits")
    tree: bool = opt(False, "a tree of the block's likeliest paths instead of a chain (DDTree)")
    nodes: int = opt(0, f"with tree: {NODES}")
    most: int = opt(0, f"with tree: {MOST}")


def _dflash(options: DFlashOptions, context: MethodContext) -> RequestMaker:
    need("dflash.draft", options.draft in DRAFTS, " or ".join(DRAFTS), options.draft)
    need(
        "dflash.policy", options.policy in POLICIES, f"one of {', '.join(POLICIES)}", options.policy
    )
    heat = options.draft_temperature
    need("dflash.draft_temperature", 0 < heat < float("inf"), "above 0", heat)
    _refuse_contradictions(options)
    bank = find_bank(context.target, options.model)
    if options.tree:
        return _tree(options, bank, context)
    rule = _rule(options, bank)
    eos = context.target.info.eos_ids

    costs: CostModel | None = None
    if rule.policy == "cost":
        costs = CostModel(context.costs or cost.load_or_measure(context.target))

    def make(shared: Mapping[str, Any]) -> tuple[Drafter, Policy]:
        length = BlockLength(rule)
        if costs is not None:
            length = CostedLength(rule, costs, shared["counts"])
        draw = options.draft == "sample"
        return DFlash(bank, length, draw=draw, temperature=heat, eos_ids=eos), length

    return RequestMaker(make, {"counts": SurvivalBook()} if costs is not None else None)


def _refuse_contradictions(options: DFlashOptions) -> None:
    """Raise OptionError for options that play no part beside others."""
    chain = {
        "draft": options.draft != "argmax",
        "length": options.length != 0,
        "policy": options.policy != "fixed",
    }
    trees = {"nodes": options.nodes != 0, "most": options.most != 0}
    for option, given in (chain if options.tree else trees).items():
        if given:
            problem = "is for chains, and tree=on drafts trees" if options.tree else WITH_TREE
            raise OptionError(f"dflash.{option}", problem, f"Leave {option} out")
    if options.most and options.nodes:
        problem = "goes with the budget policy only, and nodes=0 means that"
        raise OptionError("dflash.most", problem, "Leave most or nodes out")
    if options.rate != 1.0 and options.policy != "ratio":
        raise OptionError("dflash.rate", "goes with policy=ratio only", "Leave rate out")
    if options.least != 1 and options.policy == "fixed":
        problem = "goes with policy=ratio or cost only"
        raise OptionError("dflash.least", problem, "Leave least out")
    if options.draft_temperature != 1.0 and options.draft != "sample":
        problem = "goes with draft=sample only"
        raise OptionError("dflash.draft_temperature", problem, "Leave draft_temperature out")


def _tree(options: DFlashOptions, bank: DFlashBank, context: MethodContext) -> RequestMaker:
    policy, eos = (
        Policies("dflash", options.nodes, options.most, context),
        context.target.info.eos_ids,
    )

    def make(shared: Mapping[str, Any]) -> tuple[Drafter, Policy]:
        return DFlashTree(bank, eos_ids=eos), policy(shared)

    return RequestMaker(make, None if options.nodes else {"counts": AcceptanceBook()})


def find_bank(target: Target, model: str, *, method: str = "dflash") -> DFlashBank:
    """The drafter in the folder named, or the one shipped for the target, ready to work. Raises
    OptionError, ModelError or CapabilityError before anything has run."""
    folder = drafter_folder(target, model, "dflash", "DFlash", method)
    return assemble(target, store.load(folder, target.info), draft_linear)


def _rule(options: DFlashOptions, bank: DFlashBank) -> LengthPolicy:
    config = bank.config
    slots = config.block_size - 1
    need("dflash.length", 0 <= options.length <= slots, f"0 to {slots}", options.length)
    most = 1 + (options.length or slots)
    need("dflash.least", 1 <= options.least <= most, f"1 to {most}", options.least)
    need("dflash.rate", 0 < options.rate < float("inf"), "above 0", options.rate)
    if options.policy == "ratio" and not config.length_head:
        raise OptionError(
            "dflash.policy",
            "ratio needs a length head, which this drafter hasn't",
            "Choose fixed, or cost, which learns from what is kept",
        )
    return LengthPolicy(
        config.block_size,
        policy=options.policy,
        rate=options.rate,
        least=options.least,
        most=most,
        lookahead=config.lookahead,
    )


METHODS = (
    Method(
        name="dflash",
        summary="a small network drafts a whole block in one pass (DFlash, AdaFlash)",
        prepare=_dflash,
        options=DFlashOptions,
        requires=("rollback", "taps"),
        needs="hidden states, the model's head; a drafter trained for it",
        variants={
            "adaflash": {"policy": "ratio"},
            "cost": {"policy": "cost"},
            "tree": {"tree": True},
        },
        trees=True,
    ),
)

"""EAGLE-3 drafting: options and how it is put together."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from hasten.builtin.common import drafter_folder, need, opt
from hasten.drafters.eagle3 import Eagle3
from hasten.eagle3 import store
from hasten.eagle3.bank import Eagle3Bank, assemble
from hasten.errors import OptionError
from hasten.methods import MakeRequest, Method, MethodContext
from hasten.policies.base import FixedPolicy
from hasten.targets.base import Target
from hasten.targets.fused_native import draft_linear

logger = logging.getLogger(__name__)

DRAFTS = ("chain", "tree")


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """Options of ``eagle3``."""

    model: str = opt("", "folder of the drafter; empty: the one shipped for these weights")
    draft: str = opt("chain", "what is drafted: chain, or tree (EAGLE-2's dynamic tree)")
    length: int = opt(4, "with draft=chain: tokens drafted at most")
    top_k: int = opt(4, "with draft=tree: children of a node, and nodes of a level that get some")
    depth: int = opt(4, "with draft=tree: of the deepest node (the reference's depth plus one)")
    nodes: int = opt(12, "with draft=tree: rows per pass, the root included")
    sample: bool = opt(False, "with draft=chain: draw the tokens of sampled requests")
    draft_temperature: float = opt(1.0, "with sample=on: of the drafter's own logits")


_OF_TREES = ("top_k", "depth", "nodes")
_OF_CHAINS = ("length", "sample")


def _eagle3(options: Eagle3Options, context: MethodContext) -> MakeRequest:
    _check(options)
    bank = find_bank(context.target, options.model)
    eos, tree = context.target.info.eos_ids, options.draft == "tree"
    if tree and not context.target.capabilities.tree:
        logger.warning(
            "%s: eagle3 verifies the best chain of its tree. Take draft=chain, which costs less",
            context.target.info.name,
        )

    def make() -> tuple[Eagle3, FixedPolicy]:
        if tree:
            drafter = Eagle3(bank, top_k=options.top_k, depth=options.depth, eos_ids=eos)
            return drafter, FixedPolicy(options.nodes, options.depth)
        drafter = Eagle3(
            bank,
            length=options.length,
            sample=options.sample,
            temperature=options.draft_temperature,
            eos_ids=eos,
        )
        return drafter, FixedPolicy(options.length + 1, options.length)

    return make


def _check(options: Eagle3Options) -> None:
    """Raise OptionError for values out of range, and for options that play no part beside
    others."""
    need("eagle3.draft", options.draft in DRAFTS, " or ".join(DRAFTS), options.draft)
    for name in ("length", "top_k", "depth"):
        need(f"eagle3.{name}", getattr(options, name) >= 1, "at least 1", getattr(options, name))
    need("eagle3.nodes", options.nodes >= 2, "at least 2, the root included", options.nodes)
    heat = options.draft_temperature
    need("eagle3.draft_temperature", 0 < heat < float("inf"), "above 0", heat)
    usual = Eagle3Options()
    tree = options.draft == "tree"
    for name in _OF_CHAINS if tree else _OF_TREES:
        if getattr(options, name) != getattr(usual, name):
            problem = f"goes with draft={'chain' if tree else 'tree'} only"
            raise OptionError(f"eagle3.{name}", problem, f"Leave {name} out")
    if heat != usual.draft_temperature and not options.sample:
        problem = "goes with sample=on only"
        raise OptionError("eagle3.draft_temperature", problem, "Leave draft_temperature out")


def find_bank(target: Target, model: str, *, method: str = "eagle3") -> Eagle3Bank:
    """The drafter in the folder named, or the one shipped for the target, ready to work. Raises
    OptionError, ModelError or CapabilityError before anything has run."""
    folder = drafter_folder(target, model, "eagle3", "EAGLE-3", method)
    return assemble(target, store.load(folder, target.info), draft_linear)


METHODS = (
    Method(
        name="eagle3",
        summary="a small network fed with its own output drafts a chain or a tree (EAGLE-3)",
        prepare=_eagle3,
        options=Eagle3Options,
        requires=("rollback", "taps"),
        needs="hidden states; a drafter trained for it",
        variants={
            "tree": {"draft": "tree"},
            "paper": {"draft": "tree", "top_k": 10, "depth": 6, "nodes": 60},
        },
    ),
)

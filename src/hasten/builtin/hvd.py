"""Hybrid Verified Decoding: options, its two arms, and how they are put together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hasten.builtin.common import need, opt
from hasten.dflash import store as dflash_store
from hasten.drafters.base import Drafter
from hasten.drafters.hybrid import Hybrid
from hasten.errors import OptionError
from hasten.exits import store as exit_store
from hasten.methods import Method, MethodContext, MethodSpec, RequestMaker, parse, prepare
from hasten.payoff.features import class_table, digest_of
from hasten.payoff.gate import LEAST_SCORE, RULES, TAU, Gate, Record, Rule
from hasten.payoff.policy import HybridPolicy
from hasten.payoff.predictor import CacheOptions, Predictor, find
from hasten.policies import cost
from hasten.policies.base import FixedPolicy, Policy
from hasten.policies.cost_model import CostModel
from hasten.targets.base import Target

ARMS = ("early-exit", "del", "dflash", "eagle3", "draft-model")
"""Methods that the model arm may be."""
NONE, DRAFT = "none", "draft"
_CACHE = CacheOptions()


@dataclass(frozen=True, slots=True)
class HvdOptions:
    """Options of ``hvd``."""

    model: str = opt(
        "",
        "the model arm: early-exit, dflash, eagle3, draft:NAME or none, its own options after ; "
        "(as dflash;length=4); empty: one shipped for these weights",
    )
    rule: str = opt(
        "payoff",
        "payoff (predicted), cost (predicted and timed), frequency (the score), cache, model",
    )
    predictor: str = opt("", "rules payoff, cost: its file; empty: the one shipped")
    tau: float = opt(TAU, "rule=payoff: least tokens expected of the cache's draft (the paper's)")
    s0: float = opt(LEAST_SCORE, "rule=frequency: least score of the cache's draft")
    plain: bool = opt(False, "rule=cost: plain rounds are a choice, too")
    longest: int = opt(_CACHE.longest, "the cache's draft, in tokens, at most")
    max_tree_depth: int = opt(_CACHE.max_tree_depth, "the cache: longest string counted")
    max_spec_factor: float = opt(
        _CACHE.max_spec_factor, "the cache: tokens drafted per token matched; 0: no such bound"
    )
    min_token_prob: float = opt(
        _CACHE.min_token_prob, "the cache: least estimated probability of a path"
    )


# -- the model arm ---------------------------------------------------------------------------------


def arm_of(text: str, target: Target) -> MethodSpec | None:
    """The model arm that an option names, as a method; None: none. Raises OptionError."""
    text = text.strip()
    if not text:
        return _shipped_arm(target)
    if text == NONE:
        return None
    first, *options = [part.strip() for part in text.split(";")]
    name, _, value = first.partition(":")
    if name == DRAFT:
        first = f"draft-model,model={value}" if value else "draft-model"
    elif name not in ARMS:
        known = ", ".join((*(arm for arm in ARMS if arm != "draft-model"), "draft:NAME", NONE))
        raise OptionError("hvd.model", f"no such model arm: {name!r}", f"Choose one of {known}")
    return parse(",".join([first, *options]))


def _shipped_arm(target: Target) -> MethodSpec | None:
    """Exit modules where some are shipped (trees, where one stands at exit 0), else a DFlash
    drafter, else none."""
    have = target.capabilities
    if have.layer_ranges and (stored := exit_store.shipped(target.info)) is not None:
        at_zero = any(config.layer == 0 for config in stored.configs)
        return parse("early-exit:tree" if at_zero else "early-exit")
    if have.taps and dflash_store.shipped(target.info) is not None:
        return parse("dflash")
    return None


class _Learned:
    """What requests share: the model arm's own counts, and what its rounds were like."""

    def __init__(self, arm: RequestMaker | None, record: Record) -> None:
        self.arm, self.record = arm, record

    def reset(self) -> None:
        """Forget everything learned."""
        self.record.reset()
        if self.arm is not None:
            self.arm.reset()

    def fork(self) -> _Learned:
        """A copy that shares nothing that changes."""
        arm = None if self.arm is None else self.arm.fork()
        return _Learned(arm, self.record.fork())


# -- the method ------------------------------------------------------------------------------------


def _check(options: HvdOptions) -> Rule:
    """The rule. Raises OptionError for values out of range, and for options that play no part."""
    need("hvd.rule", options.rule in RULES, f"one of {', '.join(RULES)}", options.rule)
    need("hvd.tau", math.isfinite(options.tau), "finite", options.tau)
    need("hvd.s0", math.isfinite(options.s0), "finite", options.s0)
    default = HvdOptions()
    plays = {
        "predictor": options.rule in ("payoff", "cost"),
        "tau": options.rule == "payoff",
        "s0": options.rule == "frequency",
        "plain": options.rule == "cost",
        **{each.name: options.rule != "model" for each in fields(CacheOptions)},
    }
    for name, part in plays.items():
        if not part and getattr(options, name) != getattr(default, name):
            problem = f"plays no part with rule={options.rule}"
            raise OptionError(f"hvd.{name}", problem, f"Leave {name} out")
    return Rule(options.rule, options.tau, options.s0, options.plain)


def _hvd(options: HvdOptions, context: MethodContext) -> RequestMaker:
    rule = _check(options)
    own = {each.name: getattr(options, each.name) for each in fields(CacheOptions)}
    cache = CacheOptions(**own).check("hvd.")
    info = context.target.info
    spec = arm_of(options.model, context.target)
    if spec is None and rule.name == "model":
        problem = "always drafts by the model arm, and there is none"
        raise OptionError("hvd.rule", problem, "Name one (model=...), or choose another rule")
    predictor: Predictor | None = None
    table = None
    if rule.name in ("payoff", "cost"):
        table = class_table(context.tokenizer, info.vocab_size)
        predictor = find(options.predictor, info, digest_of(table), cache)
    arm = None if spec is None else prepare(spec, context)
    costs: CostModel | None = None
    if rule.name == "cost":
        costs = CostModel(context.costs or cost.load_or_measure(context.target))
    longest = 0 if rule.name == "model" else cache.longest

    def make(shared: Mapping[str, Any]) -> tuple[Drafter, Policy]:
        learned = shared["counts"]
        drafter: Drafter | None = None
        policy: Policy = FixedPolicy(nodes=1, depth=0)
        if learned.arm is not None:
            drafter, policy = learned.arm()
        gate = Gate(
            rule,
            predictor,
            table,
            costs=costs,
            record=learned.record,
            model=drafter is not None,
        )
        hybrid = Hybrid(cache.cache(info.eos_ids), gate, drafter, longest=cache.longest)
        return hybrid, HybridPolicy(gate, policy, longest=longest)

    return RequestMaker(make, {"counts": _Learned(arm, Record())})


METHODS = (
    Method(
        name="hvd",
        summary="copies where they are predicted to pay, else a model drafts (HVD)",
        prepare=_hvd,
        options=HvdOptions,
        needs="a predictor (`hasten train payoff`); what the model arm needs",
        variants={name: {"rule": name} for name in ("cost", "frequency")},
    ),
)

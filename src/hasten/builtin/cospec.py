"""``cospec``: options, what drafts, which rule decides, and how they are put together."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from hasten.arbitration import arbiter as arbiters
from hasten.arbitration import rules
from hasten.arbitration.laws import CASCADES, DIVERGENCES
from hasten.arbitration.loop import CONSECUTIVE, GATE, Arbitration
from hasten.arbitration.mismatch import Words
from hasten.builtin.common import need, opt
from hasten.builtin.exit_sources import HEAD, MODULES, find_exits
from hasten.drafters.base import Drafter
from hasten.drafters.draft_model import DraftModel
from hasten.drafters.early_exit import MAX_LENGTH, EarlyExit
from hasten.errors import CapabilityError, OptionError
from hasten.exits import store
from hasten.methods import ArbitratedMaker, Method, MethodContext
from hasten.policies.base import FixedPolicy
from hasten.policies.exit_rules import Kangaroo, Static
from hasten.policies.exits import ExitPolicy, Probe
from hasten.targets.base import Target, TargetInfo
from hasten.vocabulary import check_same_vocabulary

logger = logging.getLogger(__name__)

LEARNED = "learned"
DRAFTS = ("early-exit", "draft-model", "specialist")
SPECIALIST = "specialist"


@dataclass(frozen=True, slots=True)
class CoSpecOptions:
    """Options of ``cospec``."""

    rule: str = opt(LEARNED, "who decides: learned (the arbiter), or a variant's name")
    arbiter: str = opt("", "rule=learned: a file or folder; empty: the one shipped")
    draft: str = opt("early-exit", f"what drafts: {', '.join(DRAFTS)} (constructed)")
    exits: str = opt("", "the exit's layer; empty: the arbiter's, or the lowest that has a module")
    modules: str = opt("", MODULES)
    head: str = opt("modules", HEAD)
    model: str = opt("", "draft=draft-model: an id, a folder, a .gguf file or an alias")
    length: int = opt(4, f"K, the longest draft, 1 to {MAX_LENGTH}")
    bonus: bool = opt(True, "one more token of the model's own after a block that is kept whole")
    gate: float = opt(-1.0, f"least p(d) to keep d; 0: none; negative: the arbiter's, or {GATE:g}")
    consecutive: int = opt(
        -1, f"most overrides in a row; 0: no limit; negative: the arbiter's, or {CONSECUTIVE}"
    )
    threshold: float = opt(
        -1.0, "of rule learned (theta), fuzzy, kl, judge, threshold; negative: its own"
    )
    divergence: str = opt("js", f"rule=fuzzy: {', '.join(DIVERGENCES)}")
    epsilon: float = opt(0.09, "rule=typical: p(d) above this is always enough")
    delta: float = opt(0.3, "rule=typical: or above this times exp(-entropy)")
    budget: float = opt(0.3, "rule=mentored: most KL(model, emitted) a token, in nats")
    cascade: str = opt("opt", f"rule=cascade: {', '.join(CASCADES)}")
    alpha: float = opt(0.2, "rule=cascade: how much the draft may be less sure")
    fallback: float = opt(0.6, "rule=bild: drafting stops where the draft is less sure")
    rollback: float = opt(5.0, "rule=bild: -log p(d) above this is refused")
    rate: float = opt(0.5, "rule=random: share of mismatches kept")
    weights: str = opt("", "rule=judge: a safetensors file with w and b")


# -- what drafts -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Draft:
    """`mark` identifies what it says; `make` makes a request's drafter."""

    mark: str
    make: Callable[[], Drafter]


class _Fallback(Kangaroo):
    """BiLD's: the first token isn't drafted either where the draft is unsure."""

    __slots__ = ()

    def leave(self, probe: Probe) -> bool:
        """Leave, or draft on, only where it is sure."""
        return super().leave(probe) and not self.unsure(probe)


def _draft(options: CoSpecOptions, context: MethodContext) -> _Draft:
    need("cospec.draft", options.draft in DRAFTS, f"one of {', '.join(DRAFTS)}", options.draft)
    need("cospec.length", 1 <= options.length <= MAX_LENGTH, f"1 to {MAX_LENGTH}", options.length)
    need("cospec.fallback", 0 <= options.fallback < 1, "in [0, 1)", options.fallback)
    exits = options.draft != "draft-model"
    for name, plays in (
        ("model", not exits),
        ("exits", exits),
        ("head", options.draft == "early-exit"),
        ("modules", options.draft == "early-exit"),
    ):
        _refuse_idle(options, name, plays, f"draft={options.draft}")
    if not exits:
        return _model_draft(options, context)
    modules = options.modules
    if options.draft == SPECIALIST:
        modules = str(specialist_folder(context.target.info))
    return _exit_draft(options, modules, context)


def _exit_draft(options: CoSpecOptions, modules: str, context: MethodContext) -> _Draft:
    target, stored = context.target, None
    if options.head != "own":
        stored = store.read(modules) if modules else store.shipped(target.info)
    exits = options.exits or (_arbitrated_exit(options, stored, target.info) if stored else "")
    found = find_exits(target, exits, modules, options.head, method="cospec", several=False)
    bank, eos = found.bank, target.info.eos_ids
    layer = bank.layers[0]
    own = f"own-head-{layer}-{target.info.fingerprint}"
    mark = exit_mark(stored, layer) if stored else own

    def policy() -> ExitPolicy:
        if options.rule == "bild":
            return _Fallback(0, options.fallback, options.length)
        return Static(0, options.length)

    def make() -> Drafter:
        return EarlyExit(bank, policy(), length=options.length, eos_ids=eos, laws=True)

    return _Draft(mark, make)


def _arbitrated_exit(options: CoSpecOptions, stored: store.Stored, info: TargetInfo) -> str:
    """The lowest exit that the arbiter was trained for; without one none is preferred."""
    if options.rule != LEARNED:
        return ""
    named = arbiters.Arbiter.load(options.arbiter).meta if options.arbiter else None
    for layer in sorted(config.layer for config in stored.configs):
        mark = exit_mark(stored, layer)
        fits = (
            arbiters.shipped(info.fingerprint, mark)
            if named is None
            else named.get("draft") == mark
        )
        if fits:
            return str(layer)
    return ""


def exit_mark(stored: store.Stored, layer: int) -> str:
    """What identifies the law of a stored exit module: its tensors, ids and description."""
    config = next(each for each in stored.configs if each.layer == layer)
    digest = hashlib.sha256(json.dumps(config.to_json(), sort_keys=True).encode())
    digest.update(json.dumps([stored.fingerprint, *stored.ids]).encode())
    for name in sorted(config.shapes()):
        digest.update(stored.tensors[f"{layer}.{name}"].contiguous().numpy().tobytes())
    return f"exit-{layer}-{digest.hexdigest()[:32]}"


def specialist_folder(info: TargetInfo) -> Path:
    """The specialist module shipped for these weights: trained for some kinds of questions only, to
    have a draft that is sometimes better than its target. Raises OptionError without one."""
    root = files("hasten") / "assets"
    with as_file(root) as assets:
        for folder in sorted(assets.glob(f"*/{SPECIALIST}")):
            description = folder / store.DESCRIPTION
            if not info.fingerprint or not description.is_file():
                continue
            if json.loads(description.read_text()).get("fingerprint") == info.fingerprint:
                return folder
    raise OptionError(
        "cospec.draft",
        f"no specialist is shipped for {info.name}",
        "Take draft=early-exit (modules=FOLDER names modules of your own)",
    )


def _model_draft(options: CoSpecOptions, context: MethodContext) -> _Draft:
    if not options.model:
        raise OptionError(
            "cospec.model", "is missing", "Name one: cospec,draft=draft-model,model=ID"
        )
    model, tokenizer = context.load(options.model)
    if not model.capabilities.rollback:
        raise CapabilityError(
            f"{model.info.name} can't be a draft model: its cache can't be cut back. Choose another"
        )
    check_same_vocabulary(context.tokenizer, tokenizer, context.target.info, model.info)

    def make() -> Drafter:
        return DraftModel(
            model,
            vocab_size=context.target.info.vocab_size,
            num_tokens=options.length,
            threshold=options.fallback if options.rule == "bild" else 0.0,
            laws=True,
        )

    return _Draft(f"model-{model.info.fingerprint or model.info.name}", make)


# -- who decides -----------------------------------------------------------------------------------


def _chosen(options: CoSpecOptions) -> dict[str, float]:
    """The threshold, where the user chose one."""
    return {} if options.threshold < 0 else {"threshold": options.threshold}


def _judge(options: CoSpecOptions, target: Target) -> rules.Rule:
    if not options.weights:
        raise OptionError("cospec.weights", "is missing", "Name the file with the judge's w and b")
    info = target.info
    return rules.LinearJudge.load(
        options.weights, size=info.hidden_size, target=info.fingerprint, **_chosen(options)
    )


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a rule is made, and which options are its own."""

    make: Callable[[CoSpecOptions, Target], rules.Rule]
    takes: tuple[str, ...] = ()


_THRESHOLD = ("threshold",)
RULES: dict[str, _Kind] = {
    "target": _Kind(lambda o, t: rules.Target()),
    "draft": _Kind(lambda o, t: rules.Always()),
    "typical": _Kind(lambda o, t: rules.Typical(o.epsilon, o.delta), ("epsilon", "delta")),
    "fuzzy": _Kind(
        lambda o, t: rules.Fuzzy(o.divergence, **_chosen(o)), ("divergence", "threshold")
    ),
    "kl": _Kind(lambda o, t: rules.KL(**_chosen(o)), _THRESHOLD),
    "judge": _Kind(_judge, ("weights", "threshold")),
    "mentored": _Kind(lambda o, t: rules.Mentored(o.budget), ("budget",)),
    "cascade": _Kind(lambda o, t: rules.Cascade(o.cascade, o.alpha), ("cascade", "alpha")),
    "bild": _Kind(lambda o, t: rules.BiLD(o.rollback), ("fallback", "rollback")),
    "threshold": _Kind(lambda o, t: rules.Threshold(**_chosen(o)), _THRESHOLD),
    "random": _Kind(lambda o, t: rules.Random(o.rate), ("rate",)),
}
"""Every rule but the arbiter, by name."""

_LEARNED_TAKES = ("arbiter", "threshold")


def _learned(options: CoSpecOptions, target: Target, draft: str) -> rules.Learned:
    """The arbiter named, or the one shipped for this model and draft."""
    info = target.info
    if options.arbiter:
        made = arbiters.Arbiter.load(options.arbiter)
        arbiters.check_belongs(
            made, target=info.fingerprint, draft=draft, where=options.arbiter, model=info.name
        )
    else:
        found = arbiters.shipped(info.fingerprint, draft)
        if found is None:
            raise OptionError(
                "cospec.arbiter",
                f"no arbiter is shipped for {info.name} with this draft",
                "Train one (`hasten train arbiter fit --out DIR`) and name it (arbiter=DIR), or "
                "take a rule that needs none, as cospec:typical (`hasten methods cospec` has all)",
            )
        made = found
    trained = made.meta.get("length", options.length)
    if trained != options.length:
        logger.warning(
            "the arbiter was trained with length=%s, and drafts are %s long here: it may decide "
            "worse",
            trained,
            options.length,
        )
    if made.fallback:
        logger.info("this arbiter was no better than the model alone: it keeps no draft's token")
    return rules.Learned(made, None if options.threshold < 0 else options.threshold)


def _rule(options: CoSpecOptions, target: Target, draft: str) -> rules.Rule:
    known = (LEARNED, *RULES)
    need("cospec.rule", options.rule in known, f"one of {', '.join(known)}", options.rule)
    takes = _LEARNED_TAKES if options.rule == LEARNED else RULES[options.rule].takes
    for name in sorted({*_LEARNED_TAKES, *(each for k in RULES.values() for each in k.takes)}):
        _refuse_idle(options, name, name in takes, f"rule={options.rule}")
    if options.rule == LEARNED:
        return _learned(options, target, draft)
    return RULES[options.rule].make(options, target)


def _refuse_idle(options: CoSpecOptions, name: str, plays: bool, beside: str) -> None:
    """Raise OptionError for an option that was given and plays no part."""
    default = next(each.default for each in fields(CoSpecOptions) if each.name == name)
    if not plays and getattr(options, name) != default:
        raise OptionError(f"cospec.{name}", f"plays no part with {beside}", f"Leave {name} out")


# -- the method ------------------------------------------------------------------------------------


def _cospec(options: CoSpecOptions, context: MethodContext) -> ArbitratedMaker:
    need("cospec.gate", options.gate < 1, "below 1", options.gate)
    need("cospec.threshold", options.threshold < math.inf, "finite", options.threshold)
    draft = _draft(options, context)
    own = _rule(options, context.target, draft.mark)
    gate, consecutive = options.gate, options.consecutive
    if isinstance(own, rules.Learned):
        gate = own.arbiter.gate if gate < 0 else gate
        consecutive = own.arbiter.consecutive if consecutive < 0 else consecutive
    info = context.target.info
    words = Words(info.eos_ids, context.tokenizer)

    def arrange(rule: Any) -> tuple[Drafter, FixedPolicy, Arbitration]:
        if not isinstance(rule, rules.Rule | None):
            raise OptionError(
                "rule", f"must be a hasten.arbitration.rules.Rule, got {rule!r}", "Subclass it"
            )
        verifier = Arbitration(
            own if rule is None else rule,
            words=words,
            length=options.length,
            layer=info.num_layers,
            bonus=options.bonus,
            gate=GATE if gate < 0 else gate,
            consecutive=CONSECUTIVE if consecutive < 0 else consecutive,
        )
        return draft.make(), FixedPolicy(nodes=options.length + 1), verifier

    arrange(None)  # bad options are refused now, not at the first request
    return ArbitratedMaker(draft.mark, arrange)


_OWN: dict[str, dict[str, Any]] = {
    "draft": {"gate": 0.0, "consecutive": 0, "bonus": False},
}
"""What variants set beside their rule: the draft's own text needs all of the model's say away."""

METHODS = (
    Method(
        name="cospec",
        summary="CoSpec-style: where draft and model differ, a rule decides whose token is kept",
        prepare=_cospec,
        options=CoSpecOptions,
        needs="exit modules or a draft model; an arbiter trained for both, or another rule",
        lossless="no (by design)",
        variants={name: {"rule": name, **_OWN.get(name, {})} for name in RULES},
        arbitrates=True,
    ),
)

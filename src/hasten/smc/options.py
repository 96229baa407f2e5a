"""The options of ``smc``, and what drafts for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hasten.builtin.common import need, opt
from hasten.builtin.dflash import find_bank
from hasten.builtin.exit_sources import MODULES, find_exits
from hasten.errors import OptionError
from hasten.exits.bank import DraftHead
from hasten.methods import MethodContext
from hasten.smc.dflash_proposal import DFlashProposal
from hasten.smc.exit_proposal import ExitProposal, whole_vocabulary
from hasten.smc.proposals import ModelProposal, Proposal, require_particles
from hasten.smc.resampling import SCHEMES
from hasten.targets.base import Target
from hasten.targets.fused_native import draft_linear
from hasten.types import SamplingParams
from hasten.vocabulary import check_same_vocabulary

logger = logging.getLogger(__name__)

MakeProposal = Callable[[], Proposal]

DRAFTS = ("early-exit", "draft-model", "dflash", "self")
POPULATIONS = ("persistent", "committed")
FIRST_TOKENS = ("per_particle", "shared")
MOST_PARTICLES, MOST_LENGTH = 256, 64
LEAST_ALPHA, MOST_ALPHA = 1e-3, 1e3
"""Far outside of these a law to this power is nothing, or nothing but zeros, in float32."""

_WARM = "finite and above 0 (a greedy draft can't reach every token)"


@dataclass(frozen=True, slots=True)
class SMCOptions:
    """Options of ``smc``. Raises OptionError for values out of range."""

    particles: int = opt(4, "partial answers kept; more bring the law nearer to the model's")
    length: int = opt(4, "tokens drafted a round; each particle gains one more")
    draft: str = opt(
        "early-exit", "what drafts: early-exit, draft-model, dflash, or self (for controls)"
    )
    model: str = opt("", "with draft=draft-model: as --model; with dflash: the drafter's folder")
    exits: str = opt("", "the exit's layer; empty: the lowest that has a module")
    modules: str = opt("", MODULES)
    head: str = opt("modules", "modules, or own: the model's norm and head (LayerSkip)")
    vocabulary: str = opt(
        "whole", "ids that exits and dflash draft: whole, or reduced to their own"
    )
    draft_temperature: float = opt(-1.0, "negative: the request's, for exits 0.6 of it")
    ending: float = opt(-1.0, "the share of q that ends the answer; negative: 0, of exits 0.1")
    mix: float = opt(-1.0, "the uniform law's share in the draft's; negative: 0, or 0.05 if needed")
    alpha: float = opt(1.0, "answers by the model's probability to this power; 1: its own law")
    threshold: float = opt(0.5, "resample below this share of particles that count; 0: never")
    resampler: str = opt("systematic", f"how: {', '.join(SCHEMES)}")
    first_token: str = opt("shared", "the first token: shared by all, or per_particle")
    population: str = opt("persistent", "persistent, or committed: one lineage after each round")

    def __post_init__(self) -> None:
        def check(option: str, ok: bool, rule: str) -> None:
            need(f"smc.{option}", ok, rule, getattr(self, option))

        check("particles", 1 <= self.particles <= MOST_PARTICLES, f"1 to {MOST_PARTICLES}")
        check("length", 1 <= self.length <= MOST_LENGTH, f"1 to {MOST_LENGTH}")
        check("ending", self.ending < 1, "below 1")
        check("mix", self.mix < 1, "below 1")
        powers = f"{LEAST_ALPHA:g} to {MOST_ALPHA:g}"
        check("alpha", LEAST_ALPHA <= self.alpha <= MOST_ALPHA, powers)
        check("threshold", 0 <= self.threshold < float("inf"), "finite and at least 0")
        if not self.draft_temperature < 0:
            usable = 1e-5 <= self.draft_temperature < float("inf")
            check("draft_temperature", usable, _WARM)
        for option, known in (
            ("draft", DRAFTS),
            ("vocabulary", ("whole", "reduced")),
            ("resampler", tuple(SCHEMES)),
            ("first_token", FIRST_TOKENS),
            ("population", POPULATIONS),
        ):
            check(option, getattr(self, option) in known, f"one of {', '.join(known)}")


def prepare(options: SMCOptions, context: MethodContext) -> MakeProposal:
    """Check the target, load what drafts, once; gives what makes a request's proposal.

    Raises CapabilityError, OptionError, ModelError or VocabularyError, before any pass.
    """
    require_particles(context.target, "target")
    if not context.target.capabilities.packed:
        logger.warning(
            "%s runs one sequence a pass: smc's particles take turns, and cost as much as so many "
            "answers",
            context.target.info.name,
        )
    _refuse_contradictions(options)
    if options.draft == "early-exit":
        return _early_exit(options, context)
    if options.draft == "dflash":
        return _dflash(options, context.target)
    vocab_size = context.target.info.vocab_size
    if options.draft == "self":
        return lambda: ModelProposal(context.target, vocab_size=vocab_size, name="self")
    if not options.model:
        raise OptionError("smc.model", "is missing", "Name one: smc,draft=draft-model,model=ID")
    model, tokenizer = context.load(options.model)
    check_same_vocabulary(context.tokenizer, tokenizer, context.target.info, model.info)
    made = ModelProposal(model, vocab_size=vocab_size)
    check_mix(options, made)
    return lambda: ModelProposal(model, vocab_size=vocab_size)


def _refuse_contradictions(options: SMCOptions) -> None:
    """Raise OptionError for options that play no part beside ``draft``."""
    exits = options.draft == "early-exit"
    for option, given, belongs in (
        ("model", bool(options.model), options.draft in ("draft-model", "dflash")),
        ("exits", bool(options.exits), exits),
        ("modules", bool(options.modules), exits),
        ("head", options.head != "modules", exits),
        (
            "vocabulary",
            options.vocabulary != "whole",
            (exits and options.head == "modules") or options.draft == "dflash",
        ),
    ):
        if given and not belongs:
            raise OptionError(
                f"smc.{option}",
                f"plays no part with draft={options.draft}, head={options.head}",
                f"Leave {option} out",
            )


def _early_exit(options: SMCOptions, context: MethodContext) -> MakeProposal:
    target = context.target
    found = find_exits(
        target, options.exits, options.modules, options.head, method="smc", several=False
    )
    bank = found.bank
    if options.vocabulary == "whole" and len(bank.head.ids) < target.info.vocab_size:
        bank = whole_vocabulary(target, bank)
    check_mix(options, ExitProposal(target, bank))
    return lambda: ExitProposal(target, bank)


def _dflash(options: SMCOptions, target: Target) -> MakeProposal:
    bank = find_bank(target, options.model, method="smc")
    slots = bank.config.block_size - 1
    need(
        "smc.length", options.length <= slots, f"1 to {slots}, the slots of a block", options.length
    )
    if options.vocabulary == "whole" and len(bank.head.ids) < target.info.vocab_size:
        bank = replace(bank, head=DraftHead(None, bank.head.rows, draft_linear))
    check_mix(options, DFlashProposal(target, bank))
    return lambda: DFlashProposal(target, bank)


COLDEST = 0.2
"""The least draft temperature, as a share of the request's."""
EXIT_WARMTH = 0.6
"""An exit's temperature, as a share of the request's: its answers' probability under the embedded
model is then plain decoding's (docs/methods/smc.md). An exit's law is flatter than the model's."""


def draft_temperature(options: SMCOptions, temperature: float) -> float:
    """The draft's, for a request of this `temperature`. Raises OptionError for one that leaves the
    draft next to nothing but its likeliest tokens: what it never draws is missing for any number of
    particles."""
    if options.draft_temperature >= 0:
        need(
            "smc.draft_temperature",
            options.draft_temperature >= COLDEST * temperature or options.mix > 0,
            f"at least {COLDEST:g} of the request's temperature {temperature:g} (or mix above 0): "
            "a colder draft hardly reaches most tokens",
            options.draft_temperature,
        )
        return options.draft_temperature
    return temperature * (EXIT_WARMTH if options.draft == "early-exit" else 1.0)


EXIT_ENDING = 0.1
"""Of exits: they learned from long answers and give the end of a short one next to nothing."""


def ending_share(options: SMCOptions) -> float:
    """The share of q that ends answers."""
    if options.ending >= 0:
        return options.ending
    return EXIT_ENDING if options.draft == "early-exit" else 0.0


DEFAULT_MIX = 0.05


def check_mix(options: SMCOptions, proposal: Proposal) -> float:
    """The uniform law's share in q. Raises OptionError where q would miss tokens that p can give:
    no number of particles would bring them back."""
    if options.mix == 0 and not proposal.full_support:
        raise OptionError(
            "smc.mix",
            f"is 0, and {proposal.name} can't draft every id of the vocabulary: the answers would "
            "be biased for any number of particles",
            "Leave mix out, or draft from the whole vocabulary (vocabulary=whole)",
        )
    if options.mix >= 0:
        return options.mix
    return 0.0 if proposal.full_support else DEFAULT_MIX


LEAST_TEMPERATURE = 1e-5
"""Below it the target's law is one token, and nearly every drafted particle loses all weight."""


def check_temperature(temperature: float) -> None:
    """Raise OptionError for one that leaves nothing to draw."""
    if temperature < LEAST_TEMPERATURE:
        raise OptionError(
            "temperature",
            f"smc needs at least {LEAST_TEMPERATURE}, got {temperature}: a greedy answer is one "
            "text, which particles could only guess",
            "Choose a lossless method for greedy answers, as auto or early-exit",
        )


def check_params(params: SamplingParams, tokenizer: Any) -> None:
    """Raise OptionError for what a population can't honour."""
    check_temperature(params.temperature)
    if params.stop and tokenizer is None:
        raise OptionError(
            "stop", "stop strings need a tokenizer", "Give one, or use stop_token_ids instead"
        )

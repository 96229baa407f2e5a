"""``hasten train lede arms``: what `lede`'s arms do, from rounds in which all of them are tried.

Each round of a greedy answer is drafted by every arm, and verified by one drawn at random. What a
lossless method says doesn't depend on its drafts, so at the answer's end it is known of every arm
how many of its tokens would have been kept: full information, though one arm ran. Chains of the
two-action agent (``walk``) run the target's layers, so of them only what ran is known.

What is made of it: `hasten.train.lede_arms_fit`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hasten.builtin.lede import LedeOptions, arm_costs, exit_zero, find_agent, most_rows
from hasten.decode import decode
from hasten.decoding import Decoding
from hasten.drafters.base import DraftContext
from hasten.drafters.lede import Lede
from hasten.drafters.lede_chain import LedeChain
from hasten.errors import OptionError
from hasten.exits import store
from hasten.methods import MethodContext
from hasten.policies import cost
from hasten.policies.budget import AcceptanceBook
from hasten.policies.cost_model import CostModel, CostTable
from hasten.policies.lede import ArmBudget
from hasten.policies.lede_agent import modules_digest
from hasten.policies.lede_arms import ARMS, FEATURES, Arm, ArmCosts, ArmFile, Floats
from hasten.policies.lede_chooser import Chooser
from hasten.start_rows import load as load_start_rows
from hasten.stopping import Stopper
from hasten.train import rows as text_rows
from hasten.train.lede_arms_fit import Logged, fit, scores
from hasten.types import Budget, Draft, Round, SamplingParams
from hasten.verify import walk as verify_walk

FAVOURITE = "copy+tree-2"
"""Half of the rounds are verified by this arm, so that logged starts look like useful ones."""
USUAL = 0.05
"""Part of a plain pass that drafting usually takes."""
UNKNOWN_END = 8
"""The last tokens of an answer cut off start no round: too little is known of what follows."""


@dataclass(frozen=True, slots=True)
class Options:
    """What ``hasten train lede arms`` is told.

    documents, tokens   answers, and the longest of them
    minutes             collecting ends after so many
    hidden, epochs      of the network
    """

    documents: int = 200
    tokens: int = 96
    minutes: float = 20.0
    hidden: int = 48
    epochs: int = 400
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("documents", "tokens", "hidden", "epochs"):
            if getattr(self, name) < 1:
                raise OptionError(name, f"must be at least 1, got {getattr(self, name)}")
        if self.minutes <= 0:
            raise OptionError("minutes", f"must be above 0, got {self.minutes}")


# -- collecting ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Tried:
    """A round's start, and what each arm would have verified there: tree and steps."""

    at: int
    x: Floats
    trees: list[tuple[Sequence[int], Sequence[int], int]]
    behaviour: int
    chance: float
    ran: tuple[float, float] = (0.0, 0.0)
    """Of the arm that ran: tokens kept and, for a walk, plain steps spent."""


class Recorder(Lede):
    """Tries every arm, and drafts from one drawn at random."""

    policy: ArmBudget
    dice: random.Random
    arms: tuple[Arm, ...]

    def prepare(self, policy: ArmBudget, dice: random.Random, arms: Sequence[Arm]) -> None:
        """What it decides with."""
        self.policy, self.dice, self.arms = policy, dice, tuple(arms)
        self.tried: list[_Tried] = []

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """Every arm's draft in turn, then that of the arm drawn."""
        if ctx.ids[-1] in self._eos_ids:
            return super().propose(ctx, budget)
        guess = self._guess(budget)
        x = self._features(ctx, guess).copy()
        before, trees = self._state, []
        for arm in self.arms:
            self._state = copy(before)
            trees.append(((), (), 0) if arm.walk else self._try(arm, guess, ctx, budget))
        self._state = before
        count = len(self.arms)
        names = [arm.name for arm in self.arms]
        favourite = names.index(FAVOURITE) if FAVOURITE in names else 0
        drawn = favourite if self.dice.random() < 0.5 else self.dice.randrange(count)
        chance = 0.5 / count + 0.5 * (drawn == favourite)
        self.tried.append(_Tried(len(ctx.ids), x, trees, drawn, chance))
        self.chooser.arm, self.chooser.steps = self.arms[drawn], 0
        return self.draft(self.arms[drawn], guess, ctx, budget)

    def _try(
        self, arm: Arm, guess: Any, ctx: DraftContext, budget: Budget
    ) -> tuple[Sequence[int], Sequence[int], int]:
        self.chooser.arm, self.chooser.steps = arm, 0
        draft = self.policy.select(self.draft(arm, guess, ctx, budget))
        return draft.tree.tokens, draft.tree.parents, self.chooser.steps

    def ran(self, round: Round) -> None:
        """What became of the last one."""
        if self.tried and round.tree is not None:
            spent = self.policy.spent
            self.tried[-1].ran = (float(len(round.emitted) - 1), spent)


class Unhurried(ArmBudget):
    """Trying every arm takes long; what is logged is what a live round would verify."""

    def _weigh_drafting(self, took_ms: float) -> None:
        """Drafting costs what it usually does, and never pauses."""
        self.draft_ms = USUAL * self.costs.curve(self.most, self._context)[0]


class Tabled(CostModel):
    """The table as it is, whatever passes take meanwhile."""

    def observe(self, rows: int, context: int, pass_ms: float, select_ms: float) -> None:
        """Nothing is learned."""


def collect(
    context: MethodContext,
    texts: Iterable[tuple[str, Sequence[int]]],
    options: Options,
    lede: LedeOptions,
    *,
    log: Callable[[int, int], None] = lambda documents, rounds: None,
) -> Logged:
    """Log rounds of greedy answers to `texts` (domain and prompt ids). `log` gets documents and
    rounds so far. Raises OptionError where nothing was logged."""
    target = context.target
    bank = exit_zero(lede, target)
    walk = find_agent(lede, context) if lede.walk else None
    arms = tuple(arm for arm in ARMS if not arm.walk or walk is not None)
    costs, most = _no_costs(context), most_rows(lede, context)
    table = Tabled(_table(context))
    book = AcceptanceBook()
    start = load_start_rows(target.info) if lede.start else None
    info = target.info
    params = SamplingParams(max_new_tokens=options.tokens, temperature=0.0)
    made = _Log(len(arms))
    deadline = time.monotonic() + 60.0 * options.minutes
    for number, (domain, prompt) in enumerate(texts):
        if number >= options.documents or time.monotonic() > deadline:
            break
        if len(prompt) + options.tokens >= info.context_limit:
            continue
        chooser = Chooser(_nothing(arms), costs, arms)
        chain = policy = None
        if walk is not None:
            walk_bank, make_policy, length = walk
            policy = make_policy()
            chain = LedeChain(walk_bank, policy, length=length, eos_ids=info.eos_ids)
        drafter = Recorder(bank, chooser, start=start, walk=chain, eos_ids=info.eos_ids)
        budget = Unhurried(table, book, chooser, most=most, walk=policy)
        drafter.prepare(budget, random.Random(f"{options.seed}-{number}"), arms)
        request = Decoding(
            target,
            prompt,
            params,
            drafter=drafter,
            policy=budget,
            verifier=verify_walk,
            seed=0,
            stopper=Stopper(params, info.eos_ids, len(prompt), info.context_limit, None),
        )
        finished = False
        for _, round in decode([request]):
            drafter.ran(round)
            finished = round.stop_reason is not None
        made.add(drafter.tried, request.ids, finished, domain, [arm.walk for arm in arms])
        log(number + 1, len(made.x))
    return made.logged(tuple(arm.name for arm in arms))


def _table(context: MethodContext) -> CostTable:
    return context.costs or cost.load_or_measure(context.target)


def _no_costs(context: MethodContext) -> ArmCosts:
    """While arms are drawn at random nothing is weighed."""
    return ArmCosts(verify=(0.0, *(1.0 for _ in range(64))), question=0.0, step=0.0)


def _nothing(arms: Sequence[Arm]) -> ArmFile:
    """A file that knows nothing."""
    width = len(FEATURES)
    layer = (np.zeros((width, 3 * len(arms)), np.float32), np.zeros(3 * len(arms), np.float32))
    ones = np.ones(width, np.float32)
    return ArmFile(tuple(arm.name for arm in arms), 0 * ones, ones, (layer,), 1.0, {})


@dataclass(slots=True)
class _Log:
    """Rows of `Logged` under way."""

    arms: int
    x: list[Floats] = field(default_factory=list)
    did: list[Floats] = field(default_factory=list)
    behaviour: list[int] = field(default_factory=list)
    chance: list[float] = field(default_factory=list)
    document: list[int] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)

    def add(
        self,
        tried: Sequence[_Tried],
        ids: Sequence[int],
        finished: bool,
        domain: str,
        walks: Sequence[bool],
    ) -> None:
        """A document's rounds, now that its text is known."""
        end = len(ids) - (0 if finished else UNKNOWN_END)
        for each in tried:
            if each.at >= end:
                continue
            did = np.full((self.arms, 3), np.nan, np.float32)
            for arm, (tokens, parents, steps) in enumerate(each.trees):
                if not walks[arm]:
                    did[arm] = (kept(tokens, parents, ids[each.at :]), len(tokens) - 1, steps)
                elif arm == each.behaviour:
                    did[arm] = (*each.ran, 0.0)
            self.x.append(each.x)
            self.did.append(did)
            self.behaviour.append(each.behaviour)
            self.chance.append(each.chance)
            self.document.append(len(self.domains))
        self.domains.append(domain)

    def logged(self, arms: tuple[str, ...]) -> Logged:
        """All of it as arrays."""
        if not self.x:
            raise OptionError(
                "data", "nothing was logged: no prompt left room for an answer", "Name other data"
            )
        return Logged(
            np.stack(self.x),
            np.stack(self.did),
            np.array(self.behaviour, np.int64),
            np.array(self.chance, np.float32),
            np.array(self.document, np.int64),
            tuple(self.domains),
            arms,
        )


def kept(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> int:
    """How many of a tree's tokens the text goes on with."""
    node, count = 0, 0
    for token in text:
        kids = (kid for kid in range(node + 1, len(tokens)) if parents[kid] == node)
        found = next((kid for kid in kids if tokens[kid] == token), None)
        if found is None:
            return count
        node, count = found, count + 1
    return count


# -- the whole -------------------------------------------------------------------------------------


def prompts(data: Sequence[str | Path], seed: int) -> Iterable[tuple[str, Sequence[int]]]:
    """Domain and prompt of the rows of split ``policy``, each prompt once, domains in turn."""
    by_domain: dict[str, list[Sequence[int]]] = {}
    known = text_rows.Known()
    for path in data:
        for row in text_rows.read(path, split="policy"):
            if known.add(row.prompt):
                by_domain.setdefault(row.domain, []).append(row.prompt)
    dice = random.Random(seed)
    for each in by_domain.values():
        dice.shuffle(each)
    while by_domain:
        for domain in sorted(by_domain):
            yield domain, by_domain[domain].pop()
            if not by_domain[domain]:
                del by_domain[domain]


def run(
    context: MethodContext,
    data: Sequence[str | Path],
    out: str | Path,
    options: Options,
    lede: LedeOptions,
    *,
    log: Callable[[int, int], None] = lambda documents, rounds: None,
) -> tuple[ArmFile, dict[str, float]]:
    """Collect, fit, and write the file of arms `out`, the logged rounds beside it
    (``OUT.rounds.npz``); the file, and `scores`. Raises OptionError or ModelError."""
    target, out = context.target, Path(out)
    bank = exit_zero(lede, target)
    logged = collect(context, prompts(data, options.seed), options, lede, log=log)
    out.parent.mkdir(parents=True, exist_ok=True)
    logged.save(out.with_name(f"{out.name}.rounds.npz"))
    stored = store.read(lede.modules) if lede.modules else store.shipped(target.info)
    costs = arm_costs(context, bank)
    facts = {
        "target": target.info.fingerprint,
        "exits": modules_digest(stored, (0,)),
        "model": target.info.name,
        "documents": len(logged.domains),
        "rounds": len(logged.x),
        "dtype": str(target.info.dtype).removeprefix("torch."),
    }
    file = fit(
        logged,
        costs,
        facts,
        hidden=options.hidden,
        epochs=options.epochs,
        seed=options.seed,
    )
    found = scores(logged, file, costs)
    file = ArmFile(
        file.arms, file.mean, file.scale, file.layers, file.rho, {**file.facts, "held_out": found}
    )
    file.save(out)
    return file, found

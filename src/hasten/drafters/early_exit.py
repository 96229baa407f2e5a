"""Self-speculation: the target's own lower layers, and an exit module on top of them, draft.

Rows that draft run layers 1..l only; verification resumes from their hidden states, so that every
row passes every layer exactly once in a round. Going on at the last candidate exit is a plain step:
nothing is run twice. (LayerSkip, arXiv 2404.16710; the walk over candidate exits is LEDE's, arXiv
2606.03113, as reconstructed in docs/methods/early-exit.md.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.drafters.exit_session import ExitSession, ModuleRun
from hasten.errors import CapabilityError, ModelError, OptionError
from hasten.exits.bank import ExitBank
from hasten.policies.exits import DRAFT, SELECT, ExitPolicy, Outcome, Probe
from hasten.selection import argmax_rows
from hasten.types import Budget, Draft, DraftLaw, DraftTree, Round, RowSignals, Signals

MAX_LENGTH = 12
"""Longest draft (second-hand: all dynamic methods of the LEDE paper stop there)."""

Shadow = tuple[list[int], list[int], list[float]]
"""See `hasten.policies.exits.Outcome.shadows`."""


class EarlyExit(BaseDrafter):
    """A chain drafted from the exit that the policy leaves at.

    bank      candidate exits, lowest first (all of its modules)
    policy    decides where to leave and when to stop
    length    longest draft
    draw      draw from the module's distribution in a sampled request; off: take its likeliest id
    eos_ids   nothing is drafted after these
    laws      tell what the module says at each node (`Draft.laws`)

    Nothing is decided from a drawn token but that nothing follows an end-of-sequence id, and a
    drawn token is never taken back: `rejection` stays exact. Nodes' sources are ``exit-LAYER``.
    """

    name = "early-exit"

    def __init__(
        self,
        bank: ExitBank,
        policy: ExitPolicy,
        *,
        length: int = MAX_LENGTH,
        draw: bool = True,
        eos_ids: frozenset[int] = frozenset(),
        laws: bool = False,
    ) -> None:
        if length < 1:
            raise OptionError("early-exit.length", f"must be at least 1, got {length}")
        self.bank, self.policy, self.length, self.draw = bank, policy, length, draw
        self._eos_ids, self.laws = eos_ids, laws
        taps = {*bank.taps, *(bank.layers if policy.shadow else ())} - {0}
        self.needs = Signals(hidden=tuple(sorted(taps)), prompt=bool(bank.taps))
        self._session = ExitSession(bank)
        self._forget()

    def _forget(self) -> None:
        """Nothing is known of this round yet."""
        self._probes: list[Probe] = []
        self._left: int | None = None
        """Layer of the exit drafted from."""
        self._drafted = 0
        self._proposed = False

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Feed the prompt to the modules."""
        self._session.begin(prompt, signals)

    @torch.inference_mode()
    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """Walk up to the exit the policy leaves at, and draft from there until it stops."""
        self._forget()
        self._proposed = True
        room = min(budget.nodes - 1, budget.depth, self.length)
        root = ctx.ids[-1]
        if room < 1 or root in self._eos_ids:
            return Draft(DraftTree.chain(root))
        ran = 0
        for number, run in enumerate(self._session.runs):
            if not self.policy.wants(SELECT, number, 0):
                continue
            layer = run.config.layer
            state = _run_row(ctx, root, -1, (ran, layer)) if layer else None
            ran = layer
            probe = self._probe(ctx, SELECT, number, 0, run.first, root, state)
            if self.policy.leave(probe):
                return self._draft(ctx, run, probe, room)
        return Draft(DraftTree.chain(root), frontiers=(ran,) if ran else ())

    def _draft(self, ctx: DraftContext, run: ModuleRun, probe: Probe, room: int) -> Draft:
        """Tokens from this exit, the first from `probe`, which the policy has left at."""
        layer, number = run.config.layer, probe.exit
        tokens: list[int] = []
        q: dict[int, torch.Tensor] = {}
        laws: dict[int, DraftLaw] = {}
        rows = 1  # that have run up to the exit
        while True:
            token, probs = self._token(ctx, [*ctx.ids, *tokens], probe)
            if token is None:
                break
            if probs is not None:
                q[len(tokens)] = probs
            if self.laws:
                laws[len(tokens)] = DraftLaw(probe.logits, self._session.head.spread, probe.hidden)
            tokens.append(token)
            place = len(tokens)
            # A last row isn't probed: it runs its lower layers with the verification.
            last = place == room or token in self._eos_ids
            if last or not self.policy.wants(DRAFT, number, place):
                break
            state = _run_row(ctx, token, place - 1, (0, layer)) if layer else None
            rows += 1
            above = probe.hidden.unsqueeze(0)
            probe = self._probe(ctx, DRAFT, number, place, run.more, [token], state, above, [place])
            if not self.policy.leave(probe):
                break
        self._left, self._drafted = layer, len(tokens)
        return Draft(
            DraftTree.chain(ctx.ids[-1], tokens),
            q=q,
            frontiers=(layer,) * rows if layer else (),
            sources=("", *[f"exit-{layer}"] * len(tokens)),
            laws=laws,
        )

    def _probe(
        self,
        ctx: DraftContext,
        phase: str,
        number: int,
        drafted: int,
        outputs: Callable[..., torch.Tensor],
        *inputs: object,
    ) -> Probe:
        """What candidate `number` says at one row, whose output ``(1, hidden)`` `outputs` gives."""
        started = time.perf_counter()
        run = self._session.runs[number]
        hidden = outputs(*inputs)
        logits = self._session.logits(run, hidden)[0]
        layer, context = run.config.layer, len(ctx.ids)
        probe = Probe(phase, layer, number, drafted, logits, hidden[0], context)
        ctx.model_seconds += time.perf_counter() - started
        self._probes.append(probe)
        return probe

    def _token(
        self, ctx: DraftContext, prefix: list[int], probe: Probe
    ) -> tuple[int | None, torch.Tensor | None]:
        """The next draft token and what it was drawn from (None: it wasn't drawn); (None, None)
        where this row has none: the module is broken, or the options ban all that it knows."""
        head = self._session.head
        if ctx.greedy or not self.draw:
            place = argmax_rows(probe.logits.unsqueeze(0))[0]
            return (None if place < 0 else head.id_of(place)), None
        started = time.perf_counter()
        try:
            probs = ctx.warp(prefix, head.spread(probe.logits))
        except (OptionError, ModelError):
            return None, None
        token = ctx.sample(probs, len(prefix), 1)[0]
        ctx.model_seconds += time.perf_counter() - started
        return token, probs

    @torch.inference_mode()
    def observe(self, round: Round) -> None:
        """Feed what was verified; tell the policy what came of the round."""
        self._session.observe(round)
        if self._proposed and round.tree is not None:
            drafted, accepted = _known(round, self._drafted)
            probes, shadows = tuple(self._probes), self._shadows(round)
            self.policy.learn(Outcome(self._left, drafted, accepted, probes, shadows))
        self._forget()

    def _shadows(self, round: Round) -> tuple[Shadow, ...]:
        """Every module's word on the rows that were kept, beside the tokens that followed."""
        if not self.policy.shadow:
            return ()
        return tuple(self._shadow(run, round) for run in self._session.runs)

    def _shadow(self, run: ModuleRun, round: Round) -> Shadow:
        kept = list(round.accepted)
        if run.config.attends:
            hidden = run.verified(len(kept))
        else:
            states = round.signals.hidden[run.config.layer][kept]
            hidden = run.module.run(None, states, None, verified=0, want=len(kept))
        p1, best = torch.softmax(self._session.logits(run, hidden), -1).max(-1)
        guesses = [self._session.head.id_of(place) for place in best.tolist()]
        return guesses, list(round.emitted), p1.tolist()

    def end(self) -> None:
        """Keep nothing of the request."""
        self._session.end()
        self._forget()


def _run_row(ctx: DraftContext, token: int, parent: int, layers: tuple[int, int]) -> torch.Tensor:
    """The row's state ``(1, hidden_size)`` after these layers. Raises CapabilityError."""
    if ctx.run_rows is None:
        raise CapabilityError(
            "early exits need a target that runs some of its layers only, which this one doesn't. "
            "Choose another method"
        )
    return ctx.run_rows([token], [parent], layers)


def _known(round: Round, drafted: int) -> tuple[int, int]:
    """Tokens drafted and tokens kept, as far as they are known: of a draft that the answer ends
    inside, what stood after the end counts as not drafted."""
    assert round.tree is not None
    drafted = min(drafted, round.drafted)
    accepted = min(len(round.accepted) - 1, drafted)
    if accepted < drafted and round.emitted[-1] == round.tree.tokens[accepted + 1]:
        return accepted + 1, accepted + 1
    return drafted, accepted

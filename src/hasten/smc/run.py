"""One request of ``smc``: the prompt, rounds of draft, pass, weigh and resample, and the pick."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hasten.passes import synchronize
from hasten.sampling import Sampler
from hasten.smc import weights
from hasten.smc.drafting import Block, Drafting
from hasten.smc.info import SMCInfo
from hasten.smc.keeping import Keeper
from hasten.smc.laws import DraftLaw, Scores, TargetLaw
from hasten.smc.options import (
    SMCOptions,
    check_mix,
    check_params,
    draft_temperature,
    ending_share,
)
from hasten.smc.population import Particle, Population
from hasten.smc.proposals import Proposal, require_particles
from hasten.smc.verifying import Verified, verify
from hasten.stopping import Cut, Stopper
from hasten.targets.base import Target, check_prompt
from hasten.text import TextStream
from hasten.types import DraftTree, FinishReason, Pass, Round, SamplingParams, Times, TokenLogprob


@dataclass(slots=True)
class _Clock:
    """Seconds of the round being made."""

    started: float
    draft: float = 0.0
    target: float = 0.0


class SMCRun:
    """A request answered by a population.

    ``start()``, then ``step()`` until ``finish`` is set, then ``close()`` (always); or iterate over
    ``rounds()``, once.

    ``finish`` is set at the end (at once where no token is wanted), and then ``info`` holds the
    population. Rounds emit what all particles agree on; the last one emits the rest of the answer
    picked. Same arguments and seed, same answer; no other randomness is used.

    stopper    the request's, with its text stream; it gets the emitted tokens. None: none is kept
    tokenizer  wanted for stop strings only

    Raises OptionError, CapabilityError or ContextError before any pass: temperature 0, a draft that
    can't reach every token, a target that can't fork.
    """

    def __init__(
        self,
        target: Target,
        prompt: Sequence[int],
        params: SamplingParams,
        options: SMCOptions,
        *,
        proposal: Proposal,
        seed: int = 0,
        stopper: Stopper | None = None,
        tokenizer: Any = None,
    ) -> None:
        require_particles(target, "target")
        check_prompt(target, prompt)
        check_params(params, tokenizer)
        self.target, self.params, self.options, self.seed = target, params, options, seed
        self.prompt = list(prompt)
        self.info: SMCInfo | None = None
        self.finish: FinishReason | None = None if params.max_new_tokens else FinishReason.LENGTH
        self._tokenizer = tokenizer
        info = target.info
        self._sampler = Sampler(params, info.vocab_size, info.eos_ids, len(prompt), seed)
        self._law = TargetLaw(self._sampler)
        draft_law = DraftLaw(
            self._sampler,
            info.eos_ids,
            temperature=draft_temperature(options, params.temperature),
            ending=ending_share(options),
            mix=check_mix(options, proposal),
            name=proposal.name,
        )
        self._drafting = Drafting(proposal, draft_law, length=options.length, seed=seed)
        self._stopper = stopper or self._make_stopper()
        single = options.population == "committed"
        # Without tree masks each particle needs a sequence of its own, one lineage or not.
        one = single and target.capabilities.tree
        self._population = Population(
            options.particles,
            self._make_stopper,
            seed=seed,
            resampler=options.resampler,
            threshold=options.threshold,
            single=single,
        )
        self._keeper = Keeper(target, self._population, self._drafting, single=one)
        self._base: Any = None
        self._passed: Pass | None = None
        self._owned = True
        self._emitted = self._index = 0
        self._drafted = self._rows = self._passes = self._collapsed = 0
        self._layer_rows = 0

    def _make_stopper(self) -> Stopper:
        info, params = self.target.info, self.params
        text = None
        if params.stop:
            text = TextStream(self._tokenizer, params.stop, params.min_new_tokens)
        return Stopper(params, info.eos_ids, len(self.prompt), info.context_limit, text)

    def lend(self, sequence: Any, passed: Pass | None = None) -> None:
        """Use `sequence`, which holds the prompt's first tokens (or none), instead of a fresh one.
        It stays the caller's: at the end it is left open and holds the prompt.

        passed  what a prefill of the whole prompt gave, with the proposal's taps; `sequence` holds
                all of it then, and nothing of the prompt runs: for many answers to one prompt
        """
        self._base, self._passed, self._owned = sequence, passed, False

    def rounds(self) -> Iterator[Round]:
        """All rounds; closes the request at its end, or when the caller stops early."""
        if self.finish is not None:
            return
        try:
            yield self.start()
            while self.finish is None:
                yield self.step()
        finally:
            self.close()

    def close(self) -> None:
        """Give back every sequence but a lent one. Safe to call twice and after an error."""
        base, self._base = self._base, None
        try:
            self._drafting.close()
        finally:
            self._keeper.close()
            if base is not None and self._owned:
                self.target.close(base)

    # -- the prompt ------------------------------------------------------------------------------

    def prefill(self, others: int = 0) -> Round | None:
        """`start`, as `hasten.decode.Batch` calls it: the whole prompt runs at once."""
        return self.start()

    def start(self) -> Round:
        """Run the prompt once, draw the first tokens, fork the particles: round 0, which emits the
        first token where all particles have the same."""
        clock = _Clock(time.perf_counter())
        if self._base is None:
            self._base = self.target.open()
        more = self._stopper.remaining > 1
        passed = self._prefill(self._drafting.taps if more else ())
        clock.target = time.perf_counter() - clock.started
        assert passed.logits is not None
        row = passed.logits[-1]
        log_p = self._law.log_probs(self.prompt, row)
        tokens = self._first_tokens(log_p)
        for particle, token in zip(self._population.particles, tokens, strict=True):
            self._extend(particle, [token], particle.stopper.push([token]), [row])
        self._keeper.open(self._base)
        if self._population.running:
            began = time.perf_counter()
            self._drafting.begin(self.prompt, passed.hidden, self.options.particles)
            clock.draft = time.perf_counter() - began
        if self._owned:
            self.target.close(self._base)
            self._base = None
        return self._close_round(clock, None)

    def _prefill(self, taps: Sequence[int]) -> Pass:
        """Run what the sequence doesn't hold of the prompt."""
        if self._passed is not None:
            return self._passed
        held = min(self._base.length, len(self.prompt) - 1)
        if held < self._base.length:
            self.target.truncate(self._base, held)
        passed = self.target.prefill(self._base, self.prompt[held:], taps=taps)
        synchronize(self.target)
        return passed

    def _first_tokens(self, log_p: torch.Tensor) -> list[int]:
        """One for each particle, or one for all; weighed with the power's normaliser."""
        count, options = self.options.particles, self.options
        law, totals = weights.powered(log_p.unsqueeze(0), options.alpha)
        shared = options.first_token == "shared" or options.population == "committed"
        drawn = 1 if shared else count
        slots = range(drawn)
        tokens = weights.draw(
            law.expand(drawn, -1), slots, self.seed, len(self.prompt), "smc-token"
        )
        self._population.add(range(count), totals.expand(count))
        return tokens if drawn == count else tokens * count

    # -- a round ---------------------------------------------------------------------------------

    def step(self) -> Round:
        """The next round: draft, one pass, weigh, extend, resample."""
        clock = _Clock(time.perf_counter())
        block = self._draft(clock)
        found = self._verify(block, clock)
        counts, cuts = self._cut(block)
        scores = self._law.score(block.prefixes, block.tokens, counts, found.logits, found.places)
        before = self._population.log_weights.clone()
        self._weigh(block, counts, scores)
        if self._population.live:
            self._grow(block, counts, cuts, scores, found)
            kept = block.length + 1
        else:
            self._collapse(block, before, scores, found)
            kept = 1
        self._keeper.settle(block, kept, found, self._index)
        return self._close_round(clock, block.lanes[0].root)

    def _draft(self, clock: _Clock) -> Block:
        """Draft for every running particle; the target's own token comes after, so one fewer than
        may still be emitted."""
        began = time.perf_counter()
        particles = self._population.running
        most = particles[0].stopper.remaining - 1
        block = self._drafting.draft(self.prompt, particles, most, self._index)
        synchronize(self.target)
        clock.draft = time.perf_counter() - began
        self._drafted += len(block.lanes) * block.length
        return block

    def _verify(self, block: Block, clock: _Clock) -> Verified:
        began = time.perf_counter()
        found = verify(self.target, block, self._drafting.taps if block.length else ())
        synchronize(self.target)
        clock.target = time.perf_counter() - began
        self._passes += found.passes
        self._rows += found.rows
        self._layer_rows = found.rows * self.target.info.num_layers
        return found

    def _weigh(self, block: Block, counts: Sequence[int], scores: Scores) -> None:
        """Add ``alpha log p - log q`` of each drafted token that counts; an ending one does."""
        asked = torch.arange(block.length) < torch.tensor(counts).unsqueeze(1)
        terms = self.options.alpha * scores.drafted - block.log_q
        slots = [p.slot for p in block.particles]
        self._population.add(slots, terms.where(asked, 0.0).sum(1))

    def _cut(self, block: Block) -> tuple[list[int], list[Cut]]:
        """Rows of each particle that matter: a drafted token each, up to one that ends the answer,
        that included; and one more where it goes on."""
        pairs = zip(block.particles, block.tokens, strict=True)
        cuts = [p.stopper.push(tokens) for p, tokens in pairs]
        return [cut.kept + (cut.finish is None) for cut in cuts], cuts

    def _grow(
        self,
        block: Block,
        counts: Sequence[int],
        cuts: Sequence[Cut],
        scores: Scores,
        found: Verified,
    ) -> None:
        """Take the drafts over, and a token of the target's after each that goes on."""
        live = {p.slot for p in self._population.live}
        going = [
            at
            for at, (p, cut) in enumerate(zip(block.particles, cuts, strict=True))
            if p.slot in live and cut.finish is None
        ]
        drawn = self._bonus(block, going, scores.laws, scores.last, "smc-token")
        bonus = dict(zip(going, drawn, strict=True))
        for at, particle in enumerate(block.particles):
            tokens, cut = block.tokens[at][: counts[at]], cuts[at]
            if at in bonus:
                tokens, cut = [*tokens, bonus[at]], particle.stopper.push([bonus[at]])
            self._extend(particle, tokens, cut, self._raw(found, at))

    def _bonus(
        self,
        block: Block,
        going: Sequence[int],
        laws: torch.Tensor,
        of: Sequence[int],
        purpose: str,
    ) -> list[int]:
        """Tokens of the target's own law (to its power, whose normaliser is a weight) for the
        particles at these places of the block; ``of`` has each place's row of `laws`."""
        if not going:
            return []
        used = sorted({of[at] for at in going})
        rows = [used.index(of[at]) for at in going]
        law, totals = weights.powered(laws[used], self.options.alpha)
        slots = [block.particles[at].slot for at in going]
        self._population.add(slots, totals[rows])
        position = len(self.prompt) + len(block.particles[0].ids) + block.length
        # A round undone draws at these positions again: never with the noise it was undone by.
        return weights.draw(law, slots, self.seed, position, f"{purpose}-{self._index}", rows)

    def _collapse(
        self, block: Block, before: torch.Tensor, scores: Scores, found: Verified
    ) -> None:
        """No particle has any weight left: undo the drafts, draw a token from the target instead.

        That isn't part of the published method and the evidence isn't unbiased any more: counted.
        """
        self._collapsed += 1
        self._population.log_weights = before
        everyone = range(len(block.particles))
        tokens = self._bonus(block, everyone, scores.laws, scores.first, "smc-again")
        for at, (particle, token) in enumerate(zip(block.particles, tokens, strict=True)):
            self._population.restart(particle)
            cut = particle.stopper.push([token])
            self._extend(particle, [token], cut, self._raw(found, at))

    def _raw(self, found: Verified, at: int) -> Iterable[torch.Tensor]:
        """Rows of raw logits of the particle at this place, where somebody asked for them."""
        return () if self.params.logprobs is None else found.logits_of(at)

    def _extend(
        self, particle: Particle, tokens: Sequence[int], cut: Cut, rows: Iterable[torch.Tensor]
    ) -> None:
        """Add tokens to a particle; token i follows row i of raw logits."""
        particle.ids.extend(tokens)
        particle.ended(cut)
        top = self.params.logprobs
        if top is not None:
            particle.logprobs.extend(
                self._sampler.logprob(row, token, top)
                for row, token in zip(rows, tokens, strict=False)
            )

    # -- what comes out --------------------------------------------------------------------------

    def _close_round(self, clock: _Clock, root: int | None) -> Round:
        """What can't change any more; after the last round, the answer picked."""
        population, reason = self._population, None
        if population.running:
            tokens = population.agreed(self._emitted)
            chosen = population.live[0]
        else:
            chosen = population.particles[population.pick()]
            tokens = chosen.ids[self._emitted :]
            self.finish, reason = chosen.finish, chosen.stop_reason
            self.info = self._describe(chosen.slot)
        logprobs = self._emit(chosen, tokens)
        total = time.perf_counter() - clock.started
        model = clock.draft - self._drafting.choosing
        made = Round(
            index=self._index,
            emitted=tuple(tokens),
            tree=None if root is None else DraftTree.chain(root),
            accepted=() if root is None else (0,),
            logprobs=logprobs,
            times=Times(total, clock.draft, clock.target, 0.0, model),
            finish=self.finish,
            stop_reason=reason,
            layer_rows=self._layer_rows,
        )
        self._index += 1
        return made

    def _emit(self, chosen: Particle, tokens: Sequence[int]) -> tuple[TokenLogprob, ...]:
        start, self._emitted = self._emitted, self._emitted + len(tokens)
        self._stopper.push(tokens)
        return tuple(chosen.logprobs[start : self._emitted])

    def _describe(self, picked: int) -> SMCInfo:
        population = self._population
        return SMCInfo(
            answers=population.answers(),
            picked=picked,
            log_evidence=population.total_log_evidence(),
            ess=tuple(population.ess),
            resampled=tuple(population.resampled),
            rounds=self._index,
            drafted=self._drafted,
            target_rows=self._rows,
            target_passes=self._passes,
            copies=population.copies,
            collapsed=self._collapsed,
        )

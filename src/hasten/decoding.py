"""One request on its way: prefill, then propose, settle, propose, settle, until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hasten.drafters.base import DraftContext, Drafter
from hasten.drafts import check_draft, collapse, without_far_rows
from hasten.errors import DrafterError, HastenError
from hasten.judge import PassJudge
from hasten.opening import Clock, Opening
from hasten.passes import Staged, synchronize
from hasten.policies.base import PlanContext, Policy
from hasten.policies.sharing import Shared
from hasten.readback import NOTHING, Readback
from hasten.sampling import Sampler
from hasten.stopping import Stopper
from hasten.targets.base import Target, check_prompt
from hasten.types import (
    Budget,
    Decision,
    Draft,
    DraftTree,
    FinishReason,
    Pass,
    Round,
    Rows,
    RowSignals,
    SamplingParams,
    Times,
)
from hasten.verify import Verifier, walk, wanted_by

MOST_UNSEEN = 64
"""Rounds the drafter may lag behind while nothing is drafted."""


class Decoding(Opening):
    """One request on its way: prompt, options, drafter, policy, and its sequence in the target.

    Life: ``start()`` (prefill, round 0), then ``propose()`` -> a pass -> ``settle()`` per round
    until ``finish`` is set, then ``close()`` (always). Raises ContextError when the prompt is empty
    or leaves no room.
    """

    def __init__(
        self,
        target: Target,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        drafter: Drafter,
        policy: Policy,
        verifier: Verifier,
        seed: int = 0,
        stopper: Stopper | None = None,
    ) -> None:
        check_prompt(target, prompt)
        info = target.info
        self.target, self.params, self.drafter, self.policy, self.verifier = (
            target,
            params,
            drafter,
            policy,
            verifier,
        )
        self.sampler = Sampler(params, info.vocab_size, info.eos_ids, len(prompt), seed)
        self.stopper = stopper or Stopper(
            params, info.eos_ids, len(prompt), info.context_limit, None
        )
        self.ids = list(prompt)
        self.prompt_len = len(prompt)
        self.finish: FinishReason | None = (
            FinishReason.LENGTH if params.max_new_tokens == 0 else None
        )
        self._shown = list(
            prompt
        )  # the drafter's own copy: a drafter that changes it harms only its drafts
        self._sequence: Any = None
        self._owned = True
        self._index = 0
        self._draft: Draft | None = None
        self.candidates: Draft | None = None
        """What the drafter proposed for this round; None when it wasn't asked."""
        self._read = Readback(self.sampler, drafter.needs)
        needs = drafter.needs
        self._prompt_needs = needs if needs.prompt_topk else replace(needs, topk=0)
        self._prompt_signals: list[RowSignals] = []
        self._idle = False
        """Nothing is drafted in this shared pass: what it says can be told to the drafter later."""
        self._unseen: list[Round] = []
        self._opening: RowSignals | None = None
        self._aside: dict[int, torch.Tensor] = {}
        """States of rounds the drafter hasn't seen, by layer."""
        self._wants = wanted_by(verifier)
        self.taps = tuple(sorted({*needs.hidden, *self._wants.taps}))
        """Layers whose outputs drafter and verifier want from each pass."""
        self.staged = Staged(target, self.taps)
        opens = self._wants.every and len(prompt) > 1 and not info.whole_prompt
        self._root = self.prompt_len - 1 if opens else self.prompt_len
        self._decisions: tuple[Decision, ...] = ()
        self._clock = Clock()
        self._begun = False
        # Asked once: after a pass whatever is touched is cold, and a round touches it every time.
        self.accelerated = info.device.type == "cuda"
        self.shares = isinstance(policy, Shared)
        self._most_rows = None if target.capabilities.rollback else 1
        self._own_fault: Exception | None = None
        """What the request's own options raised last, while the drafter was asking them."""
        self._context = DraftContext(
            ids=self._shown,
            sample=self._sample,
            warp=self._warp,
            greedy=params.is_greedy,
            run_rows=self._run_rows if target.capabilities.layer_ranges else None,
            embed=target.embed if drafter.needs.embeddings else None,
        )

    # -- one round -------------------------------------------------------------------------------

    def propose(self) -> Rows:
        """Plan and draft; the rows the target has to run."""
        self.draft()
        self.narrow()
        return self.rows()

    def draft(self, others: int = 0) -> None:
        """Plan and draft, for a pass shared with `others` requests. Then `narrow`, or `choose`
        among the `candidates`."""
        clock = self._clock = Clock(started=time.perf_counter())
        self._read.seconds = 0.0
        self.staged.layer_rows = 0
        budget = self._budget(others)
        root = self.ids[-1]
        drafting = budget.nodes > 1 and budget.depth > 0
        self._idle = others > 0 and not drafting
        self._draft, self.candidates = Draft(DraftTree.trusted((root,), (-1,), (0,))), None
        if not drafting:
            return
        self._catch_up()
        self._context.model_seconds, self._context.others = 0.0, others
        draft = self._guard("propose", self.drafter.propose, self._context, budget)
        self._draft = self.candidates = self._guard("propose", self._fit, draft, budget)
        clock.draft_model += self._context.model_seconds
        clock.draft = time.perf_counter() - clock.started

    def narrow(self) -> None:
        """Keep what the policy finds worth verifying in a pass of one's own."""
        if self.candidates is not None:
            started = time.perf_counter()
            self.choose(self.policy.select(self.candidates))
            self._clock.draft += time.perf_counter() - started

    def choose(self, draft: Draft) -> None:
        """Verify this part of the candidates."""
        self._draft = draft
        if self.staged.tokens and not draft.frontiers:  # run, and then given up
            self.target.rollback(self._sequence)
            self.staged.clear()

    def rows(self) -> Rows:
        """The rows the target has to run."""
        draft = self._draft
        assert draft is not None
        tokens, parents = draft.tree.tokens, draft.tree.parents
        if draft.extra is not None:
            tokens, parents = tokens + draft.extra.tokens, parents + draft.extra.parents
        return Rows(self._sequence, tokens, parents)

    def _budget(self, others: int) -> Budget:
        """The policy's budget within what may still be emitted: a round emits depth + 1 tokens at
        most."""
        remaining = self._remaining()
        plan = self.policy.plan(PlanContext(len(self.ids), remaining, others))
        nodes = self._most_rows or plan.nodes
        # The target's own token comes last, unless the last one too may be a draft's.
        room = remaining if self._wants.every else remaining - 1
        return Budget(max(nodes, 1), max(min(plan.depth, room), 0))

    def _remaining(self) -> int:
        """How many tokens may still come: ``max_new_tokens`` and the context limit (counted in
        tokens)."""
        spent = len(self.ids) - self.prompt_len
        return min(
            self.params.max_new_tokens - spent, self.target.info.context_limit - len(self.ids)
        )

    def _fit(self, draft: Draft, budget: Budget) -> Draft:
        """Check the draft and bring it to what the target can run."""
        info = self.target.info
        check_draft(draft, self.ids[-1], budget, info.vocab_size)
        if problem := self.staged.problem(draft):
            raise DrafterError(f"proposed a broken draft: {problem}")
        draft = without_far_rows(draft, info.context_limit - len(self.ids))
        if not (self.target.capabilities.tree or (draft.tree.is_chain and draft.extra is None)):
            draft = collapse(draft)
        return draft

    def settle(self, passed: Pass, seconds: float) -> Round:
        """Verify, cut, commit and observe; `passed` holds the rows of `propose`, `seconds` its
        time."""
        draft = self._draft
        assert draft is not None
        assert passed.logits is not None
        self._clock.target += seconds
        logits = passed.logits
        signals, best = self._read.round(passed, draft, self.ids, self._idle)
        if self._idle and signals.hidden:
            signals = self._set_aside(signals)
        judge = PassJudge(
            self.sampler, self.ids, logits, best, draft, passed.hidden, self.target.embed
        )
        verdict = self.verifier(draft.tree, draft.q, judge)
        self._decisions = verdict.decisions
        return self._close_round(draft, verdict.nodes, verdict.tokens, logits, signals)

    def _close_round(
        self,
        draft: Draft | None,
        nodes: tuple[int, ...],
        tokens: tuple[int, ...],
        logits: torch.Tensor,
        signals: RowSignals,
    ) -> Round:
        """Cut at a stop, keep what is left, tell drafter and policy."""
        cut = self.stopper.push(tokens)
        tokens, nodes = tokens[: cut.kept], nodes[: cut.kept]
        if draft is not None:
            self.target.commit(self._sequence, nodes)
            self.staged.clear()
        logprobs = self._read.logprobs(logits, nodes or (0,), tokens, self.params.logprobs)
        self.ids.extend(tokens)
        self._shown.extend(tokens)
        self.finish = cut.finish
        tree, sources = (None, ()) if draft is None else (draft.tree, draft.sources)
        start = (self._index, tokens, tree, nodes, sources)
        end = (cut.finish, cut.stop_reason, self.staged.layer_rows)
        self._unseen.append(Round(*start, signals, logprobs, Times(), *end))
        ended = cut.finish is not None and not self.drafter.needs.late
        if not self._idle or ended or len(self._unseen) >= MOST_UNSEEN:
            self._catch_up()
        self._index += 1
        # Rounds outlive the pass (metrics, traces): they must not keep its tensors alive.
        self.policy.learn(Round(*start, NOTHING, logprobs, self._times(), *end))
        answered = len(self.ids) - self.prompt_len
        decisions = tuple(d for d in self._decisions if d.position < answered)
        # what the policy took is part of the round
        return Round(*start, NOTHING, logprobs, self._times(), *end, decisions)

    def _times(self) -> Times:
        clock = self._clock
        total = time.perf_counter() - clock.started - clock.shared
        return Times(total, clock.draft, clock.target, self._read.seconds, clock.draft_model)

    def _set_aside(self, signals: RowSignals) -> RowSignals:
        """Signals of a lone row with the states in memory of the request's own: slices of the
        pass's would keep bits of every pass alive, and scatter the heap with them."""
        place = len(self._unseen)
        for layer, rows in signals.hidden.items():
            if layer not in self._aside:
                self._aside[layer] = rows.new_empty(MOST_UNSEEN, rows.shape[1])
            self._aside[layer][place : place + 1] = rows
        hidden = {layer: self._aside[layer][place : place + 1] for layer in signals.hidden}
        return replace(signals, hidden=hidden)

    def _catch_up(self) -> None:
        """Tell the drafter of the prompt and of rounds it hasn't seen.

        Beside others that waits until it drafts: where it never does, it never needs to know."""
        if self._opening is not None:
            signals, self._opening = self._opening, None
            self._begun, started = True, time.perf_counter()
            self._guard("begin", self.drafter.begin, tuple(self.ids[: self._root]), signals)
            if self._index:  # late: it's no part of this round
                self.wait(time.perf_counter() - started)
        unseen, self._unseen = self._unseen, []
        self._aside = {}  # the drafter may keep parts of it
        for round in unseen:
            self._guard("observe", self.drafter.observe, round)

    def close(self) -> None:
        """End the drafter and give the sequence back. Safe to call twice and after an error."""
        begun, self._begun = self._begun, False
        sequence, self._sequence = self._sequence, None
        try:
            if begun:
                self._guard("end", self.drafter.end)
        finally:
            if sequence is not None and self._owned:
                self.target.close(sequence)

    # -- helpers ---------------------------------------------------------------------------------

    def _warp(self, prefix: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """`Sampler.probs` for the drafter; what the request's processors raise isn't its fault."""
        try:
            return self.sampler.probs(prefix, logits)
        except Exception as error:
            self._own_fault = error
            raise

    def _guard(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call the drafter; whatever it raises by itself names it."""
        try:
            return call(*args)
        except Exception as error:
            own, self._own_fault = self._own_fault, None
            told = isinstance(error, HastenError) and not isinstance(error, DrafterError)
            if told or error is own:
                raise
            kind = "" if isinstance(error, DrafterError) else f"{type(error).__name__}: "
            raise DrafterError(
                f"drafter {self.drafter.name!r} failed in {what}(): {kind}{error}. Report it to "
                "the drafter's author, or choose another method (method='ar' is plain decoding)"
            ) from error

    def _timed(self, run: Callable[[], Pass]) -> Pass:
        started = time.perf_counter()
        passed = run()
        synchronize(self.target)
        self._clock.target += time.perf_counter() - started
        return passed

    def _run_rows(
        self, tokens: Sequence[int], parents: Sequence[int], layers: tuple[int, int]
    ) -> torch.Tensor:
        """``ctx.run_rows``: see `hasten.drafters.base.DraftContext`."""
        started = time.perf_counter()
        hidden = self.staged.run(self._sequence, tokens, parents, layers)
        synchronize(self.target)
        self._clock.draft_model += time.perf_counter() - started
        return hidden

    def _sample(self, probs: torch.Tensor, position: int, count: int) -> list[int]:
        """``ctx.sample``: see `hasten.drafters.base.DraftContext`.

        Where the target's own draws are emitted (`match`) the drafter draws with the same noise, so
        that it agrees with the target as often as their distributions allow; what is emitted can't
        change by it. Under `rejection` accepting is a draw of its own, and the draft's noise must
        be independent of it; and of earlier rounds', because a policy may have learned from how a
        draft went on beyond a refusal, where the next round draws again.
        """
        purpose = "token" if self.verifier is walk else f"draft-{self._index}"
        return self.sampler.draw(probs, position, count, purpose)

    def wait(self, seconds: float) -> None:
        """Leave out wall time that belongs to other requests of the batch."""
        self._clock.shared += seconds

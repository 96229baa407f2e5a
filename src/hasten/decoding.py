"""One request on its way: prefill, then propose, settle, propose, settle, until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from hasten.drafters.base import DraftContext, Drafter
from hasten.drafts import check_draft, collapse, without_far_rows
from hasten.errors import DrafterError, HastenError
from hasten.judge import PassJudge
from hasten.passes import Staged, synchronize
from hasten.policies.base import PlanContext, Policy
from hasten.policies.sharing import Shared
from hasten.readback import NOTHING, Readback, join
from hasten.sampling import Sampler
from hasten.stopping import Stopper
from hasten.targets.base import Target, check_prompt
from hasten.types import (
    Budget,
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
from hasten.verify import Verifier, walk

PREFILL_CHUNK = 256
"""Prompt rows run at a time, so that no (prompt x vocab) tensor is ever held, and that others who
share the target don't wait for a long prompt."""

MOST_UNSEEN = 64
"""Rounds the drafter may lag behind while nothing is drafted."""


@dataclass(slots=True)
class _Clock:
    """Seconds of the round being made."""

    started: float = 0.0
    draft: float = 0.0
    target: float = 0.0
    draft_model: float = 0.0
    prompt: float = 0.0
    """Of the parts of a prompt run so far."""
    shared: float = 0.0
    """Wall time since `started` that other requests of a batch used; it isn't this round's."""


class Decoding:
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
        self.staged = Staged(target, drafter.needs.hidden)
        self._clock = _Clock()
        self._begun = False
        # Asked once: after a pass whatever is touched is cold, and a round touches it every time.
        self.accelerated = info.device.type == "cuda"
        self.shares = isinstance(policy, Shared)
        self._most_rows = None if target.capabilities.rollback else 1
        self._context = DraftContext(
            ids=self._shown,
            sample=self._sample,
            warp=self.sampler.probs,
            greedy=params.is_greedy,
            run_rows=self._run_rows if target.capabilities.layer_ranges else None,
            embed=target.embed if drafter.needs.embeddings else None,
        )

    def lend(self, sequence: Any, signals: RowSignals | None = None) -> None:
        """Use `sequence`, which holds the prompt's first tokens (or none), instead of a fresh one.
        It stays the caller's: at the end it is left open, holding all tokens but the last
        emitted. `signals` are those of what it holds, where `read` gave some."""
        self._sequence, self._owned = sequence, False
        self._prompt_signals = [] if signals is None else [signals]

    # -- prefill ---------------------------------------------------------------------------------

    def start(self) -> Round:
        """Run the prompt and emit the first token."""
        while (made := self.prefill()) is None:
            pass
        return made

    def prefill(self) -> Round | None:
        """Run the next part of the prompt; after the last one round 0, with the first token."""
        clock = self._clock
        clock.started = time.perf_counter() - clock.prompt
        rest = self._unread()
        step = self._prompt_step(len(rest))
        if step < len(rest):
            self._prompt_signals.append(self.read(self._sequence, rest[:step])[1])
            clock.prompt = time.perf_counter() - clock.started
            return None
        if self._remaining() <= 1:  # nothing will be drafted: the last row is enough
            passed, signals = self._last_row(rest)
        else:
            passed, last = self.read(self._sequence, rest)
            signals = join([*self._prompt_signals, last])
        self._prompt_signals.clear()
        self._begun = True
        self._guard("begin", self.drafter.begin, tuple(self.ids), signals)
        logits = passed.logits
        assert logits is not None
        best = self._read.argmax(passed, NOTHING)
        token = PassJudge(self.sampler, self.ids, logits, best).choose(0, ())
        return self._close_round(None, (), (token,), logits, NOTHING)

    def _unread(self) -> list[int]:
        """What of the prompt the sequence doesn't hold yet: its last token at least."""
        if self._sequence is None:
            self._sequence = self.target.open()
        held = min(self._sequence.length, self.prompt_len - 1)
        if held < self._sequence.length:
            self.target.truncate(self._sequence, held)
        return self.ids[held : self.prompt_len]

    def _prompt_step(self, rows: int) -> int:
        """How many of so many prompt rows to run now."""
        whole = self.target.info.whole_prompt
        # Another target chooses its own steps, unless top-k of all rows is read back.
        wanted = self.drafter.needs.prompt or self.target.capabilities.packed
        return rows if whole or not wanted or self._remaining() <= 1 else PREFILL_CHUNK

    def _last_row(self, tokens: Sequence[int]) -> tuple[Pass, RowSignals]:
        """Run `tokens` as plain decoding does; the last row's logits and signals."""
        needs, prefill = self.drafter.needs, partial(self.target.prefill, self._sequence)
        if not needs.prompt:
            return self._timed(lambda: prefill(tokens)), NOTHING
        passed = self._timed(lambda: prefill(tokens, taps=needs.hidden))
        last = Pass(passed.logits, {layer: rows[-1:] for layer, rows in passed.hidden.items()})
        return last, self._read.rows(last, self._prompt_needs)

    def read(self, sequence: Any, tokens: Sequence[int]) -> tuple[Pass, RowSignals]:
        """Run part of a prompt into `sequence`: the last row's logits, and the signals that the
        drafter wants of the prompt's rows (all of them None where it wants none)."""
        needs, prefill = self._prompt_needs, partial(self.target.prefill, sequence)
        if not needs.prompt:
            return self._timed(lambda: prefill(tokens)), NOTHING
        parts: list[RowSignals] = []
        step = len(tokens) if self.target.info.whole_prompt else PREFILL_CHUNK
        for at in range(0, len(tokens), step):
            run = partial(prefill, tokens[at : at + step], taps=needs.hidden)
            passed = self._timed(partial(run, all_logits=needs.topk > 0))
            parts.append(self._read.rows(passed, needs))
        assert passed.logits is not None
        return Pass(passed.logits[-1:]), join(parts)

    # -- one round -------------------------------------------------------------------------------

    def propose(self) -> Rows:
        """Plan and draft; the rows the target has to run."""
        self.draft()
        self.narrow()
        return self.rows()

    def draft(self, others: int = 0) -> None:
        """Plan and draft, for a pass shared with `others` requests. Then `narrow`, or `choose`
        among the `candidates`."""
        clock = self._clock = _Clock(started=time.perf_counter())
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
        return Budget(max(nodes, 1), max(min(plan.depth, remaining - 1), 0))

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
        judge = PassJudge(self.sampler, self.ids, logits, best)
        verdict = self.verifier(draft.tree, draft.q, judge)
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
        if not self._idle or cut.finish is not None or len(self._unseen) >= MOST_UNSEEN:
            self._catch_up()
        self._index += 1
        # Rounds outlive the pass (metrics, traces): they must not keep its tensors alive.
        self.policy.learn(Round(*start, NOTHING, logprobs, self._times(), *end))
        # what the policy took is part of the round
        return Round(*start, NOTHING, logprobs, self._times(), *end)

    def _times(self) -> Times:
        clock = self._clock
        total = time.perf_counter() - clock.started - clock.shared
        return Times(total, clock.draft, clock.target, self._read.seconds, clock.draft_model)

    def _catch_up(self) -> None:
        """Tell the drafter of rounds it hasn't seen."""
        unseen, self._unseen = self._unseen, []
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

    def _guard(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call the drafter; whatever it raises names it."""
        try:
            return call(*args)
        except Exception as error:
            if isinstance(error, HastenError) and not isinstance(error, DrafterError):
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

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose outputs the drafter wants from each pass."""
        return self.drafter.needs.hidden

    def wait(self, seconds: float) -> None:
        """Leave out wall time that belongs to other requests of the batch."""
        self._clock.shared += seconds

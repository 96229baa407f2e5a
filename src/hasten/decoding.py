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
from hasten.sampling import Sampler
from hasten.selection import argmax_rows, best_of_topk, topk_and_best
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
    Signals,
    Times,
    TokenLogprob,
)
from hasten.verify import Verifier, walk

PREFILL_CHUNK = 256
"""Prompt rows whose top-k is read back at a time, so that no (prompt x vocab) tensor is ever
held."""


@dataclass(slots=True)
class _Clock:
    """Seconds of the round being made."""

    started: float = 0.0
    draft: float = 0.0
    target: float = 0.0
    topk: float = 0.0
    draft_model: float = 0.0
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
        self._lent: RowSignals | None = None
        self._index = 0
        self._draft: Draft | None = None
        self._best: list[int] | None = None
        """The pass's argmax of every row, where it came with the top-k."""
        self.staged = Staged(target, drafter.needs.hidden)
        self._clock = _Clock()
        self._begun = False
        # Asked once: after a pass whatever is touched is cold, and a round touches it every time.
        self.accelerated = info.device.type == "cuda"
        self._plain_greedy = self.sampler.is_plain_greedy
        self._most_rows = None if target.capabilities.rollback else 1
        self._reads = drafter.needs.topk > 0 or drafter.needs.probs or bool(drafter.needs.hidden)
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
        self._sequence, self._owned, self._lent = sequence, False, signals

    # -- prefill ---------------------------------------------------------------------------------

    def start(self) -> Round:
        """Run the prompt and emit the first token."""
        self._clock = _Clock(started=time.perf_counter())
        if self._sequence is None:
            self._sequence = self.target.open()
        passed, prompt_signals = self._prefill()
        self._begun = True
        self._guard("begin", self.drafter.begin, tuple(self.ids), prompt_signals)
        logits = passed.logits
        assert logits is not None
        best = self._argmax(logits, RowSignals())
        judge = PassJudge(self.sampler, self.ids, logits, best)
        token = judge.choose(0, ())
        return self._close_round(None, (), (token,), logits, RowSignals())

    def _prefill(self) -> tuple[Pass, RowSignals]:
        """Run what the sequence doesn't hold yet; the last row's logits and the prompt's
        signals."""
        held = min(self._sequence.length, self.prompt_len - 1)
        if held < self._sequence.length:
            self.target.truncate(self._sequence, held)
        rest = self.ids[held:]
        if self._remaining() <= 1:  # nothing will be drafted: the last row is enough
            return self._last_row(rest)
        passed, signals = self.read(self._sequence, rest)
        return passed, signals if self._lent is None else _join([self._lent, signals])

    def _last_row(self, tokens: Sequence[int]) -> tuple[Pass, RowSignals]:
        """Run `tokens` as plain decoding does; the last row's logits and signals."""
        needs, prefill = self.drafter.needs, partial(self.target.prefill, self._sequence)
        if not needs.prompt:
            return self._timed(lambda: prefill(tokens)), RowSignals()
        passed = self._timed(lambda: prefill(tokens, taps=needs.hidden))
        last = Pass(passed.logits, {layer: rows[-1:] for layer, rows in passed.hidden.items()})
        return last, self._signals(last, replace(needs, probs=False))

    def read(self, sequence: Any, tokens: Sequence[int]) -> tuple[Pass, RowSignals]:
        """Run part of a prompt into `sequence`: the last row's logits, and the signals that the
        drafter wants of the prompt's rows (all of them None where it wants none)."""
        needs, prefill = self.drafter.needs, partial(self.target.prefill, sequence)
        if not needs.prompt:
            return self._timed(lambda: prefill(tokens)), RowSignals()
        parts: list[RowSignals] = []
        step = len(tokens) if self.target.info.whole_prompt else PREFILL_CHUNK
        for at in range(0, len(tokens), step):
            run = partial(prefill, tokens[at : at + step], taps=needs.hidden)
            passed = self._timed(partial(run, all_logits=needs.topk > 0))
            parts.append(self._signals(passed, replace(needs, probs=False)))
        assert passed.logits is not None
        return Pass(passed.logits[-1:]), _join(parts)

    # -- one round -------------------------------------------------------------------------------

    def propose(self) -> Rows:
        """Plan and draft; the rows the target has to run."""
        clock = self._clock = _Clock(started=time.perf_counter())
        self.staged.layer_rows = 0
        budget = self._budget()
        root = self.ids[-1]
        if budget.nodes == 1 or budget.depth == 0:
            draft = Draft(DraftTree.trusted((root,), (-1,), (0,)))
        else:
            self._context.model_seconds = 0.0
            draft = self._guard("propose", self.drafter.propose, self._context, budget)
            draft = self._select(self._guard("propose", self._fit, draft, budget))
            clock.draft_model += self._context.model_seconds
            clock.draft = time.perf_counter() - clock.started
        self._draft = draft
        tokens, parents = draft.tree.tokens, draft.tree.parents
        if draft.extra is not None:
            tokens, parents = tokens + draft.extra.tokens, parents + draft.extra.parents
        return Rows(self._sequence, tokens, parents)

    def _budget(self) -> Budget:
        """The policy's budget within what may still be emitted: a round emits depth + 1 tokens at
        most."""
        remaining = self._remaining()
        plan = self.policy.plan(PlanContext(context=len(self.ids), remaining=remaining))
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

    def _select(self, draft: Draft) -> Draft:
        """What the policy finds worth verifying."""
        draft = self.policy.select(draft)
        if self.staged.tokens and not draft.frontiers:  # run, and then given up
            self.target.rollback(self._sequence)
            self.staged.clear()
        return draft

    def settle(self, passed: Pass, seconds: float) -> Round:
        """Verify, cut, commit and observe; `passed` holds the rows of `propose`, `seconds` its
        time."""
        draft = self._draft
        assert draft is not None
        assert passed.logits is not None
        self._clock.target += seconds
        tree = draft.tree
        logits = passed.logits
        signals = self._signals(passed, self.drafter.needs) if self._reads else _NOTHING
        best = self._argmax(logits, signals)
        verdict = self.verifier(tree, draft.q, PassJudge(self.sampler, self.ids, logits, best))
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
        logprobs = self._logprobs(logits, nodes or (0,), tokens)
        self.ids.extend(tokens)
        self._shown.extend(tokens)
        self.finish = cut.finish
        tree, sources = (None, ()) if draft is None else (draft.tree, draft.sources)
        start = (self._index, tokens, tree, nodes, sources)
        end = (cut.finish, cut.stop_reason, self.staged.layer_rows)
        observed = Round(*start, signals, logprobs, Times(), *end)
        self._guard("observe", self.drafter.observe, observed)
        self._index += 1
        # Rounds outlive the pass (metrics, traces): they must not keep its tensors alive.
        self.policy.learn(Round(*start, _NOTHING, logprobs, self._times(), *end))
        # what the policy took is part of the round
        return Round(*start, _NOTHING, logprobs, self._times(), *end)

    def _times(self) -> Times:
        clock = self._clock
        total = time.perf_counter() - clock.started - clock.shared
        return Times(total, clock.draft, clock.target, clock.topk, clock.draft_model)

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

    def _argmax(self, logits: torch.Tensor, signals: RowSignals) -> list[int] | None:
        """Greedy choice of every row at once (ties: the lowest id), unless options change the
        logits."""
        if not self._plain_greedy:
            return None
        if signals.topk_ids is not None and self._best is not None:
            return self._best
        started = time.perf_counter()
        if signals.topk_ids is not None and signals.topk_logits is not None:
            best = best_of_topk(signals.topk_logits, signals.topk_ids, logits)
        else:
            best = argmax_rows(logits)
        self._clock.topk += time.perf_counter() - started
        return best

    def _signals(self, passed: Pass, needs: Signals) -> RowSignals:
        """What the drafter asked for, of the rows of a pass."""
        ids = values = probs = None
        if needs.topk and passed.logits is not None:
            started = time.perf_counter()
            values, ids, self._best = topk_and_best(passed.logits, needs.topk)
            self._clock.topk += time.perf_counter() - started
        if needs.probs and passed.logits is not None:
            probs = self._all_probs(passed.logits)
        # A shared pass taps what any of its requests wants.
        hidden = {layer: passed.hidden[layer] for layer in needs.hidden}
        return RowSignals(ids, values, hidden, probs)

    def _all_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """The sampler's distribution at every row, each with its own path's prefix."""
        assert self._draft is not None
        rows = self._draft.tree.tokens
        parents = self._draft.tree.parents
        if self._draft.extra is not None:
            rows, parents = rows + self._draft.extra.tokens, parents + self._draft.extra.parents
        out = []
        paths: dict[int, list[int]] = {0: []}
        for row, (token, parent) in enumerate(zip(rows, parents, strict=True)):
            if row:
                paths[row] = [*paths[parent], token]
            out.append(self.sampler.probs([*self.ids, *paths[row]], logits[row]))
        return torch.stack(out)

    def _logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int]
    ) -> tuple[TokenLogprob, ...]:
        top = self.params.logprobs
        if top is None:
            return ()
        return tuple(
            self.sampler.logprob(logits[r], t, top) for r, t in zip(rows, tokens, strict=False)
        )

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


_NOTHING = RowSignals()


def _join(parts: Sequence[RowSignals]) -> RowSignals:
    """Signals of consecutive chunks of rows as one."""
    layers = parts[0].hidden.keys()

    def cat(values: list[torch.Tensor | None]) -> torch.Tensor | None:
        tensors = [v for v in values if v is not None]
        return torch.cat(tensors) if tensors else None

    return RowSignals(
        cat([p.topk_ids for p in parts]),
        cat([p.topk_logits for p in parts]),
        {layer: torch.cat([p.hidden[layer] for p in parts]) for layer in layers},
    )

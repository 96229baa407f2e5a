"""Running a checked call of `generate`, and giving back what `generate` gives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hasten import keyed
from hasten.api import LLM
from hasten.decode import decode
from hasten.decoding import Decoding
from hasten.drafters.base import Drafter
from hasten.methods import MethodSpec
from hasten.metrics import Summary
from hasten.plugins._hf_call import Call
from hasten.plugins._hf_rules import Row, RowScores, RowStopper
from hasten.policies.base import Policy
from hasten.types import Draft, FinishReason, Round, RowSignals, SamplingParams
from hasten.verify import Verifier, pick_verifier

logger = logging.getLogger(__name__)

OnToken = Callable[[int], None]


class _Answer:
    """One row's answer as it grows: ids, figures, and the rows of logits that are asked for."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.summary = Summary()
        self.finish: FinishReason | None = None
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []

    def take(self, made: Round) -> None:
        self.tokens.extend(made.emitted)
        self.summary.add(made)
        self.finish = made.finish


class _Reading(Decoding):
    """A request that keeps the logits its tokens were chosen from, raw and processed.

    They are read before the block is cut, because stopping criteria may look at scores.
    """

    answer: _Answer
    wanted: tuple[bool, bool]
    """Scores, logits."""

    def _close_round(
        self,
        draft: Draft | None,
        nodes: tuple[int, ...],
        tokens: tuple[int, ...],
        logits: torch.Tensor,
        signals: RowSignals,
    ) -> Round:
        answer, (scores, raw) = self.answer, self.wanted
        for at, row in enumerate(nodes or (0,)):
            if raw:
                answer.logits.append(logits[row].to(torch.float32, copy=True))
            if scores:
                prefix = [*self.ids, *tokens[:at]]
                answer.scores.append(self.sampler.process(prefix, logits[row]).clone())
        made = super()._close_round(draft, nodes, tokens, logits, signals)
        for kept in (answer.scores, answer.logits):
            del kept[len(self.ids) - self.prompt_len :]
        return made


def seeds_for(seed: int | Sequence[int], rows: int) -> tuple[int, ...]:
    """A seed for each row: as given, or from one: itself for the first row, others for the rest."""
    if isinstance(seed, int):
        others = (int(keyed.uniform(seed, row, "row") * 2**52) for row in range(1, rows))
        return (seed, *others)
    return tuple(seed)


def run(
    call: Call,
    llm: LLM,
    spec: MethodSpec,
    *,
    verify: str | None,
    seeds: Sequence[int],
    on_token: OnToken | None,
) -> tuple[Any, list[Summary]]:
    """Answer every row: what `generate` gives, and each row's figures.

    `on_token` hears of each token of the only row as soon as it is certain.
    """
    _, verifier = pick_verifier(verify, greedy=not call.sample)
    answers = [_Answer() for _ in call.rows]
    requests = [
        _request(call, row, answer, llm, spec, verifier, seed)
        for row, answer, seed in zip(call.rows, answers, seeds, strict=True)
    ]
    for index, made in _rounds(llm, requests):
        answers[index].take(made)
        if on_token is not None:
            for token in made.emitted:
                on_token(token)
    _warn_of_a_full_context(call, llm, answers)
    summaries = [answer.summary for answer in answers]
    return _output(call, answers, summaries), summaries


def _request(
    call: Call,
    row: Row,
    answer: _Answer,
    llm: LLM,
    spec: MethodSpec,
    verifier: Verifier,
    seed: int,
) -> Decoding:
    processors = (RowScores(row, call.processors, call.final),) if call.processors else ()
    remaining = _remaining(call, row, llm)
    params = SamplingParams(
        max_new_tokens=remaining,
        temperature=1.0 if call.sample else 0.0,
        ignore_eos=True,
        processors=processors,
    )
    keeps = call.scores or call.logits
    stopper = RowStopper(
        row,
        remaining,
        call.final,
        call.criteria,
        (lambda: _on(call.ids.device, answer.scores)) if call.scores else None,
    )
    drafter, policy = _drafter(llm, spec)
    kind = _Reading if keeps else Decoding
    request = kind(
        llm.target,
        row.prompt,
        params,
        drafter=drafter,
        policy=policy,
        verifier=verifier,
        seed=seed,
        stopper=stopper,
    )
    if isinstance(request, _Reading):
        request.answer, request.wanted = answer, (call.scores, call.logits)
    return request


def _drafter(llm: LLM, spec: MethodSpec) -> tuple[Drafter, Policy]:
    return llm._prepared[llm.prepare(spec)]()


def _remaining(call: Call, row: Row, llm: LLM) -> int:
    """Most tokens that may come; rows that can't be filled up end together."""
    rows = [row] if call.pad is not None else call.rows
    limit = llm.target.info.context_limit
    return max(min(call.limit, *(limit - len(each.prompt) for each in rows)), 1)


def _rounds(llm: LLM, requests: Sequence[Decoding]) -> Iterator[tuple[int, Round]]:
    """Drive the loop; threads that share a model take turns round by round."""
    loop = decode(requests)
    try:
        while True:
            with llm._lock:
                item = next(loop, None)
            if item is None:
                return
            yield item
    finally:
        with llm._lock:
            loop.close()  # type: ignore[attr-defined]


def _warn_of_a_full_context(call: Call, llm: LLM, answers: Sequence[_Answer]) -> None:
    for index, answer in enumerate(answers):
        if answer.finish is FinishReason.LENGTH and len(answer.tokens) < call.limit:
            logger.warning(
                "row %d ends after %d new tokens, at most %d were asked for: the context of %s, "
                "%d tokens, is full. Plain generate would go on past it",
                index,
                len(answer.tokens),
                call.limit,
                llm.target.info.name,
                llm.target.info.context_limit,
            )


# -- what generate gives ---------------------------------------------------------------------------


def _output(call: Call, answers: Sequence[_Answer], summaries: list[Summary]) -> Any:
    longest = max(len(answer.tokens) for answer in answers)
    fill = 0 if call.pad is None else call.pad
    new = [answer.tokens + [fill] * (longest - len(answer.tokens)) for answer in answers]
    sequences = torch.cat([call.ids, torch.tensor(new).to(call.ids)], 1)
    if not call.as_dict:
        return sequences
    make: Any = GenerateDecoderOnlyOutput  # its annotations know tuples of one tensor only
    output = make(
        sequences=sequences,
        scores=_steps([a.scores for a in answers], longest, fill, call) if call.scores else None,
        logits=_steps([a.logits for a in answers], longest, fill, call) if call.logits else None,
    )
    output.hasten = summaries
    return output


def _steps(
    kept: Sequence[Sequence[torch.Tensor]], longest: int, fill: int, call: Call
) -> tuple[torch.Tensor, ...]:
    """For each step ``(rows, vocab)``. Where a row has ended all the weight is on its padding."""
    padding = torch.full_like(kept[0][0], -torch.inf)
    padding[min(fill, len(padding) - 1)] = 0.0
    return tuple(
        torch.stack([row[step] if step < len(row) else padding for row in kept]).to(call.ids.device)
        for step in range(longest)
    )


def _on(device: torch.device, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [row.to(device) for row in rows]

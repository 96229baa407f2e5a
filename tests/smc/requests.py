"""Requests over the checking toy target, and what every one of them is held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hasten.metrics import Summary
from hasten.smc.info import SMCInfo
from hasten.smc.options import SMCOptions
from hasten.smc.proposals import ModelProposal, Proposal
from hasten.smc.run import SMCRun
from hasten.stopping import Stopper
from hasten.text import TextStream
from hasten.types import FinishReason, Round, SamplingParams
from tests.conformance.toy_target import ToyTarget, ToyTokenizer

PROMPT = (5, 9, 13, 5)
SAMPLED = SamplingParams(max_new_tokens=20, temperature=1.0)


def toy(**changes: Any) -> ToyTarget:
    return ToyTarget(**{"packed": True, **changes})


def near(**changes: Any) -> ToyTarget:
    """A draft model that agrees with `toy` now and then: both know the same bigrams."""
    model = toy(seed=1, **changes)
    size = model.info.vocab_size
    model._bigram = toy()._bigram[:size, :size]
    return model


def options(**changes: Any) -> SMCOptions:
    return SMCOptions(**{"draft": "self", "particles": 4, "length": 3, **changes})


@dataclass
class Answer:
    info: SMCInfo | None
    rounds: list[Round] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    text: str = ""

    @property
    def tokens(self) -> list[int]:
        return [token for made in self.rounds for token in made.emitted]


def start(
    params: SamplingParams = SAMPLED,
    *,
    target: ToyTarget | None = None,
    draft: ToyTarget | Proposal | None = None,
    prompt: Sequence[int] = PROMPT,
    seed: int = 0,
    stopper: Stopper | None = None,
    tokenizer: Any = None,
    **changes: Any,
) -> SMCRun:
    target = target or toy()
    if draft is None or isinstance(draft, ToyTarget):
        draft = ModelProposal(draft or near(), vocab_size=target.info.vocab_size)
    return SMCRun(
        target,
        prompt,
        params,
        options(**changes),
        proposal=draft,
        seed=seed,
        stopper=stopper,
        tokenizer=tokenizer,
    )


def ask(
    params: SamplingParams = SAMPLED,
    *,
    target: ToyTarget | None = None,
    draft: ToyTarget | Proposal | None = None,
    prompt: Sequence[int] = PROMPT,
    **changes: Any,
) -> Answer:
    """Run to the end; what holds for every request is checked on the way."""
    target, tokenizer = target or toy(), ToyTokenizer()
    info = target.info
    text = TextStream(tokenizer, params.stop, params.min_new_tokens)
    stopper = Stopper(params, info.eos_ids, len(prompt), info.context_limit, text)
    run = start(
        params,
        target=target,
        draft=draft,
        prompt=prompt,
        stopper=stopper,
        tokenizer=tokenizer,
        **changes,
    )
    answer = Answer(None)
    for made in run.rounds():
        answer.rounds.append(made)
        answer.pieces.append(text.take())
    answer.pieces.append(text.flush())
    answer.info, answer.text = run.info, text.text
    _check(answer, run, params, stopper)
    assert not target.live, "a sequence was left open"
    return answer


def _check(answer: Answer, run: SMCRun, params: SamplingParams, stopper: Stopper) -> None:
    assert "".join(answer.pieces) == answer.text
    assert len(answer.tokens) <= params.max_new_tokens
    if run.info is None:
        assert run.finish is FinishReason.LENGTH
        assert not answer.rounds
        return
    picked = run.info.answers[run.info.picked]
    assert picked.weight > 0
    assert tuple(answer.tokens) == picked.tokens
    last = answer.rounds[-1]
    assert (last.finish, last.stop_reason) == (picked.finish_reason, picked.stop_reason)
    assert last.finish is run.finish is not None
    assert all(made.finish is None for made in answer.rounds[:-1])
    end = stopper.push(())  # the request's own stopper saw the same end
    assert (end.finish, end.stop_reason) == (last.finish, last.stop_reason)
    total = Summary.of(answer.rounds)
    assert total.new_tokens == len(answer.tokens)
    assert total.target_passes == run.info.rounds == len(answer.rounds) - 1
    assert len(run.info.ess) == run.info.rounds, "one effective size a round"
    assert total.drafted == total.accepted == 0
    assert [made.index for made in answer.rounds] == list(range(len(answer.rounds)))
    assert (
        sum(each.weight for each in run.info.answers) == 1
        or abs(sum(each.weight for each in run.info.answers) - 1) < 1e-9
    )

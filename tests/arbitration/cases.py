"""Arbitrated requests on toy targets, checked after every round, and mismatches made by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hasten.arbitration.loop import Arbitration
from hasten.arbitration.mismatch import Counts, Mismatch, Words
from hasten.arbitration.rules import Rule
from hasten.decode import decode
from hasten.decoding import Decoding
from hasten.drafters.base import Drafter
from hasten.drafters.draft_model import DraftModel
from hasten.judge import PassJudge
from hasten.metrics import Summary
from hasten.policies.base import FixedPolicy
from hasten.sampling import Sampler
from hasten.stopping import Stopper
from hasten.text import TextStream
from hasten.types import Decision, Draft, DraftLaw, DraftTree, Round, SamplingParams
from tests.conformance.harness import check_cache
from tests.conformance.toy_target import ToyTarget, ToyTokenizer

GREEDY = SamplingParams(max_new_tokens=33)
SAMPLED = SamplingParams(max_new_tokens=33, temperature=0.9)
LENGTH = 4


def near() -> ToyTarget:
    """A draft model that agrees with the default toy target now and then."""
    return ToyTarget(bigram=0.7, seed=0)


def drafter(model: ToyTarget | None = None, length: int = LENGTH) -> DraftModel:
    model = model or near()
    return DraftModel(model, vocab_size=24, num_tokens=length, laws=True)


def verifier(
    rule: Rule,
    target: Any = None,
    *,
    length: int = LENGTH,
    kind: type[Arbitration] = Arbitration,
    gate: float = 0.0,
    consecutive: int = 0,
    bonus: bool = True,
) -> Arbitration:
    """Without a safety gate unless asked for."""
    info = (target or ToyTarget()).info
    return kind(
        rule,
        words=Words(info.eos_ids, ToyTokenizer()),
        length=length,
        layer=info.num_layers,
        gate=gate,
        consecutive=consecutive,
        bonus=bonus,
    )


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    text: str = ""

    @property
    def decisions(self) -> list[Decision]:
        return [each for made in self.rounds for each in made.decisions]

    @property
    def metrics(self) -> Summary:
        return Summary.of(self.rounds)

    @property
    def passes(self) -> int:
        return self.metrics.target_passes


def request(
    target: ToyTarget,
    prompt: Sequence[int],
    params: SamplingParams,
    judge: Arbitration,
    *,
    draft: Drafter | None = None,
    length: int = LENGTH,
    seed: int = 0,
    text: TextStream | None = None,
) -> Decoding:
    info = target.info
    return Decoding(
        target,
        prompt,
        params,
        drafter=draft or drafter(length=length),
        policy=FixedPolicy(length + 1),
        verifier=judge,
        seed=seed,
        stopper=Stopper(params, info.eos_ids, len(prompt), info.context_limit, text),
    )


def run(
    target: ToyTarget,
    prompt: Sequence[int],
    params: SamplingParams,
    judge: Arbitration,
    **how: Any,
) -> Answer:
    """One request to its end; the cache is what plain decoding would have built of this text."""
    text = TextStream(ToyTokenizer(), params.stop, params.min_new_tokens)
    sequence = target.open()
    asked = request(target, prompt, params, judge, text=text, **how)
    asked.lend(sequence)
    answer = Answer()
    for _, made in decode([asked]):
        answer.rounds.append(made)
        answer.tokens.extend(made.emitted)
        check_cache(sequence, [*prompt, *answer.tokens][:-1])
        check_round(made, answer)
    answer.text = text.flush()
    target.close(sequence)
    assert target.live == [], "a sequence leaked"
    return answer


def check_round(made: Round, answer: Answer) -> None:
    """What is told of decisions is what was emitted."""
    if made.tree is not None:
        assert len(made.accepted) == len(made.emitted)
    for each in made.decisions:
        assert answer.tokens[each.position] == (each.drafted if each.kept else each.target)
        assert each.drafted != each.target
    assert all(each.kept for each in made.decisions[:-1]), "the target's token ends the block"


class Noting(Rule):
    """Another rule, and what `note` says of each mismatch it is asked about."""

    def __init__(self, rule: Rule, note: Callable[[Mismatch], Any]) -> None:
        self.rule, self.note = rule, note
        self.needs_hidden, self.emits = rule.needs_hidden, rule.emits
        self.notes: list[Any] = []

    def keep(self, m: Mismatch) -> bool:
        self.notes.append(self.note(m))
        return self.rule.keep(m)


class AtPositions(Rule):
    """Keeps the draft's token at these positions of the answer."""

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = frozenset(positions)

    def keep(self, m: Mismatch) -> bool:
        return m.position in self.positions


class Alternating(Rule):
    """Keeps every other one."""

    def keep(self, m: Mismatch) -> bool:
        return m.number % 2 == 0


# -- mismatches by hand ----------------------------------------------------------------------------


def mismatch(
    p: Sequence[float],
    q: Sequence[float],
    drafted: int,
    target: int,
    *,
    place: int = 1,
    later: Sequence[int] = (),
    length: int = LENGTH,
    answered: int = 0,
    counts: Counts | None = None,
    hidden: Mapping[int, torch.Tensor] | None = None,
    state: torch.Tensor | None = None,
    eos: Sequence[int] = (),
    tokenizer: Any = None,
    seed: int = 0,
) -> Mismatch:
    """A greedy mismatch at `place` of a block, with these laws; `later` tokens were drafted after
    it. The hidden rows are numbered from the root's."""
    size = len(p)
    sampler = Sampler(SamplingParams(), size, frozenset(eos), 1, seed)
    row = torch.tensor(p, dtype=torch.float64).log().float()
    draft_row = torch.tensor(q, dtype=torch.float64).log().float()
    before = [0] * (place - 1)
    tree = DraftTree.chain(0, [*before, drafted, *later])
    draft = Draft(tree, laws={place - 1: DraftLaw(draft_row, hidden=state)})
    logits = torch.zeros(len(tree), size)
    logits[place - 1] = row
    ids = [0] * (1 + answered)
    judge = PassJudge(sampler, ids, logits, None, draft, hidden, _embed)
    return Mismatch(
        judge,
        place - 1,
        before,
        drafted,
        target,
        length=length,
        counts=counts or Counts(),
        words=Words(eos, tokenizer),
        layer=2,
    )


def _embed(tokens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([[float(t), 1.0, -float(t), 0.5] for t in tokens])


def laws(count: int, size: int = 7, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of random laws, float64."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        made = torch.randn(2, size, generator=generator, dtype=torch.float64) * 1.5
        p, q = torch.softmax(made, 1)
        yield p, q

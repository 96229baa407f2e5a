"""The two laws that weigh a draft: the target's p with the request's options, the draft's q.

q must reach every token that p can give, or what it misses is missing for any number of particles.
So q never has top_k, top_p or min_p of its own: which tokens p keeps isn't known while drafting.
Options that depend on ids alone (penalties, biases, bans) act on both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hasten.errors import DrafterError, ModelError
from hasten.sampling import Sampler

_NINF = -math.inf


@dataclass(frozen=True, slots=True)
class Scores:
    """p at the rows of n particles, each a root and K drafted tokens.

    drafted  log p of the drafted tokens, ``(n, K)`` float64 on the CPU; after a token of
             probability 0, and past the rows asked for, 0
    laws     log p ``(rows, vocab)``
    first    for each particle the row of `laws` for the token after its root; last: of the token
             after its draft, meaningless where not all rows were asked for or the draft has
             probability 0
    """

    drafted: torch.Tensor
    laws: torch.Tensor
    first: list[int]
    last: list[int]


class TargetLaw:
    """p: what plain decoding draws from, with all of the request's options."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler, params = sampler, sampler.params
        self._temperature = params.temperature
        self._plain = _same_for_all(sampler) and not (
            params.top_k or params.top_p < 1 or params.min_p
        )

    def log_probs(self, prefix: Sequence[int], row: torch.Tensor) -> torch.Tensor:
        """log p ``(vocab,)`` of the token after `prefix`, from its row of logits."""
        if not self._plain:
            return self._sampler.probs(prefix, row).log()
        return _checked(torch.log_softmax(_wide(row) / self._temperature, 0))

    def score(
        self,
        prefixes: Sequence[Sequence[int]],
        drafts: Sequence[Sequence[int]],
        counts: Sequence[int],
        logits: torch.Tensor,
        places: Sequence[Sequence[int]],
    ) -> Scores:
        """p at the first `counts` rows of each particle. ``logits[places[i]]`` are those of
        particle i's K + 1 rows; particles may share some. Raises ModelError where they hold NaN."""
        if self._plain:
            return self._score_together(drafts, counts, logits, places)
        rows = [
            self._score_one(prefix, draft, count, logits[list(place)])
            for prefix, draft, count, place in zip(prefixes, drafts, counts, places, strict=True)
        ]
        drafted = torch.tensor([terms for terms, _, _ in rows], dtype=torch.float64)
        count = len(rows)
        laws = torch.stack([*(row for _, row, _ in rows), *(row for _, _, row in rows)])
        return Scores(drafted, laws, [*range(count)], [*range(count, 2 * count)])

    def _score_together(
        self,
        drafts: Sequence[Sequence[int]],
        counts: Sequence[int],
        logits: torch.Tensor,
        places: Sequence[Sequence[int]],
    ) -> Scores:
        laws = _checked(torch.log_softmax(_wide(logits) / self._temperature, 1))
        length = len(drafts[0])
        shape = (len(drafts), length)
        ids = torch.tensor(drafts, dtype=torch.int64, device=laws.device).reshape(shape)
        rows = torch.tensor(places, device=laws.device)
        terms = laws[rows[:, :length], ids].cpu().double()
        asked = torch.arange(length) < torch.tensor(counts).unsqueeze(1)
        first, last = ([place[end] for place in places] for end in (0, -1))
        return Scores(terms.where(asked, 0.0), laws, first, last)

    def _score_one(
        self, prefix: Sequence[int], draft: Sequence[int], count: int, logits: torch.Tensor
    ) -> tuple[list[float], torch.Tensor, torch.Tensor]:
        """Row by row with its own prefix. It ends at a token of probability 0 and at the answer's
        end: what processors would say of a text that can't be isn't asked."""
        terms = [0.0] * len(draft)
        first = row = self.log_probs(prefix, logits[0])
        for place, token in enumerate(draft[:count]):
            terms[place] = float(row[token])
            if terms[place] == _NINF:
                break
            if place + 1 < count:
                row = self.log_probs([*prefix, *draft[: place + 1]], logits[place + 1])
        return terms, first, row


class DraftLaw:
    """q: the proposal's logits at a temperature, mixed with the uniform law.

    ending  the share of tokens that end an answer, wherever the request lets them: a draft that
            hardly ever ends one would leave p's ends to luck
    mix  the uniform law's share; above 0 where the logits don't cover the vocabulary
    """

    def __init__(
        self,
        sampler: Sampler,
        eos_ids: frozenset[int],
        *,
        temperature: float,
        ending: float,
        mix: float,
        name: str,
    ) -> None:
        # A processor may go by the scores: it could take from q what it leaves in p.
        params = replace(sampler.params, processors=())
        self._vocab = sampler.vocab_size
        self._sampler = Sampler(params, self._vocab, eos_ids, sampler.prompt_len, sampler.seed)
        self._temperature, self._mix, self._name = temperature, mix, name
        self._ending = 0.0 if params.ignore_eos else ending
        self._ends = sorted(each for each in eos_ids if each < sampler.vocab_size)
        self.plain = _same_for_all(self._sampler)
        """The text so far plays no part."""

    def __call__(self, prefixes: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
        """log q ``(n, vocab)`` after `prefixes` (may be none where ``plain``) from logits
        ``(n, any number of ids)``. Raises DrafterError where
        they hold NaN or infinity."""
        rows = _wide(logits)[:, : self._vocab]
        short = self._vocab - rows.shape[1]
        if short:
            rows = torch.nn.functional.pad(rows, (0, short), value=_NINF)
        top = rows.amax(1)
        if not bool((top < math.inf).all()):  # NaN compares as False
            raise DrafterError(
                f"the proposal {self._name!r} gave logits that hold NaN or infinity: choose "
                "another draft, or try dtype='float32'"
            )
        if not self.plain:
            rows = torch.stack(
                [self._sampler.process(p, row) for p, row in zip(prefixes, rows, strict=True)]
            )
            top = rows.amax(1)
        # Where the options leave nothing that the draft knows, only the uniform part is left.
        rows = torch.where((top > _NINF).unsqueeze(1), rows, 0.0)
        log_q = torch.log_softmax(rows / self._temperature, 1)
        if self._ending and self._ends:
            log_q = self._with_ends(log_q)
        if not self._mix:
            return log_q
        floor = log_q.new_tensor(math.log(self._mix / self._vocab))
        return torch.logaddexp(log_q + math.log1p(-self._mix), floor)

    def _with_ends(self, log_q: torch.Tensor) -> torch.Tensor:
        """A share for the ids that end answers and aren't banned; none where all are."""
        ends = log_q[:, self._ends]
        allowed = ends > _NINF
        count = allowed.sum(1, keepdim=True)
        log_q = torch.where(count > 0, log_q + math.log1p(-self._ending), log_q)
        share = torch.where(allowed, math.log(self._ending) - count.clamp(min=1).log(), _NINF)
        log_q[:, self._ends] = torch.logaddexp(log_q[:, self._ends], share.to(log_q.dtype))
        return log_q


def _same_for_all(sampler: Sampler) -> bool:
    """Whether the logits go on to the temperature as they are."""
    params = sampler.params
    return sampler.prefix_free and not (params.logit_bias or params.bad_words_ids)


def _wide(logits: torch.Tensor) -> torch.Tensor:
    """In float32; float64 stays."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _checked(log_probs: torch.Tensor) -> torch.Tensor:
    """The same; raises ModelError for rows that came from NaN or infinity."""
    if bool(torch.isnan(log_probs.amax(-1)).any()):
        raise ModelError(
            "the target's logits hold NaN or infinity: the model is broken in this precision; "
            "try dtype='float32'"
        )
    return log_probs

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
    first    log p ``(n, vocab)`` of the token after the root; last: of the token after the draft,
             meaningless where not all rows were asked for or the draft has probability 0
    """

    drafted: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor


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
        logits: Sequence[torch.Tensor],
    ) -> Scores:
        """p at the first `counts` rows of each particle, whose `logits` are ``(K + 1, vocab)``.
        Raises ModelError where they hold NaN."""
        if self._plain:
            return self._score_together(drafts, counts, logits)
        rows = [
            self._score_one(*each) for each in zip(prefixes, drafts, counts, logits, strict=True)
        ]
        drafted = torch.tensor([terms for terms, _, _ in rows], dtype=torch.float64)
        first = torch.stack([row for _, row, _ in rows])
        return Scores(drafted, first, torch.stack([row for _, _, row in rows]))

    def _score_together(
        self,
        drafts: Sequence[Sequence[int]],
        counts: Sequence[int],
        logits: Sequence[torch.Tensor],
    ) -> Scores:
        rows = _wide(torch.stack(list(logits))) / self._temperature
        log_probs = _checked(torch.log_softmax(rows, -1))
        length = len(drafts[0])
        ids = torch.tensor(drafts, dtype=torch.int64, device=rows.device)
        ids = ids.reshape(len(drafts), length, 1)
        terms = log_probs[:, :length].gather(2, ids).squeeze(2).cpu().double()
        asked = torch.arange(length) < torch.tensor(counts).unsqueeze(1)
        return Scores(terms.where(asked, 0.0), log_probs[:, 0], log_probs[:, -1])

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

    mix  the uniform law's share; above 0 where the logits don't cover the vocabulary
    """

    def __init__(
        self,
        sampler: Sampler,
        eos_ids: frozenset[int],
        *,
        temperature: float,
        mix: float,
        name: str,
    ) -> None:
        # A processor may go by the scores: it could take from q what it leaves in p.
        params = replace(sampler.params, processors=())
        self._vocab = sampler.vocab_size
        self._sampler = Sampler(params, self._vocab, eos_ids, sampler.prompt_len, sampler.seed)
        self._temperature, self._mix, self._name = temperature, mix, name
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
        if not self._mix:
            return log_q
        floor = log_q.new_tensor(math.log(self._mix / self._vocab))
        return torch.logaddexp(log_q + math.log1p(-self._mix), floor)


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

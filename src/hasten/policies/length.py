"""How many rows of a drafted block to verify (AdaFlash's adaptive length), after arXiv 2607.19223.

A block drafter always drafts its whole block; only the number of rows that the target verifies is
decided here, the anchor counted. What decides is the *fraction* that a small head reads off the
drafter's hidden states: the part of the block worth verifying, in (0, 1). ``ratio`` is the paper's
rule. ``cost`` is ours: the fraction gives the tokens to be expected at each length, the cost table
the time, and the best ratio wins.

No decision looks at a drawn token, so all verifiers stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from operator import mul

from hasten.errors import OptionError

POLICIES = ("fixed", "ratio", "cost")

BUCKETS = 8
"""Fractions are told apart so finely where rounds are counted."""

TRUST = 12.0
"""What a fraction promises counts as so many rounds."""

LIMIT = 400.0
"""Counts beyond this are halved, so that old evidence fades."""

_STEPS = 128


@dataclass(frozen=True, slots=True)
class LengthPolicy:
    """The rule for one method.

    block   slots of a drafted block, the anchor included (B)
    policy  ``fixed`` verifies `most` rows; ``ratio`` round(fraction * B * rate); ``cost`` the
            number with most expected tokens per time
    rate    of ``ratio``: above 1 verifies more than the head asks for (the paper's launcher: 1.3)
    least   rows verified at least (1: the head may ask for a plain step), most: at most; 0: B
    lookahead  rows that the head's labels counted beyond the drafts kept; ``cost`` leaves out
            those after the first

    Raises OptionError.
    """

    block: int
    policy: str = "ratio"
    rate: float = 1.0
    least: int = 1
    most: int = 0
    lookahead: int = 1

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            known = f"Known: {', '.join(POLICIES)}"
            raise OptionError("policy", f"no such length policy: {self.policy!r}", known)
        if not 0 < self.rate < float("inf"):
            raise OptionError("rate", f"must be above 0, got {self.rate}")
        if not 0 <= self.most <= self.block:
            problem = f"a block has {self.block} rows to verify, got {self.most}"
            raise OptionError("length", problem, "0 means all of them")
        if not 1 <= self.least <= (self.most or self.block):
            problem = f"must be from 1 to {self.most or self.block}, got {self.least}"
            raise OptionError("least", problem)

    def rows(
        self,
        fraction: float | None,
        *,
        curve: Sequence[float] = (),
        draft_ms: float = 0.0,
        book: SurvivalBook | None = None,
    ) -> int:
        """Rows to verify, the anchor included: 1 is a plain step.

        fraction  what the head says; None (a drafter without a head): the fixed length for
                  ``ratio``, and the book's counts alone for ``cost``
        curve     milliseconds of a pass over 1, 2, ... rows (`hasten.policies.cost`), for ``cost``
        draft_ms  what drafting took: spent already, whatever is decided
        book      what became of earlier rounds, for ``cost``
        """
        most = self.most or self.block
        if self.policy == "cost" and curve:
            return self._by_cost(fraction, curve, draft_ms, book)
        if self.policy == "ratio" and fraction is not None:
            wanted = min(fraction * self.block * self.rate, most)  # a float may be beyond all ints
            return max(round(wanted), self.least)
        return most

    def _by_cost(
        self,
        fraction: float | None,
        curve: Sequence[float],
        draft_ms: float,
        book: SurvivalBook | None,
    ) -> int:
        most = min(self.most or self.block, len(curve))
        tokens = expected_tokens(self.block, fraction, book, lookahead=self.lookahead)
        choices = range(min(self.least, most), most + 1)
        return max(choices, key=lambda rows: tokens[rows - 1] / (curve[rows - 1] + draft_ms))


@dataclass(slots=True)
class SurvivalBook:
    """How often slot k was kept when the slots before it were, by the head's fraction.

    It holds no text. Shared by a method's requests; `hasten.methods.Shared`.
    """

    counts: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    """``[kept, reached]`` by bucket of the fraction and slot."""

    def learn(self, fraction: float | None, drafted: Sequence[int], emitted: Sequence[int]) -> None:
        """Count a round: `drafted` are the tokens of slots 1, 2, ..., verified or not.

        The target's own token after the last row kept tells of the slot after it, too.
        """
        bucket = _bucket(fraction)
        for slot, (token, said) in enumerate(zip(drafted, emitted, strict=False), start=1):
            count = self.counts.setdefault((bucket, slot), [0.0, 0.0])
            count[0] += token == said
            count[1] += 1.0
            if count[1] > LIMIT:
                count[0] *= 0.5
                count[1] *= 0.5
            if token != said:
                return

    def rate(self, fraction: float | None, slot: int, guess: float) -> float:
        """The chance of slot `slot`, those before it kept; `guess` counts as `TRUST` rounds."""
        kept, reached = self.counts.get((_bucket(fraction), slot), _NONE)
        return (kept + TRUST * guess) / (reached + TRUST)

    def reset(self) -> None:
        """Forget all counts."""
        self.counts.clear()

    def fork(self) -> SurvivalBook:
        """A copy that shares nothing."""
        return SurvivalBook({key: list(count) for key, count in self.counts.items()})


_NONE = (0.0, 0.0)


def _bucket(fraction: float | None) -> int:
    if fraction is None:
        return -1
    return min(int(fraction * BUCKETS), BUCKETS - 1)


def expected_tokens(
    block: int,
    fraction: float | None,
    book: SurvivalBook | None = None,
    *,
    lookahead: int = 1,
) -> list[float]:
    """Tokens that a pass over 1, 2, ..., `block` rows is expected to emit.

    The head's fraction is that of all accepted drafts and `lookahead` more rows, on average; the
    anchor and those drafts emit a token each. Chances that are the same in all slots and add up to
    that are the first guess, which the book's counts correct.
    """
    mean = 0.5 * block if fraction is None else fraction * block + 1 - lookahead
    guess = _even_chance(block, round(mean / block * _STEPS))
    chances = [guess] * (block - 1)
    if book is not None:
        chances = [book.rate(fraction, slot, guess) for slot in range(1, block)]
    return list(accumulate(accumulate(chances, mul), initial=1.0))


@lru_cache(maxsize=1024)
def _even_chance(block: int, step: int) -> float:
    """The chance p with p + p^2 + ... + p^(B-1) = B * step / _STEPS - 1, within 0 to 1."""
    wanted = block * step / _STEPS - 1.0
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = 0.5 * (low + high)
        if sum(middle**k for k in range(1, block)) < wanted:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)

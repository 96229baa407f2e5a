"""What AdaPLD remembers of a request, and how it finds an earlier place like the present one.

Kept for every position of prompt and answer: the token, the target's hidden state at one layer, and
its likeliest next tokens. An *anchor* is an earlier position whose token is the one asked for, or
resembles it. Among the possible anchors the one wins whose *preceding* hidden state is nearest to
the state before the token asked for: that token itself has not run yet (arXiv 2412.01447; arXiv
2606.05742 adds the resemblance).

Everything here is small, so it lives in lists and numpy arrays on the CPU. Sums are made by
``einsum`` and not by a matrix product: equal states then score equally whatever stands beside them
(the most recent one wins), and no thread pool competes with the target's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hasten.drafters.reuse_ranks import MOST_AGREEMENT

Array = np.ndarray[Any, Any]
Embed = Callable[[Sequence[int]], torch.Tensor]

COMPARED = 1024
"""Distinct tokens that a token which never occurred is compared with at most: those that came up
last."""

_FIRST_ROWS = 512
_NOWHERE = -1.0
"""Similarity of a state that is not known."""


class Anchor(NamedTuple):
    """An earlier position to draft from.

    semantic   its token only resembles the one asked for
    score      for a semantic anchor the similarity it won by, in [-1, 1]; else 0
    """

    position: int
    semantic: bool
    score: float


class UnitRows:
    """Growing float32 rows ``(n, size)``, each of length 1 (or 0: it was no direction at all)."""

    __slots__ = ("_rows", "count")

    def __init__(self) -> None:
        self._rows: Array = np.empty((0, 0), np.float32)
        self.count = 0

    @property
    def rows(self) -> Array:
        """The rows, ``(count, size)``; a view."""
        return self._rows[: self.count]

    def append(self, new: Array, which: Sequence[int]) -> None:
        """Add the rows `which` of `new`, ``(n, size)`` float32, of any length."""
        need = self.count + len(which)
        if need > len(self._rows):
            grown = np.empty((max(2 * need, _FIRST_ROWS), new.shape[1]), np.float32)
            if self.count:
                grown[: self.count] = self.rows
            self._rows = grown
        # One by one: for the few rows of a round this takes fewer steps than all at once.
        for row, to in zip(which, self._rows[self.count : need], strict=True):
            scale_to_unit(new[row], to)
        self.count = need


def scale_to_unit(row: Array, out: Array) -> Array:
    """`row` ``(size,)`` scaled to length 1, in `out`; zeros where that can't be (zeros, infinities,
    NaN)."""
    wide = row.astype(np.float64)  # no float32 overflows when squared
    length = math.sqrt(float(wide.dot(wide)))
    if 0.0 < length < math.inf:
        return np.divide(row, length, out=out)
    out.fill(0.0)
    return out


def to_array(tensor: torch.Tensor) -> Array:
    """Rows of a target, in any dtype on any device, as float32 on the CPU."""
    array: Array = tensor.detach().float().cpu().numpy()
    return array


class ReuseMemory:
    """Tokens, states and next-token candidates of one request, by position.

    A position can be an anchor once a token follows it. The last token, the pending one, has no
    state and no candidates yet; neither have the first positions of a prompt whose beginning an
    earlier chat turn had already run.

    width      next-token candidates kept of each position
    max_cand   most anchors compared: the most recent occurrences of a token, or the positions of
               the nearest tokens
    tau        least cosine of input embeddings at which a token resembles another
    blend      weight of that cosine beside that of the hidden states, when resembling tokens are
               ranked (ours; the paper's: 0)
    rerank     compare hidden states at all; without it the most recent anchor wins
    """

    def __init__(
        self,
        *,
        width: int = 9,
        max_cand: int = 256,
        tau: float = 0.1,
        blend: float = 0.0,
        rerank: bool = True,
    ) -> None:
        self.width, self.max_cand, self.tau = width, max_cand, tau
        self.blend, self.rerank = blend, rerank
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.tokens: list[int] = []
        self.candidates: list[Sequence[int]] = []
        """Likeliest next tokens after each position but the last, best first; () where unknown."""
        self._positions: dict[int, list[int]] = {}
        self._states, self._first = UnitRows(), 0
        """Row i is the state at position ``_first + i``."""
        self._kinds: list[int] = []
        """The distinct tokens, in the order they came up."""
        self._embedded, self._embedded_from = UnitRows(), 0
        """Row i is the input embedding of kind ``_embedded_from + i``."""

    def __len__(self) -> int:
        """Positions that may be anchors: those before the last token."""
        return max(len(self.tokens) - 1, 0)

    # -- filling -----------------------------------------------------------------------------------

    def begin(
        self, prompt: Sequence[int], hidden: torch.Tensor | None, topk_ids: torch.Tensor | None
    ) -> None:
        """Start with a prompt; hidden ``(rows, hidden_size)`` and topk_ids ``(rows, k)`` int64 are
        those of its last rows, or None."""
        self.clear()
        self.tokens.extend(prompt)
        self._index(0)
        self._first = len(prompt) - (0 if hidden is None else len(hidden))
        if hidden is not None:
            self._states.append(to_array(hidden), range(len(hidden)))
        listed = [] if topk_ids is None else topk_ids[:, : self.width].tolist()
        self.candidates = [()] * (len(prompt) - len(listed)) + listed

    def commit(
        self,
        tokens: Sequence[int],
        rows: Sequence[int] = (),
        hidden: torch.Tensor | None = None,
        topk_ids: torch.Tensor | None = None,
    ) -> None:
        """Append tokens. `rows` are the rows of a pass they came from, the pending token's first;
        hidden and topk_ids are those of all its rows: the others never enter the memory. The first
        token after the prompt brings none: its row was among those of `begin`."""
        start = max(len(self.tokens) - 1, 0)
        self.tokens.extend(tokens)
        self._index(start)
        if hidden is not None:
            self._states.append(to_array(hidden), rows)
        if topk_ids is None:
            self.candidates.extend([()] * len(rows))
        else:
            listed = topk_ids.tolist()
            self.candidates.extend([listed[row][: self.width] for row in rows])

    def _index(self, start: int) -> None:
        """Positions from `start` on that a token follows become possible anchors."""
        positions = self._positions
        for position in range(start, len(self.tokens) - 1):
            token = self.tokens[position]
            known = positions.get(token)
            if known is None:
                positions[token] = [position]
                self._kinds.append(token)
            else:
                known.append(position)

    # -- retrieval ---------------------------------------------------------------------------------

    def retrieve(self, token: int, before: int, embed: Embed | None) -> Anchor | None:
        """The best anchor for `token`, if any.

        before   the position whose hidden state stands for the one before `token`
        embed    input embeddings ``(n, hidden_size)`` of ids, used when the token never occurred;
                 None: no token resembles another
        """
        found = self._positions.get(token)
        if found is not None:
            if len(found) == 1 or not self.rerank:
                return Anchor(found[-1], False, 0.0)
            likely = found[-self.max_cand :]
            _, best = max(zip(self._cosines(likely, before), likely, strict=True))
            return Anchor(best, False, 0.0)
        if embed is None or not self._kinds:
            return None
        positions, scores = self._resembling(token, embed)
        if not positions:
            return None
        if self.rerank:
            blend = self.blend
            pairs = zip(self._cosines(positions, before), scores, strict=True)
            scores = [(near + blend * like) / (1.0 + blend) for near, like in pairs]
        score, best = max(zip(scores, positions, strict=True))
        return Anchor(best, True, score)

    def cosine(self, position: int, before: int) -> float:
        """Cosine of the states before an anchor and at `before`; -1 where one isn't known."""
        return self._cosines([position], before)[0]

    def agreement(self, position: int, end: int, above: Sequence[int] = ()) -> int:
        """How many tokens before `position` agree with those wanted there: `above` (nearest first),
        then the memory's own from `end` backwards; 10 at most."""
        tokens, count = self.tokens, 0
        for token in above:
            if count == MOST_AGREEMENT or position <= 0 or tokens[position - 1] != token:
                return count
            position -= 1
            count += 1
        while count < MOST_AGREEMENT and position > 0 and tokens[position - 1] == tokens[end]:
            position -= 1
            end -= 1
            count += 1
        return count

    def _cosines(self, positions: Sequence[int], before: int) -> list[float]:
        """For each anchor the cosine of the state before it with the one at `before`."""
        query, offset = before - self._first, 1 + self._first
        if not 0 <= query < self._states.count:
            return [_NOWHERE] * len(positions)
        rows = [position - offset for position in positions]
        known = rows if min(rows) >= 0 else [row for row in rows if row >= 0]
        states = self._states.rows
        cosines: list[float] = np.einsum("ij,j->i", states[known], states[query]).tolist()
        if len(known) < len(rows):
            found = iter(cosines)
            return [next(found) if row >= 0 else _NOWHERE for row in rows]
        return cosines

    def _resembling(self, token: int, embed: Embed) -> tuple[list[int], list[float]]:
        """Positions of the tokens nearest to `token`, nearest first, and the tokens' cosines."""
        kinds, cosines = self._compare(token, embed)
        beyond = len(kinds) - self.max_cand  # each kind has a position
        few = cosines.argpartition(beyond)[beyond:] if beyond > 0 else np.arange(len(kinds))
        positions: list[int] = []
        likeness: list[float] = []
        nearest = sorted(zip(cosines[few].tolist(), few.tolist(), strict=True), reverse=True)
        for cosine, kind in nearest:
            room = self.max_cand - len(positions)
            if cosine < self.tau or room <= 0:
                break
            some = self._positions[kinds[kind]][-room:]
            positions += some
            likeness += [cosine] * len(some)
        return positions, likeness

    def _compare(self, token: int, embed: Embed) -> tuple[list[int], Array]:
        """The latest distinct tokens and the cosines of their embeddings with that of `token`."""
        oldest = max(len(self._kinds) - COMPARED, 0)
        if self._embedded_from + self._embedded.count < oldest:  # too far behind to catch up
            self._embedded, self._embedded_from = UnitRows(), oldest
        new = self._kinds[self._embedded_from + self._embedded.count :]
        rows = to_array(embed([*new, token]))
        self._embedded.append(rows, range(len(new)))
        compared = self._embedded.rows[oldest - self._embedded_from :]
        query = scale_to_unit(rows[-1], np.empty_like(rows[-1]))
        return self._kinds[oldest:], np.einsum("ij,j->i", compared, query)

"""Rounds -> figures. Every figure says its unit, and tokens are conserved.

All speeds are *decode only*: from the first token on. The prefill (round 0) counts in `new_tokens`,
`time_to_first_token_s` and `end_to_end_s`, never in passes, accepted lengths or tokens per second.
Where the first token is a pass's (``cospec``), that pass counts in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from hasten.types import Round


@dataclass(slots=True)
class Summary:
    """Running totals of one request (or several, see `merge`); add rounds as they come.

    ``depth_drafted[d]`` / ``depth_accepted[d]`` count rounds that drafted / kept a node at depth d
    (d >= 1); their quotient is the acceptance at depth d. ``depth_tried[d]`` counts rounds whose
    kept path reached depth d - 1 and had something drafted below it (see
    `conditional_acceptance`). ``layer_rows`` counts rows x layers of the target run after the
    prefill, drafting included: where nothing runs twice it is what the passes' rows and the layers
    say, however the rows were drafted. ``mismatches`` counts places where the draft's token wasn't
    the target's and a rule decided, ``overrides`` those where the draft's was kept (``cospec``).
    """

    new_tokens: int = 0
    rounds: int = 0
    target_passes: int = 0
    pass_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_rounds: int = 0
    layer_rows: int = 0
    mismatches: int = 0
    overrides: int = 0
    prefill_s: float = 0.0
    opening_s: float = 0.0
    """Of the rounds up to the first token, where the prefill brings none."""
    decode_s: float = 0.0
    draft_s: float = 0.0
    target_s: float = 0.0
    topk_s: float = 0.0
    host_s: float = 0.0
    accepted_lengths: dict[int, int] = field(default_factory=dict)
    depth_drafted: dict[int, int] = field(default_factory=dict)
    depth_tried: dict[int, int] = field(default_factory=dict)
    depth_accepted: dict[int, int] = field(default_factory=dict)
    source_drafted: dict[str, int] = field(default_factory=dict)
    source_accepted: dict[str, int] = field(default_factory=dict)

    def add(self, round: Round) -> None:
        """Count one round."""
        waiting = self.rounds and not self.new_tokens
        self.new_tokens += len(round.emitted)
        self.rounds += 1
        if round.tree is None:
            self.prefill_s += round.times.total
            return
        if waiting:
            self.opening_s += round.times.total
        if round.decisions:
            self.mismatches += len(round.decisions)
            self.overrides += sum(each.kept for each in round.decisions)
        self.target_passes += 1
        self.pass_tokens += len(round.emitted)
        self.layer_rows += round.layer_rows
        _bump(self.accepted_lengths, len(round.emitted))
        self.decode_s += round.times.total
        self.draft_s += round.times.draft
        self.target_s += round.times.target
        self.topk_s += round.times.topk
        self.host_s += round.times.host
        if round.drafted:
            self._add_draft(round)

    def _add_draft(self, round: Round) -> None:
        """Acceptance counts; a cut inside the block leaves fewer kept nodes, never more."""
        assert round.tree is not None
        kept = round.accepted[1:]
        self.draft_rounds += 1
        self.drafted += round.drafted
        self.accepted += len(kept)
        for depth in range(1, max(round.tree.depths) + 1):
            _bump(self.depth_drafted, depth)
        for node in kept:
            _bump(self.depth_accepted, round.tree.depths[node])
        with_children = set(round.tree.parents)
        for node in round.accepted:
            if node in with_children:
                _bump(self.depth_tried, round.tree.depths[node] + 1)
        for node, source in enumerate(round.sources):
            if node:
                _bump(self.source_drafted, source)
        if round.sources:
            for node in kept:
                _bump(self.source_accepted, round.sources[node])

    @classmethod
    def of(cls, rounds: Iterable[Round]) -> Summary:
        """The summary of `rounds`."""
        out = cls()
        for each in rounds:
            out.add(each)
        return out

    def merge(self, other: Summary) -> None:
        """Add another request's totals to these."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                for key, value in theirs.items():
                    mine[key] = mine.get(key, 0) + value
            else:
                setattr(self, name, mine + theirs)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per target pass, the target's own included; plain decoding is 1.00."""
        return self.pass_tokens / self.target_passes if self.target_passes else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Share of drafted tokens kept, in [0, 1]. It ranks draft budgets wrongly: compare
        `mean_accepted_length`."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def override_rate(self) -> float:
        """Share of mismatches where the draft's token was kept, in [0, 1]."""
        return self.overrides / self.mismatches if self.mismatches else 0.0

    @property
    def layer_rows_per_round(self) -> float:
        """Rows x layers of the target run per round: its layers in plain decoding, (j + 1) times as
        many where j drafted tokens are verified and nothing runs twice."""
        return self.layer_rows / self.target_passes if self.target_passes else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decode only: tokens after the first / seconds after the first."""
        return self.pass_tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def time_to_first_token_s(self) -> float:
        """Seconds up to the first token: those of the prefill round, mostly."""
        return self.prefill_s + self.opening_s

    @property
    def end_to_end_s(self) -> float:
        """Prefill and decode."""
        return self.prefill_s + self.decode_s

    def per_pass_ms(self, name: str) -> float:
        """Milliseconds per target pass of ``"draft"``, ``"target"``, ``"topk"``, ``"host"`` or
        ``"decode"``."""
        seconds: float = getattr(self, f"{name}_s")
        return 1e3 * seconds / self.target_passes if self.target_passes else 0.0

    def conditional_acceptance(self) -> dict[int, float]:
        """For each depth: rounds that kept a node at it / rounds that kept one at the depth before
        with something drafted below it; in [0, 1]."""
        return {
            depth: self.depth_accepted.get(depth, 0) / tried
            for depth, tried in sorted(self.depth_tried.items())
        }


_Key = TypeVar("_Key", int, str)


def _bump(counts: dict[_Key, int], key: _Key) -> None:
    counts[key] = counts.get(key, 0) + 1

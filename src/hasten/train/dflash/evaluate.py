"""What a drafter reaches on held-out text, teacher-forced: no answer is generated.

On the target's own greedy text a draft is kept where it says what the text says, so walking over
an answer from anchor to anchor, as serving does, counts the rounds that serving would need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hasten.exits.bank import local_ids
from hasten.policies.length import LengthPolicy
from hasten.train.dflash import losses
from hasten.train.dflash.blocks import Blocks, all_anchors
from hasten.train.dflash.feed import Batch, Feed
from hasten.train.dflash.objectives import Drafter

ANCHORS = 32
"""Blocks of a text that run together."""
RATES = (1.0, 1.3)
"""Of the length head's ratio rule, measured beside the whole block."""


@dataclass(slots=True)
class Walk:
    """Rounds over all answers: `tau` tokens a round, `rows` verified for each token emitted."""

    tokens: int = 0
    rounds: int = 0
    verified: int = 0

    @property
    def tau(self) -> float:
        """Mean accepted length: tokens a round, the target's own included."""
        return self.tokens / max(self.rounds, 1)

    @property
    def rows(self) -> float:
        """Rows verified for each emitted token."""
        return self.verified / max(self.tokens, 1)

    def over(self, kept: Sequence[int], rows: Sequence[int]) -> None:
        """One answer: at each anchor how many drafts are right, and how many rows are verified.

        The first token of an answer comes from the prompt's pass and counts for nothing.
        """
        at = 0
        while at < len(kept):
            emitted = min(kept[at] + 1, rows[at], len(kept) - at)
            self.rounds += 1
            self.verified += rows[at]
            self.tokens += emitted
            at += emitted


@dataclass(slots=True)
class Figures:
    """Of one domain, or all.

    texts, anchors  measured
    slots           how often slot 1, 2, ... says the text's token, whatever those before it say
    reached         how often it and all before it do
    covered         share of the answers' tokens that can be drafted: in the draft vocabulary, or
                    of the prompt's own ids, as in serving
    walks           ``fixed``: whole blocks verified; ``ratio 1.0``, ...: what the length head says
    length_error    mean absolute error of the length head's fraction, whole blocks; 0 without one
    """

    texts: int = 0
    anchors: int = 0
    slots: list[float] = field(default_factory=list)
    reached: list[float] = field(default_factory=list)
    covered: float = 0.0
    walks: dict[str, Walk] = field(default_factory=dict)
    length_error: float = 0.0

    @property
    def tau(self) -> float:
        """Mean accepted length with whole blocks verified."""
        return self.walks["fixed"].tau

    def to_json(self) -> dict[str, Any]:
        """Plain data, with each walk's ratios."""
        walks = {
            name: {**asdict(walk), "tau": round(walk.tau, 4), "rows": round(walk.rows, 4)}
            for name, walk in self.walks.items()
        }
        short = {name: [round(x, 4) for x in getattr(self, name)] for name in ("slots", "reached")}
        return {**asdict(self), **short, "tau": round(self.tau, 4), "walks": walks}


@dataclass(slots=True)
class _Answer:
    """Measured on one answer, in the order of its anchors."""

    domain: str
    kept: list[int] = field(default_factory=list)
    said: list[float] = field(default_factory=list)
    right: list[torch.Tensor] = field(default_factory=list)
    inside: list[torch.Tensor] = field(default_factory=list)
    error: float = 0.0
    whole: int = 0
    known: int = 0


ALL = "all"


@torch.no_grad()
def evaluate(drafter: Drafter, feed: Feed) -> dict[str, Figures]:
    """Figures of all texts of the feed (``"all"``) and of each domain."""
    answers: list[_Answer] = []
    for group in feed.in_order():
        answers += _measure(drafter, feed, group)
    domains = sorted({answer.domain for answer in answers})
    block, head = drafter.net.config.block_size, bool(drafter.net.config.length_head)
    found = {ALL: _figures(answers, block, head)}
    for domain in domains:
        own = [answer for answer in answers if answer.domain == domain]
        found[domain] = _figures(own, block, head)
    return found


def _measure(drafter: Drafter, feed: Feed, group: Sequence[int]) -> list[_Answer]:
    batch = feed.load(group)
    context = drafter.context(batch)
    known = drafter.teacher.place >= 0
    local = [local_ids(feed.states.texts[i].prompt, known) for i in group]
    answers = [_Answer(feed.states.texts[i].domain) for i in group]
    for row, answer in enumerate(answers):
        tokens = batch.ids[row, batch.starts[row] + 1 : batch.lengths[row]]
        answer.known = int((known[tokens] | torch.isin(tokens, local[row])).sum())
    last = [length - 2 for length in batch.lengths.tolist()]
    for anchors, keep in all_anchors(batch.starts.tolist(), last, ANCHORS):
        blocks = drafter.blocks(batch, anchors, keep)
        _count(drafter, blocks, drafter.states(blocks, context), local, batch, answers)
    return answers


def _count(
    drafter: Drafter,
    blocks: Blocks,
    hidden: torch.Tensor,
    local: Sequence[torch.Tensor],
    batch: Batch,
    answers: Sequence[_Answer],
) -> None:
    """Add these blocks, with the states `hidden` ``(b, N, B, H)``, to the answers they stand in;
    `local` are the ids that each text's prompt adds to the draft vocabulary."""
    config, right = drafter.net.config, torch.zeros_like(blocks.inside)
    for row, extra in enumerate(local):
        inside = blocks.inside[row]
        right[row][inside] = drafter.says(hidden[row][inside], extra) == blocks.labels[row][inside]
    kept, whole = losses.accepted(right), blocks.whole(batch.lengths)
    said = torch.ones_like(kept, dtype=torch.float32)
    if config.length_head:
        said = drafter.net.worth(hidden.flatten(0, 1)).view_as(said)
    labels = losses.length_labels(kept, config.block_size, config.lookahead)
    error = (said - labels).abs() * whole
    for row, answer in enumerate(answers):
        count = int(blocks.keep[row].sum())
        answer.kept += kept[row, :count].tolist()
        answer.said += said[row, :count].tolist()
        answer.right.append(right[row, :count].cpu())
        answer.inside.append(blocks.inside[row, :count].cpu())
        answer.error += float(error[row].sum())
        answer.whole += int(whole[row].sum())


def _figures(answers: Sequence[_Answer], block: int, head: bool) -> Figures:
    right = torch.cat([each for answer in answers for each in answer.right])[:, 1:]
    inside = torch.cat([each for answer in answers for each in answer.inside])[:, 1:]
    there = inside.sum(0).clamp(min=1)
    tokens = sum(len(answer.kept) for answer in answers)
    found = Figures(
        texts=len(answers),
        anchors=tokens,
        slots=(right.sum(0) / there).tolist(),
        reached=(right.long().cumprod(1).sum(0) / there).tolist(),
        covered=sum(answer.known for answer in answers) / max(tokens, 1),
    )
    found.walks["fixed"] = _walk(answers, LengthPolicy(block, "fixed"))
    if head:
        for rate in RATES:
            found.walks[f"ratio {rate}"] = _walk(answers, LengthPolicy(block, rate=rate))
        whole = sum(answer.whole for answer in answers)
        found.length_error = sum(answer.error for answer in answers) / max(whole, 1)
    return found


def _walk(answers: Sequence[_Answer], policy: LengthPolicy) -> Walk:
    walk = Walk()
    for answer in answers:
        walk.over(answer.kept, [policy.rows(each) for each in answer.said])
    return walk

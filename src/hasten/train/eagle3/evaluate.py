"""What a drafter reaches on held-out text, teacher-forced: no answer is generated.

A draft step is right where the likeliest id is the text's token. On the target's own greedy text a
chain is kept as far as it is right, and up to there its tokens are the text's: so walking over an
answer counts the rounds that serving with that chain would need.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hasten.policies.length import LengthPolicy
from hasten.train.dflash import losses
from hasten.train.dflash.evaluate import ALL, Figures, _Answer, _figures
from hasten.train.dflash.feed import Batch, Feed
from hasten.train.eagle3.objective import Objective
from hasten.train.eagle3.unroll import unrolled


@torch.no_grad()
def evaluate(objective: Objective, feed: Feed, length: int) -> dict[str, Figures]:
    """Figures of chains of `length` tokens: of all texts of the feed (``"all"``), of each domain.

    ``slots[s]`` is how often draft step s + 1 is right, ``reached[s]`` how often it and all before
    it are.
    """
    answers: list[_Answer] = []
    for group in feed.in_order():
        answers += _measure(objective, feed, group, length)
    found = {ALL: _figures(answers, length + 1, head=False)}
    for domain in sorted({answer.domain for answer in answers}):
        own = [answer for answer in answers if answer.domain == domain]
        found[domain] = _figures(own, length + 1, head=False)
    return found


def _measure(objective: Objective, feed: Feed, group: Sequence[int], length: int) -> list[_Answer]:
    """The answers of a group. The pending token of a round stands at `at`: the pair before it is
    the last one that is known, and step s says token `at` + s."""
    batch = feed.load(group)
    right = _right(objective, batch, length)
    known = objective.teacher.place >= 0
    rows = LengthPolicy(length + 1, "fixed").rows(None)
    answers: list[_Answer] = []
    for row, number in enumerate(group):
        start, end = int(batch.starts[row]), int(batch.lengths[row])
        at = torch.arange(start, end - 1, device=right.device)
        steps = torch.arange(length + 1, device=right.device)
        inside = (at.unsqueeze(1) + steps < end) & (steps > 0)
        hits = right[row, at - 1] & inside
        answer = _Answer(feed.states.texts[number].domain)
        answer.kept = losses.accepted(hits).tolist()
        answer.said = [float(rows)] * len(at)
        answer.right, answer.inside = [hits.cpu()], [inside.cpu()]
        answer.known = int(known[batch.ids[row, start + 1 : end]].sum())
        answers.append(answer)
    return answers


def _right(objective: Objective, batch: Batch, length: int) -> torch.Tensor:
    """Whether step s after pair t says the text's token, bool ``(b, W, 1 + length)``; step 0, the
    pending token itself, never does."""
    teacher, ids = objective.teacher, batch.ids
    outs = unrolled(objective.net, objective.embeddings, ids, batch.features, length)
    width = ids.shape[1] - 2
    right = torch.zeros(len(ids), width, length + 1, dtype=torch.bool, device=ids.device)
    labels = torch.nn.functional.pad(ids, (0, length), value=-1)
    for step, out in enumerate(outs, start=1):
        for row in range(len(ids)):  # a row's logits at a time: they are many
            said = teacher.ids[objective.net.logits(out[row]).argmax(-1)]
            right[row, :, step] = said == labels[row, 1 + step : 1 + step + width]
    return right

"""Training exit modules: the target frozen, its own text, its own distribution as the teacher.

The loss at an output row is the cross entropy of the module's distribution with the target's, both
over the draft vocabulary, mixed with that of the token that followed (arXiv 2404.18911 trains
soft labels likewise); kind ``deep`` is unrolled over several draft steps, each seeing the outputs
of the steps before it (arXiv 2503.01840's training-time test). Rows whose next token isn't in the
draft vocabulary are left out of the loss and count as misses in the figures.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from hasten.exits.config import ExitConfig
from hasten.targets.fused import FusedTarget
from hasten.train.exit_nets import ExitNet
from hasten.train.features import Features

STEP_WEIGHTS = (1.0, 0.7, 0.5, 0.4)
"""Of the losses of draft steps: later ones are reached less often."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How a module is trained.

    rows      rows of a batch (padded); steps: draft steps unrolled (kind ``deep``)
    hard      share of the loss that the token that followed has, the rest is the distribution's
    minutes   wall time at most; the learning rate falls to nothing by then
    """

    lr: float = 1e-3
    rows: int = 4096
    steps: int = 2
    hard: float = 0.1
    epochs: float = 3.0
    minutes: float = 30.0
    warmup: int = 30
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    autocast: bool = True


@dataclass(slots=True)
class Teacher:
    """What modules learn to say: the target's head over the draft vocabulary.

    ids ``(draft_vocab,)`` int64, increasing; head ``(draft_vocab, hidden)``; norm ``(hidden,)``.
    place ``(vocab,)`` int64: an id's place among `ids`, or -1.
    """

    ids: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor
    eps: float
    place: torch.Tensor

    @classmethod
    def of(cls, target: FusedTarget, ids: Sequence[int], dtype: torch.dtype) -> Teacher:
        """From the target's own head and norm."""
        kept = torch.tensor(sorted(ids), device=target.info.device)
        place = torch.full((target.info.vocab_size,), -1, device=target.info.device)
        place[kept] = torch.arange(len(kept), device=kept.device)
        ends = target.ends()
        return cls(kept, ends.head[kept].to(dtype), ends.norm.float(), ends.eps, place)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary, in the head's dtype."""
        return F.linear(normed.to(self.head.dtype), self.head)

    def probs(self, final: torch.Tensor) -> torch.Tensor:
        """softmax over the draft vocabulary of final states ``(rows, hidden)``, float32."""
        normed = F.rms_norm(final.float(), (final.shape[-1],), self.norm, self.eps)
        return torch.softmax(self.logits(normed).float(), -1)


def draft_vocabulary(features: Features, size: int, keep: Sequence[int]) -> list[int]:
    """The `size` ids most frequent in the outputs of the training split, with those in `keep`."""
    counts: dict[int, int] = {}
    for text in range(len(features)):
        if features.splits[text] == "modules":
            for token in features.ids(text)[int(features.starts[text]) :].tolist():
                counts[token] = counts.get(token, 0) + 1
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    chosen = list(dict.fromkeys([*keep, *ranked]))[:size]
    return sorted(chosen)


@dataclass(slots=True)
class Batch:
    """Padded texts on the device. `rows` picks the output rows of the flattened batch, `next` is
    the place of the token after each (-1: not in the draft vocabulary)."""

    state: torch.Tensor
    deep: list[torch.Tensor]
    rows: torch.Tensor
    next: torch.Tensor
    final: torch.Tensor


class Feed:
    """Batches of one split for one module."""

    def __init__(
        self,
        features: Features,
        target: FusedTarget,
        config: ExitConfig,
        teacher: Teacher,
        texts: Sequence[int],
        rows: int,
    ) -> None:
        self.features, self.config, self.teacher = features, config, teacher
        self.texts, self.rows = list(texts), rows
        self._embeddings = target.torch_decoder.embeddings
        self._last = max(features.layers)
        self._device = target.info.device

    def batches(self, rng: random.Random | None) -> Iterator[Batch]:
        """All texts once, those of like length together; shuffled with `rng`."""
        order = sorted(self.texts, key=self.features.length)
        groups: list[list[int]] = []
        for text in order:
            width = self.features.length(text)
            if not groups or (len(groups[-1]) + 1) * width > self.rows:
                groups.append([])
            groups[-1].append(text)
        if rng is not None:
            rng.shuffle(groups)
        for group in groups:
            yield self._load(group)

    def _load(self, group: Sequence[int]) -> Batch:
        features, config = self.features, self.config
        width = max(features.length(text) for text in group)
        ids = torch.zeros(len(group), width, dtype=torch.int64)
        picked: list[torch.Tensor] = []
        following: list[torch.Tensor] = []
        for row, text in enumerate(group):
            tokens, start = features.ids(text), int(features.starts[text])
            ids[row, : len(tokens)] = tokens
            picked.append(torch.arange(start - 1, len(tokens) - 1) + row * width)
            following.append(tokens[start:])
        ids, rows = ids.to(self._device), torch.cat(picked).to(self._device)
        if config.layer:
            state = self._padded(config.layer, group, width)
        else:
            state = F.embedding(ids, self._embeddings)
        deep = [self._padded(layer, group, width) for layer in config.deep]
        last = deep[config.deep.index(self._last)] if self._last in config.deep else None
        final = self._padded(self._last, group, width) if last is None else last
        place = self.teacher.place[torch.cat(following).to(self._device)]
        final = final.view(-1, config.hidden)[rows]
        return Batch(state.float(), [x.float() for x in deep], rows, place, final)

    def _padded(self, layer: int, group: Sequence[int], width: int) -> torch.Tensor:
        out = torch.zeros(len(group), width, self.config.hidden, dtype=torch.bfloat16)
        for row, text in enumerate(group):
            states = self.features.states(layer, text)
            out[row, : len(states)] = states
        return out.to(self._device)


def outputs(net: ExitNet, batch: Batch, steps: int) -> list[torch.Tensor]:
    """For each draft step the module's output at the batch's output rows ``(rows, hidden)``,
    before its last norm."""
    if net.config.kind == "lens":
        made = [batch.state]
    elif net.config.kind == "affine":
        made = [net.affine(batch.state)]
    else:
        feature = None
        if net.config.deep:
            feature = F.pad(net.fused(batch.deep), (0, 0, 1, 0))[:, :-1]
        made = net.steps(batch.state, feature, steps)
    return [x.flatten(0, 1)[batch.rows] for x in made]


def _normed(net: ExitNet, teacher: Teacher, hidden: torch.Tensor) -> torch.Tensor:
    """What the head sees: under the module's norm, or (a lens) the target's own."""
    if net.config.kind != "lens":
        return net.normed(hidden)
    return F.rms_norm(hidden.float(), (hidden.shape[-1],), teacher.norm, teacher.eps)


def loss_of(net: ExitNet, teacher: Teacher, batch: Batch, options: TrainOptions) -> torch.Tensor:
    """Mean loss of the rows, weighted by draft step."""
    kept = (batch.next >= 0).nonzero().squeeze(1)
    following = batch.next[kept]
    with torch.no_grad():
        probs = teacher.probs(batch.final[kept])
    total, weights = torch.zeros((), device=kept.device), 0.0
    for weight, hidden in zip(STEP_WEIGHTS, outputs(net, batch, options.steps), strict=False):
        logs = torch.log_softmax(teacher.logits(_normed(net, teacher, hidden[kept])).float(), -1)
        soft = -(probs * logs).sum(-1).mean()
        hard = F.nll_loss(logs, following)
        total = total + weight * ((1.0 - options.hard) * soft + options.hard * hard)
        weights += weight
    return total / weights


@dataclass(slots=True)
class Figures:
    """Held-out figures of a module, over output rows of greedy or sampled text.

    match[k]    share of rows at which step k + 1's first choice is the token that followed
    top         the same for the first 2, 3, 4 and 8 choices of the first step
    alpha       mean of sum min(p, q) over the draft vocabulary, first step
    covered     share of rows whose next token is in the draft vocabulary
    """

    rows: int = 0
    match: list[float] = field(default_factory=list)
    top: dict[int, float] = field(default_factory=dict)
    alpha: float = 0.0
    covered: float = 0.0


TOPS = (2, 3, 4, 8)


@torch.no_grad()
def evaluate(net: ExitNet, teacher: Teacher, feed: Feed, steps: int, autocast: bool) -> Figures:
    """Figures over all of the feed's texts."""
    found = Figures(match=[0.0] * steps, top=dict.fromkeys(TOPS, 0.0))
    for batch in feed.batches(None):
        with _autocast(batch.final.device.type, autocast):
            made = outputs(net, batch, steps)
            probs = teacher.probs(batch.final)
            for step, hidden in enumerate(made):
                logits = teacher.logits(_normed(net, teacher, hidden)).float()
                best = logits.topk(min(max(TOPS), logits.shape[-1]), -1).indices
                hits = (best == batch.next.unsqueeze(1)) & (batch.next >= 0).unsqueeze(1)
                found.match[step] += float(hits[:, 0].sum())
                if step == 0:
                    for n in TOPS:
                        found.top[n] += float(hits[:, :n].any(1).sum())
                    q = torch.softmax(logits, -1)
                    found.alpha += float(torch.minimum(probs, q).sum())
        found.rows += len(batch.rows)
        found.covered += float((batch.next >= 0).sum())
    count = max(found.rows, 1)
    found.match = [x / count for x in found.match[: len(made)]]
    found.top = {n: x / count for n, x in found.top.items()}
    found.alpha /= count
    found.covered /= count
    return found


def _autocast(device: str, enabled: bool) -> Any:
    return torch.autocast(device, dtype=torch.bfloat16, enabled=enabled)


def train(
    net: ExitNet,
    teacher: Teacher,
    feed: Feed,
    held_out: Feed,
    options: TrainOptions,
    *,
    log: Callable[[dict[str, Any]], None] = lambda row: None,
    checkpoint: Path | None = None,
    every_s: float = 240.0,
) -> Figures:
    """Train until `epochs` or `minutes` are over; the figures at the end.

    `log` gets a row every 20 batches and at each evaluation. The learning rate follows a cosine
    over whichever of the two limits is further along.
    """
    rng = random.Random(options.seed)
    groups = (
        [p for p in net.parameters() if p.dim() > 1],
        [p for p in net.parameters() if p.dim() < 2],
    )
    optimizer = torch.optim.AdamW(
        [
            {"params": groups[0], "weight_decay": options.weight_decay},
            {"params": groups[1], "weight_decay": 0.0},
        ],
        lr=options.lr,
        betas=(0.9, 0.95),
    )
    started, evaluated, losses = time.monotonic(), time.monotonic(), 0.0
    total_rows = sum(feed.features.length(text) for text in feed.texts) * options.epochs
    seen = batches = 0
    done = False
    while not done:
        for batch in feed.batches(rng):
            spent = (time.monotonic() - started) / 60.0
            progress = max(seen / total_rows if total_rows else 1.0, spent / options.minutes)
            if progress >= 1.0:
                done = True
                break
            rate = options.lr * min(1.0, (batches + 1) / options.warmup)
            rate *= 0.03 + 0.97 * 0.5 * (1.0 + math.cos(math.pi * progress))
            for group in optimizer.param_groups:
                group["lr"] = rate
            with _autocast(batch.final.device.type, options.autocast):
                loss = loss_of(net, teacher, batch, options)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(net.parameters(), options.clip)
            optimizer.step()
            seen += batch.state.shape[0] * batch.state.shape[1]
            batches += 1
            losses += float(loss.detach())
            if batches % 20 == 0:
                log(
                    {
                        "batch": batches,
                        "rows": seen,
                        "minutes": spent,
                        "loss": losses / 20,
                        "lr": rate,
                    }
                )
                losses = 0.0
            if time.monotonic() - evaluated > every_s:
                evaluated = time.monotonic()
                figures = evaluate(net, teacher, held_out, options.steps, options.autocast)
                log({"batch": batches, "rows": seen, "minutes": spent, **asdict(figures)})
                if checkpoint is not None:
                    torch.save(net.tensors(), checkpoint)
    return evaluate(net, teacher, held_out, options.steps, options.autocast)


def write_log(path: Path) -> Callable[[dict[str, Any]], None]:
    """A `log` that appends JSON lines to `path`."""

    def log(row: dict[str, Any]) -> None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    return log


def split_texts(features: Features, split: str) -> list[int]:
    """Numbers of the texts of a split."""
    return [i for i in range(len(features)) if features.splits[i] == split]

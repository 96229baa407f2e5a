"""The *constructed* specialist draft: an exit module tuned on some task families' right answers.

It is made so that the draft beats its target on those families and loses on others: then there is
something for an arbiter to find. That shows routing at work; it is no evidence for what natural
drafts do, and no reproduction of anybody's result.

An exit module (fresh, or one that drafts well already) learns the right answers of the chosen
families by cross entropy, unrolled over draft steps as in `hasten.train.exits`. On text of the
target's own it stays near the target's distribution, so that elsewhere it goes on drafting.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from hasten.errors import CapabilityError, OptionError
from hasten.exits import store
from hasten.exits.config import ExitConfig
from hasten.targets.fused import FusedTarget
from hasten.train.arbiter.lessons import OWN, Lesson, Lessons, Study
from hasten.train.arbiter.windowed import outputs
from hasten.train.exit_nets import ExitNet
from hasten.train.exits import STEP_WEIGHTS, Teacher


@dataclass(frozen=True, slots=True)
class SpecialistOptions:
    """How the constructed specialist is trained.

    families    those it learns the right answers of
    problems    most problems of each; own: texts of the target's own
    vocabulary  ids of its draft head, those of the answers included
    steps       draft steps unrolled (kind ``deep``)
    epochs      times through the problems; batch: texts of a batch
    own_weight  of the target's own text in the loss
    """

    families: tuple[str, ...]
    problems: int = 600
    own: int = 1000
    vocabulary: int = 4096
    steps: int = 4
    rate: float = 5e-4
    epochs: int = 6
    batch: int = 48
    own_weight: float = 1.0
    seed: int = 0


def loss_of(
    net: ExitNet, teacher: Teacher, lesson: Lesson, options: SpecialistOptions
) -> torch.Tensor:
    """Cross entropy with right answers, and with the target's distribution on its own text;
    weighted by draft step."""
    total, weights = torch.zeros(()), 0.0
    known, places = lesson.next >= 0, lesson.window.places
    for step, hidden in enumerate(outputs(net, lesson.window, options.steps)):
        here = known & (places >= step)
        gold, own = here & ~lesson.own.unsqueeze(1), here & lesson.own.unsqueeze(1)
        loss = torch.zeros(())
        if gold.any():
            logits = teacher.logits(net.normed(hidden[gold])).float()
            loss = loss + F.cross_entropy(logits, lesson.next[gold])
        if own.any():
            logs = torch.log_softmax(teacher.logits(net.normed(hidden[own])).float(), -1)
            with torch.no_grad():
                probs = teacher.probs(lesson.final[own])
            loss = loss - options.own_weight * (probs * logs).sum(-1).mean()
        total = total + STEP_WEIGHTS[step] * loss
        weights += STEP_WEIGHTS[step]
    return total / weights


@dataclass(slots=True)
class Found:
    """Of a family's held-out problems: shares answered exactly right, token for token given the
    right tokens before, by the draft and by the target; and of rows where both choose alike."""

    count: int = 0
    draft: float = 0.0
    target: float = 0.0
    agree: float = 0.0
    rows: int = 0


@torch.no_grad()
def measure(
    net: ExitNet,
    teacher: Teacher,
    whole: Teacher,
    lessons: Lessons,
    texts: Sequence[int],
    options: SpecialistOptions,
) -> dict[str, Found]:
    """By family; the draft as it works in blocks of `options.steps` tokens, with the ids of its
    head, and the target with all of them (`whole`)."""
    found: dict[str, Found] = {}
    order = lessons.in_order(texts)
    for start in range(0, len(order), options.batch):
        lesson = lessons.load(order[start : start + options.batch])
        made = outputs(net, lesson.window, options.steps)
        places = lesson.window.places
        which = (places.clamp_min(0) % len(made)).unsqueeze(-1).unsqueeze(-1)
        hidden = torch.stack(made, 2).gather(2, which.expand(-1, -1, 1, net.config.hidden))
        drafted = teacher.logits(net.normed(hidden.squeeze(2))).argmax(-1)
        drafted = teacher.ids[drafted]
        final = lesson.final[places >= 0]
        chosen = torch.full_like(drafted, -1)
        chosen[places >= 0] = whole.logits(
            F.rms_norm(final, final.shape[-1:], whole.norm, whole.eps)
        ).argmax(-1)
        for row, text in enumerate(lesson.texts):
            each, kept = found.setdefault(lessons.domain(text), Found()), places[row] >= 0
            right = lesson.tokens[row, kept]
            each.count += 1
            each.draft += bool((drafted[row, kept] == right).all())
            each.target += bool((chosen[row, kept] == right).all())
            each.agree += float((drafted[row, kept] == chosen[row, kept]).sum())
            each.rows += len(right)
    for each in found.values():
        each.draft, each.target = each.draft / each.count, each.target / each.count
        each.agree /= max(each.rows, 1)
    return found


def train(
    net: ExitNet,
    teacher: Teacher,
    lessons: Lessons,
    options: SpecialistOptions,
    *,
    log: Callable[[dict[str, Any]], None] = lambda row: None,
) -> None:
    """Train `net` in place on the split ``train``; `log` gets a row every 20 batches."""
    source = random.Random(options.seed)
    gold, own = lessons.texts("train", own=False), lessons.texts("train", own=True)
    share = len(own) / max(len(gold), 1)
    total = options.epochs * math.ceil(len(gold) / options.batch)
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.rate, betas=(0.9, 0.98))
    done, losses, started = 0, 0.0, time.monotonic()
    for epoch in range(options.epochs):
        for lesson in _mixed(lessons, gold, own, share, options.batch, source):
            progress = done / total
            rate = options.rate * min(1.0, (done + 1) / 30) * max(1.0 - progress, 0.02)
            for group in optimizer.param_groups:
                group["lr"] = rate
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(net, teacher, lesson, options)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            done, losses = done + 1, losses + float(loss.detach())
            if done % 20 == 0:
                minutes = (time.monotonic() - started) / 60
                log({"batch": done, "of": total, "epoch": epoch, "loss": losses / 20,
                     "minutes": minutes})  # fmt: skip
                losses = 0.0


def _mixed(
    lessons: Lessons, gold: Sequence[int], own: Sequence[int], share: float, size: int,
    source: random.Random,
) -> Iterator[Lesson]:  # fmt: skip
    """Batches of right answers, each with some of the target's own text."""
    extra = list(own)
    source.shuffle(extra)
    order = lessons.in_order(gold)
    groups = [order[at : at + size] for at in range(0, len(order), size)]
    source.shuffle(groups)
    for group in groups:
        count = min(round(share * len(group)), len(extra))
        some, extra = extra[:count], extra[count:]
        yield lessons.load([*group, *some], source)


@dataclass(slots=True)
class Specialist:
    """A trained specialist and its figures on held-out problems, by family."""

    config: ExitConfig
    tensors: dict[str, torch.Tensor]
    ids: list[int]
    figures: dict[str, Found] = field(default_factory=dict)


def draft_ids(studies: Sequence[Study], size: int, base: Sequence[int]) -> list[int]:
    """Ids of the draft head: those of the right answers to learn from, then those of `base` that
    are met most often in the target's own text."""
    answers: dict[int, None] = {}
    met: dict[int, int] = dict.fromkeys(base, 0)
    for study in studies:
        for token in study.text.output if study.text.split == "train" else ():
            if study.text.domain != OWN:
                answers[token] = None
            elif token in met:
                met[token] += 1
    ranked = sorted(met, key=lambda token: (-met[token], token))
    return sorted(list(dict.fromkeys([*answers, *ranked]))[: max(size, len(answers))])


def fresh_or_stored(
    target: FusedTarget, kind: str, layer: int, inner: int, init: str, seed: int
) -> ExitNet:
    """A net to start from: a stored module (`init`: a folder, or ``shipped``), or a new one."""
    if not isinstance(target, FusedTarget):
        raise CapabilityError("exit modules need a model of the fused family (see `hasten info`)")
    if init:
        stored = store.shipped(target.info) if init == "shipped" else store.read(init)
        if stored is None:
            raise OptionError("init", f"no exit modules are shipped for {target.info.name}")
        store.check_belongs(stored, target.info, init)
        found = [each for each in stored.configs if each.layer == layer]
        if not found:
            raise OptionError("init", f"has no module at layer {layer}")
        net = ExitNet(found[0], seed=seed)
        prefix = f"{layer}."
        net.load(
            {n.removeprefix(prefix): x for n, x in stored.tensors.items() if n.startswith(prefix)}
        )
        return net
    info, sizes = target.info, target.shape
    config = ExitConfig(
        kind,
        layer,
        info.hidden_size,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        inner=inner,
        rope_theta=100_000.0,
        eps=sizes.eps,
    )
    net = ExitNet(config, seed=seed)
    if "norm" in config.shapes():
        with torch.no_grad():  # it starts as the logit lens
            net.norm.copy_(target.ends().norm.float())
    return net

"""``hasten train arbiter specialist``: from task families to a folder of the constructed draft."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hasten.errors import CapabilityError, OptionError
from hasten.exits import store
from hasten.targets.fused import FusedTarget
from hasten.train.arbiter import specialist
from hasten.train.arbiter.lessons import OWN, Lessons, gold_studies, own_studies
from hasten.train.arbiter.specialist import Found, Specialist, SpecialistOptions
from hasten.train.exits import Teacher
from hasten.train.features import Features, Text, compute

if TYPE_CHECKING:
    from hasten.api import LLM

Log = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Module:
    """Which exit module learns: its kind and layer, the width of its MLP, and where it starts from
    (a folder, ``shipped``, or nothing for a fresh one)."""

    kind: str = "deep"
    layer: int = 0
    inner: int = 1024
    init: str = "shipped"


def run(
    llm: LLM,
    out: Path,
    module: Module,
    options: SpecialistOptions,
    *,
    others: Sequence[str] = (),
    data: Sequence[str | Path] = (),
    validation: int = 60,
    work: Path | None = None,
    log: Log = lambda row: None,
) -> Specialist:
    """Train the constructed specialist and write it to `out`.

    others      families that it doesn't learn, measured too
    data        text of the target's own (`hasten train data`) to stay near the target on
    validation  problems of each family measured on, of the validation split
    work        keeps the target's states between runs; default ``OUT/states``
    """
    target = llm.target
    if not isinstance(target, FusedTarget):
        raise CapabilityError(
            f"{target.info.name} runs in the {target.info.engine} engine: exit modules need a "
            "model of the fused family (see `hasten info`)"
        )
    known = set(options.families) & set(others)
    if known:
        raise OptionError("others", f"{', '.join(sorted(known))} are learned")
    started = time.monotonic()
    studies = gold_studies(llm, options.families, "train", options.problems, seed=options.seed)
    measured = (*options.families, *others)
    studies += gold_studies(llm, measured, "validation", validation, seed=options.seed)
    if data:
        studies += own_studies(data, options.own, seed=options.seed)
    net = specialist.fresh_or_stored(
        target, module.kind, module.layer, module.inner, module.init, options.seed
    )
    config = net.config
    layers = sorted({config.layer, *config.deep, target.info.num_layers} - {0})
    texts = [study.text for study in studies]
    features = states(target, texts, layers, work or out / "states", log)
    shipped = store.shipped(target.info)
    base = shipped.ids if shipped is not None else range(target.info.vocab_size)
    ids = specialist.draft_ids(studies, options.vocabulary, base)
    teacher = Teacher.of(target, ids, torch.bfloat16)
    whole = Teacher.of(target, range(target.info.vocab_size), torch.bfloat16)
    lessons = Lessons(studies, features, target, config, teacher)
    held_out = lessons.texts("validation")
    before = specialist.measure(net, teacher, whole, lessons, held_out, options)
    specialist.train(net, teacher, lessons, options, log=lambda row: log({"stage": "train", **row}))
    after = specialist.measure(net, teacher, whole, lessons, held_out, options)
    made = Specialist(config, net.tensors(), ids, after)
    facts = _facts(target, options, module, features, before, after, time.monotonic() - started)
    store.save(out, target.info.fingerprint, ids, [(config, made.tensors)], facts)
    return made


def states(
    target: FusedTarget, texts: Sequence[Text], layers: Sequence[int], folder: Path, log: Log
) -> Features:
    """The states of `layers` on `texts`: those in `folder` when it has them, else computed."""
    digest = hashlib.sha256(
        json.dumps([target.info.fingerprint, [asdict(each) for each in texts]]).encode()
    ).hexdigest()
    mark = folder / "digest"
    if mark.is_file() and mark.read_text() == digest:
        kept = Features(folder)
        if set(layers) <= set(kept.layers):
            return kept
    total = sum(map(len, texts))
    mark.unlink(missing_ok=True)
    made = compute(
        target,
        texts,
        layers,
        folder,
        progress=lambda done: log({"stage": "states", "done": done, "total": total}),
    )
    mark.write_text(digest)
    return made


def _facts(
    target: FusedTarget,
    options: SpecialistOptions,
    module: Module,
    features: Features,
    before: dict[str, Found],
    after: dict[str, Found],
    seconds: float,
) -> dict[str, Any]:
    domains = list(zip(features.domains, features.splits, strict=True))
    return {
        "model": target.info.name,
        "constructed": "tuned on right answers of some task families, so that it beats the model "
        "there and loses elsewhere: a demonstration of routing, not a natural draft",
        "families": list(options.families),
        "texts": sum(s == "train" and d != OWN for d, s in domains),
        "own_texts": sum(d == OWN for d, _ in domains),
        "options": {**asdict(options), **asdict(module)},
        "minutes": round(seconds / 60, 1),
        "held_out": {
            family: {
                "learned": family in options.families,
                "problems": found.count,
                "target": round(found.target, 3),
                "draft": round(found.draft, 3),
                "draft_before": round(before[family].draft, 3),
                "agree": round(found.agree, 3),
            }
            for family, found in sorted(after.items())
        },
    }

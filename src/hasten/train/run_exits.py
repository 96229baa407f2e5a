"""``hasten train exits``: from training text to a folder of exit modules.

Texts of the split ``modules`` are learned from, greedy ones of ``test`` measured on. States that
the target computes on them are kept in a working folder, so that training again, or other modules,
doesn't compute them again.
"""

from __future__ import annotations

import hashlib
import json
import random
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from hasten.errors import CapabilityError, OptionError
from hasten.exits import store
from hasten.exits.config import KINDS, ExitConfig
from hasten.targets.base import Target
from hasten.targets.fused import FusedTarget
from hasten.targets.fused_weights import make_linear
from hasten.train import calibrate_exits, exits, rows
from hasten.train.exit_nets import ExitNet
from hasten.train.exits import Feed, Figures, Teacher, TrainOptions
from hasten.train.features import Features, Text, compute

ROPE_THETA = 100_000.0
"""Base of the modules' own rotary embedding."""

_MARK = "digest"
"""Stands in a folder of states that are whole."""

Log = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """A module to train: its kind, and the layer it stands at."""

    kind: str
    layer: int


@dataclass(frozen=True, slots=True)
class Options:
    """What ``hasten train exits`` is told.

    vocabulary  ids of the draft head
    inner       width of the modules' MLPs; rank: of affine maps
    deep        layers a ``deep`` module sees; empty: those of the one it starts from, else about
                a quarter, three fifths, and the last
    share       part of the training texts to use (for learning curves)
    minutes     wall time for each module at most, epochs: times through the texts at most
    """

    plans: tuple[Plan, ...] = (Plan("deep", 0), Plan("deep", 2), Plan("adapter", 4))
    vocabulary: int = 8192
    inner: int = 1024
    rank: int = 128
    deep: tuple[int, ...] = ()
    share: float = 1.0
    minutes: float = 20.0
    epochs: float = 50.0
    steps: int = 2
    lr: float = 1e-3
    batch_rows: int = 4096
    seed: int = 0
    init: str = ""
    """Folder of modules to start from: of the kind, that of the layer, else the nearest below it,
    else the lowest."""
    texts: int = 0
    """Most texts of each split; 0: all."""
    calibration: int = 48
    """Prompts that the myopic rule's calibration is counted on; 0: none is."""


@dataclass(slots=True)
class Trained:
    """A module and what it reached on held-out greedy text, overall and by domain."""

    config: ExitConfig
    tensors: dict[str, torch.Tensor]
    figures: Figures
    domains: dict[str, Figures] = field(default_factory=dict)


def parse_plans(text: str) -> tuple[Plan, ...]:
    """``0=deep,2=deep,4=adapter``. Raises OptionError."""
    plans = []
    for part in text.split(","):
        layer, _, kind = part.strip().partition("=")
        if not layer.isdigit() or (kind or "deep") not in KINDS:
            raise OptionError(
                "exits", f"must be LAYER=KIND, got {part!r}", f"As 0=deep,4=adapter; {KINDS}"
            )
        plans.append(Plan(kind or "deep", int(layer)))
    if len({plan.layer for plan in plans}) != len(plans):
        raise OptionError("exits", f"one module a layer, got {text!r}")
    return tuple(plans)


def run(
    target: Target,
    data: Sequence[str | Path],
    out: str | Path,
    options: Options,
    *,
    work: str | Path | None = None,
    log: Log = lambda row: None,
) -> list[Trained]:
    """Train the modules of `options.plans` and write them to `out`; what each reached.

    `work` keeps states between runs; default ``OUT/states``. `log` gets dictionaries: ``stage``,
    and what `hasten.train.exits.train` logs, with ``layer`` and ``kind``. Raises CapabilityError
    for a model outside the fused family, OptionError for layers it hasn't and data without texts.
    """
    if not isinstance(target, FusedTarget):
        raise CapabilityError(
            f"{target.info.name} runs in the {target.info.engine} engine: exit modules need a "
            "model of the fused family (see `hasten info`)"
        )
    configs = [_config(target, plan, options) for plan in options.plans]
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    texts = read_texts(data, options)
    wanted = {layer for config in configs for layer in (config.layer, *config.deep)}
    layers = sorted({*wanted, target.info.num_layers} - {0})
    features = states(target, texts, layers, Path(work) if work else out / "states", log)
    ids = exits.draft_vocabulary(features, options.vocabulary, sorted(target.info.eos_ids))
    teacher = Teacher.of(target, ids, torch.bfloat16)
    made: list[Trained] = []
    for config in configs:
        made.append(_train_one(target, features, teacher, config, options, out, log))
        _save(target, ids, made, features, options, out)
    if options.calibration:
        add_calibration(target, out, read_prompts(data, options), log)
    return made


def add_calibration(
    target: Target,
    folder: str | Path,
    prompts: Sequence[Sequence[int]],
    log: Log = lambda row: None,
) -> None:
    """Count how likely the folder's modules are right on the answers to `prompts`, and keep that
    beside them, for the myopic rule."""
    stored = store.read(folder)
    with torch.inference_mode():
        bank = store.build(target, stored, make_linear)
    log({"stage": "calibration", "prompts": len(prompts)})
    samples = calibrate_exits.collect(target, bank, prompts)
    fitted = calibrate_exits.fit(samples, len(bank.modules))
    facts = {
        **stored.facts,
        "calibration": {**json.loads(fitted.to_json()), "layers": list(bank.layers)},
    }
    store.note(folder, facts)


def read_prompts(data: Iterable[str | Path], options: Options) -> list[Sequence[int]]:
    """Prompts of the split ``policy``: modules haven't learned from the answers to them."""
    found = [row.prompt for path in data for row in rows.read(path, split="policy")]
    unlike = list(dict.fromkeys(tuple(prompt) for prompt in found))
    random.Random(options.seed).shuffle(unlike)
    return list(unlike[: options.calibration])


def read_texts(data: Iterable[str | Path], options: Options) -> list[Text]:
    """Texts of the splits ``modules`` and ``test`` (greedy answers only)."""
    texts = [
        Text(tuple(row.prompt), tuple(row.output), row.domain, row.split)
        for path in data
        for row in rows.read(path)
        if row.split == "modules" or (row.split == "test" and row.temperature == 0.0)
    ]
    chosen: list[Text] = []
    for split in ("modules", "test"):
        of_split = [text for text in texts if text.split == split]
        random.Random(options.seed).shuffle(of_split)
        if split == "modules":
            of_split = of_split[: max(1, round(options.share * len(of_split)))]
        chosen += of_split[: options.texts or None]
        if not of_split:
            raise OptionError(
                "data", f"there is no text of the split {split!r}", "Make more: `hasten train data`"
            )
    return chosen


def states(
    target: FusedTarget, texts: Sequence[Text], layers: Sequence[int], folder: Path, log: Log
) -> Features:
    """The states of `layers` on `texts`: those in `folder` when they are these, else computed."""
    made_for = [*_weights(target), list(layers), [asdict(t) for t in texts]]
    digest = hashlib.sha256(json.dumps(made_for).encode()).hexdigest()
    mark = folder / _MARK
    kept = _whole(folder)
    if kept is not None and mark.read_text() == digest:
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


def kept_states(
    target: FusedTarget, texts: Sequence[Text], layers: Sequence[int], folder: Path
) -> Features | None:
    """What `states` left in `folder`, when these texts are the first of those it was computed on;
    else None."""
    kept = _whole(folder)
    if kept is None or kept.layers != tuple(layers) or len(kept) < len(texts):
        return None
    if (kept.meta["fingerprint"], kept.meta.get("dtype")) != _weights(target):
        return None
    ids = [token for text in texts for token in (*text.prompt, *text.output)]
    starts = [len(text.prompt) for text in texts]
    offsets = [0, *accumulate(map(len, texts))]
    same = kept.offsets[: len(offsets)].tolist() == offsets
    same = same and kept.starts[: len(texts)].tolist() == starts
    return kept if same and kept.tokens[: len(ids)].tolist() == ids else None


def _weights(target: FusedTarget) -> tuple[str | None, str]:
    """What computes the states."""
    return target.info.fingerprint, str(target.info.dtype)


def _whole(folder: Path) -> Features | None:
    """The states in a folder; None where there are none, or a file of theirs is damaged."""
    try:
        return Features(folder) if (folder / _MARK).is_file() else None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None


def _config(target: FusedTarget, plan: Plan, options: Options) -> ExitConfig:
    """The module's description. Raises OptionError for layers the model hasn't."""
    info, sizes = target.info, target.shape
    top = info.num_layers
    deep = options.deep or tuple(dict.fromkeys((max(top // 4, 1), max(3 * top // 5, 1), top)))
    if options.init and plan.kind == "deep":
        seen = _start(store.read(options.init), plan.kind, plan.layer).deep
        if options.deep and options.deep != seen:
            raise OptionError("init", f"sees layers {seen}, and deep={options.deep} was asked for")
        deep = seen
    if plan.layer >= top or any(not 1 <= layer <= top for layer in deep):
        raise OptionError("exits", f"{info.name} has {top} layers: {plan}, deep {deep} don't fit")
    if plan.kind in ("lens", "affine"):
        rank = options.rank if plan.kind == "affine" else 0
        return ExitConfig(plan.kind, plan.layer, info.hidden_size, rank=rank, eps=sizes.eps)
    return ExitConfig(
        plan.kind,
        plan.layer,
        info.hidden_size,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        inner=options.inner,
        deep=deep if plan.kind == "deep" else (),
        rope_theta=ROPE_THETA,
        eps=sizes.eps,
    )


def _train_one(
    target: FusedTarget,
    features: Features,
    teacher: Teacher,
    config: ExitConfig,
    options: Options,
    out: Path,
    log: Log,
) -> Trained:
    net = ExitNet(config, seed=options.seed)
    if options.init:
        net.load(_earlier(store.read(options.init), config))
    net = net.to(target.info.device)
    own = TrainOptions(
        lr=options.lr,
        rows=options.batch_rows,
        steps=options.steps if config.kind == "deep" else 1,
        epochs=options.epochs,
        minutes=options.minutes,
        seed=options.seed,
    )
    test = exits.split_texts(features, "test")

    def feed(texts: Sequence[int]) -> Feed:
        return Feed(features, target, config, teacher, texts, options.batch_rows)

    def note(row: dict[str, Any]) -> None:
        log({"stage": "train", "layer": config.layer, "kind": config.kind, **row})

    if config.kind != "lens":
        training = feed(exits.split_texts(features, "modules"))
        checkpoint = out / f"exit_{config.layer}.pt"
        exits.train(net, teacher, training, feed(test[::4]), own, log=note, checkpoint=checkpoint)
        checkpoint.unlink(missing_ok=True)
    result = Trained(config, net.tensors(), _measure(net, teacher, feed(test), own))
    for domain in sorted({features.domains[i] for i in test}):
        part = feed([i for i in test if features.domains[i] == domain])
        result.domains[domain] = _measure(net, teacher, part, own)
    note({"done": True, **asdict(result.figures)})
    return result


def _earlier(stored: store.Stored, config: ExitConfig) -> dict[str, torch.Tensor]:
    """Tensors to start from. Raises OptionError when no stored module is of the kind."""
    prefix = f"{_start(stored, config.kind, config.layer).layer}."
    own = stored.tensors.items()
    return {name.removeprefix(prefix): value for name, value in own if name.startswith(prefix)}


def _start(stored: store.Stored, kind: str, layer: int) -> ExitConfig:
    """The stored module to start from. Raises OptionError when none is of the kind."""
    alike = [each for each in stored.configs if each.kind == kind]
    if not alike:
        raise OptionError("init", f"holds no module of kind {kind!r}")
    below = [each for each in alike if each.layer <= layer]
    return max(below, key=lambda each: each.layer) if below else alike[0]


def _measure(net: ExitNet, teacher: Teacher, feed: Feed, options: TrainOptions) -> Figures:
    return exits.evaluate(net, teacher, feed, options.steps, options.autocast)


def _save(
    target: FusedTarget,
    ids: Sequence[int],
    made: Sequence[Trained],
    features: Features,
    options: Options,
    out: Path,
) -> None:
    """Write what is trained so far: a run that is stopped keeps its finished modules."""
    texts = exits.split_texts(features, "modules")
    outputs = sum(features.length(i) - int(features.starts[i]) for i in texts)
    facts = {
        "model": target.info.name,
        "texts": len(texts),
        "output_tokens": outputs,
        "steps": options.steps,
        "held_out": {
            str(each.config.layer): {
                "all": asdict(each.figures),
                **{domain: asdict(figures) for domain, figures in each.domains.items()},
            }
            for each in made
        },
    }
    modules = [(each.config, each.tensors) for each in made]
    store.save(out, target.info.fingerprint, ids, modules, facts)

"""``hasten train dflash``: from training text to a folder with a drafter.

Three stages, each of which may be left out: the drafter learns the target's text; the length head
is fitted, the drafter frozen; on-policy rounds teach both. After each the drafter is written and
measured on held-out text. The same command goes on where a stopped one stood.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hasten.api import LLM
from hasten.dflash import store
from hasten.dflash.net import DFlashNet
from hasten.errors import CapabilityError, OptionError
from hasten.targets.fused import FusedTarget
from hasten.train.dflash import start
from hasten.train.dflash.evaluate import Figures, evaluate
from hasten.train.dflash.feed import Feed, Log, States, open_states
from hasten.train.dflash.files import replacing
from hasten.train.dflash.loop import EVERY_S, Bounds, Trainer
from hasten.train.dflash.objectives import Drafter, Objective
from hasten.train.dflash.options import Options
from hasten.train.dflash.texts import Corpus, measured_texts, read_corpus, round_texts
from hasten.train.exits import Teacher
from hasten.train.features import Text

STAGES = ("sft", "length", "rounds")
REPORT = "report.json"

Measured = dict[str, Figures]
"""By domain, and ``all``."""


def fused(llm: LLM) -> FusedTarget:
    """The model's target. Raises CapabilityError for one that can't be trained for."""
    target = llm.target
    if not isinstance(target, FusedTarget):
        raise CapabilityError(
            f"{target.info.name} runs in the {target.info.engine} engine: drafters are trained for "
            "models of the fused family (see `hasten info`)"
        )
    _ = target.torch_decoder  # refuses native kernels
    return target


def run(
    llm: LLM,
    data: Sequence[str | Path],
    out: str | Path,
    options: Options,
    *,
    round_data: Sequence[str | Path] = (),
    work: str | Path | None = None,
    log: Log = lambda row: None,
    every_s: float = EVERY_S,
) -> dict[str, Any]:
    """Train a drafter and write it to `out`; what it reached after each stage, as `report.json`.

    data        folders or files of rows (`hasten.train.rows`)
    round_data  where the prompts of rounds come from; empty: `data`
    work        keeps the target's states; default ``OUT/states``
    log         gets dictionaries: ``stage``, and what is known of the step
    every_s     seconds between checkpoints

    Raises CapabilityError for a model outside the fused family, OptionError for options that don't
    fit it or ask for nothing, data without texts, a folder that holds another run, and a place that
    can't be written to; ModelError for a folder to start from that isn't a drafter of this model.
    """
    target = fused(llm)
    limit = target.info.context_limit
    corpus = read_corpus(
        data,
        round_data,
        share=options.share,
        test=options.test,
        seed=options.seed,
        limit=limit,
    )
    net, ids = first_weights(llm, target, corpus, options)
    fits = net.config.length_head and options.head.blocks
    if not (options.sft.steps or fits or options.rounds.count):
        problem = "0, no length head to be fitted and no rounds: there is nothing to do"
        raise OptionError("steps", problem, "Ask for one of them")
    return _Run(llm, target, corpus, options, net, ids, Path(out), work, log, every_s).go()


def measure(
    llm: LLM,
    data: Sequence[str | Path],
    folder: str | Path,
    options: Options,
    *,
    split: str = "test",
) -> Measured:
    """Figures of the drafter in `folder` on greedy answers of a split (the only one that must be in
    the data), its states computed for the purpose. Raises as `run` does."""
    target = fused(llm)
    net, ids = start.from_folder(target, str(folder), options, add_head=False)
    limit = target.info.context_limit
    texts = measured_texts(data, split, count=options.test, seed=options.seed, limit=limit)
    feed = _feed(target, net, open_states(target, texts, (), None, _quiet), texts, options)
    return evaluate(_drafter(target, net, ids), feed)


def first_weights(
    llm: LLM, target: FusedTarget, corpus: Corpus, options: Options
) -> tuple[DFlashNet, list[int] | None]:
    """The network as it begins, and the ids it drafts (None: all)."""
    if options.init not in ("target", "random"):
        return start.from_folder(target, options.init, options)
    shape, info = options.shape, target.info
    ids = None
    if 0 < shape.vocabulary < info.vocab_size:
        ids = start.draft_vocabulary(corpus.modules, shape.vocabulary, sorted(info.eos_ids))
    config = start.make_config(
        target,
        shape,
        mask_token=start.mask_token(target, llm.tokenizer, corpus.modules, shape.mask_token),
        vocabulary=len(ids) if ids is not None else info.vocab_size,
        lookahead=options.head.lookahead,
    )
    return start.new_net(target, config, options), ids


def _quiet(row: dict[str, Any]) -> None:
    """Nothing to say."""


def _drafter(target: FusedTarget, net: DFlashNet, ids: Sequence[int] | None) -> Drafter:
    whole = range(target.info.vocab_size)
    teacher = Teacher.of(target, ids if ids is not None else whole, torch.float32)
    return Drafter(net, teacher, target.torch_decoder.embeddings, target.ends().head)


def _feed(
    target: FusedTarget,
    net: DFlashNet,
    states: States,
    texts: Sequence[Text],
    options: Options,
    *,
    first: int = 0,
    last: bool = False,
) -> Feed:
    """Texts `first`, `first` + 1, ... of the states."""
    return Feed(
        states,
        range(first, first + len(texts)),
        net.config.taps,
        last=target.info.num_layers if last else 0,
        device=target.info.device,
        size=options.sft.texts,
        seed=options.seed,
    )


class _Run:
    """One call of `run`, its texts read and its network made."""

    def __init__(
        self,
        llm: LLM,
        target: FusedTarget,
        corpus: Corpus,
        options: Options,
        net: DFlashNet,
        ids: list[int] | None,
        out: Path,
        work: str | Path | None,
        log: Log,
        every_s: float,
    ) -> None:
        self._llm, self._target, self._corpus, self._options = llm, target, corpus, options
        self._net, self._ids, self._out, self._log = net, ids, out, log
        self._work = Path(work) if work else out / "states"
        self._objective = Objective(_drafter(target, net, ids), options)
        self._trainer = Trainer(
            net,
            out,
            self._digest(),
            options,
            device=target.info.device,
            log=log,
            every_s=every_s,
        )

    def go(self) -> dict[str, Any]:
        """Stage after stage, those that are done left out."""
        self._trainer.write_curve()  # finds out whether the folder takes it
        stages = (self._sft, self._length, self._on_policy)
        at = self._trainer.place.stage
        done = STAGES.index(at) if at else 0
        for stage in stages[done:]:
            stage()
        return self._trainer.facts

    def _digest(self) -> str:
        """Of what may not change between a run and the one that continues it."""
        said = self._options.to_json()
        for part in ("sft", "head"):
            said[part].pop("minutes")
        for name in ("minutes", "count", "steps"):
            said["rounds"].pop(name)
        for name in ("states", "test"):
            said.pop(name)
        digest = hashlib.sha256(json.dumps([self._target.info.fingerprint, said]).encode())
        for text in self._corpus.modules:
            digest.update(repr((text.prompt, text.output)).encode())
        return digest.hexdigest()

    # -- stages ----------------------------------------------------------------------------------

    def _sft(self) -> None:
        sft, trainer = self._options.sft, self._trainer
        bounds = Bounds(sft.steps, sft.minutes, sft.warmup, sft.lr_end / sft.lr)
        trainer.begin("sft", [(self._drafter_parameters(), sft.lr)], bounds)
        if not trainer.over():
            trainer.run(self._training_feed(), self._objective.sft)
        if sft.steps:
            self._finish("sft")

    def _length(self) -> None:
        head, sft, config = self._options.head, self._options.sft, self._net.config
        if not (config.length_head and head.blocks):
            return
        steps = math.ceil(head.blocks / (sft.texts * sft.anchors))
        parameters = self._net.thresh_head_two_model.parameters()
        bounds = Bounds(steps, head.minutes, end=0.03)
        self._trainer.begin("length", [(parameters, head.lr)], bounds)
        if not self._trainer.over():
            # Texts of the policy split, as many as are needed: on those it has learned from the
            # drafter is right too often.
            texts = self._corpus.policy or self._corpus.modules
            texts = texts[: math.ceil(head.blocks / sft.anchors)]
            states = self._open(texts, "policy", last=False)
            feed = _feed(self._target, self._net, states, texts, self._options)
            self._trainer.run(feed, self._objective.length)
        self._finish("length")

    def _on_policy(self) -> None:
        rounds, trainer = self._options.rounds, self._trainer
        if not rounds.count:
            return
        parts = [(self._drafter_parameters(), rounds.lr)]
        if self._net.config.length_head:
            parts.append((list(self._net.thresh_head_two_model.parameters()), rounds.head_lr))
        trainer.begin("rounds", parts, Bounds(rounds.steps or sys.maxsize, rounds.minutes))
        place = trainer.place
        while place.round < rounds.count and not trainer.over():
            self._round(place.round)
            if trainer.over():
                break
            place.round, place.epoch, place.batch = place.round + 1, 0, 0
            trainer.save()
        self._finish("rounds")

    def _round(self, number: int) -> None:
        """Answers by the deployed drafter, its states, some passes over them, the swap."""
        rounds, folder = self._options.rounds, self._out / "rounds"
        deployed = folder / "drafter"
        started = time.monotonic()
        if rounds.writer == "deployed":
            self._write(deployed)
        kept = folder / f"round_{number:03d}.jsonl"
        texts = round_texts(self._llm, self._corpus.asked, number, rounds, deployed, kept)
        rkl = rounds.objective == "rkl"
        if texts:  # else no answer has an anchor
            states = self._open(texts, "round", last=rkl)
            feed = _feed(self._target, self._net, states, texts, self._options, last=rkl)
        self._trainer.place.seconds += time.monotonic() - started
        if not texts:
            return
        objective = self._objective.distil if rkl else self._objective.control
        self._trainer.run(feed, objective, epochs=rounds.passes)
        tokens = sum(len(text.output) for text in texts)
        self._log({"stage": "rounds", "round": number, "texts": len(texts), "tokens": tokens})

    # -- what stages share -----------------------------------------------------------------------

    def _drafter_parameters(self) -> list[nn.Parameter]:
        """All but the length head's."""
        named = self._net.named_parameters()
        return [value for name, value in named if not name.startswith("thresh_head")]

    def _open(self, texts: Sequence[Text], name: str, *, last: bool) -> States:
        """The states of `texts`, kept under the working folder's `name` or computed on the fly."""
        layers = sorted({*self._net.config.taps, *([self._target.info.num_layers] if last else [])})
        folder = self._work / name if self._options.states == "file" else None
        return open_states(self._target, texts, layers, folder, self._log)

    def _training_feed(self) -> Feed:
        states = self._open(self._corpus.modules, "sft", last=False)
        return _feed(self._target, self._net, states, self._corpus.modules, self._options)

    def _finish(self, stage: str) -> None:
        """Write the drafter, measure it once, and keep the figures."""
        trainer, texts = self._trainer, self._corpus.test
        if trainer.facts.get(stage, {}).get("step") != trainer.place.step:
            trainer.save()  # measuring takes a while, and may be stopped
            states = self._open(texts, "test", last=False)
            feed = _feed(self._target, self._net, states, texts, self._options)
            found = evaluate(self._objective.drafter, feed)
            trainer.facts[stage] = {
                "step": trainer.place.step,
                "rounds": trainer.place.round,
                "minutes": round(trainer.place.seconds / 60, 2),
                "held_out": {name: each.to_json() for name, each in found.items()},
            }
            self._log({"stage": stage, "held_out": {k: v.tau for k, v in found.items()}})
        self._write(self._out)
        trainer.save()
        report = {"options": self._options.to_json(), "stages": trainer.facts}
        with replacing(self._out / REPORT) as scratch:
            scratch.write_text(json.dumps(report, indent=1) + "\n")

    def _write(self, folder: Path) -> None:
        """The drafter as it is, in the layout that serving loads."""
        modules = self._corpus.modules
        about = {
            "target": self._target.info.fingerprint,
            "model": self._target.info.name,
            "texts": len(modules),
            "output_tokens": sum(len(text.output) for text in modules),
            "held_out": {
                stage: {name: each["tau"] for name, each in facts["held_out"].items()}
                for stage, facts in self._trainer.facts.items()
            },
        }
        ids = None if self._ids is None else torch.tensor(self._ids)
        store.save(folder, self._net.config, self._net, ids, about)

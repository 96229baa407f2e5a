"""``hasten train eagle3``: from training text to a folder with a drafter.

The drafter learns the target's distribution on its own text, several draft steps at once; it is
written in the layout of speculators and measured on held-out text. The same command goes on where a
stopped one stood.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from hasten.api import LLM
from hasten.eagle3 import store
from hasten.eagle3.net import Eagle3Net
from hasten.errors import OptionError
from hasten.targets.fused import FusedTarget
from hasten.train.dflash.feed import Feed, Log, States, open_states
from hasten.train.dflash.loop import EVERY_S, Bounds, Trainer
from hasten.train.dflash.run import REPORT, Measured, _quiet, fused
from hasten.train.dflash.start import draft_vocabulary
from hasten.train.dflash.texts import Corpus, read_corpus
from hasten.train.eagle3 import start
from hasten.train.eagle3.evaluate import evaluate
from hasten.train.eagle3.objective import Objective
from hasten.train.eagle3.options import Options
from hasten.train.exits import Teacher
from hasten.train.features import Text

STAGE = "sft"


def run(
    llm: LLM,
    data: Sequence[str | Path],
    out: str | Path,
    options: Options,
    *,
    work: str | Path | None = None,
    log: Log = lambda row: None,
    every_s: float = EVERY_S,
) -> dict[str, Any]:
    """Train a drafter and write it to `out`; what it reached, as `report.json`.

    data     folders or files of rows (`hasten.train.rows`)
    work     keeps the target's states; default ``OUT/states``
    log      gets dictionaries: ``stage``, and what is known of the step
    every_s  seconds between checkpoints

    Raises CapabilityError for a model outside the fused family, OptionError for options that don't
    fit it, data without texts, and a folder that holds another run; ModelError for a folder to
    start from that isn't a drafter of this model.
    """
    target = fused(llm)
    corpus = _corpus(target, data, options, options.share)
    pupil = _Pupil.begin(target, corpus, options)
    place = Path(work) if work else Path(out) / "states"
    return _Run(target, corpus, options, pupil, Path(out), place, log, every_s).go()


def measure(
    llm: LLM,
    data: Sequence[str | Path],
    folder: str | Path,
    options: Options,
    *,
    split: str = "test",
) -> Measured:
    """Figures of the drafter in `folder` on greedy answers of a split, its states computed for
    the purpose. Raises as `run` does."""
    target = fused(llm)
    pupil = _Pupil.of_folder(target, str(folder))
    corpus = _corpus(target, data, options, 1.0)
    texts = {"modules": corpus.modules, "policy": corpus.policy, "test": corpus.test}[split]
    if not texts:
        raise OptionError("split", f"there is no text of the split {split!r}", "Take another")
    texts = texts[: options.test]
    feed = _feed(target, pupil, open_states(target, texts, (), None, _quiet), texts, options)
    return evaluate(pupil.objective(options), feed, options.length)


def _corpus(
    target: FusedTarget, data: Sequence[str | Path], options: Options, share: float
) -> Corpus:
    limit = target.info.context_limit
    return read_corpus(data, (), share=share, test=options.test, seed=options.seed, limit=limit)


class _Pupil:
    """A drafter that learns: its network, its draft vocabulary (None: all ids) and its own table of
    embeddings (None: the target's)."""

    def __init__(
        self,
        target: FusedTarget,
        net: Eagle3Net,
        ids: list[int] | None,
        embeddings: torch.Tensor | None,
    ) -> None:
        self._target, self.net, self.ids, self.embeddings = target, net, ids, embeddings

    @classmethod
    def begin(cls, target: FusedTarget, corpus: Corpus, options: Options) -> _Pupil:
        """As the options say."""
        if options.init not in ("target", "random"):
            return cls.of_folder(target, options.init)
        info, size = target.info, options.shape.vocabulary
        ids = None
        if 0 < size < info.vocab_size:
            ids = draft_vocabulary(corpus.modules, size, sorted(info.eos_ids))
        count = info.vocab_size if ids is None else len(ids)
        config = start.make_config(target, options.shape, count)
        return cls(target, start.new_net(target, config, ids, options), ids, None)

    @classmethod
    def of_folder(cls, target: FusedTarget, folder: str) -> _Pupil:
        """As a folder has it."""
        return cls(target, *start.from_folder(target, folder))

    def objective(self, options: Options) -> Objective:
        """What it learns by."""
        target = self._target
        ids = self.ids if self.ids is not None else range(target.info.vocab_size)
        table = target.torch_decoder.embeddings if self.embeddings is None else self.embeddings
        return Objective(self.net, Teacher.of(target, ids, torch.float32), table, options)


def _feed(
    target: FusedTarget,
    pupil: _Pupil,
    states: States,
    texts: Sequence[Text],
    options: Options,
    *,
    last: bool = False,
) -> Feed:
    return Feed(
        states,
        range(len(texts)),
        pupil.net.config.taps,
        last=target.info.num_layers if last else 0,
        device=target.info.device,
        size=options.sft.texts,
        seed=options.seed,
    )


class _Run:
    """One call of `run`, its texts read and its network made."""

    def __init__(
        self,
        target: FusedTarget,
        corpus: Corpus,
        options: Options,
        pupil: _Pupil,
        out: Path,
        work: Path,
        log: Log,
        every_s: float,
    ) -> None:
        self._target, self._corpus, self._options = target, corpus, options
        self._pupil, self._out, self._work, self._log = pupil, out, work, log
        self._objective = pupil.objective(options)
        # The trainer asks nothing of network and options that only DFlash's have.
        self._trainer = Trainer(
            cast(Any, pupil.net),
            out,
            self._digest(),
            cast(Any, options),
            device=target.info.device,
            log=log,
            every_s=every_s,
        )

    def go(self) -> dict[str, Any]:
        """Learn, measure, write."""
        sft, trainer = self._options.sft, self._trainer
        bounds = Bounds(sft.steps, sft.minutes, sft.warmup, sft.lr_end / sft.lr)
        trainer.begin(STAGE, [(list(self._pupil.net.parameters()), sft.lr)], bounds)
        if not trainer.over():
            trainer.run(self._open(self._corpus.modules, "sft", last=True), self._objective)
        self._finish()
        return trainer.facts

    def _digest(self) -> str:
        """Of what may not change between a run and the one that continues it."""
        said = self._options.to_json()
        said["sft"].pop("minutes")
        for name in ("states", "test", "length"):
            said.pop(name)
        digest = hashlib.sha256(json.dumps([self._target.info.fingerprint, said]).encode())
        for text in self._corpus.modules:
            digest.update(repr((text.prompt, text.output)).encode())
        return digest.hexdigest()

    def _open(self, texts: Sequence[Text], name: str, *, last: bool = False) -> Feed:
        """Batches of `texts`, with the target's states kept under the working folder's `name` or
        computed on the fly."""
        layers = {*self._pupil.net.config.taps, *([self._target.info.num_layers] if last else [])}
        folder = self._work / name if self._options.states == "file" else None
        states = open_states(self._target, texts, sorted(layers), folder, self._log)
        return _feed(self._target, self._pupil, states, texts, self._options, last=last)

    def _finish(self) -> None:
        """Measure the drafter once, write it, and keep the figures."""
        trainer, length = self._trainer, self._options.length
        said = trainer.facts.get(STAGE, {})
        if (said.get("step"), said.get("length")) != (trainer.place.step, length):
            found = evaluate(self._objective, self._open(self._corpus.test, "test"), length)
            trainer.facts[STAGE] = {
                "step": trainer.place.step,
                "length": length,
                "minutes": round(trainer.place.seconds / 60, 2),
                "held_out": {name: each.to_json() for name, each in found.items()},
            }
            self._log({"stage": STAGE, "held_out": {k: v.tau for k, v in found.items()}})
        self._write()
        trainer.save()
        report = {"options": self._options.to_json(), "stages": trainer.facts}
        (self._out / REPORT).write_text(json.dumps(report, indent=1) + "\n")

    def _write(self) -> None:
        """The drafter as it is, in the layout that serving loads."""
        modules, info, pupil = self._corpus.modules, self._target.info, self._pupil
        facts = self._trainer.facts[STAGE]
        about = {
            "target": info.fingerprint,
            "model": info.name,
            "texts": len(modules),
            "output_tokens": sum(len(text.output) for text in modules),
            "chain": facts["length"],
            "held_out": {name: each["tau"] for name, each in facts["held_out"].items()},
        }
        store.save(
            self._out,
            pupil.net.config,
            pupil.net,
            None if pupil.ids is None else torch.tensor(pupil.ids),
            about,
            embeddings=pupil.embeddings,
            architecture=info.architecture,
            tokens=self._options.length,
        )

"""What ``hasten train eagle3`` is told."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hasten.errors import OptionError
from hasten.train.checks import above, least, one_of, schedule
from hasten.train.dflash.options import STATES


@dataclass(frozen=True, slots=True)
class Shape:
    """The drafter's sizes; what isn't named is the target's own (hidden size, heads, MLP).

    taps         0-based layers of the target whose outputs are fused; empty: as public checkpoints
                 choose three
    vocabulary   ids that can be drafted; 0: all
    rope_theta   base of the rotary embedding
    norm_before_residual, norm_before_fc   see `hasten.eagle3.config.Eagle3Config`
    """

    taps: tuple[int, ...] = ()
    vocabulary: int = 8192
    rope_theta: float = 10_000.0
    norm_before_residual: bool = True
    norm_before_fc: bool = False

    def __post_init__(self) -> None:
        least("vocabulary", self.vocabulary, 0)
        above("rope_theta", self.rope_theta)


@dataclass(frozen=True, slots=True)
class SFT:
    """Learning the target's distribution on its own text.

    steps, minutes  whichever is over first; the learning rate falls along a cosine to `lr_end`
                    by then, after `warmup` (a share of the way)
    texts           of a step
    unroll          draft steps that are learned together (training-time test)
    decay           weight of step s: decay^s
    """

    steps: int = 1700
    minutes: float = 25.0
    texts: int = 4
    unroll: int = 3
    decay: float = 0.8
    lr: float = 1e-3
    lr_end: float = 1e-4
    warmup: float = 0.05

    def __post_init__(self) -> None:
        schedule(self.steps, self.minutes, self.lr, self.lr_end, self.warmup)
        least("texts", self.texts, 1)
        least("unroll", self.unroll, 1)
        above("decay", self.decay)


@dataclass(frozen=True, slots=True)
class Options:
    """All of it.

    init      ``target``: head and last norm from the target's; ``random``; or a folder of a drafter
    states    ``file``: the target's states are computed once and kept on disk (2 bytes a number);
              ``fly``: anew for every batch
    share     part of the training texts to use (for learning curves)
    test      held-out texts to measure on, at most
    length    tokens of the chain that is measured
    autocast  bfloat16 products (for a GPU)
    """

    shape: Shape = field(default_factory=Shape)
    sft: SFT = field(default_factory=SFT)
    init: str = "target"
    states: str = "file"
    share: float = 1.0
    test: int = 128
    length: int = 4
    weight_decay: float = 0.0
    grad_clip: float = 0.5
    seed: int = 0
    autocast: bool = False

    def __post_init__(self) -> None:
        one_of("states", self.states, STATES)
        least("test", self.test, 1)
        least("length", self.length, 1)
        if not 0 < self.share <= 1:
            raise OptionError("share", f"must be above 0 and at most 1, got {self.share}")
        if not self.init:
            raise OptionError("init", "names nothing", "target, random, or a folder")

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

"""What ``hasten train dflash`` is told."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hasten.errors import OptionError
from hasten.train.checks import above, least, one_of, schedule

OBJECTIVES = ("rkl", "sft")
STATES = ("file", "fly")
WRITERS = ("deployed", "batched", "rows")


@dataclass(frozen=True, slots=True)
class Shape:
    """The drafter's sizes; what isn't named is the target's own (hidden size, heads, MLP).

    layers       of the drafter
    block        slots of a block, the anchor included
    taps         0-based layers of the target whose outputs are fused; empty: as the public
                 checkpoints choose `tap_count` of them
    vocabulary   ids that can be drafted; 0: all
    mask_token   id whose embedding stands in the empty slots; None: a row that no text uses
    head         width of the length head; 0: none
    rope_theta   base of the rotary embedding
    """

    layers: int = 2
    block: int = 8
    taps: tuple[int, ...] = ()
    tap_count: int = 3
    vocabulary: int = 8192
    mask_token: int | None = None
    head: int = 64
    rope_theta: float = 100_000.0

    def __post_init__(self) -> None:
        least("layers", self.layers, 1)
        least("block", self.block, 2)
        least("taps", self.tap_count, 1)
        least("vocabulary", self.vocabulary, 0)
        least("length_head", self.head, 0)
        above("rope_theta", self.rope_theta)


@dataclass(frozen=True, slots=True)
class SFT:
    """Learning the target's text.

    steps, minutes  whichever is over first; the learning rate falls along a cosine to `lr_end`
                    by then, after `warmup` (a share of the way)
    texts, anchors  of a step: texts, and blocks drawn in each
    gamma           weight of slot k: exp(-(k-1)/gamma)
    """

    steps: int = 1700
    minutes: float = 25.0
    texts: int = 4
    anchors: int = 32
    gamma: float = 4.0
    lr: float = 2e-3
    lr_end: float = 1e-4
    warmup: float = 0.05

    def __post_init__(self) -> None:
        schedule(self.steps, self.minutes, self.lr, self.lr_end, self.warmup)
        least("texts", self.texts, 1)
        least("anchors", self.anchors, 1)
        above("gamma", self.gamma)


@dataclass(frozen=True, slots=True)
class Rounds:
    """On-policy rounds: answers by the deployed system, learned from, the weights swapped.

    count         of rounds; minutes and steps (0: as many as it takes): for all of them, answers
                  and states included; whichever is over first
    prompts       answered in a round; passes: times that its answers are learned from
    writer        ``deployed``: target and drafter answer, as in serving; ``batched``: the target
                  answers many prompts at once (greedy answers are the same, drafts don't change
                  them); ``rows``: the rows' own greedy answers are taken
    objective     ``rkl``: alpha * cross entropy with the target's first choice, (1 - alpha) *
                  reverse KL; ``sft``: the base loss on the same text (the control)
    temperature   of both distributions in the divergence
    clip          of a slot's divergence; 0: none. `clip_before_norm` False, as published: it is
                  clipped after the division by the batch's summed weights W, so that the cap in
                  nats is clip * W; True: clip is in nats
    lr, head_lr   of the drafter and of the length head; they stay as they are
    """

    count: int = 0
    minutes: float = 15.0
    prompts: int = 128
    passes: int = 2
    max_new_tokens: int = 208
    writer: str = "deployed"
    objective: str = "rkl"
    alpha: float = 0.8
    temperature: float = 1.0
    clip: float = 0.01
    clip_before_norm: bool = False
    lr: float = 3e-4
    head_lr: float = 2e-4
    steps: int = 0

    def __post_init__(self) -> None:
        least("rounds", self.count, 0)
        least("round_steps", self.steps, 0)
        above("round_minutes", self.minutes)
        least("round_prompts", self.prompts, 1)
        least("passes", self.passes, 1)
        least("max_new_tokens", self.max_new_tokens, 2)
        one_of("writer", self.writer, WRITERS)
        one_of("objective", self.objective, OBJECTIVES)
        if not 0 <= self.alpha <= 1:
            raise OptionError("alpha", f"must be from 0 to 1, got {self.alpha}")
        above("temperature", self.temperature)
        least("clip", self.clip, 0)
        above("round_lr", self.lr)
        above("head_lr", self.head_lr)


@dataclass(frozen=True, slots=True)
class Head:
    """The length head learned off line, the drafter frozen.

    blocks      seen in all, minutes: at most; a step takes as many texts and anchors as one of
                `SFT`
    everywhere  anchors in the prompts too (as published), not in the answers only
    lookahead   slots beyond the accepted ones that its labels ask for
    """

    blocks: int = 20_000
    minutes: float = 5.0
    lr: float = 1e-3
    everywhere: bool = False
    lookahead: int = 1

    def __post_init__(self) -> None:
        least("head_blocks", self.blocks, 0)
        above("head_minutes", self.minutes)
        above("head_lr", self.lr)
        least("lookahead", self.lookahead, 0)


@dataclass(frozen=True, slots=True)
class Options:
    """All of it.

    init      ``target``: from the target's own layers; ``random``; or a folder of a drafter
    states    ``file``: the target's states are computed once and kept on disk (2 bytes a number);
              ``fly``: anew for every batch
    share     part of the training texts to use (for learning curves)
    test      held-out texts to measure on, at most
    autocast  bfloat16 products: for a GPU, or a CPU that has them (1.4 times the steps)
    """

    shape: Shape = field(default_factory=Shape)
    sft: SFT = field(default_factory=SFT)
    head: Head = field(default_factory=Head)
    rounds: Rounds = field(default_factory=Rounds)
    init: str = "target"
    states: str = "file"
    share: float = 1.0
    test: int = 128
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    seed: int = 0
    autocast: bool = False

    def __post_init__(self) -> None:
        one_of("states", self.states, STATES)
        least("test", self.test, 1)
        if not 0 < self.share <= 1:
            raise OptionError("share", f"must be above 0 and at most 1, got {self.share}")
        least("weight_decay", self.weight_decay, 0)
        above("grad_clip", self.grad_clip)
        if not -(2**63) <= self.seed < 2**64:  # what torch takes
            raise OptionError("seed", f"must be an integer of 64 bits, got {self.seed}")
        if not self.init:
            raise OptionError("init", "names nothing", "target, random, or a folder")

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

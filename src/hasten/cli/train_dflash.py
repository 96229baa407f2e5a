"""``hasten train dflash``: a block drafter for a model, from text that it has made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress as Bar

from hasten.cli import options as opt
from hasten.cli.guard import INTERRUPTED
from hasten.cli.screen import err, load_model, out, table
from hasten.cli.train_exits import Data, Dtype
from hasten.errors import OptionError

if TYPE_CHECKING:
    from hasten.train.dflash.options import Options

_SHAPE, _SFT, _ROUNDS, _HEAD = "The drafter", "Learning text", "On-policy rounds", "Length head"


def _option(*names: str, help: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


OutFolder = Annotated[
    Path,
    _option("--out", "-o", metavar="DIR", help="Folder of the drafter.", show_default=False),
]
Work = Annotated[
    Path | None,
    _option(
        "--work",
        metavar="DIR",
        help="Where the target's states are kept between runs: about 3.5 GB a million tokens.",
        show_default="OUT/states",
    ),
]
States = Annotated[
    str, _option("--states", metavar="file|fly", help="Keep states, or compute them every time.")
]
Evaluate = Annotated[
    bool, _option("--evaluate", help="Train nothing: measure the drafter in DIR on --split.")
]
Split = Annotated[
    str, _option("--split", metavar="NAME", help="With --evaluate: test, policy or modules.")
]
Test = Annotated[int, _option("--test", help="Held-out texts to measure on, at most.")]
Share = Annotated[float, _option("--share", help="Part of the training texts to use.")]
Init = Annotated[
    str,
    _option(
        "--init", metavar="target|random|DIR", help="First weights: from the model, or a drafter."
    ),
]
Seed = Annotated[int, _option("--seed", help="Of first weights, texts' order and anchors.")]
Autocast = Annotated[
    bool, _option("--autocast", help="bfloat16 products, where the device is quick at them.")
]

Layers = Annotated[int, _option("--layers", panel=_SHAPE, help="Layers of the drafter.")]
Block = Annotated[int, _option("--block", panel=_SHAPE, help="Slots of a block, with the anchor.")]
Taps = Annotated[
    str,
    _option(
        "--taps",
        panel=_SHAPE,
        metavar="LAYER,...",
        help="Layers of the model, from 0, whose outputs it sees.",
        show_default="three, as public ones choose them",
    ),
]
Vocabulary = Annotated[
    int, _option("--vocabulary", panel=_SHAPE, help="Ids that can be drafted; 0: all.")
]
MaskToken = Annotated[
    int | None,
    _option(
        "--mask-token",
        panel=_SHAPE,
        metavar="ID",
        help="Stands in the empty slots.",
        show_default="a row that no text uses",
    ),
]

Steps = Annotated[int, _option("--steps", panel=_SFT, help="At most; 0: none.")]
Minutes = Annotated[float, _option("--minutes", panel=_SFT, help="At most.")]
Texts = Annotated[int, _option("--texts", panel=_SFT, help="Texts of a step.")]
Anchors = Annotated[int, _option("--anchors", panel=_SFT, help="Blocks drawn in a text.")]
Gamma = Annotated[
    float,
    _option("--gamma", panel=_SFT, help="Slot k weighs exp(-(k-1)/gamma); 7 for blocks of 16."),
]
Rate = Annotated[float, _option("--lr", panel=_SFT, help="Learning rate at first.")]
RateEnd = Annotated[float, _option("--lr-end", panel=_SFT, help="Learning rate at the end.")]

RoundCount = Annotated[int, _option("--rounds", panel=_ROUNDS, help="At most; 0: none.")]
RoundMinutes = Annotated[float, _option("--round-minutes", panel=_ROUNDS, help="For all, at most.")]
RoundSteps = Annotated[
    int, _option("--round-steps", panel=_ROUNDS, help="For all, at most; 0: no limit.")
]
RoundData = Annotated[
    list[str] | None,
    _option(
        "--round-data",
        panel=_ROUNDS,
        metavar="DIR|FILE",
        help="Rows whose prompts are asked; may be given again.",
        show_default="those of --data, unused ones first",
    ),
]
Prompts = Annotated[int, _option("--round-prompts", panel=_ROUNDS, help="Asked in a round.")]
Passes = Annotated[int, _option("--passes", panel=_ROUNDS, help="Times its answers are seen.")]
NewTokens = Annotated[
    int, _option("--max-new-tokens", "-n", panel=_ROUNDS, help="Longest answer, in tokens.")
]
Writer = Annotated[
    str,
    _option(
        "--writer",
        panel=_ROUNDS,
        metavar="deployed|batched|rows",
        help="Who answers: model and drafter; the model alone, in batches; or the rows' greedy "
        "answers. The text is the same.",
    ),
]
ObjectiveName = Annotated[
    str,
    _option(
        "--objective",
        panel=_ROUNDS,
        metavar="rkl|sft",
        help="Reverse KL, or as in learning text (the control).",
    ),
]
Alpha = Annotated[
    float, _option("--alpha", panel=_ROUNDS, help="Share of the cross entropy; the rest is KL.")
]
Temperature = Annotated[float, _option("--temperature", "-t", panel=_ROUNDS, help="In the KL.")]
Clip = Annotated[
    float,
    _option(
        "--clip",
        panel=_ROUNDS,
        help="Of a slot's KL over the batch's summed weights, as published; 0: none.",
    ),
]
ClipFirst = Annotated[
    bool, _option("--clip-before-norm", panel=_ROUNDS, help="--clip is a slot's KL in nats.")
]
RoundRate = Annotated[float, _option("--round-lr", panel=_ROUNDS, help="Learning rate.")]

Width = Annotated[
    int, _option("--length-head", panel=_HEAD, metavar="WIDTH", help="Of the head; 0: none.")
]
HeadBlocks = Annotated[
    int, _option("--head-blocks", panel=_HEAD, help="It is fitted on before rounds; 0: not.")
]
HeadMinutes = Annotated[float, _option("--head-minutes", panel=_HEAD, help="For that, at most.")]
Everywhere = Annotated[
    bool, _option("--head-everywhere", panel=_HEAD, help="In prompts too, as published.")
]


def dflash(
    data: Data,
    out_folder: OutFolder,
    model: opt.Model = None,
    work: Work = None,
    states: States = "file",
    evaluate: Evaluate = False,
    split: Split = "test",
    test: Test = 128,
    share: Share = 1.0,
    init: Init = "target",
    seed: Seed = 0,
    layers: Layers = 2,
    block: Block = 8,
    taps: Taps = "",
    vocabulary: Vocabulary = 8192,
    mask_token: MaskToken = None,
    steps: Steps = 1700,
    minutes: Minutes = 25.0,
    texts: Texts = 4,
    anchors: Anchors = 32,
    gamma: Gamma = 4.0,
    lr: Rate = 2e-3,
    lr_end: RateEnd = 1e-4,
    rounds: RoundCount = 0,
    round_minutes: RoundMinutes = 15.0,
    round_steps: RoundSteps = 0,
    round_data: RoundData = None,
    round_prompts: Prompts = 128,
    passes: Passes = 2,
    max_new_tokens: NewTokens = 208,
    writer: Writer = "deployed",
    objective: ObjectiveName = "rkl",
    alpha: Alpha = 0.8,
    temperature: Temperature = 1.0,
    clip: Clip = 0.01,
    clip_before_norm: ClipFirst = False,
    round_lr: RoundRate = 3e-4,
    length_head: Width = 64,
    head_blocks: HeadBlocks = 20_000,
    head_minutes: HeadMinutes = 5.0,
    head_everywhere: Everywhere = False,
    autocast: Autocast = False,
    dtype: Dtype = "bfloat16",
    device: opt.Device = None,
) -> None:
    """Train a block drafter, the model frozen, and write it with its held-out figures.

    DIR is then what `--method dflash,model=DIR` takes; its layout is that of the public DFlash
    checkpoints. The drafter learns the model's text; a head that says how much of a block to verify
    is fitted; with --rounds both then learn from the answers of the deployed system. The same
    command goes on where a stopped one stood. DIR/curve.json holds the loss curve, DIR/report.json
    the figures.
    """
    from hasten.train.batched import keep_freed_memory
    from hasten.train.dflash import run
    from hasten.train.dflash.options import SFT, Head, Options, Rounds, Shape

    chosen = Options(
        shape=Shape(layers, block, parse_taps(taps), 3, vocabulary, mask_token, length_head),
        sft=SFT(steps, minutes, texts, anchors, gamma, lr, lr_end),
        head=Head(head_blocks, head_minutes, everywhere=head_everywhere),
        rounds=Rounds(
            rounds,
            round_minutes,
            round_prompts,
            passes,
            max_new_tokens,
            writer,
            objective,
            alpha,
            temperature,
            clip,
            clip_before_norm,
            round_lr,
            steps=round_steps,
        ),
        init=init,
        states=states,
        share=share,
        test=test,
        seed=seed,
        autocast=autocast,
    )
    _refuse_idle(chosen, evaluate, split, work, round_data)
    keep_freed_memory()
    llm = load_model(model, "ar", dtype=dtype, device=device, kernels="torch")
    if evaluate:
        found = run.measure(llm, data, out_folder, chosen, split=split)
        print_figures({name: each.to_json() for name, each in found.items()})
        return
    console = err()
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        try:
            made = run.run(
                llm,
                data,
                out_folder,
                chosen,
                round_data=round_data or (),
                work=work,
                log=_Show(bar, chosen),
            )
        except KeyboardInterrupt:
            note = f"stopped. {out_folder} keeps what is done; the same command goes on"
            console.print(note, soft_wrap=True)
            raise typer.Exit(INTERRUPTED) from None
    for stage, facts in made.items():
        out().print(f"after {stage}, {facts['step']} steps, {facts['minutes']:.1f} min")
        print_figures(facts["held_out"])
    out().print(f"the drafter is in {out_folder}", soft_wrap=True)


def _refuse_idle(
    chosen: Options,
    evaluate: bool,
    split: str,
    work: Path | None,
    round_data: list[str] | None,
) -> None:
    """Raise OptionError for a split that isn't one, and for options that would change nothing."""
    if split not in ("test", "policy", "modules"):
        raise OptionError("split", f"must be test, policy or modules, got {split!r}")
    if split != "test" and not evaluate:
        raise OptionError("split", "goes with --evaluate only", "Leave it out, or add --evaluate")
    if work is not None and chosen.states == "fly":
        raise OptionError("work", "is of no use with --states fly", "Leave one of them out")
    if round_data and not chosen.rounds.count:
        raise OptionError("round_data", "goes with --rounds only", "Add --rounds, or leave it out")


def parse_taps(text: str) -> tuple[int, ...]:
    """``1,14,27``. Raises OptionError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise OptionError("taps", f"must be layers, got {text!r}", "As 1,14,27")
    return tuple(int(part) for part in parts)


class _Show:
    """Progress: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, bar: Bar, options: Options) -> None:
        self._bar, self._options = bar, options
        self._tasks: dict[str, Any] = {}
        self._told: dict[str, float] = {}

    def __call__(self, row: dict[str, Any]) -> None:
        stage, console = row["stage"], self._bar.console
        if "held_out" in row:
            words = ", ".join(f"{name} {tau:.2f}" for name, tau in sorted(row["held_out"].items()))
            console.print(f"after {stage}, tokens a pass on held-out text: {words}", soft_wrap=True)
            return
        if "tokens" in row:
            words = f"round {row['round']}: {row['texts']} answers, {row['tokens']:,} tokens"
            console.print(words, soft_wrap=True)
            return
        at, total = self._amount(row)
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total)
        words = f"{stage} loss {row['loss']:.3f}" if "loss" in row else stage
        self._bar.update(self._tasks[stage], completed=at, total=total, description=words)
        if console.is_terminal or "loss" not in row:
            return
        if row["minutes"] - self._told.get(stage, -1.0) >= 1.0:
            self._told[stage] = row["minutes"]
            step = f"{stage}: step {row['step']}, {row['minutes']:.1f} min"
            console.print(f"{step}, loss {row['loss']:.3f}", soft_wrap=True)

    def _amount(self, row: dict[str, Any]) -> tuple[float, float]:
        """How far a stage is, and of what: whichever limit is nearer."""
        stage = row["stage"]
        if stage == "states":
            return float(row["done"]), float(row["total"])
        if stage == "length":
            head, sft = self._options.head, self._options.sft
            by_steps = row["step"] * sft.texts * sft.anchors / max(head.blocks, 1)
            return 100.0 * max(row["minutes"] / head.minutes, by_steps), 100.0
        if stage == "sft":
            by_time = row["minutes"] / self._options.sft.minutes
            by_steps = row["step"] / max(self._options.sft.steps, 1)
            return 100.0 * max(by_time, by_steps), 100.0
        by_time = row["minutes"] / self._options.rounds.minutes
        return 100.0 * max(by_time, row["round"] / max(self._options.rounds.count, 1)), 100.0


def print_figures(found: dict[str, dict[str, Any]]) -> None:
    """A table of held-out figures by domain: tokens a pass with whole blocks verified, and with
    what the length head asks for."""
    walks = [name for name in found["all"]["walks"] if name != "fixed"]
    lines = table("domain")
    for name in ("texts", "tokens a pass", "covered"):
        lines.add_column(name, justify="right")
    for name in walks:
        lines.add_column(f"at {name}", justify="right")
        lines.add_column("rows a token", justify="right")
    for domain, each in found.items():
        numbers = [f"{each['texts']:,}", f"{each['tau']:.3f}", f"{each['covered']:.3f}"]
        for walk in (each["walks"][name] for name in walks):
            numbers += [f"{walk['tau']:.3f}", f"{walk['rows']:.2f}"]
        lines.add_row(domain, *numbers)
    console = out()
    console.print(lines)
    for name, words in (("slots", "right"), ("reached", "right, and all before them")):
        shares = " ".join(f"{each:.3f}" for each in found["all"][name])
        console.print(f"slots {words}: {shares}", soft_wrap=True)

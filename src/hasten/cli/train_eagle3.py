"""``hasten train eagle3``: an EAGLE-3 drafter for a model, from text that it has made."""

from __future__ import annotations

from typing import Annotated, Any, cast

import typer
from rich.progress import Progress as Bar

from hasten.cli import options as opt
from hasten.cli.guard import INTERRUPTED
from hasten.cli.screen import err, load_model, out, table
from hasten.cli.train_dflash import (
    _SFT,
    Autocast,
    Evaluate,
    Init,
    Minutes,
    OutFolder,
    Rate,
    RateEnd,
    Share,
    Split,
    States,
    Steps,
    Taps,
    Test,
    Texts,
    Vocabulary,
    Work,
    _option,
    _Show,
    parse_taps,
)
from hasten.cli.train_exits import Data, Dtype
from hasten.errors import OptionError

Seed = Annotated[int, _option("--seed", help="Of first weights and texts' order.")]
Length = Annotated[int, _option("--length", help="Tokens of the chain that is measured.")]
Unroll = Annotated[
    int, _option("--unroll", panel=_SFT, help="Draft steps learned together (training-time test).")
]
Decay = Annotated[float, _option("--decay", panel=_SFT, help="Step s weighs decay^s.")]


def eagle3(
    data: Data,
    out_folder: OutFolder,
    model: opt.Model = None,
    work: Work = None,
    states: States = "file",
    evaluate: Evaluate = False,
    split: Split = "test",
    test: Test = 128,
    length: Length = 4,
    share: Share = 1.0,
    init: Init = "target",
    seed: Seed = 0,
    taps: Taps = "",
    vocabulary: Vocabulary = 8192,
    steps: Steps = 1700,
    minutes: Minutes = 25.0,
    texts: Texts = 4,
    unroll: Unroll = 3,
    decay: Decay = 0.8,
    lr: Rate = 1e-3,
    lr_end: RateEnd = 1e-4,
    autocast: Autocast = False,
    dtype: Dtype = "bfloat16",
    device: opt.Device = None,
) -> None:
    """Train an EAGLE-3 drafter, the model frozen, and write it with its held-out figures.

    DIR is then what `--method eagle3,model=DIR` takes; its layout is that of speculators, which
    vLLM reads, too. The drafter learns the model's own distribution on its text, several draft
    steps at once. The same command goes on where a stopped one stood. DIR/curve.json holds the loss
    curve, DIR/report.json the figures.
    """
    from hasten.train.batched import keep_freed_memory
    from hasten.train.eagle3 import run
    from hasten.train.eagle3.options import SFT, Options, Shape

    chosen = Options(
        shape=Shape(parse_taps(taps), vocabulary),
        sft=SFT(steps, minutes, texts, unroll, decay, lr, lr_end),
        init=init,
        states=states,
        share=share,
        test=test,
        length=length,
        seed=seed,
        autocast=autocast,
    )
    if split not in ("test", "policy", "modules"):
        raise OptionError("split", f"must be test, policy or modules, got {split!r}")
    keep_freed_memory()
    llm = load_model(model, "ar", dtype=dtype, device=device, kernels="torch")
    if evaluate:
        found = run.measure(llm, data, out_folder, chosen, split=split)
        print_figures({name: each.to_json() for name, each in found.items()}, length)
        return
    console = err()
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        # Of the options it reads those of stage `sft` alone.
        show = _Show(bar, cast(Any, chosen))
        try:
            made = run.run(llm, data, out_folder, chosen, work=work, log=show)
        except KeyboardInterrupt:
            note = f"stopped. {out_folder} keeps what is done; the same command goes on"
            console.print(note, soft_wrap=True)
            raise typer.Exit(INTERRUPTED) from None
    facts = made[run.STAGE]
    out().print(f"after {facts['step']} steps, {facts['minutes']:.1f} min")
    print_figures(facts["held_out"], length)
    out().print(f"the drafter is in {out_folder}", soft_wrap=True)


def print_figures(found: dict[str, dict[str, Any]], length: int) -> None:
    """A table of held-out figures by domain, and how often each draft step is right."""
    lines = table("domain")
    for name in ("texts", "tokens a pass", "covered"):
        lines.add_column(name, justify="right")
    for domain, each in found.items():
        lines.add_row(domain, f"{each['texts']:,}", f"{each['tau']:.3f}", f"{each['covered']:.3f}")
    console = out()
    console.print(lines)
    console.print(f"of chains of {length}, on the text itself (nothing was generated)")
    for name, words in (("slots", "right"), ("reached", "right, and all before them")):
        shares = " ".join(f"{each:.3f}" for each in found["all"][name])
        console.print(f"steps {words}: {shares}", soft_wrap=True)

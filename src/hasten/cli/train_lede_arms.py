"""``hasten train lede arms``: what the choices of method ``lede`` do, logged and fitted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hasten.cli import options as opt
from hasten.cli.guard import INTERRUPTED
from hasten.cli.screen import err, load_model, out, table
from hasten.cli.train_exits import Data, Dtype

OutFile = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        help="The file to write, as lede_arms.npz.",
        show_default=False,
    ),
]
Documents = Annotated[int, typer.Option("--documents", help="Prompts to answer, at most.")]
Tokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="Longest answer, in tokens.")]
Minutes = Annotated[float, typer.Option("--minutes", help="Stop collecting after so many.")]
Modules = Annotated[
    str,
    typer.Option("--modules", metavar="DIR", help="Exit modules.", show_default="those shipped"),
]
Agent = Annotated[
    str,
    typer.Option(
        "--agent",
        metavar="FILE",
        help="An agent whose chains are a choice too (lede,walk=on).",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Of the prompts, the draws and the network.")]


def arms(
    data: Data,
    out_file: OutFile,
    model: opt.Model = None,
    documents: Documents = 200,
    max_new_tokens: Tokens = 96,
    minutes: Minutes = 20.0,
    modules: Modules = "",
    agent: Agent = "",
    seed: Seed = 0,
    dtype: Dtype = "bfloat16",
    device: opt.Device = None,
) -> None:
    """Let every choice of `lede` draft every round of greedy answers, and fit what they do.

    FILE is then what `--method lede,arms=FILE` takes; FILE.rounds.npz holds the logged rounds.
    Prompts come from the rows' split `policy`.
    """
    from hasten.builtin.lede import LedeOptions
    from hasten.methods import MethodContext
    from hasten.train import lede_arms

    options = lede_arms.Options(documents, max_new_tokens, minutes, seed=seed)
    lede = LedeOptions(modules=modules, agent=agent, walk=bool(agent))
    llm = load_model(model, "ar", dtype=dtype, device=device)
    context = MethodContext(llm.target, llm.tokenizer, _no_other)
    console = err()

    def show(done: int, rounds: int) -> None:
        if done % 10 == 0:
            console.print(f"{done} of {documents} answers, {rounds:,} rounds")

    try:
        made, found = lede_arms.run(context, data, out_file, options, lede, log=show)
    except KeyboardInterrupt:
        console.print("stopped: nothing was written")
        raise typer.Exit(INTERRUPTED) from None
    lines = table("choice")
    lines.add_column("tokens per plain step's time, held out", justify="right")
    for name, score in sorted(found.items(), key=lambda item: item[1]):
        lines.add_row(name, f"{score:.3f}")
    out().print(lines)
    out().print(
        f"{made.facts['rounds']:,} rounds of {made.facts['documents']} answers; the file is "
        f"{out_file}",
        soft_wrap=True,
    )


def _no_other(name: str) -> Any:
    raise AssertionError(f"no other model is loaded here: {name}")

"""``hasten train``: make training text, and the trained parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from hasten.cli import options as opt
from hasten.cli import train_arbiter
from hasten.cli.guard import INTERRUPTED, Commands
from hasten.cli.screen import err, load_model, out, table
from hasten.cli.train_dflash import dflash
from hasten.cli.train_eagle3 import eagle3
from hasten.cli.train_exits import exits
from hasten.cli.train_lede import lede
from hasten.cli.train_payoff import payoff
from hasten.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hasten.train.data import Progress

app = typer.Typer(
    cls=Commands,
    help="Make the trained parts of a model's drafters, from the model's own text.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def main(context: typer.Context) -> None:
    """Show the help when no command is named."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("exits")(exits)
app.command("dflash")(dflash)
app.command("payoff")(payoff)
app.command("eagle3")(eagle3)
app.add_typer(lede, name="lede")
app.add_typer(train_arbiter.app, name="arbiter")


OutFolder = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        metavar="DIR",
        help="Folder of the rows; one that has some is added to.",
        show_default=False,
    ),
]
Sources = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        metavar="DOMAIN[=PATH]",
        help="Where prompts come from; may be given again. math=FILE and chat=FILE read JSONL rows "
        "(turns or question), chat=self samples user turns from the model, code, summarisation and "
        "translation search a folder, or the installed packages.",
        show_default="chat=self, code, summarisation, translation",
    ),
]
Shares = Annotated[
    list[str] | None,
    typer.Option(
        "--domain-share",
        metavar="DOMAIN=NUMBER",
        help="A domain's part of all tokens, relative to the others'; may be given again.",
        show_default="1 each",
    ),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        help="Stop when the folder holds so many answer tokens.",
        show_default="2000000",
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option("--minutes", help="Stop after so many, wherever it is.", show_default=False),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", "-n", help="Longest answer, in tokens.", show_default="208"),
]
MaxPromptTokens = Annotated[
    int | None,
    typer.Option(
        "--max-prompt-tokens", help="Pass over prompts that are longer.", show_default="620"
    ),
]
GreedyShare = Annotated[
    float | None,
    typer.Option(
        "--greedy-share",
        help="Part of the answers that takes the likeliest tokens; the others are drawn.",
        show_default="0.6",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", "-t", help="Of the answers drawn.", show_default="0.8"),
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch", help="Prompts answered together.", show_default="128 on a CPU, 512 elsewhere"
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Of the prompts' order and of the draws.", show_default="0"),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        metavar="DIR|FILE",
        help="Rows made elsewhere, whose prompts aren't asked again; may be given again.",
        show_default=False,
    ),
]
Dtype = Annotated[
    str, typer.Option("--dtype", metavar="NAME", help="float32, bfloat16 or float16.")
]


@app.command("data")
def data(
    out_folder: OutFolder,
    model: opt.Model = None,
    source: Sources = None,
    domain_share: Shares = None,
    tokens: Tokens = None,
    minutes: Minutes = None,
    max_new_tokens: MaxNewTokens = None,
    max_prompt_tokens: MaxPromptTokens = None,
    greedy_share: GreedyShare = None,
    temperature: Temperature = None,
    batch: Batch = None,
    seed: Seed = None,
    exclude: Exclude = None,
    dtype: Dtype = "bfloat16",
    device: opt.Device = None,
) -> None:
    """Let the model answer prompts of five domains, in large batches, and keep its answers.

    What is made goes to DIR/rows.jsonl after every wave of answers. The same command goes on where
    it stood. Sets that results are measured on are refused.
    """
    from hasten.train import data as made
    from hasten.train.batched import keep_freed_memory

    given: dict[str, Any] = {
        "sources": tuple(source) if source else None,
        "shares": _shares(domain_share or ()),
        "tokens": tokens,
        "minutes": minutes,
        "max_new_tokens": max_new_tokens,
        "max_prompt_tokens": max_prompt_tokens,
        "greedy_share": greedy_share,
        "temperature": temperature,
        "batch": batch,
        "seed": seed,
        "exclude": tuple(exclude or ()),
    }
    options = made.Options(**{name: value for name, value in given.items() if value is not None})
    keep_freed_memory()
    llm = load_model(model, "ar", dtype=dtype, device=device, kernels="torch")
    with _shown(options.tokens) as show:
        try:
            done = made.make(llm, out_folder, options, show)
        except KeyboardInterrupt:
            note = f"stopped. {out_folder} keeps all finished waves; the same command goes on"
            err().print(note, soft_wrap=True)
            raise typer.Exit(INTERRUPTED) from None
    _print(done, out_folder, options.tokens)


def _shares(given: list[str] | tuple[str, ...]) -> dict[str, float]:
    """``["code=2", ...]`` by domain. Raises OptionError."""
    shares: dict[str, float] = {}
    for text in given:
        name, _, number = text.partition("=")
        try:
            shares[name.strip()] = float(number)
        except ValueError:
            problem = f"must be DOMAIN=NUMBER, got {text!r}"
            raise OptionError("domain_share", problem, "As code=2") from None
    return shares


@contextmanager
def _shown(tokens: int) -> Iterator[Callable[[Progress], None]]:
    """Progress on stderr: a bar on a terminal, else a line for every wave."""
    console = err()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("start", total=tokens)

        def show(at: Progress) -> None:
            if at.note:
                bar.console.print(Text("note: ", style="yellow") + Text(at.note), soft_wrap=True)
            elif console.is_terminal:
                words = f"{at.speed:,.0f} tokens/s  {_by_domain(at)}"
                bar.update(task, description=words, completed=at.total + at.running)
            elif not at.running:
                line = f"{at.total:,} of {tokens:,} tokens, {at.speed:,.0f} tokens/s, "
                console.print(f"{line}{at.seconds:,.0f} s: {_by_domain(at)}", soft_wrap=True)

        yield show


def _by_domain(at: Progress) -> str:
    total = at.total or 1
    return ", ".join(f"{name} {part / total:.0%}" for name, part in sorted(at.tokens.items()))


def _print(done: Progress, folder: Path, wanted: int) -> None:
    lines = table("domain")
    for name in ("answers", "tokens"):
        lines.add_column(name, justify="right")
    for domain in sorted(done.tokens):
        lines.add_row(domain, f"{done.rows[domain]:,}", f"{done.tokens[domain]:,}")
    lines.add_row("all", f"{sum(done.rows.values()):,}", f"{done.total:,}")
    console = out()
    console.print(lines)
    words = f"{done.made:,} tokens made in {done.seconds:,.0f} s; all are in {folder}"
    if done.total < wanted:
        words += f". {wanted - done.total:,} are missing: the same command goes on"
    console.print(words, soft_wrap=True)

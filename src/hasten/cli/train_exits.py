"""``hasten train exits``: exit modules for a model, from text that it has made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress as Bar

from hasten.cli import options as opt
from hasten.cli.guard import INTERRUPTED
from hasten.cli.screen import err, load_model, out, table
from hasten.errors import OptionError

Data = Annotated[
    list[str],
    typer.Option(
        "--data",
        metavar="DIR|FILE",
        help="Rows that `hasten train data` has made for this model; may be given again.",
        show_default=False,
    ),
]
OutFolder = Annotated[
    Path,
    typer.Option("--out", "-o", metavar="DIR", help="Folder of the modules.", show_default=False),
]
Exits = Annotated[
    str,
    typer.Option(
        "--exits", metavar="LAYER=KIND,...", help="Kinds: lens, affine, adapter, deep (at 0 too)."
    ),
]
Work = Annotated[
    Path | None,
    typer.Option(
        "--work",
        metavar="DIR",
        help="Where the target's states are kept between runs: about 7 GB a million tokens.",
        show_default="OUT/states",
    ),
]
Minutes = Annotated[float, typer.Option("--minutes", help="For each module, at most.")]
Vocabulary = Annotated[int, typer.Option("--vocabulary", help="Ids of the draft head.")]
Share = Annotated[float, typer.Option("--share", help="Part of the training texts to use.")]
Steps = Annotated[int, typer.Option("--steps", help="Draft steps that deep modules learn.")]
Init = Annotated[
    Path | None,
    typer.Option(
        "--init", metavar="DIR", help="Modules to start from, as an earlier run has written them."
    ),
]
Rate = Annotated[
    float,
    typer.Option("--lr", help="Learning rate; a fifth of it goes better with a short --init run."),
]
Seed = Annotated[int, typer.Option("--seed", help="Of first weights and the texts' order.")]
Dtype = Annotated[
    str, typer.Option("--dtype", metavar="NAME", help="The target's: float32, bfloat16, float16.")
]


def exits(
    data: Data,
    out_folder: OutFolder,
    model: opt.Model = None,
    exits: Exits = "0=deep,2=deep,4=adapter",
    work: Work = None,
    minutes: Minutes = 20.0,
    vocabulary: Vocabulary = 8192,
    share: Share = 1.0,
    steps: Steps = 2,
    init: Init = None,
    lr: Rate = 1e-3,
    seed: Seed = 0,
    dtype: Dtype = "bfloat16",
    device: opt.Device = None,
) -> None:
    """Train exit modules, the model frozen, and write them with their held-out figures.

    DIR is then what `--method early-exit,modules=DIR` takes. DIR/log.jsonl holds the losses and
    figures on the way.
    """
    from hasten.train import run_exits
    from hasten.train.batched import keep_freed_memory

    if minutes <= 0 or not 0 < share <= 1 or not 1 <= steps <= 4:
        raise OptionError("exits", "needs minutes above 0, a share in (0, 1], and 1 to 4 steps")
    if not 0 < lr < 1:
        raise OptionError("lr", f"must be between 0 and 1, got {lr}")
    options = run_exits.Options(
        plans=run_exits.parse_plans(exits),
        vocabulary=vocabulary,
        share=share,
        minutes=minutes,
        steps=steps,
        init=str(init or ""),
        lr=lr,
        seed=seed,
    )
    keep_freed_memory()
    opt.make_folder("out", out_folder)
    llm = load_model(model, "ar", dtype=dtype, device=device, kernels="torch")
    console = err()
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        show = _Show(bar, out_folder / "log.jsonl", minutes)
        try:
            made = run_exits.run(llm.target, data, out_folder, options, work=work, log=show)
        except KeyboardInterrupt:
            console.print(f"stopped. Finished modules are in {out_folder}", soft_wrap=True)
            raise typer.Exit(INTERRUPTED) from None
    _print(made, out_folder)


class _Show:
    """Progress: a bar on a terminal, a line now and then elsewhere, all rows in a file."""

    def __init__(self, bar: Bar, path: Path, minutes: float) -> None:
        self._bar, self._path, self._minutes = bar, path, minutes
        self._tasks: dict[str, Any] = {}

    def __call__(self, row: dict[str, Any]) -> None:
        states = row.get("stage") == "states"
        name = "states" if states else f"exit {row['layer']} ({row['kind']})"
        total = float(row["total"]) if states else self._minutes
        at = float(row["done"]) if states else float(row.get("minutes", total))
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(name, total=total)
        self._bar.update(self._tasks[name], completed=at)
        if not states:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            if not self._bar.console.is_terminal and "match" in row:
                first = row["match"][0]
                self._bar.console.print(f"{name}: {at:.1f} min, first choice right {first:.3f}")


def _print(made: list[Any], folder: Path) -> None:
    lines = table("exit")
    lines.add_column("kind")
    for name in ("first choice", "second step", "one of 4", "alpha", "covered", "rows"):
        lines.add_column(name, justify="right")
    for each in made:
        found = each.figures
        second = f"{found.match[1]:.3f}" if len(found.match) > 1 else ""
        numbers = (found.match[0], found.top[4], found.alpha, found.covered)
        first, four, alpha, covered = (f"{x:.3f}" for x in numbers)
        layer, kind = str(each.config.layer), each.config.kind
        lines.add_row(layer, kind, first, second, four, alpha, covered, f"{found.rows:,}")
    console = out()
    console.print(lines)
    console.print(f"the modules are in {folder}", soft_wrap=True)

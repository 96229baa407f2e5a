"""``hasten train arbiter``: an arbiter for ``cospec``, a constructed draft, a table of rules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress as Bar

from hasten.cli import options as opt
from hasten.cli.guard import INTERRUPTED, Commands
from hasten.cli.screen import err, load_model, out, table, write
from hasten.errors import OptionError

if TYPE_CHECKING:
    from hasten.train.arbiter.run import Trained
    from hasten.train.arbiter.specialist import Specialist

app = typer.Typer(
    cls=Commands,
    help="Train what decides whose token is kept where draft and model disagree (cospec).",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def main(context: typer.Context) -> None:
    """Show the help when no command is named."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


OutFolder = Annotated[
    Path,
    typer.Option("--out", "-o", metavar="DIR", help="Folder of what is made.", show_default=False),
]
Families = Annotated[
    str,
    typer.Option(
        "--families",
        metavar="NAME,...",
        help="Of tasks; 'qualifying': those the embedded model gets right now and then.",
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="OPTIONS",
        help="The draft, as options of the method cospec: draft=specialist, "
        "draft=early-exit,modules=DIR,exits=0, draft=draft-model,model=NAME.",
    ),
]
Validation = Annotated[
    int, typer.Option("--validation", help="Problems that thresholds are chosen on, at most.")
]
Length = Annotated[int, typer.Option("--length", help="Tokens drafted a block.")]
Seed = Annotated[int, typer.Option("--seed", help="Of everything drawn.")]
Work = Annotated[
    Path | None,
    typer.Option(
        "--work",
        metavar="DIR",
        help="Where answers (or states) are kept between runs.",
        show_default="beside the arbiter",
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", metavar="NAME", help="float32, bfloat16, float16.")]


def _families(text: str) -> tuple[str, ...]:
    """Names given with commas. Raises OptionError for one that isn't known."""
    from hasten.tasks import FAMILIES, QUALIFYING

    names = QUALIFYING if text == "qualifying" else tuple(x.strip() for x in text.split(",") if x)
    unknown = [name for name in names if name not in FAMILIES]
    if unknown or not names:
        known = f"Known: {', '.join(FAMILIES)}"
        raise OptionError("families", f"no such family: {', '.join(unknown) or text!r}", known)
    return tuple(dict.fromkeys(names))


@app.command("fit")
def fit(
    out_folder: OutFolder,
    model: opt.Model = None,
    families: Families = "qualifying",
    draft: Draft = "draft=early-exit",
    problems: Annotated[int, typer.Option("--problems", help="To learn from, at most.")] = 500,
    validation: Validation = 240,
    branches: Annotated[
        int, typer.Option("--branches", help="Mismatches of a problem tried both ways, at most.")
    ] = 2,
    kinds: Annotated[
        str, typer.Option("--kinds", metavar="NAME,...", help="Arbiters tried: mlp, linear.")
    ] = "mlp,linear",
    length: Length = 4,
    iterations: Annotated[
        int, typer.Option("--iterations", help="Of stage B, the policy gradient; 0: none.")
    ] = 20,
    rollouts: Annotated[
        int, typer.Option("--rollouts", help="Answers to each problem of an iteration.")
    ] = 8,
    speed: Annotated[
        float, typer.Option("--speed", help="Weight of the passes saved in stage B's reward.")
    ] = 0.05,
    seed: Seed = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Train even where there is little to gain.")
    ] = False,
    work: Work = None,
    dtype: Dtype = "float32",
    device: opt.Device = None,
) -> None:
    """Train an arbiter on tasks with exact answers, the models frozen.

    First it measures what any arbiter could gain. DIR is then what `--method cospec,arbiter=DIR`
    takes. An arbiter that is no better than the model alone on validation problems says so in its
    file and keeps no draft token. The same command goes on where it was stopped.
    """
    from hasten.train.arbiter import run
    from hasten.train.arbiter.policy import PolicyOptions

    options = run.Options(
        families=_families(families),
        draft=draft,
        problems=problems,
        validation=validation,
        branches=branches,
        kinds=tuple(kind.strip() for kind in kinds.split(",")),
        length=length,
        stage_b=PolicyOptions(iterations=iterations, rollouts=rollouts, speed=speed),
        seed=seed,
        force=force,
    )
    llm = load_model(model, "ar", dtype=dtype, device=device)
    with _shown(out_folder) as show:
        made = run.run(llm, out_folder, options, work=work, log=show)
    _print_arbiter(made, out_folder)


@app.command("specialist")
def specialist(
    out_folder: OutFolder,
    families: Annotated[
        str,
        typer.Option("--families", metavar="NAME,...", help="Learned from.", show_default=False),
    ],
    model: opt.Model = None,
    others: Annotated[
        str,
        typer.Option("--others", metavar="NAME,...", help="Measured, and not learned from."),
    ] = "",
    kind: Annotated[str, typer.Option("--kind", help="deep, adapter or affine.")] = "deep",
    layer: Annotated[int, typer.Option("--layer", help="Where it leaves the model.")] = 0,
    inner: Annotated[int, typer.Option("--inner", help="Width of a fresh module's MLP.")] = 1024,
    init: Annotated[
        str,
        typer.Option(
            "--init", metavar="DIR|shipped", help="Module to start from; '': a fresh one."
        ),
    ] = "shipped",
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="DIR|FILE",
            help="Text of the model's own (`hasten train data`), to stay near it elsewhere.",
        ),
    ] = None,
    problems: Annotated[int, typer.Option("--problems", help="Of each family, at most.")] = 600,
    own: Annotated[int, typer.Option("--own", help="Texts of the model's own, at most.")] = 1000,
    vocabulary: Annotated[int, typer.Option("--vocabulary", help="Ids of the draft head.")] = 4096,
    epochs: Annotated[int, typer.Option("--epochs", help="Times through the problems.")] = 6,
    rate: Annotated[float, typer.Option("--rate", help="Learning rate.")] = 5e-4,
    validation: Annotated[
        int, typer.Option("--validation", help="Problems of each family measured on, at most.")
    ] = 60,
    seed: Seed = 0,
    work: Work = None,
    dtype: Dtype = "bfloat16",
) -> None:
    """Train the constructed specialist: a draft that is better than the model on some families.

    It is tuned on right answers, so that an arbiter has something to find. A demonstration: it says
    nothing about natural drafts.
    """
    from hasten.train.arbiter import run_specialist
    from hasten.train.arbiter.specialist import SpecialistOptions

    options = SpecialistOptions(
        families=_families(families),
        problems=problems,
        own=own,
        vocabulary=vocabulary,
        rate=rate,
        epochs=epochs,
        seed=seed,
    )
    llm = load_model(model, "ar", dtype=dtype, device="cpu", kernels="torch")
    with _shown(out_folder) as show:
        made = run_specialist.run(
            llm,
            out_folder,
            run_specialist.Module(kind, layer, inner, init),
            options,
            others=_families(others) if others else (),
            data=tuple(data or ()),
            validation=validation,
            work=work,
            log=show,
        )
    _print_specialist(made, options.families, out_folder)


@app.command("evaluate")
def evaluate(
    arbiter: Annotated[
        Path,
        typer.Option("--arbiter", metavar="DIR", help="As `fit` wrote it.", show_default=False),
    ],
    model: opt.Model = None,
    families: Families = "qualifying",
    draft: Draft = "draft=early-exit",
    test: Annotated[int, typer.Option("--test", help="Held-out problems, at most.")] = 500,
    validation: Validation = 240,
    length: Length = 4,
    seed: Seed = 0,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Every answer, to print the table again from."),
    ] = None,
    work: Work = None,
    dtype: Dtype = "float32",
    device: opt.Device = None,
) -> None:
    """Answer held-out problems under every rule, and print how they compare.

    Knobs of all rules are chosen on validation problems. Accuracies only: no time is measured.
    """
    from hasten.train.arbiter import evaluate as measuring

    options = measuring.Options(
        families=_families(families),
        draft=draft,
        validation=validation,
        test=test,
        length=length,
        seed=seed,
    )
    llm = load_model(model, "ar", dtype=dtype, device=device)
    console = err()
    folder = work or arbiter / "answers"
    made = measuring.measure(
        llm, arbiter, options, work=folder, say=lambda text: console.print(f"{text} ...")
    )
    if json_path is not None:
        measuring.save(made, json_path)
    write(measuring.markdown(made) + "\n")


# -- what is seen ----------------------------------------------------------------------------------


@contextmanager
def _shown(folder: Path) -> Iterator[_Show]:
    """Progress on stderr and a file of what happened; Ctrl-C ends in order."""
    opt.make_folder("out", folder)
    console = err()
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        try:
            yield _Show(bar, folder / "log.jsonl")
        except KeyboardInterrupt:
            note = f"stopped. {folder} keeps what was made; the same command goes on"
            console.print(note, soft_wrap=True)
            raise typer.Exit(INTERRUPTED) from None


class _Show:
    """A bar on a terminal, lines for what matters, all rows but the counts in a file."""

    def __init__(self, bar: Bar, path: Path) -> None:
        self._bar, self._path = bar, path
        self._tasks: dict[str, Any] = {}

    def __call__(self, row: dict[str, Any]) -> None:
        """Take a row of a log."""
        stage = row["stage"]
        if stage == "answers":
            task = self._task(f"answers ({row['split']})", None)
            self._bar.advance(task, row["made"])
            return
        if stage == "states":
            self._bar.update(self._task("states", row["total"]), completed=row["done"])
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if stage == "train":
            self._bar.update(self._task("training", row["of"]), completed=row["batch"])
        self._bar.console.print(_line(row), soft_wrap=True)

    def _task(self, name: str, total: float | None) -> Any:
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(name, total=total)
        return self._tasks[name]


def _line(row: dict[str, Any]) -> str:
    stage = row["stage"]
    if stage == "headroom":
        return (
            f"headroom: target only {row['plain']:.1%}, best of {row['answers']:.1f} branches "
            f"{row['oracle']:.1%} ({row['gain']:+.1%}, by luck alone {row['lucky']:+.1%}), "
            f"{row['mismatches']:.1f} mismatches an answer"
        )
    if stage == "branches":
        told, draft = row["informative"], row["draft"]
        return f"branches: {row['pairs']}, one right in {told}, the draft's in {draft}"
    if stage == "train":
        at, loss = f"{row['batch']} of {row['of']}", row["loss"]
        return f"batch {at}: loss {loss:.3f}, {row['minutes']:.1f} min"
    choice = row.get("validation", row)
    if "plain" not in choice:
        return f"{stage} {row.get('iteration', '')}: reward {row['reward']:.3f}"
    return (
        f"{stage} {row.get('kind', row.get('iteration', ''))}: validation {choice['accuracy']:.1%} "
        f"against {choice['plain']:.1%}, theta {choice['theta']:.2f}, keeps {choice['kept']:.0%}, "
        f"{choice['passes']:.2f} passes a token"
    )


def _print_arbiter(made: Trained, folder: Path) -> None:
    lines = table("stage")
    for name in ("kind", "branches", "validation", "target only", "kept", "passes a token"):
        lines.add_column(name, justify="right")
    for each in made.stages:
        found = each.choice
        shares = (f"{x:.1%}" for x in (found.accuracy, found.plain, found.kept))
        lines.add_row(each.name, each.net.kind, f"{each.pairs}", *shares, f"{found.passes:.2f}")
    console = out()
    if made.stages:
        console.print(lines)
    if made.arbiter.fallback:
        console.print(
            "a negative result: no better than the model alone on validation problems, so the "
            "arbiter keeps no draft token",
            soft_wrap=True,
        )
    console.print(f"the arbiter is in {folder} ({made.seconds / 60:.0f} minutes)", soft_wrap=True)


def _print_specialist(made: Specialist, learned: tuple[str, ...], folder: Path) -> None:
    lines = table("family")
    for name in ("learned", "problems", "model right", "draft right", "agree"):
        lines.add_column(name, justify="right")
    for family, found in sorted(made.figures.items(), key=lambda pair: pair[0] not in learned):
        mark = "yes" if family in learned else ""
        shares = (f"{x:.0%}" for x in (found.target, found.draft, found.agree))
        lines.add_row(family, mark, f"{found.count}", *shares)
    console = out()
    console.print(lines)
    console.print(f"the constructed specialist is in {folder}", soft_wrap=True)

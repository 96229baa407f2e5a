"""``hasten bench``: measure methods against plain decoding, and print tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hasten.cli import options as opt
from hasten.cli import throughput
from hasten.cli.measuring import output_file, prepare_model, progress_bar, told
from hasten.cli.screen import err, out, table
from hasten.errors import OptionError

if TYPE_CHECKING:
    from hasten.bench import Report, Row

PAGE = "report.html"
"""The page's name in the folder given to ``--report``."""

Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--methods",
        metavar="NAMES",
        help="Methods to measure, split at commas between names; may be given again.",
        show_default="ar,auto",
    ),
]
SuiteOption = Annotated[
    str | None,
    typer.Option(
        "--suite",
        metavar="NAME|FILE",
        help="mini, mixed, editing, agent, adversarial, or a JSONL file with turns or question.",
        show_default="mini",
    ),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", "-n", help="Longest answer, in tokens.", show_default="128"),
]
Turns = Annotated[
    str | None,
    typer.Option(
        "--turns",
        metavar="NAME",
        help="first, or all: ask follow-up turns too.",
        show_default="first",
    ),
]
Repeats = Annotated[
    int | None,
    typer.Option(
        "--repeats",
        help="Answer everything this often; a prompt's time is the median.",
        show_default="1",
    ),
]
State = Annotated[
    str | None,
    typer.Option(
        "--state",
        metavar="NAME",
        help="For methods that learn across requests: cold, warm or both.",
        show_default="cold",
    ),
]
Concurrency = Annotated[
    str | None,
    typer.Option(
        "--concurrency",
        metavar="NUMBERS",
        help="Instead: tokens per second with so many requests at a time, as 1,2,4,8.",
        show_default=False,
    ),
]
Peers = Annotated[
    list[str] | None,
    typer.Option(
        "--peers",
        metavar="NAMES",
        help="Other libraries to measure too: transformers, transformers-early-exit, llama-cpp; "
        "commas or again.",
        show_default=False,
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Write all figures to this file.", show_default=False
    ),
]
ReportFolder = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="DIR",
        help="Write a page with charts to DIR/report.html (needs hasten\\[report]).",
        show_default=False,
    ),
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", "-t", help="0 is greedy.", show_default="0.0")
]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Of the draws and of the bootstrap.", show_default="0")
]


@opt.loads
def bench(
    model: opt.Model = None,
    methods: Methods = None,
    suite: SuiteOption = None,
    limit: opt.Limit = None,
    max_new_tokens: MaxNewTokens = None,
    turns: Turns = None,
    state: State = None,
    repeats: Repeats = None,
    peers: Peers = None,
    verify: opt.Verify = None,
    temperature: Temperature = None,
    seed: Seed = None,
    json: JsonFile = None,
    report: ReportFolder = None,
    concurrency: Concurrency = None,
    *,
    loading: opt.Loading,
) -> None:
    """Measure methods against plain decoding, interleaved on one model, prompt by prompt.

    Times and speedups are decode only, from the first token on.
    """
    from hasten.bench import BenchConfig
    from hasten.bench.runner import run
    from hasten.methods import split

    given: dict[str, Any] = {
        "model": model,
        "methods": tuple(name for text in methods for name in split(text)) if methods else None,
        "suite": suite,
        "limit": limit,
        "max_new_tokens": max_new_tokens,
        "turns": turns,
        "state": state,
        "repeats": repeats,
        "peers": tuple(name.strip() for text in peers for name in text.split(",") if name.strip())
        if peers
        else None,
        "verify": verify,
        "temperature": temperature,
        "seed": seed,
    }
    given = {name: value for name, value in given.items() if value is not None}
    config = BenchConfig(**given, **loading)
    if concurrency is not None:
        unused = {"turns": turns, "state": state, "peers": peers, "verify": verify,
                  "report": report}  # fmt: skip
        throughput.bench(config, concurrency, json, unused)
        return
    with _page(report) as page:
        with output_file("json", json) as target:
            prepare_model(config.model)
            with progress_bar() as progress:
                made = run(config, progress)
            if target is not None:
                made.write(target)
        print_report(made)
        told(json)
        if page is not None:
            from hasten.bench.report import render

            page.write_text(render(made), encoding="utf-8")
    told(report and report / PAGE)
    if made.partial:
        raise KeyboardInterrupt  # told and written is what was measured; the exit code says so
    if made.faults:
        raise typer.Exit(1)


@contextmanager
def _page(folder: Path | None) -> Iterator[Path | None]:
    """A file to write the report's page to, as `_output`; the folder is made when it isn't there.

    What the page needs is checked now too, before anything is measured.
    """
    if folder is None:
        yield None
        return
    from hasten.bench.report import check_installed

    check_installed()
    try:
        folder.expanduser().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            "report", f"{folder} can't be made a folder ({error.strerror or error})"
        ) from error
    with output_file("report", folder / PAGE) as page:
        yield page


def print_report(report: Report) -> None:
    """Warnings to stderr; what ran, and a table for each category and one for all, to stdout."""
    from hasten.bench import OVERALL

    for warning in report.warnings:
        err().print(Text("note: ", style="yellow") + Text(warning), soft_wrap=True)
    console = out()
    if report.environment.get("model"):
        console.print(_conditions(report.environment))
        console.print()
    categories = [*report.categories, OVERALL] if len(report.categories) > 1 else [OVERALL]
    for category in categories:
        console.print(_table(report, category))
        console.print()
    console.print(_LEGEND, style="dim")
    for row in report.rows:
        if row.category == OVERALL:
            for line in row.extra.get("differences", ()):
                console.print(f"{row.method}: {line}", soft_wrap=True)
    if report.faults:
        console.print(
            f"answers of lossless methods that differ without excuse: {report.faults}",
            style="bold red",
        )


def _conditions(facts: Mapping[str, Any]) -> str:
    """What was measured, as a line."""
    weights = f", {facts['quantize']} weights" if facts.get("quantize") else ""
    kernels = f", {facts['kernels']} kernels" if facts.get("kernels") else ""
    exact = ", exact" if facts.get("exact") else ""
    return (
        f"{facts['model']} in {facts['dtype']}{weights} on {facts['device']}: "
        f"{facts['engine']} engine{kernels}{exact}; suite {facts['suite']}"
    )


_LEGEND = """\
macro, micro: speedup over plain decoding (ar), decode only: mean of the
prompts, and of all tokens and times. length: tokens per target pass. same ids:
answers identical to plain decoding's. All figures: --json FILE."""
_COLUMNS = ("macro", "micro", "tok/s", "length", "same\nids", "ms a\npass")


def _table(report: Report, category: str) -> Table:
    rows = [row for row in report.rows if row.category == category]
    prompts = max((row.prompts for row in rows), default=0)
    made = table(title=f"{category} (prompts: {prompts})", title_justify="left")
    made.add_column("method", overflow="fold")
    for name in _COLUMNS:
        made.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(row.method, *_cells(row))
    return made


def _cells(row: Row) -> list[str]:
    return [
        _number(row.speedup_macro, 2, "x"),
        _number(row.speedup_micro, 2, "x"),
        _number(row.tokens_per_s, 1),
        _number(row.mean_accepted_length, 2),
        f"{row.identical}/{row.prompts}",
        _number(row.extra.get("pass_ms"), 1),
    ]


def _number(value: Any, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"

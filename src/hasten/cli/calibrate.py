"""``hasten calibrate``: measure what a pass costs on this machine, and keep it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.panel import Panel

from hasten.cli import options as opt
from hasten.cli.screen import counting, err, load_model, out, print_json, table
from hasten.errors import OptionError

if TYPE_CHECKING:
    from hasten.policies.cost_model import CostTable
    from hasten.targets.base import Target

RowCounts = Annotated[
    str | None,
    typer.Option(
        "--rows",
        metavar="NUMBERS",
        help="Rows of the passes to time, as 1,2,4.",
        show_default="1 to 64",
    ),
]
Contexts = Annotated[
    str | None,
    typer.Option(
        "--contexts",
        metavar="NUMBERS",
        help="Tokens in the cache when they are timed, as 128,1024.",
        show_default="128,1024",
    ),
]
Repeats = Annotated[
    int | None,
    typer.Option("--repeats", min=1, help="Times each; the median counts.", show_default="7"),
]
Force = Annotated[
    bool, typer.Option("--force", help="Measure anew, and keep it even from a busy machine.")
]


@opt.loads
def calibrate(
    model: opt.Name = None,
    rows: RowCounts = None,
    contexts: Contexts = None,
    repeats: Repeats = None,
    force: Force = False,
    json: opt.Json = False,
    *,
    loading: opt.Loading,
) -> None:
    """Time passes of 1 to 64 rows; methods without a fixed budget draft by these figures.

    A table measured before is shown as it is unless something else is asked for. The exit code is 1
    when the machine was busy and the table therefore not kept.
    """
    from hasten.policies import cost

    given: dict[str, Any] = {
        "rows": _numbers("rows", rows),
        "contexts": _numbers("contexts", contexts),
        "repeats": repeats,
    }
    given = {name: value for name, value in given.items() if value is not None}
    target = load_model(model, "ar", **loading).target
    _check_room(target, given)
    made = None if force or given else cost.load(target)
    state = "found"
    if made is None or not _is_whole(made):  # what methods measure by themselves is rougher
        made = _measure(target, given)
        state = _keep(target, made, force, own=bool({"rows", "contexts"} & given.keys()))
    place = cost._file(target)
    if json:
        print_json(_as_json(made, state, place))
    else:
        _print(made, state, place)
    if state == "busy":
        raise typer.Exit(1)


def _numbers(option: str, text: str | None) -> list[int] | None:
    """``"1,2,4"`` as rising numbers of at least 1. Raises OptionError."""
    if text is None:
        return None
    try:
        made = sorted({int(part) for part in text.split(",")})
    except ValueError:
        made = [0]
    if made[0] < 1:
        raise OptionError(option, f"must be whole numbers >= 1 with commas, got {text!r}")
    return made


def _check_room(target: Target, given: dict[str, Any]) -> None:
    """Refuse what was asked for and doesn't fit, which would be left out silently."""
    limit = target.info.context_limit
    asked = [name for name in ("contexts", "rows") if name in given]
    longest = sum(max(given[name]) for name in asked) + given.get("repeats", 7)
    if asked and longest >= limit:
        raise OptionError(
            asked[0],
            f"the longest passes need {longest} tokens, and the context holds {limit}",
            "Ask for less",
        )


def _measure(target: Target, given: dict[str, Any]) -> CostTable:
    from hasten.policies import cost

    with counting("timing passes", 1) as bar:
        return cost.measure(
            target,
            **given,
            progress=lambda done, total: bar.update(bar.task_ids[0], completed=done, total=total),
        )


def _keep(target: Target, made: CostTable, force: bool, *, own: bool) -> str:
    """Keep the table if it may be; says what became of it. `own`: with rows or contexts asked for.

    A forced table is kept as one of a quiet machine, else nobody would use it.
    """
    from hasten.policies import cost

    if own and not _is_whole(made):
        return "partial"
    if made.busy and not force:
        return "busy"
    kept = replace(made, busy=False)
    cost.save(target, kept)
    return "kept" if cost.load(target) == kept else "unwritable"


def _is_whole(made: CostTable) -> bool:
    """True when nothing that methods ask for lies beyond what was measured."""
    from hasten.policies import cost

    reaches = made.rows[-1] >= cost.ROWS[-1] and made.contexts[-1] >= cost.CONTEXTS[-1]
    return reaches and made.rows[0] == 1 and len(made.contexts) > 1


# -- output ----------------------------------------------------------------------------------------

_SAID = {
    "found": "measured before and still good (--force measures anew): {place}",
    "kept": "kept for the next sessions: {place}",
    "partial": "not kept: methods need rows from 1 to 64 and contexts up to 1024",
    "unwritable": "not kept: {place} can't be written",
    "busy": "not kept",
}


def _print(made: CostTable, state: str, place: Path) -> None:
    console = out()
    console.print(f"milliseconds of a pass: {made.key}", soft_wrap=True)
    first = f"{made.rows[0]} row{'s' if made.rows[0] > 1 else ''} = 1"
    lines = table("rows")
    lines.columns[0].justify = "right"
    for context in made.contexts:
        lines.add_column(f"context {context}", justify="right")
        lines.add_column(first, justify="right")
    lines.add_column("argmax, top-k", justify="right")
    for at, rows in enumerate(made.rows):
        times = [(line[at], line[at] / line[0]) for line in made.ms]
        cells = [text for ms, ratio in times for text in (f"{ms:.2f}", f"{ratio:.2f}")]
        lines.add_row(str(rows), *cells, f"{made.topk_ms[at]:.2f}" if made.topk_ms else "-")
    console.print(lines)
    console.print(_SAID[state].format(place=place), soft_wrap=True)
    if made.busy:
        words = "Other work used the machine: these times are blurred."
        if state == "busy":
            words += " The table was NOT kept. Stop the other work, or use --force."
        err().print(Panel(words, title="busy machine", style="bold red"))


def _as_json(made: CostTable, state: str, place: Path) -> dict[str, Any]:
    return {
        "key": made.key,
        "rows": list(made.rows),
        "contexts": list(made.contexts),
        "ms": [list(line) for line in made.ms],
        "ratios": [[t / line[0] for t in line] for line in made.ms],
        "topk_ms": list(made.topk_ms),
        "busy": made.busy,
        "measured_at": made.measured_at,
        "state": state,
        "path": str(place) if state in ("found", "kept") else None,
    }

"""``hasten methods``: what can draft, and with which options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from hasten.cli.options import Json
from hasten.cli.screen import grid, out, print_json, table

if TYPE_CHECKING:
    from hasten.methods import Method

Name = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="Show this method's options.", show_default=False),
]


def methods(name: Name = None, json: Json = False) -> None:
    """List the methods, or one method's options and variants."""
    from hasten.methods import all_methods, get

    chosen = (
        list(all_methods().values())
        if name is None
        else [get(name.partition(":")[0].partition(",")[0])]
    )
    if json:
        data = [_as_json(method) for method in chosen]
        print_json(data if name is None else data[0])
    elif name is None:
        _print_all(chosen)
    else:
        _print_one(chosen[0])


def _print_all(chosen: list[Method]) -> None:
    rows = table("method", "lossless", "what it does")
    rows.columns[0].no_wrap = rows.columns[1].no_wrap = True
    for method in chosen:
        said = Text(method.summary)
        if method.needs != "nothing":
            said.append(f"\nneeds {method.needs}", style="dim")
        if method.variants:
            said.append(f"\nvariants {', '.join(f':{v}' for v in method.variants)}", style="dim")
        rows.add_row(Text(method.name, style="bold"), method.lossless, said)
    console = out()
    console.print(rows)
    console.print(
        "Options: `hasten methods NAME`. Use: --method NAME[:VARIANT][,key=value...]", style="dim"
    )


def _print_one(method: Method) -> None:
    from hasten.methods import MethodSpec, option_help

    console = out()
    head = grid()
    head.add_row(method.name, method.summary)
    head.add_row("needs", method.needs)
    head.add_row("lossless", method.lossless)
    console.print(head)
    options = option_help(method)
    if options:
        rows = table("option", "default", "meaning")
        for key, default, help in options:
            rows.add_row(Text(key, style="bold"), default or "none", help)
        console.print(rows)
    else:
        console.print("no options")
    if method.variants:
        rows = table("variant", "the same as")
        rows.columns[0].no_wrap = True
        rows.columns[1].overflow = "fold"
        for variant, values in method.variants.items():
            same = MethodSpec(method.name, options=tuple(values.items()))
            rows.add_row(Text(f"{method.name}:{variant}", style="bold"), str(same))
        console.print(rows)


def _as_json(method: Method) -> dict[str, Any]:
    from hasten.methods import option_help

    return {
        "name": method.name,
        "summary": method.summary,
        "needs": method.needs,
        "lossless": method.lossless,
        "requires": list(method.requires),
        "variants": {name: dict(values) for name, values in method.variants.items()},
        "options": [{"name": n, "default": d, "help": h} for n, d, h in option_help(method)],
    }

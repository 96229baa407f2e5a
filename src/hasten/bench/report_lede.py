"""The report page's section on exits: what rounds drafted from, and one answer round by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hasten.bench import charts
from hasten.bench.output import Report, Row
from hasten.bench.report_tables import NOTHING, number, overall

COLORS = 8
"""Colours that the page must have for these charts."""
PLAIN = "plain"


def exits_section(report: Report, colors: Mapping[str, str]) -> list[dict[str, Any]]:
    """For each method that drafted from exits: its name and colour, a line of figures, a table of
    what its rounds drafted from, and charts (two widths) of one answer."""
    return [_card(row, colors[row.method]) for row in overall(report) if row.extra.get("choices")]


def _card(row: Row, color: str) -> dict[str, Any]:
    choices: Mapping[str, Mapping[str, int]] = row.extra["choices"]
    shades = _shades(choices)
    rounds = sum(entry["rounds"] for entry in choices.values())
    one = row.extra["choices_of_one"]
    return {
        "method": row.method,
        "color": color,
        "facts": _facts(row),
        "rows": [
            (name, shades[name], [charts.percent(entry["rounds"] / rounds), *_lengths(entry)])
            for name, entry in choices.items()
        ],
        "one": one["row"],
        "charts": _timelines(row.method, one["rounds"], shades),
    }


def _shades(choices: Mapping[str, Any]) -> dict[str, str]:
    """A colour for each kind of round, the most frequent ones apart; plain steps are grey."""
    drafting = [name for name in choices if name != PLAIN]
    shades = {name: f"m{at % COLORS}" for at, name in enumerate(drafting)}
    return {name: shades.get(name, "target") for name in choices}


def _lengths(entry: Mapping[str, int]) -> tuple[str, str, str]:
    """Drafted and kept a round, and the share kept."""
    rounds, drafted = entry["rounds"], entry["drafted"]
    share = charts.percent(entry["kept"] / drafted) if drafted else NOTHING
    return number(drafted / rounds, 1), number(entry["kept"] / rounds, 2), share


def _facts(row: Row) -> str:
    """The cost of deciding, where something learned decides."""
    made = row.extra.get("decisions")
    if not made:
        return ""
    return (
        f"{made['per_round']:.1f} decisions a round, {made['us']:.0f} microseconds each: "
        f"{100 * made['share']:.1f}% of the time"
    )


def _timelines(
    method: str, rounds: Sequence[Sequence[Any]], shades: Mapping[str, str]
) -> list[str]:
    """One answer, round by round, for a desktop and for a phone."""
    bars = [
        charts.Draft(shades.get(name, "target"), exit, depth, kept)
        for name, exit, depth, kept in rounds
    ]
    lengths = ", ".join(f"{bar.kept} of {bar.length}" for bar in bars[: charts.MOST_ROUNDS])
    return [
        charts.timeline(
            bars,
            width,
            f"{method}: drafts of one answer, round by round",
            f"Upright bars: tokens of the longest path, the kept ones filled; dashes: the exit. "
            f"Kept: {lengths}.",
        )
        for width in (charts.WIDE, charts.NARROW)
    ]

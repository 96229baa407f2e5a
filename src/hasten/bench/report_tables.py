"""The report page's tables: rows as texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hasten.bench.charts import percent
from hasten.bench.config import WARM
from hasten.bench.output import OVERALL, Report, Row

NOTHING = "–"
"""Shown for a figure that there is none of."""


def number(value: Any, digits: int, unit: str = "") -> str:
    """A figure with so many digits; `NOTHING` for None."""
    return NOTHING if value is None else f"{value:,.{digits}f}{unit}"


def interval(row: Row) -> str:
    """The bootstrap interval of the micro speedup."""
    ends = row.extra.get("speedup_micro_interval")
    return f"{ends[0]:.2f}–{ends[1]:.2f}" if ends else NOTHING


def distinct(row: Row) -> str:
    """Share of distinct 4-grams of the answers."""
    share = row.extra.get("distinct_4gram_share")
    return NOTHING if share is None else percent(share)


def _kind(name: str) -> Callable[[Row], str]:
    return lambda row: str(row.extra.get(name, 0))


def _extra(name: str, digits: int) -> Callable[[Row], str]:
    return lambda row: number(row.extra.get(name), digits)


COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("speedup, micro", lambda row: number(row.speedup_micro, 2, "x")),
    ("95% interval", interval),
    ("speedup, macro", lambda row: number(row.speedup_macro, 2, "x")),
    ("with prefill", lambda row: number(row.extra.get("e2e_speedup_micro"), 2, "x")),
    ("distinct 4\N{NON-BREAKING HYPHEN}grams", distinct),
    ("tokens/s", lambda row: number(row.tokens_per_s, 1)),
    ("accepted length", lambda row: number(row.mean_accepted_length, 2)),
    ("same ids", lambda row: f"{row.identical}/{row.prompts}"),
    ("near ties", _kind("near_ties")),
    ("faults", _kind("faults")),
    ("unexplained", _kind("unexplained")),
    ("tokens", lambda row: f"{row.tokens:,}"),
    ("passes", lambda row: number(row.target_passes, 0)),
    ("drafted per pass", _extra("drafted_per_round", 1)),
    ("draft ms", lambda row: number(row.draft_ms_per_round, 2)),
    ("pass ms", _extra("pass_ms", 2)),
    ("top-k ms", _extra("topk_ms", 2)),
    ("host ms", _extra("host_ms", 2)),
    ("first token ms", _extra("ttft_ms", 0)),
)


def groups(report: Report, colors: Mapping[str, str]) -> list[dict[str, Any]]:
    """The rows by category, ``overall`` first, each: method, colour, whether at fault, cells."""
    made = []
    for category in (OVERALL, *report.categories):
        rows = [row for row in report.rows if row.category == category]
        if rows:
            lines = [
                (row.method, colors[row.method], bool(row.extra.get("faults")), _texts(row))
                for row in rows
            ]
            prompts = max(row.prompts for row in rows)
            made.append({"name": category, "prompts": prompts, "rows": lines})
    return made


def _texts(row: Row) -> list[str]:
    return [show(row) for _, show in COLUMNS]


def overall(report: Report) -> list[Row]:
    """The rows over all categories, in the order of the methods."""
    return [row for row in report.rows if row.category == OVERALL]


def sameness(report: Report) -> list[dict[str, Any]]:
    """Per method how many answers are plain decoding's, and what the others are."""
    made = []
    for row in overall(report):
        kinds = [(name, row.extra.get(name, 0)) for name in ("near_ties", "faults", "unexplained")]
        told = [f"{name.replace('_', ' ')}: {count}" for name, count in kinds if count]
        made.append(
            {
                "method": row.method,
                "same": f"{row.identical}/{row.prompts}",
                "others": ", ".join(told) or ("none" if row.identical == row.prompts else NOTHING),
                "fault": bool(row.extra.get("faults")),
                "lines": list(row.extra.get("differences", ())),
            }
        )
    return made


def states(report: Report) -> list[tuple[str, list[str]]]:
    """Methods measured both cold and warm: their cold and their warm figures."""
    rows = {row.method: row for row in overall(report)}
    return [
        (name, [*_learned(cold), *_learned(rows[name + WARM])])
        for name, cold in rows.items()
        if name + WARM in rows
    ]


def _learned(row: Row) -> list[str]:
    return [
        number(row.speedup_micro, 2, "x"),
        interval(row),
        distinct(row),
        number(row.mean_accepted_length, 2),
    ]

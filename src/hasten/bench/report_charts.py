"""The report page's charts: which rows become which bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hasten.bench import charts
from hasten.bench.output import OVERALL, Report, Row
from hasten.bench.report_tables import distinct, number, overall

_PARTS = (
    ("target", "the target's pass", "pass_ms"),
    ("topk", "top-k selection", "topk_ms"),
    ("draft", "drafting", ""),
    ("host", "other host work", "host_ms"),
)
"""A round's parts: colour, words, and the key of its milliseconds ("": a field of its own)."""


def speedup_charts(report: Report, drafting: Sequence[str], colors: Mapping[str, str]) -> list[str]:
    """Speedup per category and method, drawn for a desktop and for a phone."""
    if not drafting:
        return []
    groups: dict[str, list[charts.Bar]] = {}
    for category in (OVERALL, *report.categories):
        rows = {row.method: row for row in report.rows if row.category == category}
        groups[category] = [
            _speedup_bar(rows[method], colors[method]) for method in drafting if method in rows
        ]
    told = "; ".join(f"{bar.name} {number(bar.value, 2, 'x')}" for bar in groups[OVERALL])
    return [
        charts.speedups(
            groups,
            width,
            "Speedup over plain decoding by category and method",
            f"Horizontal bars, one group a category; a line marks 1.0. Overall: {told}.",
        )
        for width in (charts.WIDE, charts.NARROW)
    ]


def _speedup_bar(row: Row, color: str) -> charts.Bar:
    share = distinct(row)
    interval = row.extra.get("speedup_micro_interval") if row.category == OVERALL else None
    return charts.Bar(
        name=row.method,
        color=color,
        value=row.speedup_micro,
        note=f"{share} distinct",
        short=share,
        interval=tuple(interval) if interval else None,
    )


def cards(
    report: Report, drafting: Sequence[str], colors: Mapping[str, str]
) -> list[dict[str, Any]]:
    """One card a method: accepted lengths, acceptance by depth and by source, on equal axes."""
    rows = [row for row in overall(report) if row.method in drafting]
    lengths = {row.method: _lengths(row) for row in rows}
    depths = {row.method: _rates(row, "acceptance_by_depth") for row in rows}
    top = max((max(values.values()) for values in lengths.values() if values), default=1.0)
    deep = max((max(values.values()) for values in depths.values() if values), default=1.0)
    made = []
    for row in rows:
        name, color = row.method, colors[row.method]
        charted = {
            "lengths": _shares(
                f"{name}: share of rounds by tokens accepted", lengths[name], color, 1.12 * top
            ),
            "depths": _shares(
                f"{name}: share of drafts accepted, by depth", depths[name], color, 1.12 * deep
            ),
            "sources": _source_chart(row, color),
        }
        if any(charted.values()):
            facts = f"accepted length {number(row.mean_accepted_length, 2)}"
            if row.extra.get("drafted_per_round") is not None:
                facts += f", drafted per pass {row.extra['drafted_per_round']:.1f}"
            made.append({"method": name, "color": color, "facts": facts, **charted})
    return made


def _lengths(row: Row) -> dict[str, float]:
    """Share of rounds by tokens emitted, the longest taken together."""
    counts = row.extra.get("accepted_length_histogram") or {}
    total = sum(counts.values())
    folded: dict[int, float] = {}
    for length, count in counts.items():
        at = min(int(length), charts.MOST_BARS)
        folded[at] = folded.get(at, 0.0) + count / total if total else 0.0
    return _filled(folded, 1 if 0 not in folded else 0)


def _rates(row: Row, name: str) -> dict[str, float]:
    """Acceptance by depth; depths beyond the last bar are taken together."""
    counts: dict[int, list[int]] = {}
    for depth, entry in (row.extra.get(name) or {}).items():
        sums = counts.setdefault(min(int(depth), charts.MOST_BARS), [0, 0])
        sums[0] += entry["accepted"]
        sums[1] += entry["drafted"]
    return _filled({at: a / d if d else 0.0 for at, (a, d) in counts.items()}, 1)


def _filled(values: Mapping[int, float], start: int) -> dict[str, float]:
    """Without gaps, by label; the last possible one stands for what is beyond it too."""
    last = max(values, default=-1)
    names = {at: str(at) + ("+" if at == charts.MOST_BARS else "") for at in range(start, last + 1)}
    return {name: values.get(at, 0.0) for at, name in names.items()}


def _shares(title: str, values: Mapping[str, float], color: str, top: float) -> str:
    if not values:
        return ""
    told = ", ".join(f"{name}: {charts.percent(value)}" for name, value in values.items())
    return charts.shares(
        list(values.values()), list(values), color, top=top, title=title, text=told
    )


def _source_chart(row: Row, color: str) -> str:
    bars = [
        charts.Bar(name, color, entry["rate"], f"of {entry['drafted']:,}")
        for name, entry in (row.extra.get("acceptance_by_source") or {}).items()
    ]
    if not bars:
        return ""
    told = ", ".join(f"{bar.name}: {charts.percent(bar.value or 0.0)} {bar.note}" for bar in bars)
    return charts.rates(bars, f"{row.method}: share of drafted tokens accepted, by source", told)


def split(report: Report) -> dict[str, Any] | None:
    """Where a round's time goes, as charts for both widths and as a table."""
    stacks, lines = [], []
    for row in overall(report):
        times = [row.draft_ms_per_round if not key else row.extra.get(key) for _, _, key in _PARTS]
        known = [(name, time) for (name, _, _), time in zip(_PARTS, times, strict=True) if time]
        if known:
            total = sum(time for _, time in known)
            stacks.append(charts.Stack(row.method, tuple(known), f"{total:.1f} ms"))
            lines.append((row.method, [number(t, 2) for t in times], f"{total:.2f}"))
    if not stacks:
        return None
    told = "; ".join(f"{stack.name}: {stack.note}" for stack in stacks)
    title = "Milliseconds of a round by part and method"
    return {
        "parts": [(words, name) for name, words, _ in _PARTS],
        "charts": [
            charts.stacks(stacks, width, title, told) for width in (charts.WIDE, charts.NARROW)
        ],
        "rows": lines,
    }

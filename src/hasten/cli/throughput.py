"""``hasten bench --concurrency``: tokens per second of many requests at a time."""

from __future__ import annotations

import json as js
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from hasten.cli.measuring import output_file, prepare_model, progress_bar, told
from hasten.cli.screen import err, out, table
from hasten.errors import OptionError

if TYPE_CHECKING:
    from hasten.bench import BenchConfig
    from hasten.bench.throughput import ThroughputReport

_LEGEND = """\
tok/s: all new tokens / all time, reading the prompts included. plain: against
plain decoding of as many requests. one by one: against the same method, one
request after the other. length: tokens per request and pass. same ids: answers
identical to plain decoding of the prompt alone. All figures: --json FILE."""


def bench(
    config: BenchConfig, concurrency: str, json: Path | None, unused: Mapping[str, Any]
) -> None:
    """Measure and print; `unused` are options that don't go with it."""
    from hasten.bench.throughput import run_throughput

    for name, value in unused.items():
        if value is not None:
            raise OptionError(name, "doesn't go with --concurrency", "Leave one of them out")
    try:
        levels = [int(part) for part in concurrency.split(",")]
    except ValueError:
        raise OptionError(
            "concurrency", f"must be whole numbers, as 1,2,4, got {concurrency!r}"
        ) from None
    with output_file("json", json) as target:
        prepare_model(config.model)
        with progress_bar() as progress:
            made = run_throughput(config, levels, progress)
        if target is not None:
            target.write_text(js.dumps(made.as_json(), indent=2) + "\n", encoding="utf-8")
    _print(made)
    told(json)


def _print(report: ThroughputReport) -> None:
    for warning in report.warnings:
        err().print(Text("note: ", style="yellow") + Text(warning), soft_wrap=True)
    console, facts = out(), report.environment
    console.print(
        f"{facts['model']} in {facts['precision']}: {facts['engine']} engine; suite "
        f"{facts['suite']}, {report.rows[0].prompts} prompts"
    )
    console.print()
    made = table()
    made.add_column("at a\ntime", justify="right")
    made.add_column("method", overflow="fold")
    for name in ("tok/s", "plain", "one by\none", "length", "same\nids"):
        made.add_column(name, justify="right", no_wrap=True)
    for row in report.rows:
        one = "-" if row.against_one is None else f"{row.against_one:.2f}x"
        made.add_row(
            str(row.concurrency),
            row.method,
            f"{row.tokens_per_s:.1f}",
            f"{row.against_plain:.2f}x",
            one,
            f"{row.decode_per_pass:.2f}",
            f"{row.identical}/{row.prompts}",
        )
    console.print(made)
    console.print()
    console.print(_LEGEND, style="dim")

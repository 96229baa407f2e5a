"""A benchmark's figures as one HTML page that needs nothing besides itself.

No script, no font, no link: style and charts are within the page. Needs the ``report`` extra
(matplotlib, jinja2); `check_installed` says so before anything is measured.
"""

from __future__ import annotations

import colorsys
import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hasten.bench.output import Report
from hasten.bench.report_charts import cards, speedup_charts, split
from hasten.bench.report_lede import COLORS, exits_section
from hasten.bench.report_tables import COLUMNS, groups, sameness, states
from hasten.errors import OptionError

# Blue, orange, green, magenta, olive, violet, teal, brown: (on light, on dark), each at least 3:1
# against its background.
_COLORS = (
    ("#0a66c2", "#62abff"),
    ("#c4420c", "#ff9357"),
    ("#0b7a53", "#41cf9b"),
    ("#a8328f", "#f08adb"),
    ("#7f6a00", "#dcc244"),
    ("#6844c9", "#ad97ff"),
    ("#0e7490", "#5fcbe6"),
    ("#7b4a2b", "#cfa07c"),
)


_DATE = re.compile(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d)\S*\+00:00$")

_TOLD = (
    *("model", "dtype", "suite", "baseline", "command"),
    *("max_new_tokens", "repeats", "temperature"),
)
"""Conditions that the page's first lines tell, where they are known."""

_HEADLINE = (
    ("engine", "engine"),
    ("kernels", "kernels"),
    ("weights", "quantize"),
    ("keys and values", "kv_dtype"),
    ("checked to be bit-exact", "exact"),
    ("runs on", "device"),
    ("processor", "cpu"),
    ("accelerator", "gpu"),
    ("cores", "cores"),
    ("threads", "threads"),
    ("hasten", "hasten"),
    ("torch", "torch"),
    ("measured (UTC)", "date"),
)


def check_installed() -> None:
    """Raise OptionError, naming the extra, when a package that the page needs isn't installed."""
    missing = []
    for name in ("matplotlib", "jinja2"):
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise OptionError(
            "report",
            f"needs {' and '.join(missing)}, not installed here",
            "Install what it needs: pip install 'hasten[report]'",
        )


def render(report: Report) -> str:
    """The page. Raises OptionError when the ``report`` extra isn't installed."""
    check_installed()
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hasten.bench"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    return environment.get_template("report.html.j2").render(_view(report))


def _breakable(name: str) -> Any:
    """A method's name that may be broken after its commas and colons."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([,:])", r"\1<wbr>", str(escape(name))))


def _view(report: Report) -> dict[str, Any]:
    """Everything the template shows, as texts and finished charts."""
    facts = report.environment
    colors = {method: f"m{index}" for index, method in enumerate(report.methods)}
    drafting = [method for method in report.methods if method != facts.get("baseline", "ar")]
    return {
        "title": f"{facts.get('model', 'a model')}: {facts.get('suite', 'benchmark')}",
        "facts": {**dict.fromkeys(_TOLD), **facts},
        "warnings": report.warnings,
        "partial": report.partial,
        "busy": bool(facts.get("busy")),
        "headline": [(name, _plain(facts[key])) for name, key in _HEADLINE if facts.get(key)],
        "prompts": max((row.prompts for row in report.rows), default=0),
        "palette": palette(max(len(colors), COLORS)),
        "colors": colors,
        "legend_methods": [(method, colors[method]) for method in drafting],
        "columns": [name for name, _ in COLUMNS],
        "groups": groups(report, colors),
        "speedup_charts": speedup_charts(report, drafting, colors),
        "cards": cards(report, drafting, colors),
        "exits": exits_section(report, colors),
        "split": split(report),
        "states": states(report),
        "sameness": sameness(report),
        "environment": [(name, _plain(value)) for name, value in _conditions(facts)],
        "lists": [(name, _items(value)) for name, value in facts.items() if _is_list(value)],
    }


def palette(count: int) -> list[tuple[str, str]]:
    """One colour a method, ``(on light, on dark)``: fixed ones first, then spread hues."""
    made = list(_COLORS[:count])
    for index in range(len(made), count):
        hue = index * 0.618 % 1
        made.append((_hex(hue, 0.34, 0.75), _hex(hue, 0.72, 0.75)))
    return made


def _hex(hue: float, lightness: float, saturation: float) -> str:
    parts = colorsys.hls_to_rgb(hue, lightness, saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


# -- conditions ------------------------------------------------------------------------------------


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0


def _items(value: Any) -> list[str]:
    return [str(item) for item in value]


def _conditions(facts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in facts.items() if not _is_list(value)]


def _plain(value: Any) -> str:
    """A recorded condition in words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={item}" for key, item in value.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    return "none" if value is None or value in ("", [], ()) else _DATE.sub(r"\1 \2", str(value))

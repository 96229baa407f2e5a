"""The report's charts: matplotlib figures as inline SVG that takes the page's fonts and colours.

Colours are names of the page's CSS variables (``"ink"``, ``"m0"``), so one drawing serves light and
dark. Figures are drawn in CSS pixels. Nothing of matplotlib's settings is changed outside of
`_figure`, nor are the user's own styles followed.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, NARROW = 1080, 336
"""Widths, in CSS pixels, of the drawings for a desktop and for a phone."""

MOST_BARS = 16
"""Bars of a histogram; what lies beyond them is in the last one."""

_TEXT, _SMALL = 12, 11
_BAR, _STEP, _HEAD = 15, 20, 30
_NO_METADATA: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its name, colour (a CSS variable's name), value (None: not measured) and words.

    interval  ``(low, high)`` drawn over the bar
    note      what is written after the value; `short` in its place where there is little room
    """

    name: str
    color: str
    value: float | None
    note: str = ""
    short: str = ""
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Stack:
    """A bar made of parts: ``(colour, length)`` from left to right, and what is written after."""

    name: str
    parts: tuple[tuple[str, float], ...]
    note: str


@dataclass(frozen=True, slots=True)
class Draft:
    """A round: colour, the exit drafted from (None: none), tokens of the draft's longest path, and
    how many were kept."""

    color: str
    exit: int | None
    length: int
    kept: int


MOST_ROUNDS = 96
"""Rounds of a timeline; later ones are left out."""


# -- drawings --------------------------------------------------------------------------------------


def speedups(groups: Mapping[str, Sequence[Bar]], width: int, title: str, text: str) -> str:
    """Grouped horizontal bars with a line at 1.0; wide drawings name every bar."""
    named = width > NARROW
    left, right = (240, 130) if named else (8, 92)
    rows, heads, height = _places(groups)
    bars = [bar for group in groups.values() for bar in group]
    ends = [max(b.value, *(b.interval or (0.0,))) for b in bars if b.value is not None]
    with _figure(width, height + 42) as figure:
        axes = _axes(figure, left, 22, width - left - right, height)
        axes.set_ylim(height, 0)
        axes.set_xlim(0, 1.02 * max([1.0, *ends]))
        _value_axis(axes, "x")
        for head, at in heads.items():
            axes.text(
                0,
                at,
                head,
                transform=_pixels(axes, left=4 - left),
                **_words("ink", _TEXT, weight="bold", ha="left"),
            )
        for at, bar in zip(rows, bars, strict=True):
            _speedup(axes, at, bar, named)
        axes.axvline(1.0, color=_slot("ink"), lw=1, ls=(0, (4, 3)), zorder=3)
        axes.text(1.0, -8, "plain decoding", **_words("muted", _SMALL, ha="center", va="bottom"))
        return _svg(figure, title, text)


def _places(groups: Mapping[str, Sequence[Bar]]) -> tuple[list[float], dict[str, float], int]:
    """Centres of the bars and of the groups' names, from the top, and the height of it all."""
    rows: list[float] = []
    heads: dict[str, float] = {}
    at = 0
    for name, bars in groups.items():
        heads[name] = at + _HEAD / 2
        at += _HEAD
        for _ in bars:
            rows.append(at + _STEP / 2)
            at += _STEP
    return rows, heads, at + 6


def _speedup(axes: Axes, at: float, bar: Bar, named: bool) -> None:
    if named:
        name = shorten(bar.name, 36)
        axes.text(0, at, name, transform=_pixels(axes, left=-8), **_words("muted", _SMALL))
    if bar.value is None:
        axes.text(0, at, " not measured", **_words("muted", _SMALL, ha="left"))
        return
    axes.barh(at, bar.value, height=_BAR, color=_slot(bar.color), clip_on=False)
    end = bar.value
    if bar.interval is not None:
        _interval(axes, at, *bar.interval)
        end = max(end, bar.interval[1])
    note = bar.note if named else bar.short
    words = {**_words("ink", _SMALL, ha="left"), "bbox": _PLATE, "zorder": 5}
    axes.annotate(
        f"{bar.value:.2f}x {note}", (end, at), (6, 0), textcoords="offset points", **words
    )


def _interval(axes: Axes, at: float, low: float, high: float) -> None:
    """A line with ends, set off from what lies under it."""
    for color, width in (("card", 3.6), ("ink", 1.4)):
        for x, y in (((low, high), (at, at)), *(((v, v), (at - 4, at + 4)) for v in (low, high))):
            axes.plot(x, y, color=_slot(color), lw=width, zorder=4, clip_on=False)


def shares(
    values: Sequence[float], labels: Sequence[str], color: str, *, top: float, title: str, text: str
) -> str:
    """Upright bars of shares in [0, 1], `top` being the axis's end; each says its percentage."""
    width, height = NARROW, 150
    with _figure(width, height) as figure:
        axes = _axes(figure, 36, 24, width - 44, height - 44)
        axes.bar(range(len(values)), values, width=0.78, color=_slot(color), clip_on=False)
        axes.set_ylim(0, max(top, 1e-9))
        axes.set_xlim(-0.6, max(len(values) - 0.4, 5.4))
        _value_axis(axes, "y", percent=True)
        axes.set_xticks(range(len(values)), labels, **_tick(_SMALL))
        unit = "%" if len(values) <= 9 else ""  # the axis says it where bars are narrow
        for at, value in enumerate(values):
            words = _words("ink", 10, ha="center", va="bottom")
            shown = percent(value).replace("%", unit)
            axes.annotate(shown, (at, value), (0, 2), textcoords="offset points", **words)
        return _svg(figure, title, text)


def rates(bars: Sequence[Bar], title: str, text: str) -> str:
    """Horizontal bars of rates in [0, 1], each under its name and with its note."""
    width, step = NARROW, 34
    height = max(step * len(bars), 1)
    with _figure(width, height + 4) as figure:
        axes = _axes(figure, 4, 2, width - 120, height)
        axes.set_xlim(0, 1)
        axes.set_ylim(height, 0)
        for index, bar in enumerate(bars):
            at, rate = step * index, bar.value or 0.0
            axes.text(0, at + 9, shorten(bar.name, 44), **_words("muted", _SMALL, ha="left"))
            axes.barh(at + 23, 1.0, height=10, color=_slot("rule"), clip_on=False)
            axes.barh(at + 23, rate, height=10, color=_slot(bar.color), clip_on=False)
            axes.annotate(
                f"{percent(rate)} {bar.note}",
                (1.0, at + 23),
                (6, 0),
                textcoords="offset points",
                **_words("ink", _SMALL, ha="left"),
            )
        return _svg(figure, title, text)


def stacks(bars: Sequence[Stack], width: int, title: str, text: str) -> str:
    """Stacked horizontal bars, each under its name."""
    step, right = 42, 70
    height = max(step * len(bars), 1)
    longest = max([sum(length for _, length in bar.parts) for bar in bars], default=0.0)
    with _figure(width, height + 34) as figure:
        axes = _axes(figure, 8, 30, width - 8 - right, height)
        axes.set_xlim(0, max(longest, 1e-9))
        axes.set_ylim(height, 0)
        _value_axis(axes, "x")
        for index, bar in enumerate(bars):
            at, start = step * index, 0.0
            name = shorten(bar.name, 90 if width > NARROW else 44)
            axes.text(0, at + 10, name, **_words("muted", _SMALL, ha="left"))
            for color, length in bar.parts:
                axes.barh(at + 28, length, height=16, left=start, color=_slot(color), clip_on=False)
                start += length
            words = _words("ink", _SMALL, ha="left")
            axes.annotate(bar.note, (start, at + 28), (6, 0), textcoords="offset points", **words)
        return _svg(figure, title, text)


def timeline(drafts: Sequence[Draft], width: int, title: str, text: str) -> str:
    """Rounds from left to right: a bar for each draft, filled as far as it was kept, and above it a
    dash at the exit it came from."""
    shown = drafts[: MOST_ROUNDS if width > NARROW else MOST_ROUNDS // 3]
    count = max(len(shown), 1)
    with _figure(width, 226) as figure:
        bars = _axes(figure, 36, 24, width - 44, 92)
        bars.set_xlim(-1, count)
        bars.set_ylim(0, max([1, *(draft.length for draft in shown)]))
        dots = _axes(figure, 36, 142, width - 44, 60)
        dots.set_xlim(-1, count)
        tall = max([4, *(draft.exit or 0 for draft in shown)])
        dots.set_ylim(-0.1 * tall, 1.1 * tall)
        for axes, name in ((bars, "tokens drafted and kept"), (dots, "exit (layers run)")):
            _value_axis(axes, "y")
            words = _words("muted", _SMALL, ha="left", va="bottom")
            axes.text(0, 1.04, name, transform=axes.transAxes, **words)
        for at, draft in enumerate(shown):
            color = _slot(draft.color)
            bars.bar(at, draft.length, width=0.8, facecolor="none", edgecolor=color, lw=1)
            bars.bar(at, draft.kept, width=0.8, color=color)
            if draft.exit is not None:
                # no marker: those are drawn by references to ids
                dots.barh(draft.exit, 0.8, height=0.09 * tall, left=at - 0.4, color=color)
        _value_axis(bars, "x")
        bars.grid(visible=False, axis="x")
        return _svg(figure, title, text)


# -- words -----------------------------------------------------------------------------------------


def percent(share: float) -> str:
    """``0.934`` -> ``93%``; a share that is not zero never shows as ``0%``."""
    return "<1%" if 0 < share < 0.005 else f"{100 * share:.0f}%"


def shorten(name: str, most: int) -> str:
    """The name in `most` characters, its middle left out: variants differ at the end."""
    if len(name) <= most:
        return name
    tail = most // 2 - 1
    return f"{name[: most - tail - 1]}…{name[len(name) - tail :]}"


# -- figures ---------------------------------------------------------------------------------------


@contextmanager
def _figure(width: int, height: int) -> Iterator[Figure]:
    """A figure of so many CSS pixels, drawn by matplotlib's own defaults, which come back after."""
    import matplotlib
    from matplotlib.figure import Figure

    with warnings.catch_warnings(), matplotlib.rc_context():
        # letters that matplotlib's font lacks are drawn by the browser's
        warnings.simplefilter("ignore")
        matplotlib.rcdefaults()
        matplotlib.rcParams["svg.fonttype"] = "none"
        matplotlib.rcParams["svg.hashsalt"] = "hasten"
        yield Figure(figsize=(width / 72, height / 72), dpi=72)


def _axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes at that place, in pixels, without a frame."""
    full_width, full_height = (72 * side for side in figure.get_size_inches())
    place = (
        left / full_width,
        bottom / full_height,
        max(width, 1) / full_width,
        max(height, 1) / full_height,
    )
    axes = figure.add_axes(place)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.tick_params(length=0)  # drawn by references to ids
    return axes


def _value_axis(axes: Axes, side: Literal["x", "y"], *, percent: bool = False) -> None:
    """Round values with thin lines along one side."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axis = axes.xaxis if side == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(4 if side == "x" else 3))
    axis.set_major_formatter(StrMethodFormatter("{x:.0%}" if percent else "{x:g}"))
    axes.tick_params(axis=side, labelsize=_SMALL, labelcolor=_slot("muted"))
    axes.grid(axis=side, color=_slot("rule"), lw=1)


def _pixels(axes: Axes, *, left: float) -> Any:
    """x in pixels from the axes' left edge, y in data."""
    from matplotlib.transforms import ScaledTranslation

    figure: Any = axes.figure
    shift = ScaledTranslation(left / 72, 0, figure.dpi_scale_trans)
    return axes.get_yaxis_transform() + shift


def _words(
    color: str, size: int, *, ha: str = "right", va: str = "center", weight: str = "normal"
) -> dict[str, Any]:
    """Options of a text that is taken literally."""
    return {
        "color": _slot(color),
        "fontsize": size,
        "ha": ha,
        "va": va,
        "fontweight": weight,
        "parse_math": False,
    }


def _tick(size: int) -> dict[str, Any]:
    return {"color": _slot("muted"), "fontsize": size, "parse_math": False}


# -- colours and markup ----------------------------------------------------------------------------

_FIXED = ("ink", "muted", "rule", "card", "target", "topk", "draft", "host")


def _slot(name: str) -> str:
    """A colour that stands for a CSS variable until the markup is made: `_FIXED`, or ``m0``..."""
    if name in _FIXED:
        return f"#0a0{_FIXED.index(name):03x}"
    return f"#0b0{int(name[1:]) % 4096:03x}"


_PLATE = {"facecolor": _slot("card"), "edgecolor": "none", "pad": 1}
"""Behind words that lie over a line."""


def _variable(color: str) -> str:
    """The CSS variable that a colour of `_slot` stands for."""
    index = int(color[4:], 16)
    return f"var(--{_FIXED[index] if color[2] == 'a' else f'm{index}'})"


def _svg(figure: Figure, title: str, text: str) -> str:
    """The figure as an ``<svg>`` element with a title and a description, for use within a page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata=_NO_METADATA)
    markup = out.getvalue()
    box = re.search(r'viewBox="([^"]*)"', markup)
    body = markup[markup.index(">", markup.index("<svg")) + 1 :]
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    # ids would meet those of the page's other charts; nothing drawn here needs clipping
    body = re.sub(r' (?:id|clip-path)="[^"]*"', "", body)
    body = re.sub(r"<defs>\s*<clipPath>.*?</defs>", "", body, flags=re.DOTALL)
    body = re.sub(r" font-family: [^;\"]*;", "", body)
    body = re.sub(r"(?<=: )#0(?:a000[0-7]|b0[0-9a-f]{3})\b", lambda m: _variable(m[0]), body)
    body = re.sub(r"\s*\n\s*", " ", body)
    view = box[1] if box else "0 0 1 1"
    return (
        f'<svg role="img" viewBox="{view}" style="max-width: {float(view.split()[2]):.0f}px">'
        f"<title>{escape(title)}</title><desc>{escape(text)}</desc>{body}"
    )

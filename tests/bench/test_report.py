"""The HTML page: one file, everything on it, whatever the figures are."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from hasten.bench import Report, Row
from hasten.bench.report import check_installed, palette, render
from hasten.errors import OptionError

METHODS = ("ar", "racer,nodes=24,scope=session", "racer,nodes=24,scope=session (warm)", "peer:x")
CATEGORIES = ("qa", "math_reasoning")
ENVIRONMENT = {
    "model": "smollm2-135m",
    "dtype": "bfloat16",
    "device": "cpu",
    "cpu": "A Processor 9000",
    "suite": "mini",
    "baseline": "ar",
    "row_ids": ["qa-1", "qa-2"],
    "skipped": [],
    "thread_settings": {"OMP_NUM_THREADS": "2"},
    "other_work_during_cores": 0.123456,
    "busy": False,
    "date": "2026-01-02T03:04:05+00:00",
    "command": "hasten bench --suite mini",
}


def row(method: str, category: str, **changes: Any) -> Row:
    peer = method.startswith("peer:")
    extra: dict[str, Any] = {
        "speedup_micro_interval": (1.41, 1.73),
        "e2e_speedup_micro": 1.37,
        "ttft_ms": 130.4,
        "distinct_4gram_share": 0.934,
        "near_ties": 0,
        "faults": 0,
        "unexplained": 0,
        "differences": [],
    }
    if not peer:
        extra |= {
            "pass_ms": 15.25,
            "topk_ms": 0.35,
            "host_ms": 0.31,
            "drafted_per_round": 12.3,
            "accepted_length_histogram": {"1": 60, "2": 30, "20": 10},
            "acceptance_by_depth": {
                str(d): {"drafted": 100, "accepted": 50 // d, "rate": 0.5 / d} for d in (1, 2, 18)
            },
            "acceptance_by_source": {"trie": {"drafted": 1200, "accepted": 300, "rate": 0.25}},
        }
    values: dict[str, Any] = {
        "method": method,
        "category": category,
        "prompts": 8,
        "tokens": 1024,
        "target_passes": None if peer else 500,
        "mean_accepted_length": None if peer else 2.04,
        "tokens_per_s": 81.25,
        "speedup_macro": 1.6,
        "speedup_micro": 1.57,
        "identical": 8,
        "draft_ms_per_round": None if peer else 0.4,
        "verify_ms_per_round": None if peer else 16.0,
        "extra": extra,
    }
    return Row(**{**values, **changes})


def report(*rows: Row, **changes: Any) -> Report:
    made = rows or tuple(row(m, c) for m in METHODS for c in (*CATEGORIES, "overall"))
    return Report(**{"environment": ENVIRONMENT, "rows": made, **changes})


class Page(HTMLParser):
    """Tags, attributes, ids and texts of a page; raises when tags aren't closed in order."""

    VOID = frozenset({"meta", "br", "wbr", "link", "img", "input"})

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(markup)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    @property
    def text(self) -> str:
        """What a reader sees, in one line."""
        shown = (t for tag, parts in self.texts.items() if tag != "style" for t in parts)
        return " ".join(" ".join(shown).split())


@pytest.fixture(scope="module")
def markup() -> str:
    return render(report())


@pytest.fixture(scope="module")
def page(markup: str) -> Page:
    return Page(markup)


def test_the_page_names_kernels_and_quantized_weights(page: Page) -> None:
    facts = {**ENVIRONMENT, "kernels": "native", "quantize": "int8", "exact": True}
    shown = Page(render(report(environment=facts))).text
    for words in ("kernels", "native", "int8", "checked to be bit-exact"):
        assert words in shown
        assert words not in page.text


# -- one file --------------------------------------------------------------------------------------


def test_the_page_needs_nothing_besides_itself(markup: str, page: Page) -> None:
    assert "://" not in markup
    assert "@import" not in markup
    assert "url(" not in markup
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "image", "use")
        assert not {"src", "href", "xlink:href", "srcset", "data"} & attributes.keys()


def test_every_colour_used_is_defined_for_light_and_for_dark(markup: str) -> None:
    style, _, body = markup.partition("</style>")
    light, _, dark = style.partition("prefers-color-scheme: dark")
    used = set(re.findall(r"var\(--(\w+)\)", body))
    assert used >= {"ink", "m1", "m2", "m3", "target", "topk", "draft", "host"}
    for name in used:
        assert f"--{name}:" in light
        assert f"--{name}:" in dark


def test_charts_have_roles_titles_and_descriptions(page: Page) -> None:
    charts = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(charts) >= 2 + 2 * 3 + 2
    assert all(attributes["role"] == "img" for attributes in charts)
    titles = page.texts["title"][1:]  # the first is the page's
    assert len(titles) == len(page.texts["desc"]) == len(charts)
    assert any("Overall: racer,nodes=24,scope=session 1.57x" in d for d in page.texts["desc"])


def test_charts_bring_no_ids_that_could_meet(page: Page) -> None:
    assert [a for tag, a in page.tags if "id" in a] == []


def test_matplotlibs_settings_are_left_alone() -> None:
    import matplotlib

    matplotlib.rcParams["svg.fonttype"] = "path"
    matplotlib.rcParams["lines.linewidth"] = 7.5
    before = dict(matplotlib.rcParams)
    try:
        made = render(report())
        assert dict(matplotlib.rcParams) == before
    finally:
        matplotlib.rcdefaults()
    assert made == render(report())  # nor are they followed


# -- what is on it ---------------------------------------------------------------------------------


def test_every_method_and_category_is_there(page: Page) -> None:
    for name in (*METHODS, *CATEGORIES, "overall"):
        assert name.split(",")[0] in page.text
    titles = " ".join(page.texts["title"])
    assert all(f"{method}: " in titles for method in METHODS[1:3])
    heads = page.texts["text"]
    assert heads.count("qa") == heads.count("math_reasoning") == 2  # wide and narrow


def test_the_conditions_are_there(page: Page) -> None:
    for words in ("smollm2-135m in bfloat16", "A Processor 9000", "hasten bench --suite mini"):
        assert words in page.text
    assert "OMP_NUM_THREADS=2" in page.text
    assert "2026-01-02 03:04" in page.text
    assert "qa-2" in page.text


def test_distinct_4grams_stand_beside_every_speedup(page: Page) -> None:
    bars = [t for t in page.texts["text"] if re.match(r"\d\.\d\dx", t)]
    assert bars.count("1.57x 93% distinct") == bars.count("1.57x 93%") == 3 * 3
    assert len(bars) == 2 * 3 * 3
    cells = page.texts["td"]
    assert cells.count("93%") >= 4 * 3


def test_intervals_are_drawn_on_overall_only(markup: str) -> None:
    none = [
        replace(r, extra={**r.extra, "speedup_micro_interval": None})
        if r.category == "overall"
        else r
        for r in report().rows
    ]
    lines = 'stroke-width: 1.4"'
    assert markup.replace("; stroke-linecap", '"').count("stroke-width: 1.4") == 2 * 3 * 3
    assert lines not in render(report(*none))


def test_lengths_beyond_the_last_bar_are_counted_in_it(page: Page) -> None:
    (told,) = {d for d in page.texts["desc"] if d.startswith("1: 60%")}
    assert told.endswith("15: 0%, 16+: 10%")
    depths = next(d for d in page.texts["desc"] if d.startswith("1: 50%"))
    assert depths.endswith("16+: 2%")


def test_the_time_of_a_round_is_split(page: Page) -> None:
    assert "16.31" in page.texts["td"]  # 15.25 + 0.35 + 0.4 + 0.31
    assert [w for w in page.texts["desc"] if w.startswith("ar: 16.3 ms; racer")]


def test_cold_and_warm_stand_side_by_side_where_both_are(page: Page) -> None:
    assert "Cold and warm" in page.text
    assert "Cold and warm" not in Page(render(report(row("ar", "overall")))).text


def test_differences_are_told_by_kind_and_listed() -> None:
    extra = {
        **row("racer", "overall").extra,
        "near_ties": 1,
        "faults": 2,
        "differences": ["qa 3: token 5", "qa 4: token 9"],
    }
    shown = Page(render(report(row("ar", "overall"), row("racer", "overall", extra=extra))))
    assert "near ties: 1, faults: 2" in shown.text
    assert "qa 4: token 9" in shown.texts["li"]
    assert "racer: 2 differences" in shown.text
    assert [a for tag, a in shown.tags if tag == "tr" and a.get("class") == "fault"]


def test_a_busy_machine_and_warnings_are_told_first() -> None:
    facts = {**ENVIRONMENT, "busy": True}
    made = render(report(environment=facts, warnings=("0.7 of 2 cores",)))
    assert 0 < made.index("Busy machine") < made.index("0.7 of 2 cores") < made.index("<main>")
    assert "Busy machine" not in render(report())


# -- whatever comes --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a & b <i>", "\"x\" y='z'", "$x$ {"])
def test_names_are_shown_as_they_are(name: str) -> None:
    rows = [row(m, c) for m in ("ar", name) for c in (name, "qa", "overall")]
    facts = {**ENVIRONMENT, "model": name, "command": name, name: name}
    made = render(report(*rows, environment=facts, warnings=(name,)))
    shown = Page(made)
    assert "<script" not in made
    assert "<i>" not in made
    assert name in shown.texts["code"]
    assert shown.texts["text"].count(name) >= 2 + 2
    assert name in "".join(shown.texts["th"])


def test_letters_that_matplotlibs_font_lacks_are_kept() -> None:
    made = render(report(row("ar", "overall"), row("方法", "overall"), row("方法", "数学")))
    assert "数学" in Page(made).texts["text"]


def test_an_interrupted_run_is_told() -> None:
    assert "Interrupted." in render(report(partial=True))
    assert "Interrupted." not in render(report())


def test_rows_without_passes_or_figures_make_a_page() -> None:
    bare = {
        "tokens": 8,
        "target_passes": 0,
        "mean_accepted_length": 1.0,
        "tokens_per_s": 0.0,
        "speedup_macro": None,
        "speedup_micro": None,
        "draft_ms_per_round": 0.0,
    }
    empty = {
        "speedup_micro_interval": None,
        "distinct_4gram_share": None,
        "pass_ms": 0.0,
        "accepted_length_histogram": {},
        "acceptance_by_depth": {},
        "acceptance_by_source": {},
    }
    rows = [
        row(m, c, extra=extra, **bare)
        for m, extra in (("ar", empty), ("racer", empty), ("peer:x", {}))
        for c in ("qa", "overall")
    ]
    shown = Page(render(report(*rows)))
    assert shown.texts["text"].count(" not measured") == 2 * 2 * 2
    assert "Where a round" not in shown.text


def test_plain_decoding_alone_makes_a_page_without_a_speedup_chart() -> None:
    shown = Page(render(report(row("ar", "qa"), row("ar", "overall"))))
    assert "Overall" in shown.text
    assert "Speedup by category" not in shown.text


def test_a_report_of_nothing_makes_a_page() -> None:
    assert "Nothing was measured" in Page(render(Report({}, ()))).text


def test_any_number_of_methods_gets_colours_of_its_own() -> None:
    made = palette(30)
    assert len(set(made)) == len(made) == 30
    assert palette(3) == made[:3]
    many = [row(m, "overall") for m in ("ar", *(f"m{i}" for i in range(20)))]
    assert "var(--m20)" in render(report(*many))


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_a_missing_package_is_told_with_the_extra_that_brings_it(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(OptionError, match=rf"needs {missing}.*hasten\[report\]") as caught:
        check_installed()
    assert caught.value.option == "report"
    with pytest.raises(OptionError):
        render(report())

"""What commands print: consoles, figures, and the wait for a model."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from hasten.api import LLM
    from hasten.methods import MethodSpec
    from hasten.metrics import Summary


class _Console(Console):
    """A console that reports a closed pipe to the caller instead of exiting by itself."""

    def on_broken_pipe(self) -> None:
        """Called inside rich's handler of the BrokenPipeError."""
        raise BrokenPipeError


def out() -> Console:
    """Standard output, as it is now."""
    return _Console(highlight=False, markup=False, emoji=False)


def err() -> Console:
    """Standard error, as it is now."""
    return _Console(stderr=True, highlight=False, markup=False, emoji=False)


def write(text: str) -> None:
    """Text to standard output as it is (no wrapping, no colours), at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_json(value: Any) -> None:
    """One JSON value to standard output."""
    write(json.dumps(value, indent=2) + "\n")


def table(*columns: str, **more: Any) -> Table:
    """A table with named columns, ruled lightly."""
    return Table(*columns, box=SIMPLE_HEAD, pad_edge=False, show_edge=False, **more)


def grid() -> Table:
    """A borderless table of names and values."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    return made


@contextmanager
def busy(text: str) -> Iterator[None]:
    """A spinner on stderr; nothing where stderr is no terminal."""
    console = err()
    if not console.is_terminal:
        yield
        return
    with console.status(f"{text} ..."):
        yield


@contextmanager
def counting(text: str, total: int) -> Iterator[Progress]:
    """A progress bar on stderr over `total` steps; ``progress.advance(progress.task_ids[0])``."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = err()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        bar.add_task(text, total=total)
        yield bar


def load_model(model: str | None, method: str | None, **options: Any) -> LLM:
    """``hasten.load``, its waits shown on stderr; what is None takes the library's default."""
    import hasten
    from hasten import methods
    from hasten.targets.catalog import prepare, resolve

    chosen = {key: value for key, value in options.items() if value is not None}
    if method is not None:
        methods.parse(method)  # a typing error is told before anything is fetched
    _check_loading(chosen)
    source = resolve(model)
    prepare(source)  # fetching and converting show bars of their own
    if method is not None:
        chosen["method"] = method
    with busy(f"loading {source.name}"):
        quiet_transformers()
        return hasten.load(model, **chosen)


def _check_loading(given: Mapping[str, Any]) -> None:
    """The library's own checks of names, before anything is fetched. Raises OptionError."""
    from hasten.targets import load_options

    load_options.check_given(given)
    load_options.read_device(given.get("device"))


def quiet_transformers() -> None:
    """Its bars and advice would mix with ours."""
    from transformers.utils import logging as transformers_logging

    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def tell_lossy(method: MethodSpec) -> None:
    """On stderr, for a method whose answers needn't be the model's."""
    from hasten.methods import is_lossy

    if is_lossy(method):
        err().print(f"note: {method} is lossy: the model may have said something else", style="dim")


def stats_table(summary: Summary, method: str, dtype: str = "") -> Table:
    """The figures of one answer, or of several merged."""
    from hasten.methods import get, parse

    kind = get(parse(method).name)
    rows = grid()
    rows.add_row("method", f"{method}{f' in {dtype}' if dtype else ''}")
    rows.add_row(
        "mean accepted length",
        f"{summary.mean_accepted_length:.2f} tokens a pass (plain decoding: 1.00)",
    )
    # Plain decoding has its first token from the prompt's pass; a method that hasn't says so.
    after = " after the first" if summary.pass_tokens < summary.new_tokens else ""
    rows.add_row("decode speed", f"{summary.tokens_per_s:.1f} tokens/s{after and after + ' token'}")
    rows.add_row("time to first token", f"{1e3 * summary.time_to_first_token_s:.0f} ms")
    rows.add_row(
        "passes",
        f"{summary.target_passes} for {summary.pass_tokens} tokens{after}",
    )
    if summary.drafted:
        kept = f"{summary.acceptance_rate:.0%} of {summary.drafted} drafted tokens kept"
    elif kind.population:
        kept = "none: particles are weighed, not rejected"
    else:
        kept = "nothing drafted"
    rows.add_row("acceptance", kept)
    if kind.arbitrates:
        rows.add_row(
            "overrides",
            f"{summary.overrides} of {summary.mismatches} mismatches: the draft's token was kept "
            "against the model's",
        )
    parts = ", ".join(f"{label} {summary.per_pass_ms(name):.2f}" for name, label in _SPLIT)
    rows.add_row("ms per pass", f"{summary.per_pass_ms('decode'):.2f} ({parts})")
    return rows


_SPLIT = (("target", "target"), ("topk", "top-k"), ("draft", "draft"), ("host", "host"))


def summary_json(summary: Summary) -> dict[str, Any]:
    """The figures as plain data; seconds and milliseconds as the names say."""
    names = (
        "new_tokens",
        "target_passes",
        "drafted",
        "accepted",
        "mean_accepted_length",
        "acceptance_rate",
        "mismatches",
        "overrides",
    )
    timed = ("tokens_per_s", "time_to_first_token_s", "end_to_end_s")
    figures: dict[str, Any] = {name: getattr(summary, name) for name in names + timed}
    figures.update(
        {
            f"{name}_ms_per_pass": summary.per_pass_ms(name)
            for name in ("target", "topk", "draft", "host")
        }
    )
    return figures

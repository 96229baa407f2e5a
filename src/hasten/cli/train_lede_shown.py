"""What ``hasten train lede`` reads from its options, and what it prints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress as Bar
from rich.table import Table

from hasten.cli.screen import err, out, table
from hasten.errors import OptionError

if TYPE_CHECKING:
    from hasten.train.lede.logs import Experience


def layers(text: str) -> tuple[int, ...]:
    """``2+4+8``. Raises OptionError."""
    try:
        found = tuple(int(part) for part in text.split("+")) if text else ()
    except ValueError:
        raise OptionError("exits", f"must be layers joined by +, as 2+4+8, got {text!r}") from None
    if len(set(found)) != len(found) or min(found, default=0) < 0:
        raise OptionError("exits", f"names a layer twice, or one below 0: {text!r}")
    return found


def own(head: str) -> bool:
    """Whether exits have the model's own head. Raises OptionError."""
    if head not in ("modules", "own"):
        raise OptionError("head", f"must be modules or own, got {head!r}")
    return head == "own"


def names(text: str) -> tuple[str, ...]:
    """``math,chat``."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def chosen(domains: str | None, leave_out: str | None) -> tuple[str, ...] | None:
    """Domains to take; None: all. Raises OptionError."""
    from hasten.train.sources import DOMAINS

    wanted = names(domains) if domains else tuple(DOMAINS)
    for name in (*wanted, *names(leave_out or "")):
        if name not in DOMAINS:
            hint = f"Domains: {', '.join(DOMAINS)}"
            raise OptionError("domains", f"no such domain: {name!r}", hint)
    if not domains and not leave_out:
        return None
    return tuple(name for name in wanted if name not in names(leave_out or ""))


def rollouts(there: Experience, domains: tuple[str, ...] | None) -> list[Any]:
    """Those over documents of these domains."""
    kept = {doc.id for doc in there.docs if domains is None or doc.domain in domains}
    return [rollout for rollout in there.rollouts() if rollout.doc in kept]


def named(text: str) -> tuple[str, str]:
    """``NAME=FILE``, or a file that is called as its folder."""
    name, found, path = text.partition("=")
    return (name, path) if found else (Path(text).parent.name or Path(text).stem, text)


@contextmanager
def shown() -> Iterator[Any]:
    """Progress on stderr: bars on a terminal, a line now and then elsewhere."""
    console = err()
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def show(row: dict[str, Any]) -> None:
            stage = row["stage"]
            if "note" in row:
                console.print(f"note: {row['note']}", soft_wrap=True)
                return
            done, total = row.get("done", row.get("updates", 0)), row.get("total")
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)
            if not console.is_terminal and (stage == "fit" or done == total or done % 20 == 0):
                more = f", rho {row['selected']:.3f}" if "selected" in row else ""
                console.print(f"{stage}: {done} of {total or '?'}{more}", soft_wrap=True)

        yield show


def print_experience(made: Experience) -> None:
    """Documents by domain and split, and how much of the rest is there."""
    lines = table("domain")
    for name in ("policy", "select", "test", "rows"):
        lines.add_column(name, justify="right")
    for domain in sorted({doc.domain for doc in made.docs}):
        own = [doc for doc in made.docs if doc.domain == domain]
        counts = [sum(doc.split == split for doc in own) for split in ("policy", "select", "test")]
        lines.add_row(domain, *map(str, counts), f"{sum(doc.rows for doc in own):,}")
    console = out()
    console.print(lines)
    there = sum(made.shard(n).is_file() for n in range(len(made.parts())))
    console.print(
        f"tables of {there} of {len(made.parts())} parts, {sum(1 for _ in made.rollouts())} "
        f"rollouts; all are in {made.folder}",
        soft_wrap=True,
    )


def print_headroom(rows: list[dict[str, Any]], least: float) -> None:
    """How much there is to gain, in a line."""
    fixed, oracle, seer = rows[0]["rho"], rows[2]["rho"], rows[3]["rho"]
    gain = oracle / fixed - 1.0
    words = f"headroom: {rows[0]['policy']} earns {fixed:.3f}, foresight {oracle:.3f} ({gain:+.1%})"
    words += f", clairvoyant {seer:.3f}"
    if gain < least:
        words += f". Below {least:.0%} there is nothing for an agent to learn"
    out().print(words, soft_wrap=True)


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A line a policy: what it earns, then what it earns in each domain."""
    lines = _columns("rho", "95%", "gap", "tokens", "length", "exit", "kept")
    for row in rows:
        lines.add_row(
            row["policy"],
            f"{row['rho']:.3f}",
            f"{row['low']:.2f}-{row['high']:.2f}",
            f"{row['gap_closed']:.0%}",
            f"{row['tokens_per_round']:.2f}",
            f"{row['length']:.1f}",
            f"{row['exit']:.1f}",
            f"{row['acceptance']:.2f}",
        )
    out().print(lines)
    domains = sorted({name for row in rows for name in row["domains"]})
    lines = _columns(*domains)
    for row in rows:
        found = (row["domains"].get(name, float("nan")) for name in domains)
        lines.add_row(row["policy"], *(f"{rho:.2f}" for rho in found))
    out().print(lines)


def _columns(*names: str) -> Table:
    lines = table("policy")
    for name in names:
        lines.add_column(name, justify="right", no_wrap=True)
    return lines

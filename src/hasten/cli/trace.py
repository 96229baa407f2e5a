"""``--trace``: the answer with its drafted tokens marked, and a table of its rounds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.text import Text

from hasten.cli.screen import out, table, write
from hasten.text import Detokenizer
from hasten.types import Result, Round

Piece = tuple[str, bool]
"""Some text, and whether it was drafted."""

GREEN, BRACKETS = ("\x1b[1;32m", "\x1b[0m"), ("‹", "›")
"""What is put around drafted tokens, on a terminal with colours and elsewhere."""


def print_trace(tokenizer: Any, result: Result) -> None:
    """Print both parts to standard output."""
    console = out()
    coloured = console.color_system in ("standard", "256", "truecolor")
    marks, legend = (GREEN, "green") if coloured else (BRACKETS, "in ‹ ›")
    rounds = list(_by_round(tokenizer, result))
    console.print(f"drafted and kept: {legend}; the model's own: plain", style="dim")
    write(_marked((piece for _, pieces in rounds for piece in pieces), marks) + "\n\n")
    rows = table("round", "drafted", "kept", "ms", "text")
    for column in rows.columns[:4]:
        column.justify = "right"
    rows.columns[4].overflow = "fold"
    for round, pieces in rounds:
        text = _marked(((_visible(piece), drafted) for piece, drafted in pieces), marks)
        drafted, kept = "prompt", ""
        if round.tree is not None:
            drafted, kept = str(round.drafted), str(len(round.accepted) - 1)
        spent = f"{1e3 * round.times.total:.1f}"
        rows.add_row(str(round.index), drafted, kept, spent, Text.from_ansi(text))
    console.print(rows)


def _by_round(tokenizer: Any, result: Result) -> Iterator[tuple[Round, list[Piece]]]:
    """Each round with its pieces of text and whether each came from the draft.

    A character spread over several tokens belongs to the last of them. What follows the answer's
    end (a stop string) is left out.
    """
    words = Detokenizer(tokenizer)
    left = len(result.text)
    for round in result.rounds:
        pieces = []
        for place, token in enumerate(round.emitted, 1):
            piece = words.push((token,))
            if round is result.rounds[-1] and place == len(round.emitted):
                piece += words.flush()
            pieces.append((piece[:left], place < len(round.accepted)))
            left -= len(pieces[-1][0])
        yield round, pieces


def _marked(pieces: Iterator[Piece], marks: tuple[str, str]) -> str:
    """Pieces as one text, each run of drafted ones between the marks."""
    runs = groupby((p for p in pieces if p[0]), key=lambda piece: piece[1])
    texts = ((drafted, "".join(text for text, _ in run)) for drafted, run in runs)
    return "".join(f"{marks[0]}{text}{marks[1]}" if drafted else text for drafted, text in texts)


def _visible(text: str) -> str:
    """Text for one line of a table."""
    shown = {"\n": "⏎", "\t": "⇥"}
    return "".join(c if c.isprintable() else shown.get(c, "·") for c in text)

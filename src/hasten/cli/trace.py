"""``--trace``: the answer with its drafted tokens marked, and a table of its rounds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.text import Text

from hasten.choices import Choice, choice, exits_drafted
from hasten.cli.screen import out, table, write
from hasten.text import Detokenizer
from hasten.types import Result, Round

OWN, DRAFTED, OVERRIDDEN = range(3)
"""Whose a token is: the model's, the draft's, or the draft's against the model (``cospec``)."""

Piece = tuple[str, int]
"""Some text, and whose it is."""

Marks = tuple[tuple[str, str], ...]
COLOURS: Marks = (("", ""), ("\x1b[1;32m", "\x1b[0m"), ("\x1b[1;33m", "\x1b[0m"))
BRACKETS: Marks = (("", ""), ("‹", "›"), ("«", "»"))
"""What is put around each kind, on a terminal with colours and elsewhere."""


def print_trace(tokenizer: Any, result: Result) -> None:
    """Print both parts to standard output."""
    console = out()
    coloured = console.color_system in ("standard", "256", "truecolor")
    marks = COLOURS if coloured else BRACKETS
    names = ("green", "yellow") if coloured else ("in ‹ ›", "in « »")
    rounds = list(_by_round(tokenizer, result))
    against = f"; kept against the model: {names[1]}" if result.overrides else ""
    console.print(f"drafted and kept: {names[0]}{against}; the model's own: plain", style="dim")
    choices = [choice(round) for round, _ in rounds]
    from_exits = exits_drafted(choices)
    sources = from_exits or len({each.name for each in choices if each.drafted}) > 1
    if from_exits:
        console.print(_TOKENS, style="dim")
    write(_marked((piece for _, pieces in rounds for piece in pieces), marks) + "\n\n")
    rows = table("round", "drafted", "kept", "ms", *_drafts(sources, from_exits), "text")
    for column in rows.columns[:4]:
        column.justify = "right"
    for column in rows.columns[4:]:
        column.overflow = "fold"
    for (round, pieces), chosen in zip(rounds, choices, strict=True):
        text = _marked(((_visible(piece), whose) for piece, whose in pieces), marks)
        drafted, kept = "prompt", ""
        if round.tree is not None:
            drafted, kept = str(round.drafted), str(len(round.accepted) - 1)
        spent = f"{1e3 * round.times.total:.1f}"
        told = (chosen.name if kept else "", tokens_told(chosen))
        more = told[: len(_drafts(sources, from_exits))]
        rows.add_row(str(round.index), drafted, kept, spent, *more, Text.from_ansi(text))
    console.print(rows)


def _drafts(sources: bool, exits: bool) -> tuple[str, ...]:
    """Columns on where drafts came from, where there were several sources, and on each token's
    exit."""
    return ("from", "tokens") if exits else ("from",) if sources else ()


_TOKENS = "tokens: each kept one by its exit (c: copy, s: stored), a dot for a refused one"


def tokens_told(chosen: Choice) -> str:
    """A round's drafted tokens in a few letters: ``44·``, two kept from exit 4 and one refused."""
    letters = [word.removeprefix("exit ") if "exit" in word else word[:1] for word in chosen.kept]
    wide = any(len(letter) > 1 for letter in letters)
    return (" " if wide else "").join(letters) + "·" * (chosen.drafted - len(chosen.kept))


def _by_round(tokenizer: Any, result: Result) -> Iterator[tuple[Round, list[Piece]]]:
    """Each round with its pieces of text and whose each is.

    A character spread over several tokens belongs to the last of them. What follows the answer's
    end (a stop string) is left out.
    """
    words = Detokenizer(tokenizer)
    left, at = len(result.text), 0
    against = {each.position for each in result.overrides}
    for round in result.rounds:
        pieces = []
        for place, token in enumerate(round.emitted, 1):
            piece = words.push((token,))
            if round is result.rounds[-1] and place == len(round.emitted):
                piece += words.flush()
            whose = OVERRIDDEN if at in against else DRAFTED if _drafted(round, place) else OWN
            pieces.append((piece[:left], whose))
            left, at = left - len(pieces[-1][0]), at + 1
        yield round, pieces


def _drafted(round: Round, place: int) -> bool:
    """Whether a round's token (`place` from 1) stood in its draft. The last one may, without its
    node being kept: it is the next round's root."""
    tree = round.tree
    if tree is None or place < len(round.accepted):
        return tree is not None
    node = (round.accepted[-1], round.emitted[place - 1])
    return node in zip(tree.parents, tree.tokens, strict=True)


def _marked(pieces: Iterator[Piece], marks: Marks) -> str:
    """Pieces as one text, each run of a kind between its marks."""
    runs = groupby((p for p in pieces if p[0]), key=lambda piece: piece[1])
    texts = ((marks[whose], "".join(text for text, _ in run)) for whose, run in runs)
    return "".join(f"{before}{text}{after}" for (before, after), text in texts)


def _visible(text: str) -> str:
    """Text for one line of a table."""
    shown = {"\n": "⏎", "\t": "⇥"}
    return "".join(c if c.isprintable() else shown.get(c, "·") for c in text)

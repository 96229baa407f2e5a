"""In words: where a round's draft came from, how long it was, what of it was kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hasten.drafters import ranks
from hasten.types import Round

PLAIN = "plain"
_EXIT = "exit-"
_COPIES = frozenset(
    {ranks.LOOKUP, ranks.SUFFIX, ranks.COPIED, ranks.CHECKED, ranks.RETRIEVAL, ranks.POOL}
)
_STORED = frozenset({ranks.LOGITS, ranks.START})


def origin(source: str) -> str:
    """A node's source in words: ``exit 4``, ``copy``, ``stored``; else the source itself."""
    if source == ranks.MODULE:
        return "exit 0"
    if source.startswith(_EXIT):
        return f"exit {source.removeprefix(_EXIT)}"
    if source in _COPIES:
        return "copy"
    return "stored" if source in _STORED else source


@dataclass(frozen=True, slots=True)
class Choice:
    """What a round drafted.

    origins   where its tokens came from, those of most tokens first; none for a plain step
    drafted   tokens verified; depth: of the longest path
    kept      for each kept token where it came from, in order
    """

    origins: tuple[str, ...] = ()
    drafted: int = 0
    depth: int = 0
    kept: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """``copy + exit 0``, or ``plain``. Stored candidates are named only where all are."""
        named = tuple(each for each in self.origins if each != "stored") or self.origins
        return " + ".join(sorted(named)) or PLAIN

    @property
    def exit(self) -> int | None:
        """The highest exit drafted from; None where there is none."""
        exits = [int(each.removeprefix("exit ")) for each in self.origins if _is_exit(each)]
        return max(exits, default=None)


def _is_exit(name: str) -> bool:
    return name.startswith("exit ")


def choice(round: Round) -> Choice:
    """What a round drafted. The prefill drafted nothing."""
    if round.tree is None or not round.drafted:
        return Choice()
    words = [origin(source) for source in round.sources]
    counts: dict[str, int] = {}
    for word in words[1:]:
        counts[word] = counts.get(word, 0) + 1
    origins = tuple(sorted(counts, key=lambda word: -counts[word]))
    kept = tuple(words[node] for node in round.accepted[1:]) if words else ()
    return Choice(origins, round.drafted, max(round.tree.depths), kept)


def exits_drafted(choices: Sequence[Choice]) -> bool:
    """Whether any of these rounds drafted from an exit."""
    return any(each.exit is not None for each in choices)

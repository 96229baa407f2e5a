"""Cold and warm: which methods learn from requests, and in which states they are measured.

Only what is learned from texts counts here. Counts of how often drafts were kept, which the budget
policy shares between requests, are kept in every state and by every method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hasten import methods
from hasten.api import LLM
from hasten.bench.config import WARM

_COUNTS = "counts"


@dataclass(frozen=True, slots=True)
class Entry:
    """A method to measure. `state` is ``"cold"``, ``"warm"``, or ``""`` where it learns nothing."""

    spec: methods.MethodSpec
    state: str = ""

    @property
    def name(self) -> str:
        """Of its rows."""
        return f"{self.spec}{WARM}" if self.state == "warm" else str(self.spec)


def entries(llm: LLM, specs: Sequence[methods.MethodSpec], state: str) -> list[Entry]:
    """What is measured of `specs` in `state` (``"cold"``, ``"warm"`` or ``"both"``).

    Methods that keep no text from one request to the next are the same either way: one entry.
    """
    made = []
    for spec in specs:
        states = [each for each in ("cold", "warm") if state in (each, "both")]
        made += [Entry(spec, each) for each in (states if _learned(llm, spec) else [""])]
    return made


def _learned(llm: LLM, spec: methods.MethodSpec) -> list[str]:
    """Kinds of what the method's requests learn from each other's texts."""
    return [kind for kind in llm._prepared[llm.prepare(spec)].shares if kind != _COUNTS]


def own_state(llm: LLM, entry: Entry) -> LLM:
    """An LLM for this entry: `llm`, or one of the same target whose learning is a copy, emptied, so
    that neither another entry nor the caller notices it."""
    if not entry.state:
        return llm
    twin = LLM(llm._loaded, method="ar")
    twin._prepared[entry.spec] = llm._prepared[llm.prepare(entry.spec)].fork()
    forget(twin, entry.spec)
    return twin


def forget(llm: LLM, spec: methods.MethodSpec) -> None:
    """Empty what the method has learned from earlier requests' texts."""
    if kinds := _learned(llm, spec):
        llm._prepared[spec].reset(*kinds)

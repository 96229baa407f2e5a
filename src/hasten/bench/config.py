"""What a benchmark run is asked to do, and how it tells how far it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hasten.errors import OptionError
from hasten.methods import MethodSpec
from hasten.targets import load_options

TURNS = ("first", "all")
STATES = ("cold", "warm", "both")
WARM = " (warm)"
"""Ends the names of rows measured in the warm state."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """One benchmark run. Bad values raise OptionError here, before anything is loaded.

    model           as for `hasten.load`; not used when `run` is given a loaded LLM
    methods         method strings or specs; ``ar`` (plain decoding) is always measured too
    suite           a suite's name (see `hasten.bench.prompts.SUITES`) or the path of a JSONL file
    limit           rows taken, spread evenly over the groups, the same ones each time; None: all
    max_new_tokens  most tokens per answer, at least 1
    turns           ``"first"``, or ``"all"``: follow-up turns are asked too, after the model's own
                    (plain decoding's) answers; every turn is measured as a prompt of its own
    state           for methods that learn from requests (``scope=session`` or ``global``):
                    ``"cold"`` empties what they learned before each prompt; ``"warm"`` lets them
                    answer the whole suite once, unmeasured, and then empties nothing (the very
                    same prompts: the most that such a method can gain); ``"both"`` measures both
                    ways in one run. Warm rows are named ``METHOD (warm)``
    repeats         times each prompt is answered by each method; a prompt's time is the median
    dtype, device, engine, quantize, kernels, kv_dtype, exact, verify
                    as for `hasten.load` and `LLM.generate`
    temperature     0 is greedy; peers are measured greedy only
    seed            of the draws (prompt i draws with seed + i) and of the bootstrap
    peers           other libraries to measure in the same run, see `hasten.bench.peers.PEERS`
    explain         re-score where answers of lossless methods differ from plain decoding's
    max_explained   at most this many are re-scored; the others are counted as unexplained
    command         the command line to record; "" records this process's own
    """

    model: Any = None
    methods: tuple[str | MethodSpec, ...] = ("auto",)
    suite: str = "mini"
    limit: int | None = None
    max_new_tokens: int = 128
    turns: str = "first"
    state: str = "cold"
    repeats: int = 1
    dtype: Any = None
    device: str | None = None
    engine: str = "auto"
    quantize: str | None = None
    kernels: str = "auto"
    kv_dtype: Any = None
    exact: bool = False
    verify: str | None = None
    temperature: float = 0.0
    seed: int = 0
    peers: tuple[str, ...] = ()
    explain: bool = True
    max_explained: int = 32
    command: str = ""

    @property
    def loading(self) -> dict[str, Any]:
        """The options of `hasten.load`, by name."""
        names = ("dtype", "device", "engine", "quantize", "kernels", "kv_dtype", "exact")
        return {name: getattr(self, name) for name in names}

    def __post_init__(self) -> None:
        for name, least in (
            ("max_new_tokens", 1),
            ("repeats", 1),
            ("max_explained", 0),
            ("seed", 0),
        ):
            _check_whole(name, getattr(self, name), least)
        names = ("quantize", "kernels", "engine", "dtype", "kv_dtype")
        load_options.check_given({name: getattr(self, name) for name in names})
        if self.limit is not None:
            _check_whole("limit", self.limit, 1)
        if self.turns not in TURNS:
            raise OptionError("turns", f"must be one of {', '.join(TURNS)}, got {self.turns!r}")
        if self.state not in STATES:
            raise OptionError("state", f"must be one of {', '.join(STATES)}, got {self.state!r}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise OptionError(
                "temperature", f"must be >= 0 (0 is greedy), got {self.temperature!r}"
            )
        if self.peers and self.temperature > 0:
            raise OptionError(
                "peers", "are measured greedy only", "Leave out --peers, or use temperature 0"
            )


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(name, f"must be a whole number >= {least}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is; handed to the progress callback often (at least once per answer).

    phase   ``"load"``, ``"warm-up"``, ``"learn"``, ``"measure"`` or ``"explain"``
    done    finished steps of this phase, of `total` (a step of ``"measure"`` is one answer;
            with ``turns="all"`` rows left out early make the phase end before `total`)
    method  what is being measured now; "" between phases
    row     id of the suite's row
    """

    phase: str
    done: int
    total: int
    method: str = ""
    row: str = ""


ProgressCallback = Callable[[Progress], None]


def no_progress(progress: Progress) -> None:
    """The callback of a run that shows nothing."""

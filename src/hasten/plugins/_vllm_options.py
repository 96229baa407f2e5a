"""What ``HASTEN_VLLM`` may say, and what rows cost in a batch."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from hasten import methods
from hasten.errors import OptionError
from hasten.plugins.session import WINDOW, even_costs
from hasten.policies.cost_model import CostModel

VARIABLE = "HASTEN_VLLM"

_RULES = {"row_cost": "a number above 0", "window": "at least 1", "logits": "on or off"}
_SWITCH = {"on": True, "off": False}


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the plug-in.

    method    as everywhere in hasten: ``NAME[:VARIANT][,key=value...]``
    row_cost  what a row more costs, as a share of a pass for one request; 0: by the device
    window    tokens of a prompt that are read at most, the last ones
    logits    read the largest logits of verified rows, for methods that want them
    """

    method: str = "auto"
    row_cost: float = 0.0
    window: int = WINDOW
    logits: bool = True


def read_options(text: str, default: Options) -> Options:
    """``[METHOD][;key=value...]`` as `Options`; what isn't said is as in `default`. Raises
    OptionError."""
    method, *pairs = [part.strip() for part in text.split(";")]
    options = replace(default, method=method) if method else default
    for pair in filter(None, pairs):
        key, _, value = (part.strip() for part in pair.partition("="))
        options = _with(options, key, value)
    methods.parse(options.method)
    return options


def _with(options: Options, key: str, text: str) -> Options:
    name = f"{VARIABLE}.{key}"
    if key not in _RULES:
        raise OptionError(name, "no such option", f"Known: {', '.join(_RULES)}")
    try:
        if key == "row_cost" and 0 < (cost := float(text)) < float("inf"):
            return replace(options, row_cost=cost)
        if key == "window" and (window := int(text)) >= 1:
            return replace(options, window=window)
        if key == "logits":
            return replace(options, logits=_SWITCH[text])
    except (ValueError, KeyError):
        pass
    raise OptionError(name, f"must be {_RULES[key]}, got {text!r}")


class StepCosts(CostModel):
    """What rows cost in a batch, and what time drafting takes from it.

    A row beyond a request's first costs the share `row_cost` of a pass for one request, which reads
    the weights once for all. In a larger batch it is a larger share of what the request's own token
    costs, so only surer drafts pay. How long a step takes is the median of what passes between two
    calls.
    """

    KEPT, FIRST_MS, IDLE_S = 32, 20.0, 1.0

    def __init__(self, row_cost: float, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(even_costs(row_cost))
        self._row_cost, self._clock = row_cost, clock
        self._steps: deque[float] = deque([self.FIRST_MS], maxlen=self.KEPT)
        self._step_ms, self._share = self.FIRST_MS, row_cost
        self._left: float | None = None

    def arrive(self, batch: int) -> None:
        """A step for `batch` requests has been verified."""
        if self._left is not None and (took := self._clock() - self._left) < self.IDLE_S:
            self._steps.append(1e3 * took)
            self._step_ms = max(statistics.median(self._steps), 1e-3)
        cost = self._row_cost
        self._share = batch * cost / (1.0 + cost * (batch - 1))

    def leave(self) -> None:
        """The engine goes on."""
        self._left = self._clock()

    def curve(self, most: int, context: int) -> list[float]:
        """Milliseconds that a request of the batch costs with 1..most rows."""
        return [self._step_ms * (1.0 + self._share * row) for row in range(most)]

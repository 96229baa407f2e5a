"""Never slower for long: drafting that doesn't pay is stopped, and tried again later.

Counters only, on costs from a table: the same rounds always lead to the same decisions.
"""

from __future__ import annotations

WINDOW, MARGIN, PAUSE, PROBING = 32, 0.03, 64, 4


class Guard:
    """Watches tokens per time, in plain steps, over about the last `WINDOW` rounds.

    Below 1 - `MARGIN` rounds are plain until `PAUSE` tokens have come; then `PROBING` rounds draft
    again, and their own tokens per time say whether drafting goes on (at least 1) or pauses again.

    hope    tokens per time before the first round
    """

    __slots__ = ("_left", "_probes", "_time", "_tokens", "drafting")

    def __init__(self, hope: float = 1.0) -> None:
        self._tokens, self._time = hope, 1.0
        self._left = 0
        """Tokens until the pause ends."""
        self._probes = 0
        """Probing rounds still to come."""
        self.drafting = True
        """Whether the next round may draft."""

    @property
    def rate(self) -> float:
        """Tokens per plain step's time lately."""
        return self._tokens / self._time

    def learn(self, tokens: int, time: float) -> None:
        """A round emitted so many tokens in so many plain steps' time, by the cost table."""
        if not self.drafting:
            self._left -= tokens
            if self._left <= 0:
                self.drafting, self._probes = True, PROBING
                self._tokens = self._time = 0.0
            return
        if self._probes:
            self._tokens += tokens / PROBING
            self._time += time / PROBING
            self._probes -= 1
            if not self._probes and self.rate < 1.0:
                self._stop()
            return
        self._tokens += (tokens - self._tokens) / WINDOW
        self._time += (time - self._time) / WINDOW
        if self.rate < 1.0 - MARGIN:
            self._stop()

    def _stop(self) -> None:
        self.drafting, self._left = False, PAUSE

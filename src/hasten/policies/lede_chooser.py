"""One request's choice of arms: what each is worth now, by the file and by its own rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hasten.policies.lede_arms import FAMILIES, PLAIN, Arm, ArmCosts, ArmFile, Floats
from hasten.policies.lede_guard import Guard

TRUST, FORGETS = 8.0, 0.98
"""A family's own record counts as much as the file's word after so many rounds; what is left of the
record a round later."""
PRICE_RATE = 0.05


class Chooser:
    """One request's choice of arms.

    file      what arms do
    costs     of this machine
    arms      those to choose from, `file`'s all
    online    correct what the file says by what this request's rounds kept
    guard     stop drafting while it doesn't pay; None: never
    """

    __slots__ = (
        "_asks", "_base", "_file", "_online", "_places", "_promised", "_record", "_seen", "_time",
        "_tokens", "_walks", "arm", "arms", "costs", "guard", "rho", "steps",
    )  # fmt: skip

    def __init__(
        self,
        file: ArmFile,
        costs: ArmCosts,
        arms: Sequence[Arm],
        *,
        online: bool = True,
        guard: Guard | None = None,
    ) -> None:
        self._file, self.costs, self.arms, self._online = file, costs, tuple(arms), online
        self._places = np.array([file.arms.index(arm.name) for arm in self.arms])
        self._walks = np.array([arm.walk for arm in self.arms])
        self._asks = np.array([arm.growth is not None for arm in self.arms])
        self.guard = guard
        self.rho = max(file.rho, 1.0)
        self._tokens, self._time = self.rho, 1.0
        self._record = np.zeros(FAMILIES)
        """By family, the fading sum of tokens kept beyond those promised."""
        self._seen = np.zeros(FAMILIES)
        self._promised: float | None = None
        self.arm = PLAIN
        """This round's."""
        self.steps = 0
        """Steps that the module was asked in it."""

    @property
    def copies(self) -> bool:
        """Whether any arm copies."""
        return any(arm.copies for arm in self.arms)

    def start(self) -> None:
        """A new round, plain until `choose` says otherwise."""
        self.arm, self.steps, self._promised = PLAIN, 0, None

    def worth(self, said: npt.NDArray[np.float64], others: int = 0) -> npt.NDArray[np.float64]:
        """What each arm is worth, in tokens, by what the file says of them ``(arms, 3)``, in a pass
        shared with `others`: of that a request pays a part, and of its questions all."""
        tokens, rows, steps = said[:, 0], said[:, 1], said[:, 2]
        verify = self.costs.verify
        times = np.interp(1.0 + rows, np.arange(len(verify)), verify)
        times[self._walks] = np.maximum(rows[self._walks], 1e-3)
        more = np.maximum(steps - 1.0, 0.0) * self.costs.step
        times += (1 + others) * self._asks * (self.costs.question + more)
        if self._online:
            tokens = tokens + self._corrections()
        value: npt.NDArray[np.float64] = 1.0 + tokens - self.rho * times
        if others:
            value[self._walks] = -np.inf  # its rows can't share a pass
        return value

    def _corrections(self) -> npt.NDArray[np.float64]:
        mean = self._record / (self._seen + TRUST)
        return np.array([0.0 if arm is PLAIN else mean[arm.family] for arm in self.arms])

    def choose(self, x: Floats, others: int = 0) -> Arm:
        """The arm worth most (of equals the first), or plain while the guard says so."""
        if self.guard is not None and not self.guard.drafting:
            self.arm, self._promised = PLAIN, None
            return PLAIN
        said = self._file.predict(x)[self._places].astype(np.float64)
        best = int(self.worth(said, others).argmax())
        self.arm, self._promised = self.arms[best], float(said[best, 0])
        return self.arm

    def learn(self, tokens: int, time: float) -> None:
        """The round emitted so many tokens; `time` in plain steps is what it cost by the table."""
        self._tokens += PRICE_RATE * (tokens - self._tokens)
        self._time += PRICE_RATE * (time - self._time)
        self.rho = max(self._tokens / self._time, 1.0)
        self._record *= FORGETS
        self._seen *= FORGETS
        if self._promised is not None and self.arm is not PLAIN:
            self._record[self.arm.family] += tokens - 1 - self._promised
            self._seen[self.arm.family] += 1.0
        if self.guard is not None:
            self.guard.learn(tokens, time)

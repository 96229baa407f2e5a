"""Exit policies without training: fixed settings, thresholds, entropy bounds, two for tests.

Each decides from a row's distribution and its prefix, never from a drawn token. The papers' code
mostly draws a token, sees that it was unlikely, *keeps* it and stops; by default these stop before
the unsure row's token, for which the probe is paid already. ``keep=True`` is the papers' order: the
unsure token is drafted still, and what ends the draft is then known before its row is probed. Both
are exact under sampling.

`describe` says of each what is a paper's, what was read in code, and what is second-hand.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import ClassVar

from hasten.errors import OptionError
from hasten.policies.exits import DRAFT, SELECT, ExitPolicy, Outcome, Probe

STEPS = 12
"""Most tokens of a draft: the cap LEDE is said to give all dynamic methods (second-hand)."""


def need(option: str, ok: bool, rule: str, value: object, hint: str = "") -> None:
    """Raise OptionError naming ``early-exit.OPTION`` unless `ok`."""
    if not ok:
        raise OptionError(f"early-exit.{option}", f"must be {rule}, got {value!r}", hint)


def need_count(option: str, value: object, least: int) -> None:
    """Raise OptionError unless `value` is an int of at least `least`."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
    need(option, whole, f"a whole number, at least {least}", value)


def need_share(option: str, value: float) -> None:
    """Raise OptionError unless `value` lies in [0, 1]."""
    need(option, 0.0 <= value <= 1.0, "in [0, 1]", value)


def describe(policy: ExitPolicy | type[ExitPolicy]) -> str:
    """``Name: source``: the policy's paper, and how its rule is known."""
    kind = policy if isinstance(policy, type) else type(policy)
    return f"{kind.__name__}: {getattr(kind, 'source', 'no source given')}"


class FixedExit:
    """Drafts from one exit until `unsure` or the number of steps ends the draft: what the rules
    below have in common. A round's first token is always drafted, as in the papers.

    exit    index of the exit among the candidates; the policy of an exit that isn't there never
            leaves, which is plain decoding
    steps   most tokens of a draft; 0 is plain decoding
    keep    draft the first unsure token still, then stop

    Raises OptionError for an option out of range.
    """

    __slots__ = ("_ending", "exit", "keep", "steps")
    shadow: bool = False
    source: ClassVar[str] = ""

    def __init__(self, exit: int, steps: int = STEPS, *, keep: bool = False) -> None:
        need_count("exit", exit, 0)
        need_count("steps", steps, 0)
        self.exit, self.steps, self.keep = exit, steps, keep
        self._ending = False
        """The token drafted last was unsure (`keep` only)."""

    def unsure(self, probe: Probe) -> bool:
        """Whether this row's token should end the draft."""
        return False

    def wants(self, phase: str, exit: int, drafted: int) -> bool:
        """False: `leave` would say False whatever the row's distribution, so that its probe can be
        left out."""
        if phase == SELECT:
            return exit == self.exit and self.steps > 0
        return drafted < self.steps and not self._ending

    def leave(self, probe: Probe) -> bool:
        """Leave at the exit; then draft until a row is unsure."""
        first = probe.phase == SELECT
        if not self.wants(probe.phase, probe.exit, probe.drafted):
            return False
        unsure = self.unsure(probe)
        self._ending = unsure and self.keep
        return first or self.keep or not unsure

    def learn(self, outcome: Outcome) -> None:
        """Nothing to learn."""


class Static(FixedExit):
    """Always the same exit and the same number of tokens; ``length=0`` is plain decoding."""

    __slots__ = ()
    source = "LayerSkip (arXiv 2404.16710), its fixed exit and draft length, read in its code"

    def __init__(self, exit: int, length: int) -> None:
        need_count("length", length, 0)
        super().__init__(exit, length)


class Kangaroo(FixedExit):
    """A fixed exit; stops where the likeliest token has less than `threshold`."""

    __slots__ = ("threshold",)
    source = (
        "Kangaroo (arXiv 2404.18911): p1 < 0.6, 6 steps, read in its code, which keeps the unsure "
        "token (keep=True); its exit is layer 2"
    )

    def __init__(
        self, exit: int, threshold: float = 0.6, steps: int = 6, *, keep: bool = False
    ) -> None:
        super().__init__(exit, steps, keep=keep)
        need_share("threshold", threshold)
        self.threshold = threshold

    def unsure(self, probe: Probe) -> bool:
        """p1 below the threshold."""
        return probe.p1 < self.threshold


class SVIP(FixedExit):
    """A fixed exit; stops where ``sqrt(scale * entropy) > threshold``, entropy in nats."""

    __slots__ = ("scale", "threshold")
    source = (
        "SVIP (arXiv 2411.18462): scale 0.15, threshold 0.3, entropy of the unwarped distribution, "
        "read in its first author's code, which keeps the unsure token (keep=True) and drafts up "
        "to 40"
    )

    def __init__(
        self,
        exit: int,
        threshold: float = 0.3,
        scale: float = 0.15,
        steps: int = STEPS,
        *,
        keep: bool = False,
    ) -> None:
        super().__init__(exit, steps, keep=keep)
        need("threshold", 0.0 <= threshold < math.inf, "at least 0", threshold)
        need("scale", 0.0 < scale < math.inf, "above 0", scale)
        self.threshold, self.scale = threshold, scale

    def unsure(self, probe: Probe) -> bool:
        """The bound on the distance from the target's distribution exceeds the threshold."""
        return math.sqrt(self.scale * probe.entropy) > self.threshold


class _Adaptive(FixedExit):
    """A threshold that follows the share of drafted tokens kept, by Draft&Verify's update:

        matched   <- 0.5 matched + 0.5 accepted / drafted
        wish       = threshold + step   where matched < target
                     threshold          where the draft could not have been longer
                     threshold - step   otherwise
        threshold <- 0.9 threshold + 0.1 wish

    Rounds without a draft change nothing. The threshold is kept within [0, 1], which the papers
    don't: beyond, every draft has one token anyway, and the way back is long.
    """

    __slots__ = ("matched", "step", "target", "threshold")

    def __init__(
        self,
        exit: int,
        threshold: float,
        steps: int,
        *,
        target: float,
        step: float,
        matched: float,
        keep: bool,
    ) -> None:
        super().__init__(exit, steps, keep=keep)
        for option, value in (("threshold", threshold), ("target", target), ("step", step)):
            need_share(option, value)
        self.threshold, self.target, self.step, self.matched = threshold, target, step, matched

    def _full(self, outcome: Outcome) -> bool:
        """The draft could not have been longer."""
        return outcome.drafted >= self.steps

    def learn(self, outcome: Outcome) -> None:
        """Move the threshold."""
        if not outcome.drafted:
            return
        self.matched = 0.5 * self.matched + 0.5 * outcome.accepted / outcome.drafted
        wish = self.threshold
        if self.matched < self.target:
            wish += self.step
        elif not self._full(outcome):
            wish -= self.step
        self.threshold = min(max(0.9 * self.threshold + 0.1 * wish, 0.0), 1.0)


class DraftVerify(_Adaptive):
    """A fixed exit; stops where p1 is below a threshold that follows acceptance.

    Draft&Verify looks at the probability of the *drawn* token, after drawing; here p1 decides,
    before drawing (under greedy drafting these are the same number). `steps` should not exceed the
    engine's own limit: a draft cut there looks as if it had stopped by itself.
    """

    __slots__ = ()
    source = (
        "Draft&Verify (arXiv 2309.08168): threshold 0.8, target 0.9, step 0.01, 8 steps and the "
        "update read in its code, which looks at the drawn token and keeps it; its set of skipped "
        "layers is here a fixed exit"
    )

    def __init__(
        self,
        exit: int,
        threshold: float = 0.8,
        steps: int = 8,
        *,
        target: float = 0.9,
        step: float = 0.01,
        keep: bool = False,
    ) -> None:
        super().__init__(exit, threshold, steps, target=target, step=step, matched=0.0, keep=keep)

    def unsure(self, probe: Probe) -> bool:
        """p1 below the threshold."""
        return probe.p1 < self.threshold


class AdaEDL(_Adaptive):
    """A fixed exit; stops where ``1 - sqrt(factor * entropy) < threshold``, entropy in nats: an
    approximate lower bound of the chance that the row's token is kept."""

    __slots__ = ("factor",)
    source = (
        "AdaEDL (arXiv 2410.18351): bound, factor 0.2 and the update's constants second-hand, from "
        "public re-implementations that quote its Algorithm 1 and agree with each other (but for "
        "one, on the sign of the last step); the paper sweeps the first threshold; that the mean "
        "acceptance starts at the target, and that a first token is always drafted, is ours"
    )

    def __init__(
        self,
        exit: int,
        threshold: float = 0.5,
        steps: int = STEPS,
        *,
        factor: float = 0.2,
        target: float = 0.9,
        step: float = 0.01,
        keep: bool = False,
    ) -> None:
        super().__init__(
            exit, threshold, steps, target=target, step=step, matched=target, keep=keep
        )
        need("factor", 0.0 < factor < math.inf, "above 0", factor)
        self.factor = factor

    def _full(self, outcome: Outcome) -> bool:
        """Every token that may be drafted was kept: Algorithm 1 looks at the accepted ones."""
        return outcome.accepted >= self.steps

    def unsure(self, probe: Probe) -> bool:
        """The bound lies below the threshold."""
        return 1.0 - math.sqrt(self.factor * probe.entropy) < self.threshold


class Thresholds:
    """Leaves at the first exit that is sure enough, and drafts there while rows are.

    select  for each candidate exit the p1 from which on to leave there; LITE's fall with depth
    stop    the p1 below which a draft ends: one number, or one for each exit
    steps   most tokens of a draft

    Raises OptionError for a threshold outside [0, 1], none at all, or unequal numbers of them.
    """

    __slots__ = ("select", "steps", "stop")
    shadow: bool = False
    source: ClassVar[str] = (
        "LITE-like (arXiv 2310.18581, abstract): confidence thresholds by exit; that deeper ones "
        "are lower is second-hand, and `stop`, for drafting from the exit chosen, is ours (LITE "
        "emits the exit's token unverified)"
    )

    def __init__(
        self, select: Sequence[float], stop: float | Sequence[float], steps: int = STEPS
    ) -> None:
        self.select = tuple(select)
        self.stop = tuple(stop) if isinstance(stop, Sequence) else (stop,) * len(self.select)
        need("select", bool(self.select), "a threshold for each exit", select)
        fits = len(self.stop) == len(self.select)
        need("stop", fits, f"one threshold, or {len(self.select)}", stop)
        for option, values in (("select", self.select), ("stop", self.stop)):
            for value in values:
                need_share(option, value)
        need_count("steps", steps, 0)
        self.steps = steps

    @classmethod
    def sloped(
        cls, first: float, last: float, exits: int, stop: float, steps: int = STEPS
    ) -> Thresholds:
        """Thresholds in even steps from `first` at the shallowest of `exits` exits to `last`: two
        numbers to tune, however many exits."""
        need_count("exits", exits, 1)
        span = max(exits - 1, 1)
        return cls([first + (last - first) * e / span for e in range(exits)], stop, steps)

    def wants(self, phase: str, exit: int, drafted: int) -> bool:
        """False: `leave` would say False whatever the row's distribution."""
        return drafted < self.steps

    def leave(self, probe: Probe) -> bool:
        """p1 reaches the exit's threshold of this phase."""
        least = self.select if probe.phase == SELECT else self.stop
        return probe.drafted < self.steps and probe.p1 >= least[probe.exit]

    def learn(self, outcome: Outcome) -> None:
        """Nothing to learn."""


class Random:
    """Leaves by the toss of its own coin, which knows nothing of the draws: a test of exactness."""

    __slots__ = ("_coin", "chance")
    shadow: bool = False
    source: ClassVar[str] = "ours, for tests of losslessness"

    def __init__(self, seed: int, chance: float = 0.5) -> None:
        need_share("chance", chance)
        self.chance = chance
        self._coin = random.Random(seed)

    def wants(self, phase: str, exit: int, drafted: int) -> bool:
        """Always."""
        return True

    def leave(self, probe: Probe) -> bool:
        """With the chance given."""
        return self._coin.random() < self.chance

    def learn(self, outcome: Outcome) -> None:
        """Nothing to learn."""


class Adversarial:
    """Leaves exactly where the draft is unsure: drafts what is least likely to be kept.

    entropy   nats above which to leave; in `DRAFT`, too
    """

    __slots__ = ("entropy",)
    shadow: bool = False
    source: ClassVar[str] = "ours, for tests of losslessness"

    def __init__(self, entropy: float = 1.0) -> None:
        need("entropy", 0.0 <= entropy < math.inf, "at least 0", entropy)
        self.entropy = entropy

    def wants(self, phase: str, exit: int, drafted: int) -> bool:
        """Always."""
        return phase in (SELECT, DRAFT)

    def leave(self, probe: Probe) -> bool:
        """High entropy."""
        return probe.entropy > self.entropy

    def learn(self, outcome: Outcome) -> None:
        """Nothing to learn."""

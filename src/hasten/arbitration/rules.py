"""Rules: whose token is kept at a mismatch. Without state of their own, so requests may share one.

Each docstring says whose rule it is and how well that is known. Numbers without a source are ours:
defaults to start from, not recommendations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from hasten.arbitration import features, laws
from hasten.arbitration.arbiter import Arbiter
from hasten.arbitration.mismatch import Mismatch
from hasten.errors import ModelError, OptionError


@dataclass(frozen=True, slots=True)
class Choice:
    """A rule's word.

    kept    keep the draft's token
    logp    log-probability of this choice, for rules that draw it; else 0
    forced  a script's word, not the rule's
    """

    kept: bool
    logp: float = 0.0
    forced: bool = False


class Rule:
    """Decides at mismatches (an `AcceptRule`); subclass it and override `keep`.

    needs_hidden  it looks at hidden states, which the loop then reads back
    emits         in sampled requests it says with `law` what is emitted from, and drafts are
                  accepted against that; `keep` serves greedy requests
    """

    needs_hidden: bool = False
    emits: bool = False

    def keep(self, m: Mismatch) -> bool:
        """True: the draft's token is emitted and its block goes on. False: the target's is."""
        return False

    def choose(self, m: Mismatch) -> Choice:
        """`keep`, with what a recorder wants to know of it."""
        return Choice(self.keep(m))

    def law(self, m: Mismatch) -> torch.Tensor:
        """What is emitted from, float32 ``(vocab,)``, where the rule `emits`."""
        return m.p


class Target(Rule):
    """Never keeps a draft's token: lossless, plain decoding."""


class Always(Rule):
    """Always keeps the draft's."""

    def keep(self, m: Mismatch) -> bool:
        """True."""
        return True


class Random(Rule):
    """Keeps a share `rate` of them, whatever they are: the control that any rule has to beat at the
    same rate. Keyed by the request's seed and the position."""

    def __init__(self, rate: float = 0.5) -> None:
        _need("rate", 0 <= rate <= 1, "in [0, 1]", rate)
        self.rate = rate

    def keep(self, m: Mismatch) -> bool:
        """By a draw."""
        return m.uniform() < self.rate


class Threshold(Rule):
    """Keeps a token with p(d) >= `threshold`."""

    def __init__(self, threshold: float = 0.1) -> None:
        _need("threshold", 0 <= threshold <= 1, "in [0, 1]", threshold)
        self.threshold = threshold

    def keep(self, m: Mismatch) -> bool:
        """By the target's law alone."""
        return float(m.p[m.drafted]) >= self.threshold


class Typical(Rule):
    """Medusa's typical acceptance (arXiv 2401.10774): p(d) > min(epsilon, delta exp(-H(p))).

    epsilon 0.09 and delta 0.3 are those of its generate interface, read in its code. There a greedy
    request matches exactly and the first token is the target's; here a greedy request is judged by
    the law at temperature 1, else the rule would never keep anything.
    """

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        _need("epsilon", 0 <= epsilon <= 1, "in [0, 1]", epsilon)
        _need("delta", 0 <= delta < math.inf, "finite and at least 0", delta)
        self.epsilon, self.delta = epsilon, delta

    def keep(self, m: Mismatch) -> bool:
        """Where the target is unsure, less likely tokens will do."""
        return float(m.p[m.drafted]) > laws.typical_bound(m.p, self.epsilon, self.delta)


class Fuzzy(Rule):
    """Fuzzy speculative decoding (arXiv 2502.20704, known second-hand): keeps any token where the
    two laws are near: divergence(p, q) <= `threshold`, ``kl``, ``js`` or ``tv``. The threshold is
    tunable there; 0.3 is ours."""

    def __init__(self, divergence: str = "js", threshold: float = 0.3) -> None:
        known = ", ".join(laws.DIVERGENCES)
        _need("divergence", divergence in laws.DIVERGENCES, f"one of {known}", divergence)
        _need("threshold", 0 <= threshold < math.inf, "finite and at least 0", threshold)
        self.divergence, self.threshold = laws.DIVERGENCES[divergence], threshold

    def keep(self, m: Mismatch) -> bool:
        """By the laws, whatever the token."""
        return self.divergence(m.p, m.q) <= self.threshold


class KL(Fuzzy):
    """The judge without training (arXiv 2601.04766, known second-hand): keeps where KL(p, q) is
    small. Its direction and its threshold weren't given; KL(p, q) <= 0.5 is ours."""

    def __init__(self, threshold: float = 0.5) -> None:
        super().__init__("kl", threshold)


class LinearJudge(Rule):
    """Judge decoding (arXiv 2501.19309, known second-hand): sigmoid(w h + b) > `threshold`, h the
    target's last state at the drafted token.

    w ``(size,)`` and b ``()`` are trained elsewhere, on tokens marked right or wrong. AutoJudge's
    regression (garipovroma/autojudge) says how important a mismatch is: its sign is the opposite.
    """

    needs_hidden = True

    def __init__(self, w: torch.Tensor, b: float = 0.0, threshold: float = 0.5) -> None:
        _need("threshold", 0 <= threshold <= 1, "in [0, 1]", threshold)
        self.w, self.b, self.threshold = w.float(), b, threshold

    def keep(self, m: Mismatch) -> bool:
        """By the drafted token's own state."""
        state = m.drafted_hidden.float().cpu()
        return float(torch.sigmoid(state @ self.w + self.b)) > self.threshold

    @classmethod
    def load(
        cls, path: str | Path, *, size: int, target: str, threshold: float = 0.5
    ) -> LinearJudge:
        """From a safetensors file: w, b, and in its metadata ``target``, the fingerprint of the
        model it was trained for. Raises ModelError when it is another's."""
        try:
            # no shell expands it after `cospec,weights=`
            with safe_open(Path(path).expanduser(), framework="pt") as file:
                meta = file.metadata() or {}
                w, b = file.get_tensor("w").float(), float(file.get_tensor("b"))
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            raise ModelError(
                f"{path} holds no linear judge that can be read ({error}): it needs w and b"
            ) from None
        if w.shape != (size,) or not target or meta.get("target") != target:
            raise ModelError(
                f"the judge in {path} belongs to other weights than this model's: train its own"
            )
        if not (bool(torch.isfinite(w).all()) and math.isfinite(b)):
            raise ModelError(
                f"the judge in {path} holds numbers that aren't finite: train it again, or choose "
                "another rule"
            )
        return cls(w, b, threshold)


class Mentored(Rule):
    """Mentored decoding: accept as much as possible of the draft while KL(p, emitted) <= `budget`
    nats. Its author stated the goal in a forum post; the closed form (`laws.mentored`) and 0.3 are
    ours. Greedy: keeps d where that law gives it more than t."""

    emits = True

    def __init__(self, budget: float = 0.3) -> None:
        _need("budget", 0 <= budget < math.inf, "finite and at least 0", budget)
        self.budget = budget

    def law(self, m: Mismatch) -> torch.Tensor:
        """Between p and q."""
        return laws.mentored(m.p, m.q, self.budget)

    def keep(self, m: Mismatch) -> bool:
        """The likelier of the two."""
        law = self.law(m)
        return bool(law[m.drafted] > law[m.target])


class Cascade(Rule):
    """Speculative cascades (Narasimhan et al., ICLR 2025, from general knowledge; check before
    citing): the draft answers unless a deferral rule hands the position to the target.

    ``chow``: max q < 1 - alpha; ``diff``: max q < max p - alpha; ``opt``: max q < max p -
    alpha TV(p, q); ``token``: for ids with p < (1 - alpha) max p. alpha 0.2 is ours.
    """

    emits = True

    def __init__(self, cascade: str = "opt", alpha: float = 0.2) -> None:
        known = ", ".join(laws.CASCADES)
        _need("cascade", cascade in laws.CASCADES, f"one of {known}", cascade)
        _need("alpha", 0 <= alpha <= 1, "in [0, 1]", alpha)
        self.cascade, self.alpha = cascade, alpha

    def law(self, m: Mismatch) -> torch.Tensor:
        """The cascade's."""
        return laws.cascade(self.cascade, m.p, m.q, self.alpha)

    def keep(self, m: Mismatch) -> bool:
        """Where the target isn't asked."""
        if self.cascade == "token":
            return bool(laws.kept_tokens(m.p, self.alpha)[m.drafted])
        return not laws.defers(self.cascade, m.p, m.q, self.alpha)


class BiLD(Rule):
    """Big little decoder (arXiv 2302.07863): a drafted run is rolled back to its first token with
    -log p(d) > `rollback`, 5.0 in its code. The other half, drafting until max q < 0.6, is the
    drafter's (``fallback``)."""

    def __init__(self, rollback: float = 5.0) -> None:
        _need("rollback", rollback >= 0, "at least 0", rollback)
        self.rollback = rollback

    def keep(self, m: Mismatch) -> bool:
        """Unless the target finds it too unlikely."""
        return -float(m.log_p[m.drafted]) <= self.rollback


class Learned(Rule):
    """The arbiter: keeps where its chance is at least theta (None: its own).

    explore  draw the choice by that chance instead, keyed by seed and position, as in training
    """

    def __init__(
        self, arbiter: Arbiter, theta: float | None = None, *, explore: bool = False
    ) -> None:
        self.arbiter = arbiter
        self.theta = arbiter.theta if theta is None else theta
        self.explore = explore
        self.needs_hidden = arbiter.needs_hidden

    def keep(self, m: Mismatch) -> bool:
        """By the arbiter."""
        return self.choose(m).kept

    def choose(self, m: Mismatch) -> Choice:
        """With the log-probability of the choice, where it is drawn."""
        if self.arbiter.fallback:
            return Choice(False)
        states = features.hidden(m)[None] if self.needs_hidden else None
        chance = float(self.arbiter.chance(features.scalars(m)[None], states)[0])
        if not self.explore:
            return Choice(chance >= self.theta)
        kept = m.uniform() < chance
        return Choice(kept, math.log(max(chance if kept else 1 - chance, 1e-30)))


class Scripted(Rule):
    """Given choices at given mismatches (by number, from 0), for the others another rule's."""

    def __init__(self, script: Mapping[int, bool], otherwise: Rule | None = None) -> None:
        self.script, self.otherwise = dict(script), otherwise or Target()
        self.needs_hidden = self.otherwise.needs_hidden

    def keep(self, m: Mismatch) -> bool:
        """By the script."""
        return self.choose(m).kept

    def choose(self, m: Mismatch) -> Choice:
        """Marked as forced where it is the script's."""
        if m.number in self.script:
            return Choice(self.script[m.number], forced=True)
        return self.otherwise.choose(m)


def _need(option: str, ok: bool, rule: str, value: object) -> None:
    """Raise OptionError naming ``cospec.OPTION`` unless `ok`."""
    if not ok:
        raise OptionError(f"cospec.{option}", f"must be {rule}, got {value!r}")

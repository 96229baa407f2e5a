"""How far a population's law is from the model's, estimated from repeated runs.

Weighing a run's answer by its evidence makes the law exact, whatever the number of particles. So
``KL(model || answers) <= log(1 + relVar)`` of the evidence, and by Pinsker's inequality total
variation is at most ``sqrt(KL / 2)``. The bounds are ours (docs/methods/smc.md has the proof). They
hold for the true relative variance: where weights are heavy-tailed, a few runs show too little of
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hasten.errors import OptionError
from hasten.smc.info import SMCInfo
from hasten.smc.run import SMCRun

LEAST_RUNS = 2
TRUSTED = 1.0
"""Above this relative variance the estimate is too low more often than not."""
MOST_ERRORS = 4
"""Evidence further from 1 than so many standard errors has missed something."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One prompt's repeated runs; standard errors are jackknife estimates.

    evidence      mean of the estimates of the normaliser; 1 up to chance with alpha = 1
    rel_var       their variance over their squared mean
    kl_bound      log(1 + rel_var), nats: of the model's law from the answers'
    tv_bound      total variation is at most this, in [0, 1]
    ess_share     mean effective sample size over particles, in (0, 1]; 1 where nothing was weighed
    collapsed     rounds without any weight left, all runs together; with some, evidence isn't
                  unbiased and the bounds don't hold
    alpha         the runs' power of the model's law
    """

    runs: int
    evidence: float
    evidence_error: float
    rel_var: float
    rel_var_error: float
    kl_bound: float
    tv_bound: float
    ess_share: float
    collapsed: int
    alpha: float

    @property
    def trusted(self) -> bool:
        """False where the bounds are more likely too low than not: nothing is known of rare heavy
        runs, or they are seen to be missing from evidence that should be 1."""
        gap = abs(self.evidence - 1) if self.alpha == 1 else 0.0
        seen = gap <= MOST_ERRORS * self.evidence_error + 1e-6
        return seen and not self.collapsed and self.rel_var + 2 * self.rel_var_error < TRUSTED


def diagnose(start: Callable[[int], SMCRun], runs: int, *, seed: int = 0) -> Diagnosis:
    """Run ``start(seed)``, ``start(seed + 1)``, ... to their ends; `runs` of them, at least 2.

    Each must be of the same prompt and options, and want at least one token.
    """
    if runs < LEAST_RUNS:
        raise OptionError("runs", f"must be at least {LEAST_RUNS}, got {runs}")
    infos: list[SMCInfo] = []
    alpha = 1.0
    for number in range(runs):
        run = start(seed + number)
        for _ in run.rounds():
            pass
        assert run.info is not None, "a run that wants no token"
        infos.append(run.info)
        alpha = run.options.alpha
    return summarise(infos, alpha=alpha)


def summarise(infos: Sequence[SMCInfo], *, alpha: float = 1.0) -> Diagnosis:
    """The diagnosis of finished runs, two at least."""
    top = max(info.log_evidence for info in infos)
    values = [math.exp(info.log_evidence - top) for info in infos]
    mean, error = _with_error(values, _mean)
    spread, spread_error = _with_error(values, _relative_variance)
    bound = math.log1p(spread)
    shares = [size / len(info.answers) for info in infos for size in info.ess]
    # Evidence of long answers may be too small for a float.
    scale = math.exp(top) if top < 700 else math.inf
    return Diagnosis(
        runs=len(infos),
        evidence=scale * mean,
        evidence_error=scale * error,
        rel_var=spread,
        rel_var_error=spread_error,
        kl_bound=bound,
        tv_bound=min(1.0, math.sqrt(bound / 2)),
        ess_share=_mean(shares) if shares else 1.0,
        collapsed=sum(info.collapsed for info in infos),
        alpha=alpha,
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _relative_variance(values: Sequence[float]) -> float:
    top = max(values)
    if top <= 0.0:  # all that is left is too small beside what was left out
        return 0.0
    values = [value / top for value in values]  # their squares mustn't vanish
    mean = _mean(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return squares / max(len(values) - 1, 1) / mean**2


def _with_error(
    values: Sequence[float], statistic: Callable[[Sequence[float]], float]
) -> tuple[float, float]:
    """A statistic and its jackknife standard error."""
    count = len(values)
    without = [statistic([*values[:at], *values[at + 1 :]]) for at in range(count)]
    middle = _mean(without)
    variance = (count - 1) / count * math.fsum((each - middle) ** 2 for each in without)
    return statistic(values), math.sqrt(variance)


HEADER = (
    "prompt",
    "runs",
    "E[Z]",
    "relVar",
    "KL\nat most",
    "TV\nat most",
    "ESS\n/ N",
    "col-\nlapsed",
)
"""Columns of `row`, for a table of prompts."""


def row(name: str, found: Diagnosis) -> tuple[str, ...]:
    """A prompt's line of that table; bounds that can't be trusted are marked with ``>``, because
    the true ones are likely larger."""
    mark = "" if found.trusted else ">"
    return (
        name,
        str(found.runs),
        f"{found.evidence:.2g} ± {found.evidence_error:.0e}",
        f"{found.rel_var:.2g} ± {found.rel_var_error:.1g}",
        f"{mark}{found.kl_bound:.3g}",
        f"{mark}{found.tv_bound:.3g}" if found.tv_bound < 1 else "none",
        f"{found.ess_share:.2f}",
        str(found.collapsed),
    )

"""What an early-exit policy decides, and from what: where to leave the trunk, how long to draft.

One round of self-speculation: the pending token's row runs up to the first candidate exit and is
*probed* there. In phase ``select`` the policy leaves (drafts from this exit for the rest of the
round) or goes on to the next candidate; going on at the last one is a plain step. In phase
``draft`` each drafted token's row runs up to the exit chosen and is probed: the policy drafts one
more token from it, or stops, and the rows are verified. One row is probed before its token is
chosen, so that no decision depends on a drawn token (sampling stays exact).

The words and the two phases are LEDE's (arXiv 2606.03113, Fig. 1); the formulation is a
reconstruction (docs/methods/early-exit.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

SELECT, DRAFT = "select", "draft"


@dataclass(slots=True)
class Probe:
    """A row's draft distribution at an exit, before a token is taken from it.

    phase     `SELECT` or `DRAFT`
    layer     layers the row has run (0: none, the module drafts from deep states alone)
    exit      index of that exit among the candidates
    drafted   tokens drafted so far in this round
    logits    float32 ``(draft_vocab,)``: the module's logits over its ids
    hidden    ``(hidden_size,)``: what the module saw (its own output state at exit 0)
    context   tokens so far, the pending one included

    p1, p2, entropy (nats) and gap (z1 - z2) describe softmax(logits); they are computed once.
    """

    phase: str
    layer: int
    exit: int
    drafted: int
    logits: torch.Tensor
    hidden: torch.Tensor
    context: int
    p1: float = 0.0
    p2: float = 0.0
    entropy: float = 0.0
    gap: float = 0.0

    def __post_init__(self) -> None:
        top = torch.topk(self.logits, 2)
        total = torch.logsumexp(self.logits, 0)
        (z1, z2), log_sum = top.values.tolist(), float(total)
        probs = torch.softmax(self.logits, 0)
        self.p1, self.p2 = math.exp(z1 - log_sum), math.exp(z2 - log_sum)
        self.entropy = max(log_sum - float(torch.dot(probs, self.logits.clamp_min(-1e4))), 0.0)
        self.gap = z1 - z2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a round.

    layer      the exit drafted from; None for a plain step
    drafted    tokens drafted
    accepted   how many of them were kept (what stood after the answer's end counts as not drafted)
    probes     the round's probes, in order: those of the walk, then one for each draft row probed
    shadows    where the policy asked for `shadow`: for each candidate exit the ids its module ranks
               first at the rows whose next token is known, beside those next tokens:
               ``shadows[exit] == (guesses, truths, p1)``, equally long lists
    """

    layer: int | None
    drafted: int
    accepted: int
    probes: tuple[Probe, ...] = ()
    shadows: tuple[tuple[list[int], list[int], list[float]], ...] = ()


@dataclass(frozen=True, slots=True)
class ExitCosts:
    """What the operations of a round cost, in units of a plain step's time.

    layer[e]    running one row through the layers up to exit e
    probe[e]    probing one row there (module, reduced head, decision)
    verify[n]   running n rows through all layers and the head, from layer 0 (n from 1; index 0
                is unused): a pass resumed at exit e costs verify[n] less the layers below it
    layers      layers of the target
    """

    layer: tuple[float, ...]
    probe: tuple[float, ...]
    verify: tuple[float, ...]
    layers: int

    def resume(self, exit_index: int, layer: int, rows: int) -> float:
        """Verifying `rows` rows that already ran `layer` layers."""
        return self.verify[rows] * (1.0 - layer / self.layers)


class ExitPolicy(Protocol):
    """One request's exit policy.

    shadow  ask for `Outcome.shadows` (costs a module's run at every candidate exit)
    """

    shadow: bool

    def wants(self, phase: str, exit: int, drafted: int) -> bool:
        """False: `leave` would say False whatever the row's distribution, so that its probe can be
        left out."""
        ...

    def leave(self, probe: Probe) -> bool:
        """True: take a token from this row's distribution. False: go on (deeper in `SELECT`, to
        verification in `DRAFT`)."""
        ...

    def learn(self, outcome: Outcome) -> None:
        """See what came of the round."""
        ...

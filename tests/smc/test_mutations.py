"""S10: every fault that is known of shows in what is unbiased. (One that takes ids from the draft
is in test_law.py.)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hasten.smc import weights
from hasten.smc.drafting import Block
from hasten.smc.population import Population
from hasten.smc.run import SMCRun
from tests.smc import toy

Patch = pytest.MonkeyPatch
CAUGHT = 5.0
PASSES = 4.5


def heaviest_wins(patch: Patch) -> None:
    patch.setattr(Population, "pick", lambda self: int(self.log_weights.argmax()))


def weights_outlive_resampling(patch: Patch) -> None:
    def keep(self: Population) -> None:
        self.log_evidence += weights.log_mean(self.log_weights)

    patch.setattr(Population, "_reset_weights", keep)


def ratio_upside_down(patch: Patch) -> None:
    def weigh(self: Any, block: Block, counts: Sequence[int], scores: Any) -> None:
        asked = torch.arange(block.length) < torch.tensor(counts).unsqueeze(1)
        terms = (block.log_q - scores.drafted).where(asked, 0.0).sum(1)
        self._population.add([p.slot for p in block.particles], terms)

    patch.setattr(SMCRun, "_weigh", weigh)


def bonus_from_the_draft(patch: Patch) -> None:
    healthy = SMCRun._bonus

    def bonus(
        self: Any, block: Block, going: Sequence[int], laws: Any, of: Any, purpose: str
    ) -> list[int]:
        texts = [[*p, *t] for p, t in zip(block.prefixes, block.tokens, strict=True)]
        drafted = torch.stack([toy.next_law(toy.HARD, text).log() for text in texts])  # HARD drafts
        return healthy(self, block, going, drafted, range(len(texts)), purpose)

    patch.setattr(SMCRun, "_bonus", bonus)


def power_without_its_normaliser(patch: Patch) -> None:
    healthy = weights.powered

    def powered(law: torch.Tensor, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
        raised, totals = healthy(law, alpha)
        return raised, torch.zeros_like(totals)

    patch.setattr(weights, "powered", powered)


def temperature_in_the_draw_only(patch: Patch) -> None:
    healthy = weights.draw

    def draw(
        law: torch.Tensor,
        slots: Sequence[int],
        seed: int,
        position: int,
        purpose: str,
        of: Sequence[int] | None = None,
    ) -> list[int]:
        if purpose.startswith("smc-draft"):
            law = torch.log_softmax(2.0 * law, 1)
        return healthy(law, slots, seed, position, purpose, of)

    patch.setattr(weights, "draw", draw)


def ended_particles_left_out(patch: Patch) -> None:
    """Whoever has ended keeps its place, but resampling sees the others only."""
    healthy = Population._offspring

    def offspring(self: Any, share: torch.Tensor, round: int) -> list[int]:
        going = torch.tensor([p.finish is None for p in self.particles])
        return healthy(self, torch.where(going, share, 0.0) / share[going].sum(), round)

    patch.setattr(Population, "_offspring", offspring)


def ending_token_not_weighed(patch: Patch) -> None:
    healthy = SMCRun._weigh

    def weigh(self: Any, block: Block, counts: Sequence[int], scores: Any) -> None:
        ended = [c <= len(t) for t, c in zip(block.tokens, counts, strict=True)]
        healthy(self, block, [c - e for c, e in zip(counts, ended, strict=True)], scores)

    patch.setattr(SMCRun, "_weigh", weigh)


Fault = tuple[Callable[[Patch], None], dict[str, Any]]
RESAMPLED = {"threshold": 1.01, "length": 1}
ENDS = {"draft": toy.EAGER, "particles": 8}
FAULTS: dict[str, Fault] = {
    "heaviest wins": (heaviest_wins, {"particles": 16, "threshold": 0.0}),
    "weights outlive resampling": (weights_outlive_resampling, RESAMPLED),
    "ratio upside down": (ratio_upside_down, {"particles": 4}),
    "bonus from the draft": (bonus_from_the_draft, {"draft": toy.HARD, "length": 1}),
    "power without its normaliser": (power_without_its_normaliser, {"alpha": 2.0}),
    "temperature in the draw only": (temperature_in_the_draw_only, {}),
    "ended particles left out": (ended_particles_left_out, {**ENDS, **RESAMPLED}),
    "ending token not weighed": (ending_token_not_weighed, ENDS),
}


def found(case: dict[str, Any]) -> tuple[float, str]:
    return toy.worst(list(toy.runs(170, **case)), toy.answers(case.get("alpha", 1.0)))


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_caught(monkeypatch: Patch, name: str) -> None:
    fault, case = FAULTS[name]
    fault(monkeypatch)
    off, where = found(case)
    assert off > CAUGHT, f"{name}: at most {off:.1f} standard errors ({where})"


@pytest.mark.parametrize("name", FAULTS)
def test_without_the_fault_the_same_runs_pass(name: str) -> None:
    off, where = found(FAULTS[name][1])
    assert off < PASSES, where

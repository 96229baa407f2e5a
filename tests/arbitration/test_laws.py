"""Laws between two laws: the mentored closed form (C8) and the cascades, by hand (C9)."""

from __future__ import annotations

import math
import time
from itertools import pairwise

import pytest
import torch

from hasten.arbitration import laws
from tests.arbitration.cases import laws as pairs

BUDGETS = (0.0, 1e-3, 0.05, 0.3, 1.0, 5.0)


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    kept = p > 0
    return float((p[kept] * (p[kept].double().log() - q[kept].double().log())).sum())


def test_a_mentored_law_sums_to_one_and_spends_its_budget() -> None:
    for p, q in pairs(12):
        far = kl(p, q)
        for budget in BUDGETS:
            law = laws.mentored(p, q, budget).double()
            assert float(law.sum()) == pytest.approx(1, abs=1e-6)
            assert kl(p, law) == pytest.approx(min(budget, far), abs=2e-6)
            assert bool((law >= 0).all())


def test_without_a_budget_it_is_the_targets_law_and_with_enough_the_drafts() -> None:
    for p, q in pairs(5):
        assert torch.allclose(laws.mentored(p, q, 0.0).double(), p, atol=1e-6)
        assert torch.allclose(laws.mentored(p, q, kl(p, q) + 1e-3).double(), q, atol=1e-6)


def test_more_budget_never_accepts_less() -> None:
    for p, q in pairs(12, seed=1):
        accepted = [float(torch.minimum(laws.mentored(p, q, b).double(), q).sum()) for b in BUDGETS]
        assert all(a <= b + 1e-6 for a, b in pairwise(accepted))
        assert accepted[0] == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-6)
        assert accepted[-1] > accepted[0]


def test_nothing_within_the_budget_accepts_more() -> None:
    generator = torch.Generator().manual_seed(5)
    for p, q in pairs(4, size=5, seed=2):
        budget = 0.4 * kl(p, q)
        law = laws.mentored(p, q, budget).double()
        best = float(torch.minimum(law, q).sum())
        tried = 0
        for scale in (0.5, 0.1, 0.02, 0.004):
            for _ in range(800):
                other = (
                    law + scale * torch.randn(5, generator=generator, dtype=torch.float64)
                ).clamp_min(1e-9)
                other = other / other.sum()
                if kl(p, other) <= budget:
                    tried += 1
                    assert float(torch.minimum(other, q).sum()) <= best + 1e-6
        assert tried > 20


def test_ids_that_one_of_the_two_never_gives_are_no_trouble() -> None:
    p = torch.tensor([0.6, 0.4, 0.0, 0.0])
    for q in ([0.1, 0.0, 0.5, 0.4], [0.0, 0.5, 0.25, 0.25], [0.6, 0.4, 0.0, 0.0]):
        for budget in BUDGETS:
            law = laws.mentored(p, torch.tensor(q), budget).double()
            assert float(law.sum()) == pytest.approx(1, abs=1e-6)
            assert kl(p.double(), law) <= budget + 1e-5


def test_a_large_vocabulary_takes_no_time_to_speak_of() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.softmax(3 * torch.randn(2, 49_152, generator=generator), 1)
    began = time.process_time()
    law = laws.mentored(p, q, 0.3)
    assert time.process_time() - began < 30, "a bisection over every id, not over their sums"
    assert kl(p, law) == pytest.approx(0.3, abs=1e-4)


# -- by hand, over four tokens ---------------------------------------------------------------------

P = torch.tensor([0.5, 0.3, 0.15, 0.05])
Q = torch.tensor([0.1, 0.6, 0.2, 0.1])


def test_divergences_by_hand() -> None:
    by_hand = 0.5 * math.log(5) + 0.3 * math.log(0.5) + 0.15 * math.log(0.75) + 0.05 * math.log(0.5)
    assert laws.kl(P, Q) == pytest.approx(by_hand, abs=1e-6)
    assert laws.tv(P, Q) == pytest.approx(0.4, abs=1e-6)
    middle = (P + Q) / 2
    assert laws.js(P, Q) == pytest.approx((kl(P, middle) + kl(Q, middle)) / 2, abs=1e-6)
    assert laws.js(P, P) == pytest.approx(0, abs=1e-6)
    half = torch.tensor([1.0, 0.0])
    assert laws.kl(half, torch.tensor([0.0, 1.0])) == pytest.approx(20.0, abs=1e-3), "not infinite"


def test_typical_bounds_by_hand() -> None:
    entropy = -sum(x * math.log(x + 1e-5) for x in (0.5, 0.3, 0.15, 0.05))
    assert laws.typical_bound(P, 0.09, 0.3) == pytest.approx(0.09)
    assert laws.typical_bound(P, 0.5, 0.3) == pytest.approx(0.3 * math.exp(-entropy), abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "alpha", "deferring"),
    [
        ("chow", 0.3, True),  # 0.6 < 0.7
        ("chow", 0.5, False),  # 0.6 < 0.5
        ("diff", 0.0, False),  # 0.6 < 0.5
        ("opt", 0.2, False),  # 0.6 < 0.5 - 0.08
    ],
)
def test_deferral_by_hand(kind: str, alpha: float, deferring: bool) -> None:
    assert laws.defers(kind, P, Q, alpha) is deferring
    assert torch.equal(laws.cascade(kind, P, Q, alpha), P if deferring else Q)


def test_deferral_where_the_draft_is_less_sure() -> None:
    unsure = torch.tensor([0.3, 0.4, 0.2, 0.1])
    assert laws.tv(P, unsure) == pytest.approx(0.2, abs=1e-6)
    assert laws.defers("diff", P, unsure, 0.05)  # 0.4 < 0.45
    assert not laws.defers("diff", P, unsure, 0.2)  # 0.4 < 0.3
    assert laws.defers("opt", P, unsure, 0.2)  # 0.4 < 0.5 - 0.04
    assert not laws.defers("opt", P, unsure, 0.6)  # 0.4 < 0.5 - 0.12


def test_the_token_cascade_by_hand() -> None:
    # ids with p >= 0.5 * 0.5: 0 and 1. q keeps 0.1 and 0.6; its other 0.3 is drawn from p.
    want = torch.tensor([0.1 + 0.15, 0.6 + 0.09, 0.045, 0.015])
    assert torch.allclose(laws.cascade("token", P, Q, 0.5), want)
    assert laws.kept_tokens(P, 0.5).tolist() == [True, True, False, False]

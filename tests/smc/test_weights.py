from __future__ import annotations

import math

import pytest
import torch

from hasten.smc import weights


def test_the_effective_size_is_between_one_and_n() -> None:
    assert weights.ess(weights.normalised(torch.zeros(8, dtype=torch.float64))) == pytest.approx(8)
    lone = torch.tensor([0.0, -math.inf, -math.inf], dtype=torch.float64)
    assert weights.ess(weights.normalised(lone)) == 1


def test_weights_far_from_one_neither_overflow_nor_vanish() -> None:
    far = torch.tensor([-5000.0, -5000.0 + math.log(3)], dtype=torch.float64)
    assert weights.normalised(far).tolist() == pytest.approx([0.25, 0.75])
    assert weights.log_mean(far) == pytest.approx(-5000 + math.log(2))
    assert weights.log_mean(-far) == pytest.approx(5000 + math.log(0.5 * (1 + 1 / 3)))


def test_a_power_is_normalised_and_says_by_how_much() -> None:
    law = torch.log(torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]], dtype=torch.float64))
    raised, totals = weights.powered(law, 2.0)
    assert totals.tolist() == pytest.approx([math.log(0.375), 0.0])
    assert raised.exp()[0].tolist() == pytest.approx([2 / 3, 1 / 6, 1 / 6])
    assert raised.exp()[1].tolist() == [1, 0, 0]


@pytest.mark.parametrize("vocab", [3, 256, 700])
def test_draws_follow_the_law_and_never_take_what_has_no_mass(vocab: int) -> None:
    law = torch.log_softmax(torch.linspace(-2, 2, vocab), 0)
    law[1] = -math.inf
    law = torch.log_softmax(law, 0)
    rows, turns = 64, 150
    found = torch.zeros(vocab, dtype=torch.float64)
    for turn in range(turns):
        for token in weights.draw(law.expand(rows, -1), range(rows), 7, turn, "test"):
            found[token] += 1
    assert found[1] == 0
    count, p = rows * turns, law.exp().double()
    head = p.cumsum(0).clamp(max=1)
    off = (found.cumsum(0) / count - head).abs()
    assert (off < 5 * (head * (1 - head) / count).sqrt() + 1e-6).all()


def test_a_slot_draws_the_same_whoever_else_draws() -> None:
    law = torch.log_softmax(torch.randn(6, 900, generator=torch.Generator().manual_seed(0)), 1)
    together = weights.draw(law, range(6), 3, 11, "test")
    for slot in range(6):
        assert weights.draw(law[slot : slot + 1], [slot], 3, 11, "test") == [together[slot]]


def test_slots_draw_independently_from_equal_laws() -> None:
    law = torch.zeros(512).log_softmax(0).expand(16, -1)
    drawn = weights.draw(law, range(16), 0, 0, "test")
    few = weights.draw(law[:1], range(16), 0, 0, "test", [0] * 16)
    assert few == drawn
    assert len(set(drawn)) > 12
    assert weights.draw(law[:2], [5, 5], 0, 0, "test") == [drawn[5]] * 2

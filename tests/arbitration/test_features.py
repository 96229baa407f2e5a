"""The arbiter's inputs: right numbers in the right order, and nothing from the future."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hasten.arbitration import features
from hasten.arbitration.features import FLOOR, SCALARS, scalars
from hasten.arbitration.mismatch import Counts, Mismatch
from tests.arbitration.cases import mismatch
from tests.conformance.toy_target import ToyTokenizer

P = (0.5, 0.3, 0.15, 0.05)
Q = (0.1, 0.6, 0.2, 0.1)


def test_the_numbers_are_those_their_names_say() -> None:
    counts = Counts(mismatches=9, chosen=4, streak=1)
    m = mismatch(P, Q, 2, 0, place=3, answered=5, counts=counts, later=[1])
    got = dict(zip(SCALARS, scalars(m).tolist(), strict=True))
    entropy_p = -sum(x * math.log(x) for x in P)
    entropy_q = -sum(x * math.log(x) for x in Q)
    want = [
        math.log(0.5),
        math.log(0.15),
        math.log(0.2),
        math.log(0.1),
        math.log(0.5) - math.log(0.15),
        math.log(0.2) - math.log(0.1),
        entropy_p / math.log(4),
        entropy_q / math.log(4),
        sum(x * math.log(x / y) for x, y in zip(P, Q, strict=True)),
        0.4,
        math.log1p(2),  # under p: 0, 1, then 2
        math.log1p(2),  # under q: 1, 2, then 0 and 3 alike
        3 / 4,
        math.tanh(7 / 64),  # five tokens before the block, two in it
        0.5,
        0.0,
        0.0,
        0.0,
    ]
    assert list(got.values()) == pytest.approx(want, abs=1e-5)
    assert len(SCALARS) == 18


def test_everything_stays_finite_where_a_law_has_zeros() -> None:
    m = mismatch((1.0, 0.0, 0.0, 0.0), (0.0, 0.5, 0.5, 0.0), 1, 0)
    got = dict(zip(SCALARS, scalars(m).tolist(), strict=True))
    assert all(map(math.isfinite, got.values()))
    assert got["log p(d)"] == got["log q(t)"] == FLOOR
    assert got["KL(p, q), at most 10"] == 10.0
    assert got["TV(p, q)"] == pytest.approx(1.0)


def test_overrides_count_up_to_eight() -> None:
    many = mismatch(P, Q, 1, 0, counts=Counts(50, 30, 3))
    assert scalars(many)[SCALARS.index("overrides so far / 8, at most 1")] == 1.0


def test_ends_and_digits_are_told() -> None:
    class Digits(ToyTokenizer):
        letters = "1x 2"

    def flags(drafted: int, target: int, eos: tuple[int, ...] = ()) -> list[float]:
        m = mismatch(P, Q, drafted, target, eos=eos, tokenizer=Digits())
        return [float(x) for x in scalars(m)[-3:]]

    assert flags(0, 3) == [0, 0, 1]
    assert flags(0, 1) == [0, 0, 0]
    assert flags(2, 0) == [0, 0, 0], "a space isn't a digit"
    assert flags(0, 3, eos=(0,)) == [1, 0, 1]
    assert flags(3, 0, eos=(0,)) == [0, 1, 1]


# -- the leak test ---------------------------------------------------------------------------------


def leaks(look: Callable[[Mismatch], Any]) -> bool:
    """Whether what is known of a mismatch depends on what was drafted, or is answered, after it."""
    said = set()
    for later in ((), (1,), (3, 3), (2, 1, 0)):
        state = torch.arange(4.0)
        rows = torch.zeros(len(later) + 2, 4)
        rows[1:] = torch.tensor(later[:1] or (7,), dtype=torch.float32)[0]
        rows[0] = torch.tensor([1.0, 2.0, 4.0, 8.0])
        m = mismatch(P, Q, 1, 0, later=later, hidden={2: rows}, state=state)
        said.add(np.asarray(look(m)).tobytes())
    return len(said) > 1


def test_features_know_nothing_of_tokens_to_come() -> None:
    assert not leaks(scalars)
    assert not leaks(features.hidden)


@pytest.mark.parametrize(
    "peek",
    [
        lambda m: [*scalars(m), len(m._judge.draft.tree)],
        lambda m: [*scalars(m), *m._judge.draft.tree.tokens[m.place + 1 : m.place + 2]],
    ],
)
def test_features_that_peek_are_found_out(peek: Callable[[Mismatch], Any]) -> None:
    assert leaks(peek)


def test_hidden_states_are_three_normed_parts() -> None:
    rows = torch.tensor([[1.0, 2.0, 3.0, 6.0], [9.0, 9.0, 9.0, 9.0]])
    m = mismatch(P, Q, 2, 0, hidden={2: rows}, state=torch.tensor([5.0, 1.0]))
    got = features.hidden(m)
    assert got.dtype == np.float16
    assert got.shape == (10,)
    assert got[:4].tolist() == pytest.approx([-1.069, -0.5345, 0.0, 1.6036], abs=2e-3)
    assert got[4:6].tolist() == pytest.approx([1.0, -1.0], abs=2e-3)
    assert float(got[6:].sum()) == pytest.approx(0, abs=1e-2)

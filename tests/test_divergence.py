"""Where two answers part, and whether a measured near tie excuses it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from hasten.divergence import NEAR_TIE_ULPS, explain_divergence, last_logits, ulp_at
from tests.conformance.harness import prompt_of
from tests.conformance.toy_target import ToyTarget


class Fixed(ToyTarget):
    """Always the same logits."""

    def __init__(self, logits: Sequence[float], dtype: torch.dtype) -> None:
        super().__init__(vocab=len(logits))
        self.info = replace(self.info, dtype=dtype)
        self.row = torch.tensor(logits).to(dtype)

    def _logits(self, key: int, token: int) -> torch.Tensor:
        return self.row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1.0, 1.5, 3.99, 17.3, 0.3, -5.0])
def test_a_unit_in_the_last_place_is_the_distance_to_the_next_number(
    value: float, dtype: torch.dtype
) -> None:
    at = torch.tensor(abs(value)).to(dtype)
    bits = at.view(torch.int32 if dtype == torch.float32 else torch.int16)
    after = (bits + 1).view(dtype)
    assert ulp_at(float(at), dtype) == float(after) - float(at)
    assert ulp_at(-float(at), dtype) == ulp_at(float(at), dtype)


def test_identical_answers_have_nothing_to_explain() -> None:
    target = ToyTarget()
    assert explain_divergence(target, prompt_of(1), [3, 4], [3, 4]) is None
    assert explain_divergence(target, prompt_of(1), [], []) is None
    assert target.passes == 0


def test_the_first_difference_is_scored_after_the_plain_answers_prefix() -> None:
    target = ToyTarget()
    found = explain_divergence(target, prompt_of(1), [3, 4, 5, 6], [3, 4, 9, 8])
    assert found is not None
    assert (found.position, found.plain, found.other) == (2, 5, 9)
    logits = target.logits_after([*prompt_of(1), 3, 4])
    assert found.gap == pytest.approx(abs(float(logits[5] - logits[9])))
    assert found.gap_float32 == found.gap, "a float32 target is its own reference"
    assert found.top_logit == pytest.approx(float(logits.max()))
    assert not found.near_tie
    assert "NOT a near tie" in found.describe()
    assert target.live == []


@pytest.mark.parametrize("ulps", [0, 1, 4, 5])
def test_a_near_tie_is_within_four_units_by_both_measures(ulps: int) -> None:
    unit = 2.0**-6  # bfloat16 has 8 bits of precision: 7 behind the leading one, at 2 to 4
    logits = [0.0, 3.0, 3.0 - ulps * unit, 1.0]
    target, exact = Fixed(logits, torch.bfloat16), Fixed(logits, torch.float32)
    found = explain_divergence(target, [0], [1], [2], reference=exact)
    assert found is not None
    assert found.ulp == unit
    assert found.gap == ulps * unit
    assert found.near_tie is (ulps <= NEAR_TIE_ULPS)
    assert f"gap {ulps:.2f} ulp" in found.describe()


def test_a_tie_in_low_precision_that_float32_tells_apart_is_a_fault() -> None:
    target = Fixed([3.0, 3.0], torch.bfloat16)
    found = explain_divergence(target, [0], [0], [1], reference=Fixed([3.0, 2.5], torch.float32))
    assert found is not None
    assert found.gap == 0
    assert not found.near_tie


def test_without_a_reference_low_precision_is_not_excused() -> None:
    found = explain_divergence(Fixed([3.0, 3.0], torch.bfloat16), [0], [0], [1])
    assert found is not None
    assert found.gap_float32 is None
    assert not found.near_tie
    assert "no reference" in found.describe()


def test_an_answer_that_ends_earlier_is_never_a_near_tie() -> None:
    target = ToyTarget()
    for plain, other in (([3, 4], [3]), ([3], [3, 4])):
        found = explain_divergence(target, prompt_of(1), plain, other)
        assert found is not None
        assert found.position == 1
        assert -1 in (found.plain, found.other)
        assert found.gap == math.inf
        assert not found.near_tie
        assert found.describe()


@pytest.mark.parametrize("count", [1, 2, 9])
def test_logits_are_scored_as_plain_decoding_computes_them(count: int) -> None:
    target = ToyTarget()
    ids = prompt_of(2)[:count]
    assert torch.equal(last_logits(target, ids), target.logits_after(ids))
    assert target.live == []


def test_a_failing_pass_leaves_no_sequence_behind() -> None:
    target = ToyTarget()

    def fail(passes: int) -> None:
        raise RuntimeError("lost")

    target.before_pass = fail
    with pytest.raises(RuntimeError):
        last_logits(target, [2, 3])
    assert target.live == []

"""The law that a draft is drawn from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hasten.sampling import Sampler
from hasten.smc.laws import DraftLaw, TargetLaw
from hasten.types import SamplingParams

VOCAB = 6
ENDS = frozenset({4, 5})
LOGITS = torch.tensor([[2.0, 0.0, -1.0, 1.0, -60.0, -60.0], [0.0, 1.0, 2.0, 3.0, -60.0, -60.0]])


def law(params: SamplingParams | None = None, **changes: Any) -> DraftLaw:
    sampler = Sampler(params or SamplingParams(temperature=1.0), VOCAB, ENDS, 2, 0)
    options = {"temperature": 0.5, "ending": 0.0, "mix": 0.0, "name": "test", **changes}
    return DraftLaw(sampler, ENDS, **options)


def q(made: DraftLaw, prefix: tuple[int, ...] = (0, 1)) -> torch.Tensor:
    found = made([prefix] * 2, LOGITS).exp()
    torch.testing.assert_close(found.sum(1), torch.ones(2))
    return found


def test_without_shares_it_is_the_draft_at_its_temperature() -> None:
    torch.testing.assert_close(q(law()), torch.softmax(LOGITS / 0.5, 1))


def test_ends_get_their_share_and_the_others_the_rest() -> None:
    found = q(law(ending=0.3))
    torch.testing.assert_close(found[:, 4:], torch.full((2, 2), 0.15))
    torch.testing.assert_close(found[:, :4], 0.7 * q(law())[:, :4])


def test_both_shares_add_up() -> None:
    found = q(law(ending=0.3, mix=0.12))
    torch.testing.assert_close(found[:, 4:], torch.full((2, 2), 0.88 * 0.15 + 0.02))


def test_ends_that_the_request_bans_get_none() -> None:
    early = q(law(SamplingParams(temperature=1.0, min_new_tokens=3), ending=0.3))
    assert float(early[:, 4:].sum()) == 0
    late = q(law(SamplingParams(temperature=1.0, min_new_tokens=3), ending=0.3), (0, 1, 2, 2, 2))
    assert float(late[0, 4:].sum()) == pytest.approx(0.3)
    one = q(law(SamplingParams(temperature=1.0, logit_bias={5: -math.inf}), ending=0.3))
    assert one[0, 4:].tolist() == pytest.approx([0.3, 0.0])


def test_where_an_end_ends_nothing_it_gets_no_share() -> None:
    found = q(law(SamplingParams(temperature=1.0, ignore_eos=True), ending=0.3))
    torch.testing.assert_close(found, q(law()))


def test_an_end_beyond_the_vocabulary_gets_no_share() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0), VOCAB, ENDS, 2, 0)
    options: dict[str, Any] = {"temperature": 0.5, "ending": 0.3, "mix": 0.0, "name": "test"}
    torch.testing.assert_close(
        q(DraftLaw(sampler, ENDS | {VOCAB + 3}, **options)), q(law(ending=0.3))
    )


def test_laws_are_taken_in_float32_from_rows_in_bfloat16() -> None:
    rows = (8 * torch.randn(2, 64, generator=torch.Generator().manual_seed(0))).bfloat16()
    sampler = Sampler(SamplingParams(temperature=0.7), 64, ENDS, 2, 0)
    p = TargetLaw(sampler)
    scores = p.score([(0, 1)], [(5,)], [2], rows, [(0, 1)])
    wanted = torch.log_softmax(rows.float() / 0.7, 1)
    torch.testing.assert_close(scores.laws, wanted)
    torch.testing.assert_close(scores.drafted, wanted[:1, 5:6].double())
    torch.testing.assert_close(p.log_probs((0, 1), rows[0]), wanted[0])
    drafted = DraftLaw(sampler, ENDS, temperature=0.5, ending=0.0, mix=0.0, name="test")
    torch.testing.assert_close(
        drafted([(0, 1)] * 2, rows), torch.log_softmax(rows.float() / 0.5, 1)
    )

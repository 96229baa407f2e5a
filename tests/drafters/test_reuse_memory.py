"""What AdaPLD remembers: which anchors it finds, and that nothing rejected gets in."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hasten.drafters import reuse_memory
from hasten.drafters.reuse_memory import Anchor, ReuseMemory, UnitRows
from hasten.drafters.reuse_ranks import MOST_AGREEMENT

SIZE = 16


def states(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, SIZE, generator=torch.Generator().manual_seed(seed))


def embedder(vocab: int, seed: int = 1) -> Callable[[Sequence[int]], torch.Tensor]:
    table = torch.randn(vocab, SIZE, generator=torch.Generator().manual_seed(seed))
    return lambda ids: table[list(ids)]


def begun(text: Sequence[int], hidden: torch.Tensor | None, **options: object) -> ReuseMemory:
    """A memory whose pending token is the last of `text`; hidden ``(len(text) - 1, SIZE)``."""
    memory = ReuseMemory(**options)  # type: ignore[arg-type]
    memory.begin(text[:-1], hidden, None)
    memory.commit(text[-1:])
    return memory


def unit(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    out = UnitRows()
    out.append(rows, range(len(rows)))
    return out.rows


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


@pytest.mark.parametrize("seed", range(6))
def test_a_known_token_has_the_anchor_of_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    text = [rng.randrange(6) for _ in range(60)]
    hidden = states(59, seed)
    memory = begun(text, hidden)
    for token in range(6):
        for before in (58, 20):
            places = [j for j in range(59) if text[j] == token]
            score = {j: cosine(hidden[j - 1], hidden[before]) if j else -1.0 for j in places}
            best = max(places, key=lambda j: (score[j], j))
            assert memory.retrieve(token, before, None) == Anchor(best, False, 0.0)


@pytest.mark.parametrize("blend", [0.0, 1.0])
@pytest.mark.parametrize("tau", [-1.0, 0.2])
def test_an_unknown_token_has_the_anchor_of_brute_force(tau: float, blend: float) -> None:
    rng = random.Random(3)
    text = [rng.randrange(20) for _ in range(60)]
    hidden, embed = states(59), embedder(50)
    memory = begun(text, hidden, tau=tau, blend=blend)
    found = 0
    for token in range(20, 50):
        likeness = {t: cosine(embed([t])[0], embed([token])[0]) for t in set(text[:-1])}
        places = [j for j in range(59) if likeness[text[j]] >= tau]
        got = memory.retrieve(token, 58, embed)
        if not places:
            assert got is None
            continue
        found += 1
        near = {j: cosine(hidden[j - 1], hidden[58]) if j else -1.0 for j in places}
        score = {j: (near[j] + blend * likeness[text[j]]) / (1 + blend) for j in places}
        best = max(places, key=lambda j: (score[j], j))
        assert got is not None
        assert got[:2] == (best, True)
        assert got.score == pytest.approx(score[best], abs=1e-5)
    assert found > 10


def test_resemblance_is_asked_for_only_when_the_token_never_occurred() -> None:
    asked: list[int] = []

    def embed(ids: Sequence[int]) -> torch.Tensor:
        asked.extend(ids)
        return embedder(50)(ids)

    memory = begun([1, 2, 3, 1, 9], states(4), tau=-1.0)
    known = memory.retrieve(2, 3, embed)
    assert known is not None
    assert not known.semantic
    assert asked == []
    unknown = memory.retrieve(9, 3, embed)  # the pending token alone: it is no anchor of itself
    assert unknown is not None
    assert unknown.semantic
    assert asked == [1, 2, 3, 9]
    memory.retrieve(9, 3, embed)
    assert asked[4:] == [9], "each token of the text is embedded once"
    assert memory.retrieve(9, 3, None) is None


def test_the_pending_token_is_no_anchor_until_a_token_follows_it() -> None:
    memory = begun([1, 2, 5], states(2))
    assert memory.retrieve(5, 1, None) is None
    memory.commit([5], [0], states(1))
    assert memory.retrieve(5, 2, None) == Anchor(2, False, 0.0)
    assert len(memory) == 3


def test_equal_states_go_to_the_most_recent_anchor() -> None:
    hidden = torch.ones(9, SIZE)
    memory = begun([7, 1, 7, 1, 7, 1, 2, 3, 4, 7], hidden)
    assert memory.retrieve(7, 8, None) == Anchor(4, False, 0.0)


def test_without_rerank_the_most_recent_anchor_wins() -> None:
    hidden = states(6)
    hidden[0] = hidden[5]
    text = [4, 7, 3, 7, 2, 2, 7]
    assert begun(text, hidden).retrieve(7, 5, None) == Anchor(1, False, 0.0)
    assert begun(text, hidden, rerank=False).retrieve(7, 5, None) == Anchor(3, False, 0.0)
    assert begun(text, None, rerank=False).retrieve(7, 5, None) == Anchor(3, False, 0.0)


def test_the_cap_keeps_the_most_recent_anchors() -> None:
    hidden = states(40)
    hidden[4] = hidden[38]  # both as near as can be
    text = [7] * 41
    assert begun(text, hidden, max_cand=36).retrieve(7, 38, None) == Anchor(39, False, 0.0)
    hidden[38] *= -1
    nearest = begun(text, hidden, max_cand=36).retrieve(7, 4, None)
    assert nearest == Anchor(5, False, 0.0)
    capped = begun(text, hidden, max_cand=5).retrieve(7, 4, None)
    assert capped is not None
    assert capped.position >= 35


def test_the_cap_keeps_the_nearest_tokens() -> None:
    table = torch.eye(SIZE)
    table[9] = table[0] + 0.1 * table[1] + 0.2 * table[2]
    text = [1, 2, 0, 1, 2, 2, 9]
    hidden = torch.ones(6, SIZE)
    memory = begun(text, hidden, tau=-1.0, max_cand=1)
    got = memory.retrieve(9, 5, lambda ids: table[list(ids)])
    assert got is not None
    assert text[got.position] == 0


def test_only_the_latest_distinct_tokens_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse_memory, "COMPARED", 3)
    table = torch.eye(SIZE)
    asked: list[list[int]] = []

    def embed(ids: Sequence[int]) -> torch.Tensor:
        asked.append(list(ids))
        return table[list(ids)]

    table[15] = table[0] + 0.5 * table[4]
    memory = begun([0, 1, 2, 3, 4, 5, 15], torch.ones(6, SIZE), tau=0.1)
    got = memory.retrieve(15, 5, embed)
    assert got is not None
    assert got.position == 4  # 0 is nearer, and too long ago
    assert asked == [[3, 4, 5, 15]]
    for token in (6, 7, 8, 9, 10):
        memory.commit([token], [0], torch.ones(1, SIZE))
    table[14] = table[9]
    got = memory.retrieve(14, len(memory) - 1, embed)
    assert got is not None
    assert memory.tokens[got.position] == 9
    assert asked[1] == [7, 8, 9, 14], "those in between were never needed"


def test_rows_that_were_rejected_never_enter() -> None:
    memory = begun([1, 2, 3], states(2))
    hidden = states(4, 8)
    hidden[[1, 3]] = float("nan")
    topk = torch.arange(36).reshape(4, 9)
    memory.commit([6, 7], [0, 2], hidden, topk)
    expected = torch.cat([states(2), hidden[[0, 2]]])
    assert np.allclose(memory._states.rows, torch.nn.functional.normalize(expected, dim=1))
    assert memory.candidates == [(), (), topk[0].tolist(), topk[2].tolist()]
    assert len(memory.candidates) == memory._states.count == len(memory) == 4
    assert memory.tokens == [1, 2, 3, 6, 7]


def test_candidates_beyond_the_width_are_not_kept() -> None:
    memory = ReuseMemory(width=3)
    memory.begin([1, 2], states(2), torch.arange(10).reshape(2, 5))
    memory.commit([3])
    memory.commit([4], [0], states(1), torch.arange(5).reshape(1, 5))
    assert memory.candidates == [[0, 1, 2], [5, 6, 7], [0, 1, 2]]


def test_a_prompt_run_in_part_has_anchors_without_states() -> None:
    text = [7, 1, 7, 2, 7, 3]
    memory = ReuseMemory()
    hidden = states(2)
    memory.begin(text, hidden, torch.arange(18).reshape(2, 9))
    memory.commit([7])
    assert memory.candidates[:4] == [()] * 4
    # 5 is the only position whose state is known besides 4: what precedes the sevens isn't.
    assert memory.retrieve(7, 5, None) == Anchor(4, False, 0.0)
    assert memory.cosine(4, 5) == -1.0
    assert memory.cosine(5, 4) == pytest.approx(1.0, abs=1e-6)
    memory.commit([9, 7], [0, 1], states(2, 4))
    assert memory.retrieve(7, 6, None) == Anchor(6, False, 0.0), "a known state beats unknown ones"


def test_no_signals_at_all_leave_the_most_recent_anchor() -> None:
    memory = begun([7, 1, 7, 2, 7], None)
    assert memory.retrieve(7, 3, None) == Anchor(2, False, 0.0)
    memory.commit([5, 7], [0, 1], states(2))  # later rows are known
    assert memory.retrieve(7, 5, None) is not None
    assert memory._states.count == 2
    assert memory.candidates == [()] * 6


def test_a_state_that_is_no_direction_resembles_nothing() -> None:
    bad = [[0.0, 0.0], [np.inf, 1.0], [np.nan, 1.0]]
    assert unit(np.array(bad, np.float32)).tolist() == [[0.0, 0.0]] * 3
    good = [[3.0, 4.0], [3e30, 4e30], [3e-30, 4e-30]]
    assert np.allclose(unit(np.array(good, np.float32)), [0.6, 0.8])
    hidden = states(5)
    hidden[1] = float("nan")
    memory = begun([7, 1, 7, 2, 3, 7], hidden)
    found = memory.retrieve(7, 4, None)
    assert found is not None
    assert memory.cosine(2, 4) == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_states_of_any_dtype_are_compared_in_float32(dtype: torch.dtype) -> None:
    memory = begun([7, 1, 7, 2, 7], states(4).to(dtype))
    assert memory._states.rows.dtype == np.float32
    assert np.allclose(np.linalg.norm(memory._states.rows, axis=1), 1, atol=1e-5)


def test_agreement_counts_the_tokens_before_an_anchor() -> None:
    memory = begun([9, 1, 2, 3, 5, 1, 2, 3], None)
    # position 3 (a 3) against the pending 3 at 7: 2 and 1 agree, 9 and 5 don't
    assert memory.agreement(3, 6) == 2
    assert memory.agreement(0, 6) == 0
    # below the drafted path 3 -> 5: its token at position 5 (a 1) follows 5, 3, 2, 1, not 9
    assert memory.agreement(5, 7, [5]) == 4
    assert memory.agreement(5, 7, [4]) == 0
    long = begun([1, 2] * 30, None)
    assert long.agreement(57, 58) == MOST_AGREEMENT
    assert long.agreement(57, 58, [1, 2] * 20) == MOST_AGREEMENT
    assert long.agreement(1, 58) == 1


def test_nothing_is_left_after_clear() -> None:
    memory = begun([7, 1, 7, 2, 7], states(4), tau=-1.0)
    memory.retrieve(30, 3, embedder(50))
    memory.clear()
    assert memory.tokens == []
    assert memory.candidates == []
    assert memory.retrieve(7, 0, embedder(50)) is None
    assert len(memory) == 0


def test_growing_keeps_every_row() -> None:
    memory = ReuseMemory()
    hidden = states(1500)
    memory.begin([1] * 300, hidden[:300], None)
    memory.commit([1])
    for row in range(300, 1500):
        memory.commit([1], [0], hidden[row : row + 1])
    assert np.allclose(memory._states.rows, torch.nn.functional.normalize(hidden, dim=1))

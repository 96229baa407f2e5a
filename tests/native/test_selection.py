"""Argmax and top-k by the kernels: exact, the lowest id first among equals, as without them."""

from __future__ import annotations

import pytest
import torch

from hasten import selection
from hasten.native import library as native
from hasten.native.build import compiled
from hasten.native.library import why_not_native
from hasten.selection import argmax_rows, topk_and_best, topk_rows

if (missing := why_not_native(torch.float32, torch.device("cpu"), 16)) is not None:
    pytest.skip(f"no CPU kernels here: {missing}", allow_module_level=True)


@pytest.fixture(scope="module")
def portable() -> native.Library:
    """The kernels without instructions of one kind of processor."""
    return native.Library(compiled(portable=True))


@pytest.fixture(params=["fast", "portable"])
def kernels(
    request: pytest.FixtureRequest, portable: native.Library, monkeypatch: pytest.MonkeyPatch
) -> native.Library:
    """The build that looks at the rows."""
    build = portable if request.param == "portable" else native.library()
    monkeypatch.setattr(selection, "loaded", lambda: build)
    return build


def logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


def check(rows: torch.Tensor, k: int) -> None:
    right, places = torch.sort(rows, dim=-1, descending=True, stable=True)
    values, ids, best = topk_and_best(rows, k)
    assert torch.equal(values, right[:, :k])
    assert torch.equal(ids, places[:, :k]), "of equal logits the lowest ids, in order"
    assert best == places[:, 0].tolist() == argmax_rows(rows)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("vocab", [1, 7, 127, 128, 129, 136, 5000, 49_152])
def test_the_largest_are_found_whatever_the_number_of_rows_and_candidates(vocab: int) -> None:
    for rows in (1, 2, 5):
        for k in (1, 8, 64):
            check(logits(rows, vocab, seed=k), min(k, vocab))


@pytest.mark.usefixtures("kernels")
def test_of_equal_logits_the_lowest_ids_come_first() -> None:
    for levels in (1, 2, 5):
        rows = (logits(3, 5000).abs() * levels / 20).round()
        for each in (rows, -rows, rows - 1):
            check(each, 8)


@pytest.mark.usefixtures("kernels")
def test_infinities_are_numbers() -> None:
    rows = logits(3, 4000)
    rows[0, [17, 3999]] = torch.inf
    rows[1, :3995] = -torch.inf
    rows[2] = -torch.inf
    check(rows, 8)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("place", [0, 7, 8, 135, 136, 2000, 4999])
def test_a_nan_anywhere_sends_the_rows_the_slower_way(place: int) -> None:
    rows = logits(3, 5000)
    clean = argmax_rows(rows)
    rows[1, place] = torch.nan
    values, ids, best = topk_and_best(rows, 8)
    assert best is None
    assert argmax_rows(rows) == [clean[0], -1, clean[2]]
    assert ids[[0, 2], 0].tolist() == [clean[0], clean[2]]
    assert bool(values[1, 0].isnan())


def test_the_kernels_change_no_value_and_no_id(
    kernels: native.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = logits(6, 49_152)
    values, ids = topk_rows(rows, 8)
    best = argmax_rows(rows)
    monkeypatch.setattr(selection, "loaded", lambda: None)
    other_values, other_ids = topk_rows(rows, 8)
    assert torch.equal(values, other_values)
    assert torch.equal(ids, other_ids)
    assert best == argmax_rows(rows)


def test_other_dtypes_and_views_never_reach_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> native.Library:
        raise AssertionError("these rows aren't float32 numbers one after another")

    monkeypatch.setattr(selection, "loaded", refuse)
    wide = logits(4, 6000)
    for rows in (wide[:, 5:], wide[::2, :], wide.bfloat16(), wide.double()):
        assert argmax_rows(rows) == rows.double().argmax(-1).tolist()
        topk_rows(rows, 8)

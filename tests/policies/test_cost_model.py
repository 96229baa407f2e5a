"""Cost tables and how they drift: what they say of passes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hasten.policies.cost_model import CostModel, CostTable, affordable_rows

TABLE = CostTable(
    "k", (1, 2, 4, 8), (100, 1000), ((10, 11, 12, 16), (20, 22, 24, 32)), (1, 2, 4, 8)
)


# -- tables ----------------------------------------------------------------------------------------


def test_between_measurements_times_are_linear() -> None:
    assert [TABLE.pass_ms(rows, 100) for rows in (1, 2, 3, 4, 6, 8)] == [10, 11, 11.5, 12, 14, 16]
    assert TABLE.pass_ms(1, 550) == pytest.approx(15)
    assert TABLE.pass_ms(6, 550) == pytest.approx((14 + 28) / 2)
    assert TABLE.select_ms(3) == pytest.approx(3)


def test_beyond_them_the_last_slope_goes_on_and_before_them_they_are_flat() -> None:
    assert TABLE.pass_ms(16, 100) == pytest.approx(24)
    assert TABLE.pass_ms(1, 1900) == pytest.approx(30)
    assert TABLE.pass_ms(1, 3) == 10
    falling = CostTable("k", (1, 4, 8), (9,), ((10, 20, 18),))
    assert falling.pass_ms(800, 9) == 18
    assert CostTable("k", (1,), (9,), ((10,),)).pass_ms(8, 900) == 10
    assert CostTable("k", (1,), (9,), ((10,),)).select_ms(8) == 0


def test_a_curve_never_falls() -> None:
    disturbed = CostTable("k", (1, 2, 4, 8), (9,), ((15, 9, 8, 16),))
    assert disturbed.curve(8, 9) == [8, 8, 8, 8, 10, 12, 14, 16]


@pytest.mark.parametrize(
    "change",
    [
        {"rows": (1, 2, 4)},
        {"rows": (1, 2, 4, 4)},
        {"rows": (0, 2, 4, 8)},
        {"contexts": (100,)},
        {"contexts": (1000, 100)},
        {"rows": (), "ms": ((), ()), "topk_ms": ()},
        {"ms": ((10, 11, 12, 16), (20, 22, 24))},
        {"ms": ((10, 11, 12, 16), (20, 22, 24, math.nan))},
        {"ms": ((10, 11, 12, 16), (20, 22, 24, 0))},
        {"topk_ms": (1, 2)},
        {"topk_ms": (1, 2, 4, math.nan)},
        {"topk_ms": (1, 2, 4, -1)},
    ],
)
def test_a_table_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a cost table"):
        replace(TABLE, **change)


# -- drift -----------------------------------------------------------------------------------------


def _observe(model: CostModel, rows: int, factor: float, times: int, select: float = 1.0) -> None:
    for _ in range(times):
        table = model.table
        model.observe(rows, 100, factor * table.pass_ms(rows, 100), select * table.select_ms(rows))


def test_without_observations_the_model_is_the_table_with_selection() -> None:
    curve = CostModel(TABLE).curve(8, 100)
    assert curve[0] == pytest.approx(10 + 1)
    assert curve[7] == pytest.approx(16 + 8)
    assert CostModel(replace(TABLE, topk_ms=())).curve(8, 100)[:8] == TABLE.curve(8, 100)


@pytest.mark.parametrize("factor", [0.6, 1.5, 3.0])
def test_a_slower_machine_is_slower_for_rows_not_yet_run_too(factor: float) -> None:
    model = CostModel(TABLE)
    _observe(model, 8, factor, 200)
    got, table = model.curve(8, 100), TABLE.curve(8, 100)
    for rows in (1, 4, 8):
        expected = factor * table[rows - 1] + TABLE.select_ms(rows)
        assert got[rows - 1] == pytest.approx(expected, rel=0.2)


def test_what_is_run_often_never_looks_cheaper_beside_the_rest_for_that() -> None:
    model = CostModel(replace(TABLE, topk_ms=()))
    for _ in range(30):
        _observe(model, 8, 0.3, 8)
        curve = model.curve(8, 100)
        assert curve[7] / curve[0] == pytest.approx(1.6, rel=1e-6)


def test_row_counts_that_deviate_are_told_apart() -> None:
    model = CostModel(replace(TABLE, topk_ms=()))
    for _ in range(100):
        _observe(model, 1, 1.0, 1)
        _observe(model, 8, 1.8, 1)
    curve = model.curve(8, 100)
    assert curve[7] / curve[0] == pytest.approx(1.6 * 1.8, rel=0.15)


def test_a_hiccup_changes_little() -> None:
    model = CostModel(TABLE)
    _observe(model, 1, 1.0, 50)
    _observe(model, 1, 1000.0, 1)
    _observe(model, 1, 1.0, 14)
    assert model.curve(1, 100)[0] == pytest.approx(11, rel=0.05)


def test_selection_drifts_by_itself() -> None:
    model = CostModel(TABLE)
    _observe(model, 8, 1.0, 300, select=3.0)
    assert model.curve(8, 100)[7] == pytest.approx(16 + 24, rel=0.05)


def test_passes_without_times_are_not_observed() -> None:
    model = CostModel(TABLE)
    for _ in range(50):
        model.observe(4, 100, 0.0, 0.0)
    assert model.curve(8, 100) == CostModel(TABLE).curve(8, 100)


def test_the_curve_follows_the_context() -> None:
    model = CostModel(TABLE)
    assert model.curve(4, 100)[0] < model.curve(4, 1000)[0] < model.curve(4, 4000)[0]
    assert len(model.curve(9, 100)) >= 9


def test_affordable_rows_follow_what_a_pass_costs() -> None:
    def table(*ms: float) -> CostTable:
        return CostTable("x", (1, 8, 16, 64), (256,), (ms,))

    assert affordable_rows(table(10.0, 10.0, 10.0, 10.0)) == 64, "free rows, as on a GPU"
    assert affordable_rows(table(10.0, 12.0, 16.0, 30.0)) == 16
    assert affordable_rows(table(10.0, 30.0, 60.0, 240.0)) == 8, "never fewer"


def test_the_models_curve_is_the_tables_at_every_context_and_length() -> None:
    tables = (TABLE, replace(TABLE, topk_ms=()), CostTable("one", (1,), (50,), ((3.0,),)))
    later = CostTable("later", (2, 6), (10, 20, 40), ((5, 9), (4, 8), (6, 20)))
    for table in (*tables, later):
        for most in (1, 3, 16, 40):
            model = CostModel(table)  # asked for ever other lengths
            for context in (1, 70, 150, 500, 5000):
                curve = model.curve(most, context)
                assert len(curve) >= most
                wanted = [
                    table.pass_ms(n, context) + table.select_ms(n) for n in range(1, most + 1)
                ]
                for n in range(1, most):
                    wanted[n] = max(wanted[n], wanted[n - 1])
                assert curve[:most] == pytest.approx(wanted)

"""``hasten calibrate``: the table, what is kept of it, and when it isn't."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hasten.policies import cost
from hasten.policies.cost_model import CostTable
from tests.cli.conftest import Hasten
from tests.cli.tiny import CONTEXT


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def calibrate(run: Hasten, tiny_model: str) -> Hasten:
    """Runs ``hasten calibrate`` on the tiny model."""

    def call(*args: str) -> Any:
        return run("calibrate", tiny_model, "--device", "cpu", *args)

    return call


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes `cost.measure` give a table at once; counts its calls. ``.busy`` sets the machine."""

    class Measured:
        busy = False
        calls: list[dict[str, Any]]

        def __init__(self) -> None:
            self.calls = []

        def __call__(self, target: Any, *, progress: Any, **given: Any) -> CostTable:
            self.calls.append(given)
            progress(1, 1)
            rows, contexts = given.get("rows", cost.ROWS), given.get("contexts", cost.CONTEXTS)
            return CostTable(
                key=cost.table_key(target),
                rows=tuple(rows),
                contexts=tuple(contexts),
                ms=tuple(tuple(10.0 + row for row in rows) for _ in contexts),
                topk_ms=tuple(0.25 for _ in rows),
                measured_at=cost.time.time(),
                busy=self.busy,
            )

    made = Measured()
    monkeypatch.setattr(cost, "measure", made)
    return made


def test_passes_are_timed_and_shown_with_their_ratio_to_one_row(calibrate: Hasten) -> None:
    result = calibrate("--rows", "4,1,2", "--contexts", "16", "--repeats", "2", "--json", "--force")
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert (value["rows"], value["contexts"]) == ([1, 2, 4], [16])
    (times,), (ratios,) = value["ms"], value["ratios"]
    assert all(ms > 0 for ms in times)
    assert ratios == [ms / times[0] for ms in times]
    assert len(value["topk_ms"]) == 3


def test_a_table_is_kept_and_found_again(calibrate: Hasten, measured: Any) -> None:
    first, second = calibrate(), calibrate()
    assert first.exit_code == second.exit_code == 0
    assert len(measured.calls) == 1
    assert "kept for the next sessions: " in first.stdout
    assert "measured before and still good" in second.stdout
    (path,) = (Path(word) for word in second.stdout.split() if word.endswith(".json"))
    assert path.is_file()
    for words in ("11.00", "1.00", "74.00", "6.73", "0.25", "context 128", "context 1024"):
        assert words in first.stdout
        assert words in second.stdout


def test_force_and_repeats_measure_anew(calibrate: Hasten, measured: Any) -> None:
    calibrate()
    calibrate("--force")
    calibrate("--repeats", "3")
    assert measured.calls == [{}, {}, {"repeats": 3}]


def test_a_rough_table_that_methods_measured_is_replaced(
    calibrate: Hasten, measured: Any, llm: Any
) -> None:
    rough = measured(llm.target, progress=lambda *_: None, rows=cost.QUICK_ROWS)
    cost.save(llm.target, rough)
    assert cost.load(llm.target) == rough
    calibrate()
    found = cost.load(llm.target)
    assert found is not None
    assert found.rows == cost.ROWS


def test_a_busy_machine_is_told_loudly_and_its_table_not_kept(
    calibrate: Hasten, measured: Any, llm: Any
) -> None:
    measured.busy = True
    result = calibrate()
    assert result.exit_code == 1
    assert "NOT" in result.stderr
    assert "busy machine" in result.stderr
    assert "not kept" in result.stdout
    assert cost.load(llm.target) is None


def test_force_keeps_a_busy_machines_table_with_the_warning(
    calibrate: Hasten, measured: Any, llm: Any
) -> None:
    measured.busy = True
    result = calibrate("--force")
    assert result.exit_code == 0
    assert "busy machine" in result.stderr
    assert "NOT" not in result.stderr
    assert cost.load(llm.target) is not None


def test_a_narrow_table_is_shown_and_does_not_replace_the_kept_one(
    calibrate: Hasten, measured: Any, llm: Any
) -> None:
    calibrate()
    whole = cost.load(llm.target)
    result = calibrate("--rows", "2,8", "--contexts", "64")
    assert "2 rows = 1" in result.stdout
    assert "not kept: methods need rows from 1 to 64" in result.stdout
    assert cost.load(llm.target) == whole
    assert whole is not None


def test_a_cache_that_can_not_be_written_is_told(
    calibrate: Hasten, measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "save", lambda target, table: None)
    result = calibrate("--json")
    value = json.loads(result.stdout)
    assert (value["state"], value["path"]) == ("unwritable", None)


def test_the_table_fits_80_columns(calibrate: Hasten, measured: Any) -> None:
    lines = calibrate().stdout.splitlines()
    shown = [line for line in lines if "/" not in line and "threads=" not in line]
    assert len(shown) > len(cost.ROWS)
    assert all(len(line) <= 80 for line in shown)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rows", "0,1"], "--rows: must be whole numbers >= 1"),
        (["--rows", "1,two"], "--rows: must be whole numbers >= 1"),
        (["--contexts", ""], "--contexts: must be whole numbers >= 1"),
        (["--rows", str(CONTEXT)], "--rows: the longest passes need"),
        (["--contexts", str(CONTEXT - 2), "--rows", "8"], "--contexts: the longest passes need"),
        (["--repeats", "0"], "'--repeats'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_option_is_named(
    calibrate: Hasten, told: Any, measured: Any, flags: list[str], words: str
) -> None:
    assert words in told(calibrate(*flags))
    assert measured.calls == []


def test_a_stale_table_is_measured_anew(calibrate: Hasten, measured: Any, llm: Any) -> None:
    calibrate()
    kept = cost.load(llm.target)
    assert kept is not None
    old = replace(kept, measured_at=kept.measured_at - cost.STALE_AFTER_S - 1)
    cost.save(llm.target, old)
    calibrate()
    assert len(measured.calls) == 2


def test_a_table_of_other_kernels_or_weights_is_not_taken(llm: Any) -> None:
    info = llm.target.info

    def key(cache: Any = None, **facts: Any) -> str:
        shape = SimpleNamespace(cache=cache or info.dtype)
        target: Any = SimpleNamespace(info=replace(info, **facts), shape=shape)
        return cost.table_key(target)

    assert key() == cost.table_key(llm.target)
    others = [
        key(kernels="native"),
        key(kernels="native", quantize="int8"),
        key(kernels="native", quantize="int4"),
        key(kernels="native", cache=cost.torch.bfloat16),
        key(engine="transformers", kernels=""),
    ]
    assert len({key(), *others}) == 1 + len(others)

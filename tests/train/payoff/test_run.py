"""From rows to a predictor and its report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hasten.errors import ModelError, OptionError
from hasten.payoff import predictor as predictors
from hasten.payoff.features import digest_of
from hasten.payoff.predictor import CacheOptions
from hasten.train.payoff import run as made
from hasten.train.payoff.fit import FitOptions
from hasten.train.payoff.run import Options
from hasten.train.rows import META
from tests.conformance.toy_target import ToyTarget
from tests.train.payoff import cases

INFO = ToyTarget(vocab=cases.VOCAB, eos_ids=(cases.EOS,)).info
QUICK = Options(fit=FitOptions(epochs=12, hidden=32))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cases.save(tmp_path_factory.mktemp("rows") / "rows.jsonl", cases.rows())


def test_a_predictor_tells_copies_from_babble_and_the_report_says_how_well(
    data: str, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "payoff.npz"
    told: list[tuple[str, int, int]] = []
    _, report = made.run(INFO, cases.table(), [data], out, QUICK, lambda *at: told.append(at))
    assert json.loads(made.report_file(out).read_text()) == report
    gate = report["test"]["payoff"]["overall"]["states"]
    assert gate["precision"] > 0.9
    assert gate["recall"] > 0.6
    copies = report["test"]["always"]["overall"]["states"]
    assert copies["recall"] == 1.0
    assert copies["precision"] < gate["precision"]
    assert report["test"]["never"]["overall"]["cached"] == 0
    rounds = {name: groups["overall"]["rounds"] for name, groups in report["test"].items()}
    assert rounds["oracle"] == min(rounds.values())
    assert rounds["payoff"] < min(rounds["always"], rounds["never"])
    assert set(report["test"]["payoff"]) == {"rewrite", "chat", "overall"}
    assert set(report["validation"]) == {"mlp", "ridge"}
    every = report["all_states"]
    assert every["payoff"]["states"] == every["score>=4"]["states"] == report["states"]["test"]
    assert every["payoff"]["precision"] > 0.9
    assert report["texts"] == {"modules": 12, "policy": 12, "test": 12}
    assert ("replay", 36, 36) in told
    file = predictors.find(str(out), INFO, digest_of(cases.table()), CacheOptions())
    assert file.facts["model"] == INFO.name
    assert file.kind == report["kind"]


@pytest.mark.parametrize("kind", ["mlp", "ridge"])
def test_a_kind_that_is_named_is_the_one_that_is_made(kind: str, data: str, tmp_path: Path) -> None:
    cache = CacheOptions(longest=16, max_spec_factor=2.0)
    options = replace(QUICK, kind=kind, dagger=1, texts=6, cache=cache)
    file, report = made.run(INFO, cases.table(), [data], tmp_path / "one.npz", options)
    assert file.kind == kind
    assert list(report["validation"]) == [kind]
    assert file.cache == cache
    assert report["texts"]["test"] == 6


def test_the_same_rows_give_the_same_file(data: str, tmp_path: Path) -> None:
    options = replace(QUICK, kind="mlp", texts=4, fit=FitOptions(epochs=2, hidden=8))
    for name in ("one.npz", "two.npz"):
        made.run(INFO, cases.table(), [data], tmp_path / name, options)
    one, two = (made.report_file(tmp_path / name).read_text() for name in ("one.npz", "two.npz"))
    assert one == two


def test_no_prompt_is_in_two_splits_and_drawn_answers_are_left_out(tmp_path: Path) -> None:
    some = [*cases.rows(12), *cases.rows(12), *cases.rows(12, temperature=0.8)]
    found = made.greedy_rows([cases.save(tmp_path / "rows.jsonl", some)])
    prompts = [tuple(row.prompt) for rows in found.values() for row in rows]
    assert len(prompts) == len(set(prompts)) == 12
    assert all(row.temperature == 0 for rows in found.values() for row in rows)
    assert {split: {row.split for row in rows} for split, rows in found.items()} == {
        split: {split} for split in ("modules", "policy", "test")
    }


def refused(data: str, out: Path, words: str, info: Any = INFO, options: Any = QUICK) -> None:
    with pytest.raises((OptionError, ModelError), match=words):
        made.run(info, cases.table(), [data], out, options)
    assert not out.exists()


def test_rows_that_cannot_teach_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    drawn = cases.save(tmp_path / "drawn.jsonl", cases.rows(12, temperature=1.0))
    refused(drawn, out, "data: there is no greedy answer in split 'modules'.*--collect")
    few = cases.save(tmp_path / "few.jsonl", [r for r in cases.rows() if r.split != "policy"])
    refused(few, out, "in split 'policy'")
    fresh = [replace(r, prompt=[n + 10], output=[50]) for n, r in enumerate(cases.rows(12))]
    refused(cases.save(tmp_path / "fresh.jsonl", fresh), out, "the cache never had a draft")
    wide = [replace(r, output=[*r.output[:-1], cases.VOCAB]) for r in cases.rows(12)]
    refused(cases.save(tmp_path / "wide.jsonl", wide), out, "ids beyond this model's 60")
    refused(drawn, out, "has no fingerprint", info=replace(INFO, fingerprint=""))


def test_rows_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / META).write_text(json.dumps({"schema": 1, "runs": [], "fingerprint": "else"}))
    cases.save(folder / "rows.jsonl", cases.rows())
    refused(str(folder), tmp_path / "out.npz", "are of other weights than toy-0's")


@pytest.mark.parametrize(
    "bad", [{"kind": "tree"}, {"dagger": -1}, {"texts": -1}, {"model_keeps": -1.0}, {"tau": 0.0}]
)
def test_options_out_of_range_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(bad))):
        Options(**bad)


def test_few_paying_states_are_doubted() -> None:
    assert made.doubt(1000, 20) == ""
    assert "only 3 of 1000" in made.doubt(1000, 3)

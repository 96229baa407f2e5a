"""The payoff predictor's file: what comes back is what was saved, and what isn't is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.errors import ModelError, OptionError
from hasten.payoff import predictor as made
from hasten.payoff.features import FEATURES
from hasten.payoff.predictor import KINDS, CacheOptions
from tests.conformance.toy_target import ToyTarget
from tests.payoff.cases import predictor

INFO = ToyTarget().info
FACTS = {"target": INFO.fingerprint, "tokenizer": "letters", "model": "toy"}


def rows(count: int = 50, seed: int = 1) -> np.ndarray[Any, Any]:
    x = np.random.default_rng(seed).normal(size=(count, len(FEATURES))).astype(np.float32)
    x[:, FEATURES.index("length")] = np.arange(count) % 30
    return x


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_says_what_the_predictor_said(kind: str, tmp_path: Path) -> None:
    first = replace(predictor(kind, 3, **FACTS), cache=CacheOptions(longest=24))
    first.save(tmp_path / "payoff.npz")
    again = made.read(tmp_path / "payoff.npz", "here")
    assert np.array_equal(again.predict(rows()), first.predict(rows()))
    assert (again.kind, again.cache, again.facts) == (kind, CacheOptions(longest=24), FACTS)
    assert [path.name for path in tmp_path.iterdir()] == ["payoff.npz"], "no scratch file is left"


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_is_told_the_same_as_among_many_and_never_more_than_was_drafted(kind: str) -> None:
    some, x = predictor(kind, 3), rows()
    said = some.predict(x)
    assert said.shape == (50,)
    assert float(some.predict(x[7])) == pytest.approx(float(said[7]), abs=1e-4)
    assert (said >= 0).all()
    assert (said <= x[:, FEATURES.index("length")]).all()
    assert len(set(said.tolist())) > 5


def test_products_are_of_all_pairs() -> None:
    wide = made.with_products(rows(3))
    assert wide.shape == (3, made.width_of("ridge"))
    count = len(FEATURES)
    pairs = [(a, b) for a in range(count) for b in range(a, count)]
    at = pairs.index((2, 5))
    assert wide[:, count + at] == pytest.approx(rows(3)[:, 2] * rows(3)[:, 5])


def found(path: Path, **changes: Any) -> Any:
    asked = {"tokenizer": "letters", "cache": CacheOptions(), "info": INFO, **changes}
    return made.find(str(path), asked["info"], asked["tokenizer"], asked["cache"])


def test_a_predictor_of_other_weights_tokenizer_or_cache_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "payoff.npz"
    predictor(**FACTS).save(path)
    assert found(path).facts["model"] == "toy"
    other = replace(INFO, fingerprint="else", name="another")
    with pytest.raises(ModelError, match=r"other weights than another's \(toy\).*train payoff"):
        found(path, info=other)
    with pytest.raises(ModelError, match="other weights"):
        found(path, info=replace(INFO, fingerprint=""))
    with pytest.raises(ModelError, match="another tokenizer"):
        found(path, tokenizer="digits")
    for name, value in (
        ("longest", 8),
        ("max_tree_depth", 24),
        ("max_spec_factor", 2.0),
        ("min_token_prob", 0.2),
    ):
        with pytest.raises(OptionError, match=rf"hvd.{name}: .* was trained for {name}=.*{value}"):
            found(path, cache=CacheOptions(**{name: value}))


def test_without_a_file_the_error_names_the_way_to_one() -> None:
    with pytest.raises(OptionError, match=r"hvd.predictor: no payoff.*train payoff.*rule=freq"):
        made.find("", INFO, "letters", CacheOptions())


def rewritten(path: Path, **changes: Any) -> None:
    with np.load(path) as raw:
        arrays = {name: raw[name] for name in raw.files}
    meta = {**json.loads(str(arrays.pop("meta"))), **changes.pop("meta", {})}
    np.savez(path, meta=np.array(json.dumps(meta)), **{**arrays, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"meta": {"kind": "lede-arms"}}, "lede-arms"),
        ({"meta": {"format": 99}}, "format 99"),
        ({"meta": {"features": ["luck"]}}, "other features"),
        ({"meta": {"model": "oracle"}}, "oracle"),
        ({"meta": {"cache": {"longest": 0}}}, "longest"),
        ({"mean": np.zeros(3, np.float32)}, "sizes"),
        ({"weight0": np.zeros((3, 8), np.float32)}, "layers"),
        ({"weight2": np.zeros((8, 2), np.float32), "bias2": np.zeros(2, np.float32)}, "one output"),
        ({"bias1": np.full(8, np.nan, np.float32)}, "finite"),
        ({"scale": np.zeros(len(FEATURES), np.float32)}, "positive"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "payoff.npz"
    predictor(**FACTS).save(path)
    rewritten(path, **changes)
    with pytest.raises(ModelError, match=f"(?s)there holds no payoff predictor.*{words}"):
        made.read(path, "there")


def test_what_is_no_file_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no")
    (tmp_path / "empty").write_bytes(b"")
    for name in ("text", "empty", "missing"):
        with pytest.raises(ModelError, match="no payoff predictor that can be used"):
            made.read(tmp_path / name, name)


def test_what_is_shipped_is_found_by_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "assets" / "toy"
    folder.mkdir(parents=True)
    predictor(**FACTS).save(folder / made.SHIPPED)
    monkeypatch.setattr(made, "files", lambda package: tmp_path)
    shipped = made.shipped(INFO)
    assert shipped is not None
    assert shipped.facts["model"] == "toy"
    assert made.shipped(replace(INFO, fingerprint="else")) is None
    assert made.shipped(replace(INFO, fingerprint="")) is None

"""The arbiter and its file: exact round trips, sound refusals (C12)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu

from hasten.arbitration import arbiter as arbiters
from hasten.arbitration.arbiter import STD_FLOOR, Arbiter
from hasten.arbitration.rules import Learned
from hasten.errors import ModelError
from tests.arbitration.cases import mismatch

META = {"target": "weights-a", "draft": "exit-2-b", "length": 4, "families": ["sum1"]}
P = (0.5, 0.3, 0.15, 0.05)
Q = (0.1, 0.6, 0.2, 0.1)


def make(kind: str = "mlp", *, hidden: int = 0, seed: int = 0, **changes: Any) -> Arbiter:
    generator = torch.Generator().manual_seed(seed)
    width = 34 if hidden else 18
    shapes: dict[str, tuple[int, ...]] = {"w": (width,), "b": ()}
    if kind == "mlp":
        shapes = {"w1": (32, width), "b1": (32,), "w2": (32,), "b2": ()}
    if hidden:
        shapes["project"] = (16, hidden)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    given: dict[str, Any] = {
        "mean": torch.randn(18, generator=generator),
        "std": torch.rand(18, generator=generator) + 0.5,
        "meta": META,
    }
    return Arbiter(kind, **{"weights": weights, **given, **changes})


def rows(count: int = 20) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=(count, 18)).astype(np.float32)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("hidden", [0, 12])
def test_what_is_loaded_is_what_was_saved(kind: str, hidden: int, tmp_path: Path) -> None:
    made = make(kind, hidden=hidden, theta=0.37, gate=0.01, consecutive=3)
    states = np.random.default_rng(1).normal(size=(20, hidden)).astype(np.float16)
    given = states if hidden else None
    for place in (tmp_path / "folder", tmp_path / "natural.json", tmp_path / "v1.safetensors"):
        made.save(place)
        got = Arbiter.load(place)
        assert torch.equal(got.logits(rows(), given), made.logits(rows(), given))
        for name in ("kind", "theta", "gate", "consecutive", "fallback", "meta"):
            assert getattr(got, name) == getattr(made, name)
        assert set(got.weights) == set(made.weights)
        assert all(torch.equal(got.weights[n], made.weights[n]) for n in made.weights)
        assert torch.equal(got.std, made.std)
    assert not list(tmp_path.rglob("*.tmp"))


def test_its_numbers_are_those_of_its_formula() -> None:
    made, x = make(), torch.from_numpy(rows())
    w = made.weights
    z = (x - made.mean) / made.std
    want = gelu(z @ w["w1"].T + w["b1"]) @ w["w2"] + w["b2"]
    assert torch.allclose(made.logits(x), want)
    assert torch.allclose(made.chance(x), torch.sigmoid(want))
    assert not made.logits(x).requires_grad


def test_a_feature_that_never_varied_divides_by_no_zero() -> None:
    made = make("linear", std=torch.zeros(18))
    assert float(made.std.min()) == pytest.approx(STD_FLOOR)
    assert bool(torch.isfinite(made.logits(rows())).all())


def test_training_differentiates_the_same_function() -> None:
    made = make("mlp", hidden=12)
    weights = {name: value.clone().requires_grad_() for name, value in made.weights.items()}
    states = torch.randn(20, 12)
    x = arbiters.inputs(torch.from_numpy(rows()), made.mean, made.std, states, weights["project"])
    out = arbiters.forward(weights, "mlp", x)
    assert torch.allclose(out, made.logits(rows(), states))
    out.sum().backward()
    assert all(value.grad is not None for value in weights.values())


def test_it_decides_by_theta_and_a_fallback_keeps_nothing() -> None:
    m = mismatch(P, Q, 1, 0)
    sure = make("linear", theta=0.0)
    assert Learned(sure).keep(m)
    assert not Learned(sure, theta=1.1).keep(m)
    assert not Learned(make("linear", theta=0.0, fallback=True)).keep(m)


def test_exploring_draws_by_the_chance_and_tells_its_logarithm() -> None:
    made = make("linear", weights={"w": torch.zeros(18), "b": torch.tensor(-0.8)})
    chance = 1 / (1 + np.exp(0.8))
    kept = []
    for seed in range(400):
        m = mismatch(P, Q, 1, 0, seed=seed)
        choice = Learned(made, explore=True).choose(m)
        assert choice.logp == pytest.approx(np.log(chance if choice.kept else 1 - chance), abs=1e-5)
        kept.append(choice.kept)
    assert np.mean(kept) == pytest.approx(chance, abs=0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "forest"},
        {"mean": torch.zeros(17), "std": torch.ones(17)},
        {"weights": {"w": torch.zeros(18)}},
        {"weights": {"w": torch.full((18,), torch.nan), "b": torch.tensor(0.0)}},
        {"theta": float("nan")},
        {"gate": 1.5},
        {"consecutive": -1},
        {"weights": {"w": torch.zeros(34), "b": torch.tensor(0.0), "project": torch.zeros(16)}},
    ],
)
def test_what_cannot_decide_is_refused(changes: dict[str, Any]) -> None:
    base = make("linear")
    given: dict[str, Any] = {
        n: getattr(base, n) for n in ("kind", "weights", "mean", "std", "meta")
    }
    with pytest.raises(ModelError, match="not an arbiter"):
        Arbiter(**{**given, **changes})


def test_broken_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        Arbiter.load(tmp_path / "nowhere")
    make().save(tmp_path)
    description = tmp_path / "arbiter.json"
    said = json.loads(description.read_text())
    for change in (
        {"format": 99},
        {"kind": "linear"},
        {"theta": "high"},
        {"consecutive": math.inf},
        {"consecutive": 2.5},
        {"fallback": "false"},
        {"meta": {**META, "length": "four"}},
        {"meta": {**META, "length": 0}},
    ):
        description.write_text(json.dumps({**said, **change}))
        with pytest.raises(ModelError, match="no arbiter that can be read"):
            Arbiter.load(tmp_path)
    description.write_text(json.dumps(said))
    (tmp_path / "arbiter.safetensors").write_bytes(b"cut")
    with pytest.raises(ModelError, match="no arbiter that can be read"):
        Arbiter.load(tmp_path)


def test_a_file_is_found_from_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make().save(tmp_path / "mine")
    assert Arbiter.load("~/mine").meta == META


def test_it_must_say_whose_it_is(tmp_path: Path) -> None:
    for meta in ({"target": "a"}, {"draft": "b"}, {}):
        with pytest.raises(ModelError, match="fingerprint"):
            make(meta=meta).save(tmp_path)


def test_another_models_or_drafts_arbiter_is_refused_by_name() -> None:
    made = make()
    arbiters.check_belongs(made, target="weights-a", draft="exit-2-b", where="here")
    with pytest.raises(ModelError, match="other weights than tiny"):
        arbiters.check_belongs(made, target="x", draft="exit-2-b", where="here", model="tiny")
    with pytest.raises(ModelError, match="another draft"):
        arbiters.check_belongs(made, target="weights-a", draft="exit-0-b", where="here")
    nameless = make(meta={**META, "target": ""})
    with pytest.raises(ModelError, match="other weights"):
        arbiters.check_belongs(nameless, target="", draft="exit-2-b", where="here")


def test_a_shipped_one_is_found_by_both_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arbiters, "files", lambda package: tmp_path)
    assert arbiters.shipped("weights-a", "exit-2-b") is None
    make().save(tmp_path / "assets" / "some-model" / "arbiter" / "natural.json")
    make(meta={**META, "draft": "other"}).save(
        tmp_path / "assets" / "some-model" / "arbiter" / "more" / "special.json"
    )
    for draft in ("exit-2-b", "other"):
        found = arbiters.shipped("weights-a", draft)
        assert found is not None
        assert found.meta["draft"] == draft
    assert arbiters.shipped("weights-a", "third") is None
    assert arbiters.shipped("", "exit-2-b") is None

"""LEDE's agent: a file that belongs to one model, and values from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.exits.exit_tensors import config, near_tensors
from tests.policies.exit_cases import costs

from hasten.errors import ModelError
from hasten.exits import store
from hasten.policies.lede_agent import AgentFacts, LedeAgent, modules_digest, shipped
from hasten.policies.lede_features import FEATURES, Prior

AT = (2, 4)
COSTS = costs(AT, 12)
INFO: Any = SimpleNamespace(fingerprint="weights", num_layers=12, name="tiny")
FACTS = AgentFacts("weights", "modules", AT, 12, 6, COSTS, rho=1.4, notes={"seed": 3})
FITS: dict[str, Any] = {"modules": "modules", "layers": AT, "steps": 6, "costs": COSTS}


def agent(facts: AgentFacts = FACTS, seed: int = 0) -> LedeAgent:
    rng = np.random.default_rng(seed)
    sizes = [(16, 20), (8, 16), (2, 8)]
    weights = tuple(rng.normal(size=size).astype(np.float32) for size in sizes)
    biases = tuple(rng.normal(size=size[0]).astype(np.float32) for size in sizes)
    prior = Prior(
        np.array([3, 40_000]),
        np.array([[0.5, 0.25], [0.75, 0.125]], dtype=np.float32),
        np.array([0.4, 0.6], dtype=np.float32),
    )
    return LedeAgent(facts, weights, biases, prior, (0.5, 0.75), 1.5)


def test_values_are_those_of_the_network_one_by_one_and_together() -> None:
    made = agent()
    x = np.random.default_rng(1).normal(size=(20, 7)).astype(np.float32)
    together = made.q_batch(x)
    for lane in range(7):
        h = x[:, lane]
        for w, b in zip(made.weights[:-1], made.biases[:-1], strict=True):
            h = np.maximum(w @ h + b, 0)
        want = made.weights[-1] @ h + made.biases[-1]
        kept = x[:, lane].copy()
        np.testing.assert_allclose(made.q_values(x[:, lane]), want, rtol=1e-5)
        np.testing.assert_allclose(together[:, lane], want, rtol=1e-4, atol=1e-5)
        assert made.leaves(x[:, lane]) == (want[1] > want[0])
        assert (x[:, lane] == kept).all(), "the features are the caller's"


def test_a_file_gives_the_agent_back(tmp_path: Path) -> None:
    made, path = agent(), tmp_path / "new" / "agent.npz"
    made.save(path)
    again = LedeAgent.load(path)
    x = np.random.default_rng(1).normal(size=20).astype(np.float32)
    assert again.q_values(x) == made.q_values(x)
    assert again.facts == made.facts
    assert (again.rates, again.length) == (made.rates, made.length)
    assert again.prior.at(40_000, 1) == made.prior.at(40_000, 1)
    assert path.stat().st_size < 100_000
    assert [each.name for each in path.parent.iterdir()] == ["agent.npz"]


def test_a_file_that_is_no_agent_is_refused_by_name(tmp_path: Path) -> None:
    whole = tmp_path / "whole.npz"
    agent().save(whole)
    cut = tmp_path / "cut.npz"
    cut.write_bytes(whole.read_bytes()[:-200])
    text = tmp_path / "text.npz"
    text.write_text("not an agent")
    other = tmp_path / "other.npz"
    np.savez(other, ids=np.arange(3))
    for path in (tmp_path / "none.npz", cut, text, other):
        with pytest.raises(ModelError, match=path.name):
            LedeAgent.load(path)


def test_an_agent_for_its_own_model_is_taken() -> None:
    agent().check(INFO, **FITS)
    agent().check(INFO, **{**FITS, "steps": 2, "costs": costs(AT, 12, row=0.5)})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"info": SimpleNamespace(fingerprint="others", num_layers=12, name="x")}, "weights"),
        ({"info": SimpleNamespace(fingerprint="", num_layers=12, name="x")}, "weights"),
        ({"info": SimpleNamespace(fingerprint="weights", num_layers=30, name="x")}, "12 layers"),
        ({"layers": (2, 8)}, r"\(2, 8\)"),
        ({"layers": (2,)}, "exits"),
        ({"modules": "retrained"}, "exit modules"),
        ({"steps": 12}, "at most 6"),
        ({"costs": costs((2, 4, 6), 12)}, "cost table"),
        ({"costs": costs(AT, 12, rows=4)}, "cost table"),
    ],
)
def test_an_agent_for_something_else_is_refused_by_what_differs(
    changes: dict[str, Any], words: str
) -> None:
    given = {"info": INFO, **FITS, **changes}
    with pytest.raises(ModelError, match=words):
        agent().check(given.pop("info"), **given)


def test_an_agent_of_other_features_is_refused() -> None:
    with pytest.raises(ModelError, match="features of version"):
        agent(replace(FACTS, version=99)).check(INFO, **FITS)
    with pytest.raises(ModelError, match="features"):
        agent(replace(FACTS, features=("p1", "mood"))).check(INFO, **FITS)


def test_weights_that_dont_fit_or_arent_finite_are_refused() -> None:
    good = agent()
    bad = good.weights[0].copy()
    bad[0, 0] = np.nan
    for weights in ((), good.weights[1:], good.weights[::-1], (bad, *good.weights[1:])):
        with pytest.raises(ModelError):
            replace(good, weights=weights)


def test_features_carry_the_costs_of_the_machine_at_hand() -> None:
    made, slow = agent(), costs(AT, 12, row=0.5)
    wider = FEATURES.index("wider")
    assert wider == 19
    assert made.feature_facts(slow).wider[0, 0] > made.feature_facts().wider[0, 0]
    assert made.feature_facts().rates == (0.5, 0.75)


def modules(tmp_path: Path, name: str, seed: int = 0, ids: range = range(50)) -> store.Stored:
    kinds = [config("deep", 0, 32), config("adapter", 2, 32)]
    store.save(tmp_path / name, "tiny", ids, [(c, near_tensors(c, seed)) for c in kinds], {})
    return store.read(tmp_path / name)


def test_exit_modules_are_told_apart_by_what_they_compute(tmp_path: Path) -> None:
    one, again = modules(tmp_path, "a"), modules(tmp_path, "b")
    assert modules_digest(one, (0, 2)) == modules_digest(again, (0, 2))
    others = {
        modules_digest(modules(tmp_path, "c", seed=1), (0, 2)),
        modules_digest(modules(tmp_path, "d", ids=range(51)), (0, 2)),
        modules_digest(one, (0,)),
        modules_digest(one, (2,)),
        modules_digest(None, (0, 2)),
    }
    assert len({modules_digest(one, (0, 2)), *others}) == 6


def test_modules_added_beside_dont_change_an_agents_own(tmp_path: Path) -> None:
    """A folder that gets another exit later still belongs to agents of those it had."""
    one = modules(tmp_path, "a")
    extra = config("adapter", 4, 32)
    kinds = [(c, near_tensors(c, 0)) for c in (*one.configs, extra)]
    store.save(tmp_path / "more", "tiny", range(50), kinds, {})
    assert modules_digest(store.read(tmp_path / "more"), (0, 2)) == modules_digest(one, (0, 2))


def test_writing_modules_again_doesnt_make_them_others(tmp_path: Path) -> None:
    one = modules(tmp_path, "a")
    for _ in range(3):
        kinds = [(c, {n: one.tensors[f"{c.layer}.{n}"] for n in c.shapes()}) for c in one.configs]
        store.save(tmp_path / "a", "tiny", one.ids, kinds, {})
        again = store.read(tmp_path / "a")
        assert modules_digest(again, (0, 2)) == modules_digest(one, (0, 2))
        one = again


def test_nothing_is_shipped_for_unknown_weights() -> None:
    assert shipped(SimpleNamespace(fingerprint="")) is None  # type: ignore[arg-type]
    assert shipped(SimpleNamespace(fingerprint="no such weights")) is None  # type: ignore[arg-type]

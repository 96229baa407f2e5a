"""The arbiters that come with the package belong to the modules that come with it."""

from __future__ import annotations

from pathlib import Path

import pytest

import hasten
from hasten.arbitration import arbiter as arbiters
from hasten.arbitration.rules import LinearJudge
from hasten.builtin.cospec import exit_mark
from hasten.exits import store

ASSETS = Path(hasten.__file__).parent / "assets" / "smollm2-135m"
PAIRS = {"natural": ASSETS, "specialist": ASSETS / "specialist"}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_shipped_arbiter_is_the_one_of_its_shipped_module(pair: str) -> None:
    stored = store.read(PAIRS[pair])
    folder = ASSETS / "arbiter" / pair
    mine = arbiters.Arbiter.load(folder)
    layer = min(config.layer for config in stored.configs)
    assert mine.meta["draft"] == exit_mark(stored, layer)
    found = arbiters.shipped(stored.fingerprint, exit_mark(stored, layer))
    assert found is not None
    assert (found.theta, found.fallback, found.kind) == (mine.theta, mine.fallback, mine.kind)
    size = stored.configs[0].hidden
    LinearJudge.load(folder / "judge.safetensors", size=size, target=stored.fingerprint)
    assert "Lossy" in (folder / "README.md").read_text()


def test_an_arbiter_of_one_pair_is_not_taken_for_the_other() -> None:
    marks = set()
    for pair, folder in PAIRS.items():
        stored = store.read(folder)
        marks.add(arbiters.Arbiter.load(ASSETS / "arbiter" / pair).meta["draft"])
        assert arbiters.shipped("another" + stored.fingerprint, next(iter(marks))) is None
    assert len(marks) == 2

"""What arms do: logged over rounds of all arms, fitted, scored on documents held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.builtin.lede import LedeOptions
from hasten.errors import OptionError
from hasten.methods import MethodContext
from hasten.policies import lede_arms
from hasten.policies.cost_model import CostTable
from hasten.policies.lede_arms import ARMS, FEATURES, ArmCosts
from hasten.train import lede_arms as made
from hasten.train import lede_arms_fit as fitted
from hasten.train.lede_arms import Options
from hasten.train.lede_arms_fit import Logged
from hasten.types import SamplingParams
from tests.exits import exit_models as tiny
from tests.exits.exit_models import LAYERS
from tests.exits.exit_requests import EVEN, plain, prompt_of, tokens_of
from tests.policies import lede_cases

COSTS = CostTable("tiny", (1, 8, 64), (64,), ((10.0, 10.5, 20.0),))
NAMES = tuple(arm.name for arm in ARMS if not arm.walk)


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> MethodContext:
    bank = tiny.bank((("deep", 0),), EVEN)
    monkeypatch.setattr(made, "exit_zero", lambda options, target: bank)
    return MethodContext(tiny.target(), None, lambda name: None, COSTS)  # type: ignore[arg-type, return-value]


def texts(count: int = 4) -> Iterator[tuple[str, Sequence[int]]]:
    for case in range(count):
        yield ("chat", "math")[case % 2], [*prompt_of(case), *prompt_of(case)]


SMALL = Options(documents=4, tokens=24, epochs=30, hidden=8)


@pytest.mark.parametrize(
    ("tokens", "parents", "text", "count"),
    [
        ((9,), (-1,), (1, 2), 0),
        ((9, 1, 2), (-1, 0, 1), (1, 2, 3), 2),
        ((9, 1, 2), (-1, 0, 1), (1, 3), 1),
        ((9, 5, 1, 2), (-1, 0, 0, 2), (1, 2), 2),
        ((9, 1, 2), (-1, 0, 1), (), 0),
    ],
)
def test_kept_tokens_are_those_the_text_goes_on_with(
    tokens: tuple[int, ...], parents: tuple[int, ...], text: tuple[int, ...], count: int
) -> None:
    assert made.kept(tokens, parents, text) == count


def test_every_arm_is_known_at_every_start_and_the_one_that_ran_did_what_is_said(
    context: MethodContext,
) -> None:
    ran: list[tuple[int, int]] = []

    class Watched(made.Recorder):
        def ran(self, round: Any) -> None:
            super().ran(round)
            if round.tree is not None and self.tried:
                ran.append((len(round.emitted) - 1, round.drafted))

    before, made.Recorder = made.Recorder, Watched  # type: ignore[misc]
    try:
        logged = made.collect(context, texts(2), SMALL, LedeOptions())
    finally:
        made.Recorder = before  # type: ignore[misc]
    assert logged.x.shape == (len(logged.x), len(FEATURES))
    assert logged.did.shape == (len(logged.x), len(NAMES), 3)
    assert np.isfinite(logged.did).all()
    assert logged.did[:, NAMES.index("plain")].max() == 0.0
    assert set(logged.behaviour.tolist()) <= set(range(len(NAMES)))
    half = 0.5 / len(NAMES)
    favourite = logged.behaviour == NAMES.index(made.FAVOURITE)
    assert logged.chance == pytest.approx(np.where(favourite, 0.5 + half, half))
    told = logged.did[np.arange(len(logged.x)), logged.behaviour]
    real = np.array(ran[: len(told)])  # later rounds stand in the unknown end, or in document 2
    first = logged.document == 0
    assert told[first][:, 0].tolist() == real[first[: len(real)]][:, 0].tolist()
    assert told[first][:, 1].tolist() == real[first[: len(real)]][:, 1].tolist()


def test_collecting_changes_no_answer_and_is_the_same_each_time(context: MethodContext) -> None:
    one, two = (made.collect(context, texts(2), SMALL, LedeOptions()) for _ in range(2))
    assert np.array_equal(one.x, two.x)
    assert np.array_equal(one.did, two.did)
    assert one.domains == ("chat", "math")
    tiny.target().check()
    params = SamplingParams(max_new_tokens=8)
    assert tokens_of(plain(tiny.target(), prompt_of(0), params))
    assert tiny.target().info.num_layers == LAYERS


def test_no_document_is_in_both_parts() -> None:
    logged = invented(120)
    held = fitted._held_out(logged)
    assert not set(logged.document[held]) & set(logged.document[~held])
    assert held.any()


def invented(rows: int, seed: int = 0) -> Logged:
    """Where the first feature is high copies keep four tokens, elsewhere the module keeps two."""
    dice = np.random.default_rng(seed)
    x = dice.random((rows, len(FEATURES))).astype(np.float32)
    did = np.zeros((rows, len(NAMES), 3), np.float32)
    copies = x[:, 0] > 0.5
    copy, tree = NAMES.index("copy"), NAMES.index("tree-2")
    did[:, copy] = np.stack([4.0 * copies, np.full(rows, 4), np.zeros(rows)], 1)
    did[:, tree] = np.stack([2.0 * ~copies, np.full(rows, 4), np.full(rows, 2)], 1)
    document = np.arange(rows) // 10
    behaviour = np.zeros(rows, np.int64)
    chance = np.full(rows, 1.0, np.float32)
    return Logged(x, did, behaviour, chance, document, ("chat",) * (rows // 10), NAMES)


PRICES = ArmCosts((0.0, *(1.0 + 0.05 * n for n in range(64))), 0.1, 0.05)


def test_a_fitted_file_chooses_better_than_any_arm_on_documents_it_hasnt_seen() -> None:
    logged = invented(1800)
    file = fitted.fit(logged, PRICES, {"target": "t"}, epochs=300, hidden=16)
    found = fitted.scores(logged, file, PRICES)
    best = max(score for name, score in found.items() if name not in ("chosen", "clairvoyant"))
    assert found["chosen"] > 1.1 * best
    assert found["clairvoyant"] >= found["chosen"]
    assert file.rho == pytest.approx(found["chosen"], rel=0.1), "of the documents to stop by"
    assert file.facts["target"] == "t"


def test_what_is_learned_beyond_other_arms_is_folded_back() -> None:
    dice = np.random.default_rng(1)
    did = dice.random((1, len(NAMES), 3)).astype(np.float32)
    beyond = fitted._beyond(did, NAMES)
    assert not np.allclose(beyond, did)
    nothing = np.zeros((4, beyond.size), np.float32)
    ((weight, bias),) = fitted._whole(((nothing, beyond.reshape(-1)),), NAMES)
    assert bias.reshape(did.shape[1:]) == pytest.approx(did[0])
    assert not weight.any()
    ((weight, _),) = fitted._whole(((beyond.reshape(1, -1), beyond.reshape(-1)),), NAMES)
    assert weight.reshape(did.shape[1:]) == pytest.approx(did[0])


def test_what_isnt_known_of_an_arm_isnt_learned_from() -> None:
    logged = invented(600)
    at = NAMES.index("tree-2")
    logged.did[::2, at] = np.nan
    file = fitted.fit(logged, PRICES, {}, epochs=150, hidden=16)
    assert np.isfinite(fitted.scores(logged, file, PRICES)["tree-2"])
    kept = file.predict(logged.x)[:, at, 0].mean()
    assert kept == pytest.approx(np.nanmean(logged.did[:, at, 0]), abs=0.25)


def test_fitting_leaves_the_global_generator_as_it_was() -> None:
    import torch

    before = torch.get_rng_state()
    fitted.fit(invented(120), PRICES, {}, epochs=3, hidden=4)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_whole_writes_a_file_that_lede_takes(
    context: MethodContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made, "arm_costs", lambda context, bank: PRICES)
    monkeypatch.setattr(made, "prompts", lambda data, seed: texts(6))
    file, found = made.run(
        context, ["-"], tmp_path / "arms.npz", Options(6, 24, epochs=10, hidden=8), LedeOptions()
    )
    again = lede_arms.read(tmp_path / "arms.npz", "arms.npz")
    assert again.arms == NAMES
    assert again.facts["target"] == tiny.target().info.fingerprint
    assert again.facts["rounds"] == file.facts["rounds"]
    assert set(found) == {*NAMES, "chosen", "clairvoyant"}
    with np.load(tmp_path / "arms.npz.rounds.npz") as kept:
        assert kept["did"].shape[1:] == (len(NAMES), 3)
    assert lede_cases.CHEAP.of(1, 0) == 1.0


def test_too_little_is_refused_by_name(context: MethodContext) -> None:
    with pytest.raises(OptionError, match="nothing was logged"):
        made.collect(context, [("chat", list(range(2, 120)))], SMALL, LedeOptions())
    with pytest.raises(OptionError, match="six are needed"):
        fitted.fit(invented(10), PRICES, {})
    for options in ({"documents": 0}, {"minutes": 0}, {"tokens": 0}):
        with pytest.raises(OptionError, match=f"{next(iter(options))}: must be"):
            Options(**options)  # type: ignore[arg-type]

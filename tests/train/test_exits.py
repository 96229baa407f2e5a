"""Exit modules learn from the target's own text, and at work do what they did in training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.drafters.exit_session import ExitSession
from hasten.errors import OptionError
from hasten.exits import store
from hasten.targets.fused_weights import make_linear
from hasten.train import exits, run_exits
from hasten.train.exits import Feed, Teacher
from hasten.train.features import Features, Text, compute, run_batch
from hasten.train.rows import ROWS
from hasten.train.run_exits import Options, Plan
from tests.exits.exit_models import LAYERS, target

TEXTS, LENGTH = 48, 40


def answers(count: int = TEXTS) -> list[list[int]]:
    """The target's own greedy text after two random tokens: it repeats itself soon."""
    generator = torch.Generator().manual_seed(0)
    model, out = target(), []
    for _ in range(count):
        ids = torch.randint(2, model.info.vocab_size, (2,), generator=generator).tolist()
        sequence = model.open()
        passed = model.prefill(sequence, ids)
        while len(ids) < LENGTH:
            assert passed.logits is not None
            ids.append(int(passed.logits[-1].argmax()))
            passed = model.prefill(sequence, ids[-1:])
        model.close(sequence)
        out.append(ids)
    return out


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("data") / ROWS
    with path.open("w") as file:
        for at, ids in enumerate(answers()):
            row: dict[str, Any] = {"domain": "math" if at // 6 % 2 else "chat", "source": "toy"}
            row |= {"split": "test" if at % 6 == 0 else "modules", "temperature": 0.0}
            file.write(json.dumps({**row, "prompt": ids[:2], "output": ids[2:]}) + "\n")
    return path


def options(*plans: Plan, **changes: Any) -> Options:
    usual: dict[str, Any] = {"vocabulary": 40, "inner": 24, "rank": 8, "deep": (3, LAYERS)}
    usual |= {"minutes": 10.0, "epochs": 60.0, "lr": 5e-3, "batch_rows": 600, "calibration": 0}
    return Options(plans=plans, **{**usual, **changes})


def test_states_of_a_batch_are_those_of_a_prefill() -> None:
    model, texts = (
        target(),
        [ids[:length] for ids, length in zip(answers(3), (5, 31, 17), strict=True)],
    )
    found = run_batch(model, texts, (2, LAYERS))
    for row, ids in enumerate(texts):
        passed = model.prefill(model.open(), ids, taps=(2, LAYERS))
        for layer in (2, LAYERS):
            wanted = passed.hidden[layer]
            torch.testing.assert_close(found[layer][row, : len(ids)], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("plan", [Plan("affine", 3), Plan("adapter", 2), Plan("deep", 0)], ids=str)
def test_training_makes_a_module_right_more_often(plan: Plan, data: Path, tmp_path: Path) -> None:
    model = target()
    (made,) = run_exits.run(model, [data], tmp_path, options(plan))
    features = Features(tmp_path / "states")
    ids = store.read(tmp_path).ids
    teacher = Teacher.of(model, ids, torch.float32)
    test = exits.split_texts(features, "test")
    feed = Feed(features, model, made.config, teacher, test, 600)
    raw = exits.evaluate(run_exits.ExitNet(made.config), teacher, feed, 1, autocast=False)
    assert made.figures.match[0] > raw.match[0] + 0.03
    assert 0 < made.figures.alpha <= 1
    assert made.figures.match[0] <= made.figures.top[2] <= made.figures.top[8] <= 1
    assert set(made.domains) == {"math", "chat"}
    assert sum(each.rows for each in made.domains.values()) == made.figures.rows


@pytest.mark.parametrize("plan", [Plan("affine", 3), Plan("adapter", 2), Plan("deep", 2)], ids=str)
def test_a_written_module_says_at_work_what_it_said_in_training(
    plan: Plan, data: Path, tmp_path: Path
) -> None:
    model = target()
    run_exits.run(model, [data], tmp_path, options(plan, epochs=1.0))
    stored = store.read(tmp_path)
    bank = store.build(model, stored, make_linear)
    config = stored.configs[0]
    (ids,) = answers(1)
    layers = sorted({*bank.taps, config.layer, LAYERS} - {0})
    text = Text(tuple(ids[:2]), tuple(ids[2:]))
    features = compute(model, [text], layers, tmp_path / "one")
    teacher = Teacher.of(model, stored.ids, torch.float32)
    net = run_exits.ExitNet(config)
    net.load({name.partition(".")[2]: value for name, value in stored.tensors.items()})
    feed = Feed(features, model, config, teacher, [0], 600)
    (batch,) = feed.batches(None)
    with torch.no_grad():
        hidden = exits.outputs(net, batch, 1)[0]
        wanted = teacher.ids[teacher.logits(net.normed(hidden)).argmax(-1)].tolist()
        session = ExitSession(bank)
        run = session.runs[0]
        found = []
        for at, token in enumerate(ids[:-1]):
            states = {layer: features.states(layer, 0)[at : at + 1].float() for layer in layers}
            if at >= 1:
                out = run.first(token, states.get(config.layer))
                found.append(session.head.id_of(int(session.logits(run, out)[0].argmax())))
            run.feed([token], states)
    assert found == wanted


def test_training_goes_on_from_an_earlier_run(data: Path, tmp_path: Path) -> None:
    plan = Plan("deep", 0)
    (first,) = run_exits.run(target(), [data], tmp_path / "a", options(plan))
    again = options(Plan("deep", 2), plan, init=str(tmp_path / "a"), epochs=0.0)
    other, same = run_exits.run(target(), [data], tmp_path / "b", again)
    for name, value in first.tensors.items():
        # Kept in 8 bits: within half a step of the row's largest.
        close = value.abs().amax() / 127.0
        assert float((same.tensors[name] - value).abs().max()) <= float(close)
        assert torch.equal(other.tensors[name], same.tensors[name])
    with pytest.raises(OptionError, match="adapter"):
        run_exits.run(target(), [data], tmp_path / "c", replace(again, plans=(Plan("adapter", 2),)))


def test_a_module_that_starts_from_another_sees_the_layers_that_one_saw(
    data: Path, tmp_path: Path
) -> None:
    early = options(Plan("deep", 0), Plan("deep", 1), deep=(1, LAYERS), epochs=0.0)
    first = run_exits.run(target(), [data], tmp_path / "a", replace(early, seed=3))
    start = options(Plan("deep", 2), init=str(tmp_path / "a"), epochs=0.0, deep=())
    (later,) = run_exits.run(target(), [data], tmp_path / "b", start)
    assert later.config.deep == (1, LAYERS)
    for name, value in first[1].tensors.items():  # the nearest below, up to its 8 bits
        assert float((later.tensors[name] - value).abs().max()) <= float(value.abs().max()) / 127
    with pytest.raises(OptionError, match="sees layers"):
        run_exits.run(target(), [data], tmp_path / "c", replace(start, deep=(2, LAYERS)))


def test_states_are_computed_once_for_the_same_texts(data: Path, tmp_path: Path) -> None:
    stages: list[dict[str, Any]] = []
    for _ in range(2):
        stages.clear()
        run_exits.run(target(), [data], tmp_path, options(Plan("lens", 3)), log=stages.append)
    assert not [row for row in stages if row.get("stage") == "states"]


def test_a_module_beyond_the_model_is_refused_before_any_text_is_read(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="layers"):
        run_exits.run(target(), ["nowhere"], tmp_path, options(Plan("deep", LAYERS)))


@pytest.mark.parametrize("text", ["deep", "2=bilinear", "2=deep,2=affine", "x=deep"])
def test_a_plan_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="exits"):
        run_exits.parse_plans(text)


def test_rows_outside_the_draft_vocabulary_count_as_misses(data: Path, tmp_path: Path) -> None:
    few = options(Plan("affine", 3), vocabulary=3, epochs=1.0)
    (made,) = run_exits.run(target(), [data], tmp_path, few)
    assert made.figures.covered < 0.9
    assert made.figures.match[0] <= made.figures.covered

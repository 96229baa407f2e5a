"""A drafter learns, is written, stops and goes on, and is measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hasten.dflash import store
from hasten.errors import CapabilityError, ModelError, OptionError
from hasten.train import run_exits
from hasten.train.dflash import feed
from hasten.train.dflash import run as training
from hasten.train.dflash.loop import CHECKPOINT, CURVE
from hasten.train.dflash.options import SFT, Head, Rounds, Shape
from tests.train.dflash.cases import (
    BLOCK,
    MASK,
    everything,
    llm,
    options,
    ruled,
    target,
    train,
    weights,
    write_rows,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl")


def round_of(folder: Path, number: int) -> list[dict[str, Any]]:
    """The texts of a round."""
    lines = (folder / "rounds" / f"round_{number:03d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("init", "share"), [("target", 0.4), ("random", 0.75)])
def test_the_loss_falls_and_drafts_of_unseen_texts_get_longer(
    init: str, share: float, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", ruled())
    made = train(rows, tmp_path, options(sft=SFT(60, 10.0, 8, 8, lr=5e-3), init=init))
    curve = json.loads((tmp_path / CURVE).read_text())
    assert [point["step"] for point in curve] == list(range(10, 61, 10))
    assert curve[-1]["loss"] < share * curve[0]["loss"]
    raw = train(rows, tmp_path / "raw", options(sft=SFT(1, 10.0, lr=1e-9, lr_end=0.0), init=init))
    tau = [each["sft"]["held_out"]["all"]["tau"] for each in (raw, made)]
    assert tau[1] > tau[0] + 0.2


def test_the_fitted_length_head_is_nearer_and_verifies_fewer_rows(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", ruled())
    sft = SFT(40, 10.0, 8, 8, lr=5e-3)
    made = train(rows, tmp_path, options(sft=sft, head=Head(6000, lr=1e-2)))
    before, after = (made[stage]["held_out"]["all"] for stage in ("sft", "length"))
    assert before["slots"] == after["slots"]
    assert after["length_error"] < 0.8 * before["length_error"]
    assert after["walks"]["ratio 1.0"]["rows"] < after["walks"]["fixed"]["rows"]


def test_states_from_disk_and_from_fresh_passes_teach_the_same(data: Path, tmp_path: Path) -> None:
    chosen = options(sft=SFT(4, lr=5e-3))
    train(data, tmp_path / "file", chosen)
    train(data, tmp_path / "fly", replace(chosen, states="fly"))
    assert not (tmp_path / "fly" / "states").exists()
    found = weights(tmp_path / "fly")
    for name, value in weights(tmp_path / "file").items():
        torch.testing.assert_close(found[name], value, rtol=0.02, atol=2e-3)


def test_states_of_all_texts_serve_a_smaller_share_of_them(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, half = tmp_path / "work", options(sft=SFT(4, lr=5e-3), share=0.5)
    train(data, tmp_path / "all", options(sft=SFT(4, lr=5e-3)), work=work)
    computed: list[tuple[str, int]] = []

    def counted(target: Any, texts: Any, layers: Any, folder: Path, log: Any) -> Any:
        computed.append((folder.name, len(texts)))
        return run_exits.states(target, texts, layers, folder, log)

    monkeypatch.setattr(feed, "compute_states", counted)
    train(data, tmp_path / "half", half, work=work)
    assert computed == []
    train(data, tmp_path / "anew", half)
    assert "sft" in dict(computed)
    found = weights(tmp_path / "anew")
    for name, value in weights(tmp_path / "half").items():
        assert torch.equal(found[name], value)
    train(data, tmp_path / "whole", options(sft=SFT(4, lr=5e-3)), work=tmp_path / "anew" / "states")
    assert computed[-1][1] > dict(computed[:-1])["sft"]  # more than is there: computed


@pytest.mark.parametrize("name", ["meta.json", "texts.npz", "layer_003.bf16"])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_damaged_states_are_computed_again(
    data: Path, tmp_path: Path, name: str, damage: str
) -> None:
    work = tmp_path / "work"
    train(data, tmp_path / "out", options(sft=SFT(2)), work=work)
    path = work / "sft" / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 3]) if damage == "cut" else path.unlink()
    train(data, tmp_path / "again", options(sft=SFT(2)), work=work)
    assert path.stat().st_size == len(whole)
    found = weights(tmp_path / "again")
    for key, value in weights(tmp_path / "out").items():
        assert torch.equal(found[key], value)


def test_states_of_another_dtype_or_of_other_layers_are_not_reused(
    data: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    train(data, tmp_path / "out", options(sft=SFT(2)), work=work)
    meta = work / "sft" / "meta.json"
    made = json.loads(meta.read_text())
    stale = work / "sft" / "layer_044.bf16"
    stale.write_bytes(b"old")
    meta.write_text(json.dumps({**made, "dtype": "torch.float16"}))
    (work / "sft" / "digest").write_text("of others")
    train(data, tmp_path / "again", options(sft=SFT(2)), work=work)
    assert json.loads(meta.read_text()) == made
    assert not stale.exists()


def test_room_on_a_disk_counts_what_is_written_there_and_of_the_layers_wanted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "layer_001.bf16"
    with path.open("wb") as file:
        file.truncate(1 << 24)
    assert feed._blocks(path) < 1 << 20
    path.write_bytes(b"\1" * (1 << 20))
    assert feed._blocks(path) >= 1 << 20
    assert feed._blocks(tmp_path / "layer_002.bf16") == 0


def test_what_is_written_loads_for_this_target_and_no_other(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path, everything())
    loaded = store.load(tmp_path, target().info)
    assert loaded.config.block_size == BLOCK
    assert loaded.config.mask_token_id == MASK
    assert loaded.config.target_layer_ids == (1, 2, 4)
    assert loaded.config.length_head == 8
    assert loaded.draft_ids is not None
    assert len(loaded.draft_ids) == loaded.config.draft_vocab_size
    assert loaded.about["output_tokens"] > 0
    with pytest.raises(ModelError, match="other weights"):
        store.load(tmp_path, replace(target().info, fingerprint="else"))


def test_rounds_and_their_control_take_the_same_steps_on_the_same_text(
    data: Path, tmp_path: Path
) -> None:
    train(data, tmp_path / "base", options(sft=SFT(30, lr=5e-3)))
    taught = {}
    for objective in ("rkl", "sft"):
        rounds = Rounds(2, 10.0, 8, 2, writer="rows", objective=objective, clip=0.0)
        chosen = options(sft=SFT(0), rounds=rounds, init=str(tmp_path / "base"))
        out = tmp_path / objective
        taught[objective] = train(data, out, chosen)["rounds"]
        taught[objective]["texts"] = [round_of(out, at) for at in range(2)]
    assert taught["rkl"]["step"] == taught["sft"]["step"] > 0
    assert taught["rkl"]["texts"] == taught["sft"]["texts"]
    rkl, sft = weights(tmp_path / "rkl"), weights(tmp_path / "sft")
    assert not torch.equal(rkl["fc.weight"], sft["fc.weight"])


def test_a_batch_of_answers_is_the_targets_own_greedy_text(data: Path, tmp_path: Path) -> None:
    for writer in ("rows", "batched"):
        rounds = Rounds(1, 10.0, 6, 1, max_new_tokens=37, writer=writer)
        chosen = options(sft=SFT(2), rounds=rounds)
        train(data, tmp_path / writer, chosen)
    written = [round_of(tmp_path / writer, 0) for writer in ("rows", "batched")]
    for own, made in zip(*written, strict=True):
        assert own["prompt"] == made["prompt"]
        assert made["output"][: len(own["output"])] == own["output"]


def test_the_cap_of_a_round_is_in_the_curve(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path, everything(rounds=Rounds(2, 10.0, 24, 2, writer="rows", clip=0.01)))
    curve = json.loads((tmp_path / CURVE).read_text())
    caps = [point["cap_nats"] for point in curve if point["stage"] == "rounds"]
    assert caps
    assert all(0.01 < cap < 10 for cap in caps)  # 0.01 times the summed weights of a batch


def test_measuring_a_folder_says_what_training_said(data: Path, tmp_path: Path) -> None:
    made = train(data, tmp_path, everything())
    found = training.measure(llm(), [data], tmp_path, options())
    said = made["rounds"]["held_out"]
    assert set(found) == {"all", "chat", "math"} == set(said)
    for name, figures in found.items():
        # The file holds bfloat16.
        assert figures.tau == pytest.approx(said[name]["tau"], abs=0.15)
        assert figures.texts == said[name]["texts"]
    assert found["all"].walks["ratio 1.0"].rounds >= found["all"].walks["fixed"].rounds


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"shape": Shape(1, BLOCK, (1, 5), mask_token=MASK)}, "taps"),
        ({"shape": Shape(1, BLOCK, (1, 1), mask_token=MASK)}, "taps"),
        ({"shape": Shape(1, BLOCK, (1, 2))}, "mask_token"),
        ({"shape": Shape(1, BLOCK, (1, 2), mask_token=1000)}, "mask_token"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_before_anything_runs(
    changes: dict[str, Any], name: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=f"^{name}:"):
        train(data, tmp_path / "out", options(**changes))
    assert not (tmp_path / "out").exists()


def test_data_without_a_held_out_text_is_refused(tmp_path: Path) -> None:
    lines = write_rows(tmp_path / "all.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    kept = [json.dumps(row) + "\n" for row in rows if row["split"] != "test"]
    (tmp_path / "rows.jsonl").write_text("".join(kept))
    with pytest.raises(OptionError, match="'test'"):
        train(tmp_path / "rows.jsonl", tmp_path / "out", options())


def test_a_stages_points_of_the_curve_are_of_its_own_steps(data: Path, tmp_path: Path) -> None:
    """The steps left over since a stage's last point aren't counted in the next one's first."""
    head = Head(blocks=300, lr=1e-9)
    train(data, tmp_path / "both", everything(sft=SFT(13, 10.0, 4, 6, lr=5e-3), head=head))
    curve = json.loads((tmp_path / "both" / CURVE).read_text())
    first = next(point for point in curve if point["stage"] == "length")
    assert first["loss"] == pytest.approx(first["length_loss"], abs=2e-6)


def test_a_run_that_would_do_nothing_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"^steps: .*nothing to do"):
        train(data, tmp_path / "out", options(sft=SFT(0)))
    assert not (tmp_path / "out").exists()


def test_a_round_whose_answers_are_too_short_to_learn_from_is_passed_over(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "round_texts", lambda *args: [])
    made = train(data, tmp_path, options(sft=SFT(2), rounds=Rounds(2, 10.0, 4, writer="rows")))
    assert (made["rounds"]["step"], made["rounds"]["rounds"]) == (0, 2)


def test_a_place_that_cannot_be_written_to_is_named_before_anything_runs(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(feed, "compute_states", lambda *args: pytest.fail("it ran"))
    with pytest.raises(OptionError, match=r"^out: can't write to .*file"):
        train(data, tmp_path / "file", options(sft=SFT(2)))
    with pytest.raises(OptionError, match=r"^out: can't write to .*below"):
        train(data, tmp_path / "file" / "below", options(sft=SFT(2)))


def test_a_disk_that_is_full_is_named(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = options(sft=SFT(2))
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"^work: can't write to .*file"):
        train(data, tmp_path / "out", chosen, work=tmp_path / "file" / "states")

    def full(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=1000)

    with monkeypatch.context() as little:
        little.setattr(feed.shutil, "disk_usage", full)
        with pytest.raises(OptionError, match=r"^work: .* of the target's states .*states=fly"):
            train(data, tmp_path / "out", chosen)
        train(data, tmp_path / "fly", replace(chosen, states="fly"))
    train(data, tmp_path / "out", chosen)
    (tmp_path / "out" / CHECKPOINT).unlink()
    monkeypatch.setattr(feed.shutil, "disk_usage", full)
    train(data, tmp_path / "out", chosen)  # its states are there
    (tmp_path / "out" / CHECKPOINT).unlink()

    def fails(*args: Any) -> None:
        raise RuntimeError("file write failed")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OptionError, match=r"^out: can't write to .*file write failed"):
        train(data, tmp_path / "out", chosen)


def test_a_head_added_to_a_drafter_learns_what_was_asked_for(data: Path, tmp_path: Path) -> None:
    bare = Shape(1, BLOCK, (1, 2, 4), vocabulary=60, mask_token=MASK, head=0)
    train(data, tmp_path / "bare", options(shape=bare, sft=SFT(1)))
    head = Head(blocks=100, lookahead=2)
    chosen = options(sft=SFT(0), head=head, init=str(tmp_path / "bare"))
    train(data, tmp_path / "out", chosen)
    config = store.load(tmp_path / "out", target().info).config
    assert (config.length_head, config.lookahead) == (8, 2)


def test_a_drafter_that_taps_the_embeddings_is_refused_for_training(
    data: Path, tmp_path: Path
) -> None:
    train(data, tmp_path / "base", options(sft=SFT(1)))
    described = json.loads((tmp_path / "base" / "config.json").read_text())
    described["dflash_config"]["target_layer_ids"] = [-1, 2, 4]
    (tmp_path / "base" / "config.json").write_text(json.dumps(described))
    store.load(tmp_path / "base", target().info)  # it can draft
    for states in ("file", "fly"):
        chosen = options(sft=SFT(1), init=str(tmp_path / "base"), states=states)
        with pytest.raises(CapabilityError, match="taps the model's embeddings"):
            train(data, tmp_path / "out", chosen)
    with pytest.raises(CapabilityError, match="taps the model's embeddings"):
        training.measure(llm(), [data], tmp_path / "base", options())


def test_bfloat16_products_learn_too(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", ruled())
    train(rows, tmp_path, everything(autocast=True, sft=SFT(60, 10.0, 8, 8, lr=5e-3)))
    curve = json.loads((tmp_path / CURVE).read_text())
    points = [point["loss"] for point in curve if point["stage"] == "sft"]
    assert points[-1] < 0.5 * points[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_every_stage_runs_and_goes_on(tmp_path: Path) -> None:
    from hasten.targets.fused import FusedTarget
    from tests.targets.fused_models import llama, random_model

    rows = write_rows(tmp_path / "rows.jsonl", ruled())
    model = random_model(llama(num_hidden_layers=6))
    made = FusedTarget.from_tensors(
        model.config,
        model.state_dict(),
        name="tiny",
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        eos_ids=(),
        fingerprint="tiny",
    )
    rounds = Rounds(1, 10.0, 4, 1, max_new_tokens=8, writer="batched")
    chosen = everything(autocast=True, rounds=rounds)
    first, again = (training.run(llm(made), [rows], tmp_path / "out", chosen) for _ in range(2))
    assert set(first) == {"sft", "length", "rounds"}
    assert again == first
    curve = json.loads((tmp_path / "out" / CURVE).read_text())
    assert curve[-1]["loss"] < 10

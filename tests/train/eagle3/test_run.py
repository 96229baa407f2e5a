"""A drafter learns, is written, stops and goes on, and is measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.eagle3 import store
from hasten.errors import ModelError, OptionError
from hasten.methods import configure
from hasten.train.dflash.loop import CHECKPOINT, CURVE
from hasten.train.dflash.run import REPORT
from hasten.train.dflash.texts import Text
from hasten.train.eagle3 import run as training
from hasten.train.eagle3.evaluate import evaluate
from hasten.train.eagle3.options import SFT, Shape
from tests.eagle3.eagle3_models import config, net, uncached
from tests.train.dflash.cases import (
    LENGTH,
    PROMPT,
    answers,
    llm,
    target,
    texts,
    write_rows,
)
from tests.train.eagle3.cases import IDS, feed, objective, options, pupil, train, weights


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl")


SHORT = SFT(steps=20, texts=4, lr=5e-3, minutes=10.0)


@pytest.mark.parametrize("init", ["target", "random"])
def test_the_loss_falls_and_chains_on_the_text_it_learned_get_longer(
    init: str, data: Path, tmp_path: Path
) -> None:
    """The target is a random model: its texts have nothing in common that could be learned for
    others."""
    made = options(sft=SFT(100, 10.0, 8, lr=1e-2), init=init)
    train(data, tmp_path / "made", made)
    curve = json.loads((tmp_path / "made" / CURVE).read_text())
    assert [point["step"] for point in curve] == list(range(10, 101, 10))
    assert curve[-1]["loss"] < 0.9 * curve[0]["loss"]
    for step in (1, 2, 3):
        assert curve[-1][f"right_{step}"] > curve[0][f"right_{step}"] + 0.15
    train(data, tmp_path / "raw", options(sft=SFT(0), init=init))
    tau = [
        training.measure(llm(), [data], tmp_path / name, made, split="modules")["all"].tau
        for name in ("raw", "made")
    ]
    assert tau[1] > tau[0] + 0.15


def test_the_report_holds_options_and_figures_by_domain(data: Path, tmp_path: Path) -> None:
    made = train(data, tmp_path, options(sft=SHORT))
    said = json.loads((tmp_path / REPORT).read_text())
    assert said["options"]["sft"]["unroll"] == 3
    assert said["stages"] == json.loads(json.dumps(made))
    held_out = made["sft"]["held_out"]
    assert set(held_out) == {"all", "chat", "math"}
    whole = held_out["all"]
    assert len(whole["slots"]) == len(whole["reached"]) == 3
    assert whole["slots"][0] == whole["reached"][0]
    assert 1.0 <= whole["tau"] <= 4.0
    assert whole["texts"] == held_out["chat"]["texts"] + held_out["math"]["texts"] == 5


def test_figures_are_those_of_one_chain_after_another() -> None:
    made, length, table = pupil(), 3, target().torch_decoder.embeddings.__getitem__
    found = evaluate(objective(made), feed(4, 2, last=False), length)["all"]
    hits, there, tokens, rounds, anchors = [0] * length, [0] * length, 0, 0, 0
    for number in range(4):
        given = feed(4, 1, last=False).load([number])
        start, end = int(given.starts[0]), int(given.lengths[0])
        kept: dict[int, int] = {}
        for at in range(start, end - 1):
            anchors += 1
            right = []
            for step in range(min(length, end - 1 - at)):
                own, drafted = table(given.ids[0, 1 : at + 1]), given.ids[0, at + 1 :][:step]
                with torch.no_grad():
                    said = uncached(made, own, given.features[0, :at], table(drafted))
                place = int(said.argmax())
                right.append(IDS[place] == int(given.ids[0, at + 1 + step]))
                hits[step] += right[-1]
                there[step] += 1
            kept[at] = [*right, False].index(False)
        at = start
        while at < end - 1:
            rounds += 1
            gone = min(kept[at] + 1, end - 1 - at)
            tokens, at = tokens + gone, at + gone
    assert found.anchors == anchors
    assert found.slots == pytest.approx([h / n for h, n in zip(hits, there, strict=True)])
    assert sum(hits) > 0
    assert (found.walks["fixed"].tokens, found.walks["fixed"].rounds) == (tokens, rounds)
    known = sum(t in IDS for text in texts(4) for t in text.output[1:])
    assert found.covered == pytest.approx(known / anchors)
    assert found.covered < 1


def test_the_walk_over_held_out_text_is_what_serving_emits_a_pass(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    train(rows, tmp_path / "out", options(sft=SFT(100, 10.0, 8, lr=1e-2)))
    pupil_, model = training._Pupil.of_folder(target(), str(tmp_path / "out")), llm()
    served = [Text(ids[:PROMPT], ids[PROMPT:]) for ids in answers()[2:8]]
    feed_ = training._feed(
        target(), pupil_, training.open_states(target(), served, (), None, lambda row: None),
        served, options(),
    )  # fmt: skip
    walk = evaluate(pupil_.objective(options()), feed_, 3)["all"].walks["fixed"]
    rounds = tokens = 0
    for text in served:
        result = model.generate(
            list(text.prompt),
            method=configure("eagle3", model=str(tmp_path / "out"), length=3),
            max_new_tokens=LENGTH - PROMPT,
            trace=True,
        )
        assert result.tokens == text.output
        rounds += sum(each.tree is not None for each in result.rounds)
        tokens += len(result.tokens) - 1
    assert walk.tokens == tokens
    assert walk.tau > 1.2  # the toy's training text: it has something to accept
    # States are kept in bfloat16 there: a draft may differ now and then.
    assert walk.rounds == pytest.approx(rounds, abs=0.06 * rounds)


def test_states_from_disk_and_from_fresh_passes_teach_the_same(data: Path, tmp_path: Path) -> None:
    chosen = options(sft=SFT(4, lr=5e-3))
    train(data, tmp_path / "file", chosen)
    train(data, tmp_path / "fly", replace(chosen, states="fly"))
    assert not (tmp_path / "fly" / "states").exists()
    found = weights(tmp_path / "fly")
    for name, value in weights(tmp_path / "file").items():
        torch.testing.assert_close(found[name], value, rtol=0.02, atol=2e-3)


def test_what_is_written_loads_for_this_target_and_no_other(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path, options(sft=SHORT))
    loaded = store.load(tmp_path, target().info)
    assert loaded.config.taps == (2, 3, 5)
    assert loaded.config.norm_before_residual
    assert loaded.draft_ids is not None
    assert len(loaded.draft_ids) == loaded.config.draft_vocab_size
    assert loaded.embeddings is None
    assert loaded.about["output_tokens"] > 0
    assert loaded.about["held_out"]["all"] >= 1.0
    data_ = json.loads((tmp_path / "config.json").read_text())
    assert data_["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert data_["speculators_config"]["verifier"]["architectures"] == [target().info.architecture]
    with pytest.raises(ModelError, match="other weights"):
        store.load(tmp_path, replace(target().info, fingerprint="else"))


def test_a_run_goes_on_from_a_folder_with_its_sizes_and_embeddings(
    data: Path, tmp_path: Path
) -> None:
    made = config(draft_vocab_size=40, head_norms=True, taps=(1, 4))
    table = torch.randn(target().info.vocab_size, 32, generator=torch.Generator().manual_seed(1))
    about = {"target": target().info.fingerprint}
    ids = torch.arange(10, 50)
    store.save(tmp_path / "base", made, net(made), ids, about, embeddings=table)
    train(data, tmp_path / "out", options(sft=SFT(3), init=str(tmp_path / "base")))
    got = store.load(tmp_path / "out", target().info)
    assert got.config == made
    assert got.draft_ids is not None
    assert torch.equal(got.draft_ids, ids)
    assert got.embeddings is not None
    torch.testing.assert_close(got.embeddings, table, rtol=0.01, atol=0.01)
    assert not torch.equal(
        got.net.fc.weight, store.load(tmp_path / "base", target().info).net.fc.weight
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"taps": (0, 3)},
        {"layer_types": ("sliding_attention",), "sliding_window": 4},
    ],
)
def test_a_folder_that_cannot_be_trained_is_refused(
    changes: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    made = config(**changes)
    store.save(tmp_path / "base", made, net(made), None, {"target": target().info.fingerprint})
    with pytest.raises(OptionError, match="can't be trained"):
        train(data, tmp_path / "out", options(init=str(tmp_path / "base")))


class Stop(Exception):
    """A run is killed."""


def test_a_run_that_was_killed_ends_with_the_weights_of_one_that_was_not(
    data: Path, tmp_path: Path
) -> None:
    chosen = options(sft=SHORT)
    whole = train(data, tmp_path / "whole", chosen)

    def kill(row: dict[str, Any]) -> None:
        if row.get("step") == 10:
            raise Stop

    with pytest.raises(Stop):
        train(data, tmp_path / "killed", chosen, log=kill, every_s=0.0)
    assert (tmp_path / "killed" / CHECKPOINT).is_file()
    again = train(data, tmp_path / "killed", chosen)
    wanted, found = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    for made in (whole, again):
        del made["sft"]["minutes"]
    assert again == whole


def test_a_finished_run_is_not_run_again_and_another_does_not_go_on(
    data: Path, tmp_path: Path
) -> None:
    chosen = options(sft=SFT(2))
    first = train(data, tmp_path, chosen)
    rows: list[dict[str, Any]] = []
    assert train(data, tmp_path, chosen, log=rows.append) == first
    assert rows == []
    longer = train(data, tmp_path, replace(chosen, length=2), log=rows.append)
    assert len(longer["sft"]["held_out"]["all"]["slots"]) == 2
    assert not any("loss" in row for row in rows)
    with pytest.raises(OptionError, match="other options"):
        train(data, tmp_path, options(sft=SFT(2), seed=1))


def test_measuring_a_folder_says_what_training_said(data: Path, tmp_path: Path) -> None:
    made = train(data, tmp_path, options(sft=SHORT))
    found = training.measure(llm(), [data], tmp_path, options())
    said = made["sft"]["held_out"]
    assert set(found) == set(said)
    for name, figures in found.items():
        assert figures.tau == pytest.approx(said[name]["tau"], abs=0.15)  # bfloat16 in the file
    with pytest.raises(OptionError, match="split"):
        training.measure(llm(), [_only(data, tmp_path, "policy")], tmp_path, options(),
                         split="policy")  # fmt: skip


def _only(data: Path, folder: Path, without: str) -> Path:
    """The rows without those of a split."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    out = folder / "some.jsonl"
    out.write_text("".join(json.dumps(row) + "\n" for row in rows if row["split"] != without))
    return out


@pytest.mark.parametrize("taps", [(1, 5), (-1, 2), (1, 9)])
def test_taps_that_do_not_fit_are_refused_before_anything_runs(
    taps: tuple[int, ...], data: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=r"^taps:"):
        train(data, tmp_path / "out", options(shape=Shape(taps)))
    assert not (tmp_path / "out").exists()


def test_bfloat16_products_learn_too(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    train(rows, tmp_path, options(autocast=True, sft=SFT(60, 10.0, 8, lr=5e-3)))
    curve = json.loads((tmp_path / CURVE).read_text())
    assert curve[-1]["loss"] < 0.9 * curve[0]["loss"]

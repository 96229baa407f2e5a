"""Experience is collected once, from the right texts, and gone on with."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hasten.errors import CapabilityError, ModelError, OptionError
from hasten.policies.lede_features import FeatureFacts, Prior
from hasten.train.lede import logs, tables, texts
from hasten.train.lede.candidates import find
from hasten.train.lede.collect import CollectOptions, collect
from hasten.train.lede.logs import SHARD, Experience, Tables
from hasten.train.lede.texts import TextOptions
from hasten.train.lede.transitions import from_rollouts
from hasten.train.lede.world import build
from hasten.train.rows import Row, split_of
from tests.exits import exit_models as tiny
from tests.exits.exit_requests import prompt_of
from tests.policies.exit_cases import costs
from tests.train import cases as text_cases
from tests.train.lede import cases

LLM: Any = SimpleNamespace(target=tiny.target())
TEXTS = TextOptions(docs=4, domains=("math", "chat"), sources=())
AT = (0, 2, 4)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of all splits, greedy and drawn."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = []
    for at in range(36):
        prompt = prompt_of(at, 6 + at % 5)
        row = Row(
            ("math", "chat")[at % 2],
            "toy",
            ("modules", "policy", "test")[at % 3],
            0.8 if at % 9 == 8 else 0.0,
            prompt,
            cases.answer(tiny.target(), prompt, 14),
        )
        lines.append(json.dumps(asdict(row)) + "\n")
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.save_modules(tmp_path_factory.mktemp("exits") / "modules")


def options(modules: Path, **changes: Any) -> CollectOptions:
    usual: dict[str, Any] = {"modules": str(modules), "texts": TEXTS, "depths": 4}
    return CollectOptions(**{**usual, "rollouts": 6, "rollout_tokens": 14, **changes})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, data: Path, modules: Path) -> Experience:
    return collect(LLM, [data], tmp_path_factory.mktemp("made") / "e", options(modules))


def test_what_modules_learned_from_and_what_was_drawn_is_left_out(
    made: Experience, data: Path
) -> None:
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    allowed = {
        tuple(row["prompt"]) for row in rows if row["split"] != "modules" and not row["temperature"]
    }
    assert {doc.prompt for doc in made.docs} <= allowed
    assert all(doc.greedy for doc in made.docs)
    by_split = {s: {d.prompt for d in made.docs if d.split == s} for s in texts.SPLITS}
    assert all(by_split.values())
    assert not by_split["policy"] & by_split["test"]
    assert not by_split["policy"] & by_split["select"]
    assert {doc.domain for doc in made.docs} == {"math", "chat"}


def test_a_prompt_is_in_one_split_whoever_answers_it() -> None:
    prompts = [prompt_of(at) for at in range(400)]
    found: dict[str, int] = {}
    for prompt in prompts:
        row = Row("chat", "toy", split_of(prompt), 0.0, prompt, [1, 2])
        split = texts.split_for(row)
        assert split == texts.split_for(replace(row, output=[5], temperature=0.5))
        found[split] = found.get(split, 0) + 1
    assert found["modules"] > 250
    assert min(found["policy"], found["test"]) > 15
    assert 0 < found["select"] < found["policy"]


def test_the_folder_holds_all_that_is_documented(made: Experience) -> None:
    names = {path.name for path in made.folder.iterdir() if path.is_file()}
    shards = {f"tf-{n:05d}.npz" for n in range(-(-len(made.docs) // SHARD))}
    assert names >= {"meta.json", "docs.jsonl", "rounds.jsonl"} | shards
    meta = made.meta
    assert (meta.layers, meta.depths) == (AT, (4, 2, 4))
    assert meta.kinds == ("deep", "adapter", "deep")
    assert meta.fingerprint == "tiny"
    for table in made.tables():
        rows = len(table.said)
        for depth, exit in zip(meta.depths, table.exits, strict=True):
            assert set(exit) == set(Tables.NAMES)
            assert exit["p1"].shape == (depth, rows)
            assert exit["top_ids"].shape == (rows, 8)
            assert (exit["p1"] >= exit["p2"]).all()
            assert ((exit["alpha"] >= 0) & (exit["alpha"] <= 1 + 1e-5)).all()
            assert (exit["top_ids"][:, 0] == exit["best"][0]).all()


def test_the_target_says_its_own_text(made: Experience) -> None:
    for table, part in zip(made.tables(), made.parts(), strict=True):
        follows = [token for doc in part for token in doc.output[1:]]
        assert table.said.tolist() == follows


def test_running_it_again_makes_nothing(made: Experience, data: Path, modules: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in made.folder.iterdir()}
    collect(LLM, [data], made.folder, options(modules))
    assert {path.name: path.stat().st_mtime_ns for path in made.folder.iterdir()} == before


def test_a_killed_run_is_gone_on_with(
    made: Experience, data: Path, modules: Path, tmp_path: Path
) -> None:
    out = tmp_path / "e"
    first = options(modules, minutes=1e-9)
    part = collect(LLM, [data], out, first)
    assert not list(part.tables())
    whole = collect(LLM, [data], out, options(modules))
    path = whole.folder / logs.ROUNDS
    path.write_bytes(path.read_bytes()[:-20])
    whole.shard(0).unlink()
    again = collect(LLM, [data], out, options(modules))
    assert [r.behaviour for r in again.rollouts()] == [r.behaviour for r in made.rollouts()]
    for a, b in zip(again.tables(), made.tables(), strict=True):
        np.testing.assert_array_equal(a.exits[0]["best"], b.exits[0]["best"])


def test_a_folder_of_something_else_is_left_alone(
    made: Experience, data: Path, modules: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match="another model, exits"):
        collect(LLM, [data], made.folder, options(modules, depths=2))
    with pytest.raises(OptionError, match="another model, exits"):
        collect(LLM, [data], made.folder, options(modules, exits=(0, 2)))
    with pytest.raises(OptionError, match="hasten train lede collect"):
        Experience(tmp_path)


def test_data_without_policy_texts_says_what_to_do(modules: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="hasten train data"):
        collect(LLM, [], tmp_path / "e", options(modules))


def test_a_model_that_cant_exit_early_is_refused(tmp_path: Path) -> None:
    other: Any = SimpleNamespace(info=SimpleNamespace(name="plain", engine="transformers"))
    with pytest.raises(CapabilityError, match="fused family"):
        find(other, ())
    with pytest.raises(ModelError, match="nowhere"):
        find(tiny.target(), (), tmp_path / "nowhere")
    with pytest.raises(OptionError, match="exits"):
        find(tiny.target(), (), own=True)


def test_damaged_tables_are_named(made: Experience) -> None:
    path = made.shard(0)
    kept = path.read_bytes()
    try:
        path.write_bytes(kept[: len(kept) // 2])
        with pytest.raises(OptionError, match=path.name):
            list(made.tables())
    finally:
        path.write_bytes(kept)


def test_deeper_rows_than_were_logged_count_as_the_last_depth(made: Experience) -> None:
    world = build(made)
    assert world.stack.shape[1] == 4
    assert (world.stack[1, 1] == world.stack[1, 3]).all(), "an adapter is the same at all depths"
    assert not (world.stack[0, 1] == world.stack[0, 3]).all()


def test_exits_with_the_models_own_head_need_no_modules() -> None:
    exits = find(tiny.target(), (2, 4), own=True)
    docs = cases.documents(tiny.target(), exits, count=2, length=8)
    made = tables.compute(exits, docs, tables.depths_of(exits, 12))
    assert [exit["p1"].shape for exit in made.exits] == [(2, 14), (2, 14)]
    assert exits.digest == "own-2+own-4"


# -- rollouts --------------------------------------------------------------------------------------


def test_rollouts_are_the_targets_own_answers_by_several_behaviours(made: Experience) -> None:
    found = list(made.rollouts())
    assert len(found) == 6
    assert len({rollout.behaviour["kind"] for rollout in found}) > 1
    by_id = {doc.id: doc for doc in made.docs}
    for rollout in found:
        doc = by_id[rollout.doc]
        assert doc.split == "policy"
        context = len(doc.prompt) + 1
        for one in rollout.rounds:
            assert one.context == context
            assert one.emitted == one.accepted + 1
            context += one.emitted
        assert len(doc.prompt) + 12 <= context <= len(doc.prompt) + 14


def test_rollouts_log_how_likely_each_decision_was(made: Experience) -> None:
    steps = [s for rollout in made.rollouts() for one in rollout.rounds for s in one.steps]
    assert {s.action for s in steps} == {0, 1}
    chances = {round(s.chance, 6) for s in steps}
    assert chances <= {0.1, 0.5, 0.9}
    assert all((s.drew >= 0) == (s.action == 1) for s in steps)
    assert all(s.token >= 0 for s in steps)


def test_rows_after_a_wrong_draft_come_from_the_rollouts(made: Experience) -> None:
    world = build(made)
    strayed = sum(
        step.phase == 1 and step.drafted > one.accepted
        for rollout in made.rollouts()
        for one in rollout.rounds
        for step in one.steps
    )
    assert strayed > 0
    assert len(world.off.token) == strayed
    drawn = world.off.draw(
        np.random.default_rng(0), np.array([0, 1, 2]), np.array([1, 2, 9]), np.full(3, 0.5)
    )
    assert (drawn < strayed).all()


def test_rollouts_are_learned_from_at_any_machines_costs(made: Experience) -> None:
    for row in (0.02, 0.4):
        priced = costs(AT, tiny.LAYERS, row=row)
        facts = FeatureFacts(AT, priced, (0.5,) * 3, 1.0, Prior.flat((0.5,) * 3))
        found = from_rollouts(made.rollouts(), facts, None, 3)
        assert found is not None
        rounds = sum(len(rollout.rounds) for rollout in made.rollouts())
        assert int(found.done.sum()) == rounds
        assert found.gain.sum() == sum(o.emitted for r in made.rollouts() for o in r.rounds)


# -- texts -----------------------------------------------------------------------------------------


def test_domains_that_lack_documents_get_new_greedy_answers(tmp_path: Path) -> None:
    llm = text_cases.make_llm()
    math = text_cases.prompt_file(tmp_path, "questions", 160)
    wanted = TextOptions(
        docs=3, domains=("math",), sources=(f"math={math}",), max_new_tokens=12, longest=120
    )
    rows = texts.gather(llm, [], tmp_path / "text", wanted, lambda row: None)
    chosen = texts.choose(rows, wanted)
    count = {s: sum(texts.split_for(row) == s for row in chosen) for s in texts.SPLITS}
    assert count == {"policy": 3, "select": 1, "test": 3}
    assert all(row.temperature == 0.0 for row in rows)
    assert not any(row.split == "modules" for row in rows)
    again = texts.gather(llm, [], tmp_path / "text", wanted, lambda row: None)
    assert [row.prompt for row in again] == [row.prompt for row in rows], "nothing is asked twice"


def test_a_domain_that_stays_short_is_told(tmp_path: Path) -> None:
    said: list[dict[str, Any]] = []
    wanted = TextOptions(docs=3, domains=("math",), sources=())
    texts.gather(text_cases.make_llm(), [], tmp_path / "text", wanted, said.append)
    assert "math" in said[-1]["note"]


def test_measuring_sets_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "gsm8k_test_dev.jsonl"
    path.write_text('{"question": "1 + 1?"}\n')
    wanted = TextOptions(docs=1, domains=("math",), sources=(f"math={path}",))
    with pytest.raises(OptionError, match="gsm8k_test"):
        texts.gather(text_cases.make_llm(), [], tmp_path / "text", wanted, lambda row: None)


@pytest.mark.parametrize(
    "wrong",
    [{"docs": 0}, {"domains": ("poetry",)}],
)
def test_text_options_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        TextOptions(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"depths": 0},
        {"depths": 13},
        {"rollouts": -1},
        {"minutes": 0.0},
        {"own": True, "modules": "x"},
    ],
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        CollectOptions(**wrong)


def test_costs_are_read_back_and_other_files_named(tmp_path: Path) -> None:
    priced = costs(AT, 6)
    logs.write_costs(tmp_path / "costs.json", priced)
    assert logs.read_costs(tmp_path / "costs.json") == priced
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(OptionError, match=r"other\.json"):
        logs.read_costs(tmp_path / "other.json")

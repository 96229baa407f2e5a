"""``dflash`` as users name it: folders, options, both engines, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

import hasten
from hasten.api import LLM
from hasten.builtin.dflash import DFlashOptions, _rule
from hasten.dflash import store
from hasten.dflash.config import read_config
from hasten.errors import ModelError, OptionError
from hasten.policies import cost
from tests.dflash.dflash_models import bank, config, net, save_for
from tests.dflash.test_config import HEAD, QWEN3_8B
from tests.exits.layerskip import COSTS
from tests.tiny_llm import PLAIN, make_model, make_tokenizer, meter, metered


@pytest.fixture(autouse=True)
def _known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured here."""
    monkeypatch.setattr(cost, "load_or_measure", lambda target: COSTS)


def load(**options: Any) -> LLM:
    made = (make_model(num_hidden_layers=3), make_tokenizer())
    return hasten.load(made, method="ar", **options)


@pytest.fixture(scope="module")
def shared() -> LLM:
    return load()


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    with metered(shared) as made:
        yield made


@pytest.fixture(scope="module")
def folder(shared: LLM, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_for(tmp_path_factory.mktemp("dflash"), shared.target.info))


METHODS = [
    "dflash,model=FOLDER",
    "dflash,model=FOLDER,length=2",
    "dflash:adaflash,model=FOLDER,rate=1.3,least=2",
    "dflash:cost,model=FOLDER",
    "dflash,model=FOLDER,draft=sample,draft_temperature=0.7,policy=ratio",
    "dflash:tree,model=FOLDER",
    "dflash:tree,model=FOLDER,nodes=9",
]


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_plain_decodings_greedy_and_sampled(method: str, llm: LLM, folder: str) -> None:
    method = method.replace("FOLDER", folder)
    for options in ({}, {"temperature": 0.8, "top_k": 40, "seed": 3}):
        want = llm.generate("Say it.", **PLAIN, **options)
        got = llm.generate("Say it.", method=method, trace=True, **PLAIN, **options)
        assert got.tokens == want.tokens
        assert set(got.metrics.source_drafted) <= {"dflash", "dflash-beside"}
        if method != f"dflash:tree,model={folder}":  # a random drafter isn't worth a row
            assert got.metrics.drafted > 5
    assert meter(llm).live == 0


def test_a_sampled_request_under_rejection_is_answered(llm: LLM, folder: str) -> None:
    got = llm.generate(
        "Say it.",
        method=f"dflash,model={folder},draft=sample",
        temperature=1.0,
        verify="rejection",
        **PLAIN,
    )
    assert len(got.tokens) == 24


def test_requests_that_share_passes_are_answered_as_alone(llm: LLM, folder: str) -> None:
    prompts = ["One.", "Two, please.", "And three."]
    for method in ("dflash", "dflash:cost", "dflash:adaflash", "dflash:tree"):
        method = f"{method},model={folder}"
        want = [llm.generate(prompt, **PLAIN).tokens for prompt in prompts]
        got = llm.generate_many(prompts, method=method, **PLAIN)
        assert [each.tokens for each in got] == want


def test_a_transformers_target_drafts_the_same(shared: LLM, folder: str) -> None:
    other = load(engine="transformers")
    assert other.target.info.engine == "transformers"
    assert other.target.info.fingerprint == shared.target.info.fingerprint
    method = f"dflash,model={folder}"
    want = shared.generate("Say it.", method=method, trace=True, **PLAIN)
    got = other.generate("Say it.", method=method, trace=True, **PLAIN)
    assert got.tokens == want.tokens
    drafts = [[each.tree for each in result.rounds] for result in (want, got)]
    same = sum(a == b for a, b in zip(*drafts, strict=True))
    assert same > 0.8 * len(drafts[0]), "8-bit products of two engines differ at near ties only"


def test_a_reduced_vocabulary_and_the_prompts_ids_are_all_that_is_drafted(
    llm: LLM, tmp_path: Path
) -> None:
    save_for(tmp_path, llm.target.info, ids=range(0, 258, 2))
    got = llm.generate("Say it.", method=f"dflash,model={tmp_path}", trace=True, **PLAIN)
    assert got.tokens == llm.generate("Say it.", **PLAIN).tokens
    drafted = {t for each in got.rounds if each.tree for t in each.tree.tokens[1:]}
    assert drafted
    assert all(t % 2 == 0 or t in got.prompt_tokens for t in drafted)


def test_without_a_drafter_the_error_names_the_way_to_one(llm: LLM) -> None:
    with pytest.raises(
        OptionError, match=r"dflash.model: no DFlash drafter is shipped.*train dflash"
    ):
        llm.generate("Say it.", method="dflash", **PLAIN)
    with pytest.raises(OptionError, match=r"dflash.model: there is no folder '/nowhere/at/all'"):
        llm.generate("Say it.", method="dflash,model=/nowhere/at/all", **PLAIN)
    assert meter(llm).rows == 0, "refused before anything has run"


def test_a_shipped_drafter_is_taken_where_none_is_named(
    llm: LLM, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "shipped", lambda info, kind: Path(folder))
    got = llm.generate("Say it.", method="dflash", trace=True, **PLAIN)
    assert set(got.metrics.source_drafted) == {"dflash"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("draft=best", "dflash.draft: must be argmax or sample"),
        ("policy=some", "dflash.policy: must be one of fixed, ratio, cost"),
        ("length=5", "dflash.length: must be 0 to 4"),
        ("length=-1", "dflash.length"),
        ("policy=ratio,least=6", "dflash.least: must be 1 to 5"),
        ("policy=ratio,rate=0", "dflash.rate: must be above 0"),
        ("rate=2", "dflash.rate: goes with policy=ratio only"),
        ("least=2", "dflash.least: goes with policy=ratio or cost only"),
        ("draft=sample,draft_temperature=0", "dflash.draft_temperature: must be above 0"),
        ("tree=on,length=2", "dflash.length: is for chains"),
        ("tree=on,policy=cost", "dflash.policy: is for chains"),
        ("tree=on,draft=sample", "dflash.draft: is for chains"),
        ("tree=on,rate=2", "dflash.rate: goes with policy=ratio only"),
        ("tree=on,nodes=-1", "dflash.nodes: must be at least 1"),
        ("tree=on,most=-1", "dflash.most: must be at least 1"),
        ("tree=on,nodes=4,most=9", "dflash.most: goes with the budget policy only"),
        ("nodes=4", "dflash.nodes: goes with tree=on only"),
        ("most=4", "dflash.most: goes with tree=on only"),
        ("draft_temperature=0.5", "dflash.draft_temperature: goes with draft=sample only"),
    ],
)
def test_options_out_of_range_are_refused_by_name(
    options: str, words: str, llm: LLM, folder: str
) -> None:
    with pytest.raises(OptionError, match=words):
        llm.generate("Say it.", method=f"dflash,model={folder},{options}", **PLAIN)
    assert meter(llm).rows == 0


def test_the_length_head_is_asked_for_by_name_only_where_there_is_one(
    llm: LLM, tmp_path: Path
) -> None:
    info = llm.target.info
    made = config(vocab_size=258, num_target_layers=3, target_layer_ids=(0, 2))
    store.save(tmp_path, made, net(made), None, {"target": info.fingerprint})
    with pytest.raises(OptionError, match=r"dflash.policy: ratio needs a length head"):
        llm.generate("Say it.", method=f"dflash:adaflash,model={tmp_path}", **PLAIN)
    got = llm.generate("Say it.", method=f"dflash:cost,model={tmp_path}", trace=True, **PLAIN)
    assert got.tokens == llm.generate("Say it.", **PLAIN).tokens


def test_the_rule_knows_what_the_length_heads_labels_looked_ahead(llm: LLM) -> None:
    made = bank(llm.target, vocab_size=258, num_target_layers=3, target_layer_ids=(0, 2),
                length_head=6, lookahead=2)  # fmt: skip
    assert _rule(DFlashOptions(policy="cost"), made).lookahead == 2


# -- a checkpoint as it was published --------------------------------------------------------------

SMALL: Mapping[str, Any] = {
    **QWEN3_8B,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_hidden_layers": 2,
    "num_target_layers": 6,
    "layer_types": ["full_attention"] * 2,
    "block_size": 16,
    "vocab_size": 272,
    "dflash_config": {**HEAD, "mask_token_id": 265, "target_layer_ids": [1, 3]},
}
"""The published description with small sizes: its mask token is a row beyond the tokenizer."""


def test_a_published_folder_goes_through_load_draft_and_verify(tmp_path: Path) -> None:
    described = hf.Qwen3Config(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=192,
        initializer_range=0.3,
        eos_token_id=257,
        bos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = hf.Qwen3ForCausalLM(described).eval()
    llm = hasten.load((model, make_tokenizer()), method="ar")
    tensors = net(read_config(SMALL)).state_dict()
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    save_file({k: v.bfloat16() for k, v in tensors.items()}, tmp_path / "model.safetensors")
    assert "thresh_head_two_model.res.0.weight" in tensors
    want = llm.generate("Say it.", **PLAIN)
    for policy in ("fixed", "ratio", "cost"):
        method = f"dflash,model={tmp_path},policy={policy}"
        got = llm.generate("Say it.", method=method, trace=True, **PLAIN)
        assert got.tokens == want.tokens
        assert got.metrics.drafted > 0
    assert max(each.drafted for each in got.rounds) <= 15
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "hidden_size": 64}))
    with pytest.raises(ModelError, match="hidden_size is 64"):
        llm.generate("Say it.", method=f"dflash,model={tmp_path},length=3", **PLAIN)

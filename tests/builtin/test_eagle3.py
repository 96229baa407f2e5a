"""``eagle3`` as users name it: folders, options, both engines, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tests.conformance.toy_target import ToyTarget, ToyTokenizer
from tests.eagle3.eagle3_models import config, net, save_for
from tests.tiny_llm import PLAIN, make_model, make_tokenizer, meter, metered

import hasten
from hasten import methods
from hasten.api import LLM
from hasten.dflash import store as assets
from hasten.eagle3 import store
from hasten.eagle3.config import read_config
from hasten.errors import ModelError, OptionError


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
    return str(save_for(tmp_path_factory.mktemp("eagle3"), shared.target.info))


METHODS = {
    "eagle3,model=FOLDER": 4,
    "eagle3,model=FOLDER,length=2,sample=on,draft_temperature=0.7": 2,
    "eagle3:tree,model=FOLDER": 11,
    "eagle3:tree,model=FOLDER,top_k=3,depth=2,nodes=6": 5,
    "eagle3:paper,model=FOLDER": 59,
}
"""What each drafts at most."""


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_plain_decodings_greedy_and_sampled(method: str, llm: LLM, folder: str) -> None:
    most = METHODS[method]
    method = method.replace("FOLDER", folder)
    for options in ({}, {"temperature": 0.8, "top_k": 40, "seed": 3}):
        want = llm.generate("Say it.", **PLAIN, **options)
        got = llm.generate("Say it.", method=method, trace=True, **PLAIN, **options)
        assert got.tokens == want.tokens
        assert set(got.metrics.source_drafted) == {"eagle3"}
        assert max(each.drafted for each in got.rounds) == most
    assert meter(llm).live == 0


def test_a_sampled_request_under_rejection_is_answered(llm: LLM, folder: str) -> None:
    for more in (",sample=on", ",draft=tree"):
        got = llm.generate(
            "Say it.",
            method=f"eagle3,model={folder}{more}",
            temperature=1.0,
            verify="rejection",
            **PLAIN,
        )
        assert len(got.tokens) == 24


def test_requests_that_share_passes_are_answered_as_alone(llm: LLM, folder: str) -> None:
    prompts = ["One.", "Two, please.", "And three."]
    want = [llm.generate(prompt, **PLAIN).tokens for prompt in prompts]
    for method in ("eagle3", "eagle3:tree"):
        got = llm.generate_many(prompts, method=f"{method},model={folder}", **PLAIN)
        assert [each.tokens for each in got] == want


def test_a_transformers_target_drafts_the_same(shared: LLM, folder: str) -> None:
    other = load(engine="transformers")
    assert other.target.info.engine == "transformers"
    for draft in ("chain", "tree"):
        method = f"eagle3,model={folder},draft={draft}"
        want = shared.generate("Say it.", method=method, trace=True, **PLAIN)
        got = other.generate("Say it.", method=method, trace=True, **PLAIN)
        assert got.tokens == want.tokens
        drafts = [[each.tree for each in result.rounds] for result in (want, got)]
        same = sum(a == b for a, b in zip(*drafts, strict=True))
        assert same > 0.7 * len(drafts[0]), "8-bit products of two engines differ at near ties only"


def test_a_reduced_vocabulary_is_all_that_is_drafted(llm: LLM, tmp_path: Path) -> None:
    save_for(tmp_path, llm.target.info, ids=range(0, 258, 2))
    for draft in ("chain", "tree"):
        method = f"eagle3,model={tmp_path},draft={draft}"
        got = llm.generate("Say it.", method=method, trace=True, **PLAIN)
        assert got.tokens == llm.generate("Say it.", **PLAIN).tokens
        drafted = {t for each in got.rounds if each.tree for t in each.tree.tokens[1:]}
        assert drafted
        assert all(token % 2 == 0 for token in drafted)


def test_without_a_drafter_the_error_names_the_way_to_one(llm: LLM) -> None:
    with pytest.raises(
        OptionError, match=r"eagle3.model: no EAGLE-3 drafter is shipped.*train eagle3"
    ):
        llm.generate("Say it.", method="eagle3", **PLAIN)
    with pytest.raises(OptionError, match=r"eagle3.model: there is no folder '/nowhere/at/all'"):
        llm.generate("Say it.", method="eagle3,model=/nowhere/at/all", **PLAIN)
    assert meter(llm).rows == 0, "refused before anything has run"


def test_a_shipped_drafter_is_taken_where_none_is_named(
    llm: LLM, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assets, "shipped", lambda info, kind: Path(folder))
    got = llm.generate("Say it.", method="eagle3", trace=True, **PLAIN)
    assert set(got.metrics.source_drafted) == {"eagle3"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("draft=bush", "eagle3.draft: must be chain or tree"),
        ("length=0", "eagle3.length: must be at least 1"),
        ("draft=tree,top_k=0", "eagle3.top_k: must be at least 1"),
        ("draft=tree,depth=0", "eagle3.depth: must be at least 1"),
        ("draft=tree,nodes=1", "eagle3.nodes: must be at least 2"),
        ("nodes=8", "eagle3.nodes: goes with draft=tree only"),
        ("top_k=8", "eagle3.top_k: goes with draft=tree only"),
        ("draft=tree,length=5", "eagle3.length: goes with draft=chain only"),
        ("draft=tree,sample=on", "eagle3.sample: goes with draft=chain only"),
        ("sample=on,draft_temperature=0", "eagle3.draft_temperature: must be above 0"),
        ("draft_temperature=0.5", "eagle3.draft_temperature: goes with sample=on only"),
    ],
)
def test_options_out_of_range_are_refused_by_name(
    options: str, words: str, llm: LLM, folder: str
) -> None:
    with pytest.raises(OptionError, match=words):
        llm.generate("Say it.", method=f"eagle3,model={folder},{options}", **PLAIN)
    assert meter(llm).rows == 0


def test_a_tree_for_a_target_without_tree_masks_is_talked_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = ToyTarget(tree=False)
    save_for(tmp_path, target.info)
    context = methods.MethodContext(target, ToyTokenizer(), lambda name: (target, None))
    with caplog.at_level(logging.WARNING, "hasten"):
        methods.prepare(methods.parse(f"eagle3,model={tmp_path}"), context)
        assert not caplog.records
        methods.prepare(methods.parse(f"eagle3:tree,model={tmp_path}"), context)
    assert "Take draft=chain" in caplog.text


def test_an_authors_folder_goes_through_load_draft_and_verify(tmp_path: Path) -> None:
    """Their names, their file, a reduced vocabulary, taps by the rule."""
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
    data = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 1,
        "vocab_size": 272,
        "draft_vocab_size": 90,
    }
    ids = torch.arange(0, 270, 3)
    tensors = {
        name.replace("layers.0.", "midlayer."): value.bfloat16()
        for name, value in net(read_config(data, target_layers=6)).state_dict().items()
    }
    known = torch.zeros(272, dtype=torch.bool)
    known[ids] = True
    tensors |= {"d2t": ids - torch.arange(90), "t2d": known}
    (tmp_path / "config.json").write_text(json.dumps(data))
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    want = llm.generate("Say it.", **PLAIN)
    for method in ("eagle3", "eagle3:tree"):
        got = llm.generate("Say it.", method=f"{method},model={tmp_path}", trace=True, **PLAIN)
        assert got.tokens == want.tokens
        assert got.metrics.drafted > 20
        drafted = {t for each in got.rounds if each.tree for t in each.tree.tokens[1:]}
        assert drafted <= set(ids.tolist())
    (tmp_path / "config.json").write_text(json.dumps({**data, "hidden_size": 64}))
    with pytest.raises(ModelError, match="hidden_size is 64"):
        llm.generate("Say it.", method=f"eagle3,model={tmp_path},length=3", **PLAIN)


def test_a_drafter_of_another_width_drafts_with_its_own_embeddings(
    llm: LLM, tmp_path: Path
) -> None:
    made = config(hidden_size=24, head_dim=6, target_hidden_size=32, vocab_size=258, taps=(1, 2))
    table = torch.randn(258, 24, generator=torch.Generator().manual_seed(2))
    about = {"target": llm.target.info.fingerprint}
    store.save(tmp_path, made, net(made), None, about, embeddings=table)
    got = llm.generate("Say it.", method=f"eagle3,model={tmp_path}", trace=True, **PLAIN)
    assert got.tokens == llm.generate("Say it.", **PLAIN).tokens
    assert got.metrics.drafted > 20

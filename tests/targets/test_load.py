"""`load_target` by name: any folder, file or id becomes the right target.

Models are tiny, random and written here; the embedded one is loaded where its being real matters.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.targets.checkpoints import (
    Saved,
    load,
    logits_of,
    logits_of_model,
    tiny_gpt2,
    tiny_llama,
    tiny_qwen3,
)
from transformers import (
    PreTrainedTokenizerFast,
)

from hasten.errors import CapabilityError, ModelError, OptionError
from hasten.targets import catalog
from hasten.targets.checkpoint import SafetensorsFolder, eos_ids, weights_fingerprint
from hasten.targets.load import Loaded, load_target

# -- folders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_runs_in_the_fused_engine_with_the_models_own_logits(
    make: Callable[..., Any], tied: bool, saved: Saved
) -> None:
    folder, model = saved(make(tie_word_embeddings=tied))
    assert ("lm_head.weight" in SafetensorsFolder(folder)) is not tied
    loaded = load(folder)
    assert loaded.target.info.engine == "fused"
    assert loaded.source.kind == "folder"
    assert loaded.target.info.name == "tiny-model"
    assert loaded.tokenizer("w5 w9").input_ids == [5, 9]
    torch.testing.assert_close(logits_of(loaded), logits_of_model(model), atol=1e-4, rtol=0)


def test_sharded_weights_are_found_through_their_index(saved: Saved) -> None:
    folder, model = saved(tiny_llama(), max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    loaded = load(str(folder))
    torch.testing.assert_close(logits_of(loaded), logits_of_model(model), atol=1e-4, rtol=0)
    next(folder.glob("*-00002-*.safetensors")).unlink()
    with pytest.raises(ModelError, match=r"incomplete: 1 of \d+ weight files are missing"):
        load(folder)


def test_what_the_fused_engine_does_not_know_runs_in_transformers(saved: Saved) -> None:
    folder, model = saved(tiny_gpt2())
    loaded = load(folder)
    assert loaded.target.info.engine == "transformers"
    torch.testing.assert_close(logits_of(loaded), logits_of_model(model), atol=1e-4, rtol=0)
    with pytest.raises(CapabilityError, match=r"engine='fused' can't run tiny-model: .*gpt2"):
        load(folder, engine="fused")


def test_the_engine_asked_for_is_the_engine_taken(saved: Saved) -> None:
    folder, model = saved(tiny_llama())
    loaded = load(folder, engine="transformers")
    assert loaded.target.info.engine == "transformers"
    torch.testing.assert_close(logits_of(loaded), logits_of_model(model), atol=1e-4, rtol=0)
    with pytest.raises(OptionError, match=r"engine: unknown: 'vllm'.*auto, fused, transformers"):
        load(folder, engine="vllm")


def test_a_choice_of_transformers_kernels_means_its_engine(saved: Saved) -> None:
    folder, _ = saved(tiny_llama())
    assert load(folder, attn_implementation="eager").target.info.engine == "transformers"
    placed = load_target(folder, device_map={"": "cpu"})
    assert placed.target.info.engine == "transformers"
    with pytest.raises(CapabilityError, match="device_map"):
        load_target(folder, device_map={"": "cpu"}, engine="fused")
    with pytest.raises(OptionError, match="device_map: contradicts device"):
        load_target(folder, device_map={"": "cpu"}, device="cpu")


def test_weights_outside_safetensors_run_in_transformers(saved: Saved) -> None:
    folder, model = saved(tiny_llama())
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    loaded = load(folder)
    assert loaded.target.info.engine == "transformers"
    torch.testing.assert_close(logits_of(loaded), logits_of_model(model), atol=1e-4, rtol=0)


def test_the_checkpoints_own_dtype_is_the_default_and_an_option_wins(saved: Saved) -> None:
    folder, _ = saved(tiny_llama().to(torch.bfloat16))
    assert load(folder).target.info.dtype == torch.bfloat16
    assert load(folder, dtype="auto").target.info.dtype == torch.bfloat16
    assert load(folder, dtype="float32").target.info.dtype == torch.float32
    assert load(folder, dtype=torch.float16).target.info.dtype == torch.float16
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder).target.info.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dtype", "int4"),
        ("dtype", torch.int64),
        ("device", "warp9"),
        ("device", "cuda:99"),
        ("revision", "main"),
        ("tokenizer", 7),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(
    option: str, value: object, saved: Saved
) -> None:
    folder, _ = saved(tiny_llama())
    with pytest.raises(OptionError) as caught:
        load_target(folder, **{option: value})
    assert caught.value.option == option


def test_a_folder_that_is_incomplete_or_damaged_is_a_model_error(saved: Saved) -> None:
    folder, _ = saved(tiny_llama())
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(ModelError, match="tiny-model can't be loaded"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="tiny-model"):
        load(folder)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").write_text("{broken")
    with pytest.raises(ModelError, match="no tokenizer can be loaded"):
        load(folder)
    (folder / "config.json").write_text("{broken")
    with pytest.raises(ModelError, match="tiny-model can't be loaded"):
        load(folder)


def test_missing_weights_are_refused_where_transformers_would_make_them_up(saved: Saved) -> None:
    model = tiny_gpt2()
    folder, _ = saved(model)
    kept = {
        n: t for n, t in model.state_dict().items() if ".h.1." not in n and n != "lm_head.weight"
    }
    model.save_pretrained(folder, state_dict=kept)
    with pytest.raises(ModelError, match=r"no complete causal language model: \d+ of its weights"):
        load(folder)


def test_a_tokenizer_may_come_from_elsewhere(
    saved: Saved, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder, _ = saved(tiny_llama())
    other = tmp_path / "other"
    tiny_llama().save_pretrained(other)
    with pytest.raises(ModelError, match="no tokenizer"):
        load(other)
    assert load(other, tokenizer=tokenizer).tokenizer is tokenizer
    assert load(other, tokenizer=str(folder)).tokenizer("w5").input_ids == [5]


# -- end-of-sequence ids ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        (2, None, 9, {2}),
        (None, [2, 3], 9, {2, 3}),
        ([4, 2], 3, 9, {2, 3, 4}),
        (None, None, 9, {9}),
        (None, None, None, set()),
        ([], -1, 9, {9}),
        (torch.tensor([5, 6]), None, 9, {5, 6}),
    ],
)
def test_end_ids_are_the_union_of_both_configs_and_the_tokenizers_only_without_them(
    generation: object, config: object, tokenizer: object, expected: set[int]
) -> None:
    holders = [SimpleNamespace(eos_token_id=value) for value in (generation, config, tokenizer)]
    assert eos_ids(*holders) == expected
    if generation is None:
        assert eos_ids(None, *holders[1:]) == expected


def test_end_ids_reach_the_target(saved: Saved) -> None:
    model = tiny_llama(eos_token_id=[1, 6])
    model.generation_config.eos_token_id = [6, 8]
    folder, _ = saved(model)
    assert load(folder).target.info.eos_ids == {1, 6, 8}
    (folder / "generation_config.json").unlink()
    assert load(folder).target.info.eos_ids == {1, 6}
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = None
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder).target.info.eos_ids == {9}


# -- hub ids ---------------------------------------------------------------------------------------


def test_a_hub_id_loads_what_its_snapshot_holds(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = saved(tiny_llama())
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    loaded = load("acme/rocket", revision="v2")
    assert (asked["name"], asked["revision"]) == ("acme/rocket", "v2")
    assert "*.py" not in asked["allow_patterns"]
    assert (loaded.source.kind, loaded.target.info.name) == ("hub", "acme/rocket")
    assert loaded.source.fingerprint == load(folder).source.fingerprint
    torch.testing.assert_close(logits_of(loaded), logits_of_model(model), atol=1e-4, rtol=0)


# -- the embedded model ----------------------------------------------------------------------------


def test_the_embedded_model_runs_in_the_fused_engine_in_float32(smollm2: Loaded) -> None:
    info = smollm2.target.info
    assert (info.name, info.engine, info.dtype) == ("smollm2-135m", "fused", torch.float32)
    assert info.eos_ids == {2}
    assert info.fingerprint == catalog.EMBEDDED["smollm2-135m"].member_sha256
    assert (info.vocab_size, info.num_layers, info.context_limit) == (49152, 30, 8192)
    ids = smollm2.tokenizer("The capital of France is").input_ids
    sequence = smollm2.target.open()
    logits = smollm2.target.prefill(sequence, ids).logits
    smollm2.target.close(sequence)
    assert logits is not None
    assert smollm2.tokenizer.decode(logits[-1].argmax().item()) == " Paris"


def test_the_embedded_model_is_known_again_when_the_user_loaded_it(smollm2_dir: Path) -> None:
    found = weights_fingerprint("llama", SafetensorsFolder(smollm2_dir))
    assert catalog.KNOWN_WEIGHTS[found] == catalog.EMBEDDED["smollm2-135m"].member_sha256

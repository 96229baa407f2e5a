"""`load_target` of a model the user has loaded: it runs, and is left as it was."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from tests.targets.checkpoints import (
    SIZES,
    Saved,
    load,
    logits_of,
    logits_of_model,
    tiny_gpt2,
    tiny_llama,
)
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hasten.errors import HastenError, OptionError
from hasten.targets import engine
from hasten.targets.load import load_target


def test_a_loaded_model_runs_and_is_left_as_it_was(tokenizer: PreTrainedTokenizerFast) -> None:
    for model, engine_name in ((tiny_llama(), "fused"), (tiny_gpt2(), "transformers")):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        config, generation = copy.deepcopy(model.config), copy.deepcopy(model.generation_config)
        random = torch.get_rng_state()
        loaded = load((model, tokenizer))
        assert loaded.target.info.engine == engine_name
        assert loaded.source.kind == "object"
        assert loaded.tokenizer is tokenizer
        torch.testing.assert_close(logits_of(loaded), logits_of_model(model), atol=1e-4, rtol=0)
        assert torch.equal(torch.get_rng_state(), random)
        assert model.config.to_dict() == config.to_dict()
        assert model.generation_config.to_dict() == generation.to_dict()
        after = model.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_loaded_float64_model_runs_as_it_is(tokenizer: PreTrainedTokenizerFast) -> None:
    loaded = load((tiny_llama().double(), tokenizer))
    assert loaded.target.info.engine == "transformers"
    assert loaded.target.info.dtype == torch.float64


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dtype", "bfloat16"),
        ("device", "cpu"),
        ("device_map", "auto"),
        ("attn_implementation", "eager"),
        ("trust_remote_code", True),
        ("revision", "main"),
    ],
)
def test_loading_options_contradict_a_loaded_model(
    option: str, value: object, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(OptionError, match="can't be given with a loaded model") as caught:
        load_target(tiny_llama(), tokenizer=tokenizer, **{option: value})
    assert caught.value.option == option


def test_a_loaded_model_needs_a_tokenizer_once(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(OptionError, match="tokenizer: is needed with a loaded model"):
        load_target(tiny_llama())
    with pytest.raises(OptionError, match="tokenizer: given twice"):
        load_target((tiny_llama(), tokenizer), tokenizer=tokenizer)
    with pytest.raises(OptionError, match=r"model: a tuple must be \(model, tokenizer\)"):
        load_target((tiny_llama(), tokenizer, 1))
    with pytest.raises(OptionError, match="model: a int is no model"):
        load_target(3, tokenizer=tokenizer)


def test_a_model_in_training_mode_is_refused_where_dropout_would_act(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = tiny_gpt2().train()
    with pytest.raises(HastenError, match=r"training mode.*model\.eval\(\)"):
        load_target(model, tokenizer=tokenizer)
    assert model.training


def test_what_is_more_than_plain_weights_is_not_copied_into_the_fused_engine() -> None:
    assert engine.why_object_not_fused(tiny_llama()) is None

    hooked = tiny_llama()
    hooked.model.layers[1].register_forward_hook(lambda *args: None)
    assert engine.why_object_not_fused(hooked) == "it has forward hooks"

    adapted = tiny_llama()
    adapted.peft_config = {"default": object()}
    assert engine.why_object_not_fused(adapted) == "it carries PEFT adapters"

    class Changed(LlamaForCausalLM):
        pass

    changed = Changed(tiny_llama().config)
    assert engine.why_object_not_fused(changed) == "Changed is not a class of transformers"

    mixed = tiny_llama()
    mixed.model.norm.to(torch.bfloat16)
    assert engine.why_object_not_fused(mixed) == "it holds several dtypes"

    spread = tiny_llama()
    spread.model.layers[1].to("meta")
    assert engine.why_object_not_fused(spread) == "it is spread over several devices"


def test_no_room_for_a_copy_means_the_model_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    reason = engine.why_object_not_fused(tiny_llama())
    assert reason is not None
    assert "no memory left" in reason


def test_quantised_and_foreign_configs_and_other_devices_are_named() -> None:
    cpu = torch.device("cpu")
    config = tiny_llama().config
    assert engine.why_not_fused(config, device=cpu) is None
    assert "mps" in str(engine.why_not_fused(config, device=torch.device("mps")))
    config.quantization_config = {"quant_method": "gptq"}
    assert "quantised" in str(engine.why_not_fused(config, device=cpu))

    class Mine(LlamaConfig):
        pass

    assert engine.why_not_fused(Mine(**SIZES), device=cpu) == "it brings code of its own"


# -- fingerprints ----------------------------------------------------------------------------------


def test_a_fingerprint_tells_weights_apart_but_not_how_they_are_held(
    saved: Saved, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder, model = saved(tiny_llama(tie_word_embeddings=True))
    first = load(folder).source.fingerprint
    assert load(folder, engine="transformers").source.fingerprint == first
    assert load(folder, dtype="bfloat16").target.info.fingerprint == first
    assert load((model, tokenizer)).source.fingerprint == first
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert load((half, tokenizer)).source.fingerprint == first
    assert load((tiny_llama(3, tie_word_embeddings=True), tokenizer)).source.fingerprint != first
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.1)
    assert load((model, tokenizer)).source.fingerprint != first

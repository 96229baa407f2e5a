"""`load_target` of models that aren't what their config says: the answer is the model's own."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.targets.checkpoints import (
    Saved,
    load,
    logits_of,
    logits_of_model,
    tiny_gpt2,
    tiny_llama,
    tiny_qwen3,
)
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hasten.errors import CapabilityError
from hasten.targets.checkpoint import weights_fingerprint
from hasten.targets.load import load_target


class _Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 1.7


class _Int8(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("whole", (linear.weight / scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.whole.float() * self.scale)


def _head_bias(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.arange(64.0))


def _linear_subclass(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    changed = _Scaled(32, 48, bias=False)
    changed.weight = mlp.up_proj.weight
    mlp.up_proj = changed.eval()


def _model_forward(model: Any) -> None:
    forward = model.forward

    def negated(*args: Any, **options: Any) -> Any:
        out = forward(*args, **options)
        out.logits = -out.logits
        return out

    model.forward = negated


def _mlp_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = types.MethodType(lambda self, x: x * 0.5, mlp)


def _activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU().eval()


def _scaling(model: Any) -> None:
    model.model.layers[0].self_attn.scaling = 0.9


def _norm_eps(model: Any) -> None:
    model.model.norm.variance_epsilon = 1.0


def _int8(model: Any) -> None:
    model.model.layers[0].mlp.up_proj = _Int8(model.model.layers[0].mlp.up_proj).eval()


def _weight_norm(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)


def _frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


CHANGES = [
    _head_bias,
    _linear_subclass,
    _model_forward,
    _mlp_forward,
    _activation,
    _scaling,
    _norm_eps,
    _int8,
    _weight_norm,
    _frequencies,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_loaded_model_that_was_changed_runs_as_it_is(
    change: Callable[[Any], None], tokenizer: PreTrainedTokenizerFast
) -> None:
    model = tiny_llama(initializer_range=0.3)
    change(model)
    loaded = load((model, tokenizer))
    assert loaded.target.info.engine == "transformers"
    torch.testing.assert_close(logits_of(loaded), logits_of_model(model), atol=1e-4, rtol=1e-4)
    with pytest.raises(CapabilityError, match="engine='fused' can't run"):
        load((model, tokenizer), engine="fused")


def test_a_replaced_method_of_a_whole_class_is_found_by_comparing(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(initializer_range=0.3)
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, x: x * 0.5)
    loaded = load((model, tokenizer))
    assert loaded.target.info.engine == "transformers"
    torch.testing.assert_close(logits_of(loaded), logits_of_model(model), atol=1e-4, rtol=1e-4)
    with pytest.raises(CapabilityError, match="doesn't compute what its config says"):
        load((model, tokenizer), engine="fused")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_unchanged_model_of_any_dtype_passes_the_comparison(
    dtype: torch.dtype, tokenizer: PreTrainedTokenizerFast
) -> None:
    for model in (tiny_llama(), tiny_qwen3(tie_word_embeddings=True)):
        assert load((model.to(dtype), tokenizer)).target.info.engine == "fused"


def test_a_head_of_its_own_is_used_though_the_config_says_tied(
    saved: Saved, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder, model = saved(tiny_llama(initializer_range=0.3))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    want = logits_of_model(theirs)
    torch.testing.assert_close(want, logits_of_model(model))
    for engine in ("fused", "transformers"):
        loaded = load(folder, engine=engine)
        torch.testing.assert_close(logits_of(loaded), want, atol=1e-4, rtol=1e-4)
    loaded = load((theirs, tokenizer), engine="fused")
    torch.testing.assert_close(logits_of(loaded), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["model.layers.0.mlp.extra", "model.layers.1.mlp.up_proj.bias"])
def test_a_folder_with_unknown_tensors_runs_as_transformers_runs_it(
    name: str, saved: Saved
) -> None:
    folder, _ = saved(tiny_llama(initializer_range=0.3))
    path = folder / "model.safetensors"
    save_file({**load_file(path), name: torch.ones(48)}, path, metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    loaded = load(folder)
    assert loaded.target.info.engine == "transformers"
    torch.testing.assert_close(logits_of(loaded), logits_of_model(theirs), atol=1e-4, rtol=1e-4)
    with pytest.raises(CapabilityError, match="which its config doesn't ask for"):
        load(folder, engine="fused")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # torch is dropping it
def test_dynamically_quantised_weights_have_a_fingerprint_of_their_own() -> None:
    def weights(scale: float) -> dict[str, Any]:
        packed = torch.quantize_per_tensor(torch.full((4, 4), scale), scale / 7, 0, torch.qint8)
        return {"up._packed_params": (packed, None), "up.dtype": torch.qint8}

    first = weights_fingerprint("llama", weights(1.0))
    assert first == weights_fingerprint("llama", weights(1.0))
    assert first != weights_fingerprint("llama", weights(2.0))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_torch_changes_nothing(
    default: torch.dtype, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = tiny_llama()
    want = logits_of_model(model)
    torch.set_default_dtype(default)
    try:
        loaded = load((model, tokenizer))
        got = logits_of(loaded)
    finally:
        torch.set_default_dtype(torch.float32)
    assert loaded.target.info.engine == "fused"
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_later_changes_to_a_loaded_model_are_not_seen(
    dtype: torch.dtype, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = tiny_llama(attention_bias=True).to(dtype)
    loaded = load((model, tokenizer), engine="fused")
    before = logits_of(loaded)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    assert torch.equal(logits_of(loaded), before)


def test_training_mode_is_refused_for_every_engine(tokenizer: PreTrainedTokenizerFast) -> None:
    for model in (tiny_llama().train(), tiny_gpt2().train()):
        for engine in ("auto", "transformers"):
            with pytest.raises(CapabilityError, match=r"training mode.*model\.eval\(\)"):
                load_target((model, tokenizer), engine=engine)
        assert model.training
    partly = tiny_llama()
    partly.model.layers[0].train()
    assert load((partly, tokenizer)).target.info.engine == "transformers"

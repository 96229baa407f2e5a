"""How a model object is read and called, whatever wraps it and wherever it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers as hf
from tests.targets import hf_cases
from tests.targets import tiny_models as tiny
from tests.targets.hf_cases import PROMPT, make, use

from hasten.errors import CapabilityError
from hasten.targets.hf_model import NO_LIMIT, inspect_model

one_thread = hf_cases.one_thread


def test_a_model_in_training_mode_is_refused() -> None:
    model = tiny.build(tiny.llama).train()
    with pytest.raises(CapabilityError, match=r"model\.eval\(\)"):
        make(model)
    target = make(model.eval())
    sequence = target.open()
    model.train()
    with pytest.raises(CapabilityError, match=r"model\.eval\(\)"):
        target.prefill(sequence, PROMPT)
    assert model.training
    model.eval()
    target.prefill(sequence, PROMPT)


def test_settings_of_the_users_config_do_not_matter() -> None:
    for kind in (tiny.llama, tiny.bloom):
        model = tiny.build(kind, use_cache=False)
        use(make(model))
        assert not model.config.use_cache


class OldNames(hf.LlamaForCausalLM):
    """A forward as older models have it: another name for the cache, and no logits_to_keep."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: Any = None,
    ) -> Any:
        return super().forward(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            **{tiny.CACHE_NAME: past_key_values},
        )


def test_argument_names_are_read_off_the_forward() -> None:
    model = tiny.build(lambda: (OldNames, tiny.llama()[1]))
    target = make(model)
    assert (target.facts.cache_name, target.facts.keep_name) == ("past_key_values", "")
    assert target.capabilities.tree
    passed = target.prefill(target.open(), PROMPT)
    right = tiny.fresh_logits(tiny.build(tiny.llama), PROMPT)[-1:]
    torch.testing.assert_close(passed.logits, right, rtol=0, atol=1e-4)
    use(target)


def test_a_prefill_makes_one_row_of_logits_a_chunk() -> None:
    model = tiny.build(tiny.llama)
    target = make(model, prefill_rows=8)
    rows: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda _m, args, _o: rows.append(args[0].shape[1]))
    target.prefill(target.open(), PROMPT)
    handle.remove()
    assert rows == [1, 1, 1]


class Adapter(torch.nn.Module):
    """What PEFT's wrapper looks like from outside."""

    def __init__(self, base: Any, prompt_learning: bool = False) -> None:
        super().__init__()
        self.base = base
        self.calls = 0
        self.active_peft_config = type("Config", (), {"is_prompt_learning": prompt_learning})()

    def get_base_model(self) -> Any:
        return self.base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.base(*args, **kwargs)


def test_a_wrapped_model_runs_through_its_wrapper() -> None:
    wrapper = Adapter(tiny.build(tiny.qwen3)).eval()
    target = make(wrapper)
    assert target.capabilities.tree
    assert target.info.architecture == "Qwen3ForCausalLM"
    before = wrapper.calls
    target.prefill(target.open(), PROMPT)
    assert wrapper.calls == before + 1


def test_adapters_that_put_rows_of_their_own_before_the_prompt_are_refused() -> None:
    with pytest.raises(CapabilityError, match="prompt-learning"):
        make(Adapter(tiny.build(tiny.llama), prompt_learning=True).eval())


def test_an_offloaded_model_runs_where_its_hooks_say() -> None:
    import accelerate

    right = tiny.fresh_logits(tiny.build(tiny.llama), PROMPT)[-1:]
    model = accelerate.cpu_offload(tiny.build(tiny.llama), execution_device=torch.device("cpu"))
    assert model.get_input_embeddings().weight.device.type == "meta"
    target = make(model)
    assert target.info.device.type == "cpu"
    assert target.capabilities.tree
    passed = target.prefill(target.open(), PROMPT)
    torch.testing.assert_close(passed.logits, right, rtol=0, atol=1e-4)
    use(target)


def test_objects_that_are_no_causal_language_models_are_refused() -> None:
    with pytest.raises(CapabilityError, match="isn't a transformers causal language model"):
        make(torch.nn.Linear(2, 2).eval())
    small = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    config = hf.T5Config(vocab_size=32, decoder_start_token_id=0, **small)
    with pytest.raises(CapabilityError, match="encoder-decoder"):
        make(tiny.build(lambda: (hf.T5ForConditionalGeneration, config)))


def test_a_model_without_a_context_limit_has_none() -> None:
    assert inspect_model(tiny.build(tiny.mamba2)).context_limit == NO_LIMIT
    assert inspect_model(tiny.build(tiny.mpt)).context_limit == tiny.CONTEXT


def test_a_prompt_runs_in_one_pass_where_angles_depend_on_its_length() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny.build(tiny.llama, rope_parameters=dynamic, max_position_embeddings=16)
    facts = inspect_model(model)
    assert facts.whole_prompt
    assert not inspect_model(tiny.build(tiny.llama)).whole_prompt
    target = make(model, prefill_rows=4)
    target.info = dataclasses.replace(target.info, context_limit=64)
    passed = target.prefill(target.open(), PROMPT, all_logits=True)
    right = tiny.fresh_logits(model, PROMPT)
    torch.testing.assert_close(passed.logits, right, rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [tiny.llama, tiny.gemma3, tiny.llama4, tiny.gpt2, tiny.jamba])
def test_a_model_on_a_gpu_answers_as_on_the_cpu(kind: Any, dtype: torch.dtype) -> None:
    target = make(tiny.build(kind, dtype=dtype).cuda())
    assert target.info.device.type == "cuda"
    assert target.capabilities.tree == (kind is not tiny.jamba)
    use(target)
    passed = target.prefill(target.open(), PROMPT)
    right = tiny.fresh_logits(tiny.build(kind, dtype=dtype), PROMPT)[-1:]
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    atol = tolerance * float(right.abs().max())
    torch.testing.assert_close(passed.logits.cpu(), right, rtol=0, atol=atol)

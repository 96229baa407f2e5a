"""What `speculate` can't do as plain `generate` does it is refused by name, before any pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from tests.plugins.transformers_cases import Passes, generate, prompt
from tests.targets import tiny_models
from transformers.generation import logits_process

from hasten.errors import CapabilityError, ContextError, HastenError, OptionError
from hasten.plugins.transformers import speculate


@pytest.fixture(scope="module")
def ready() -> Any:
    """A model whose self-check is over."""
    model = tiny_models.build(tiny_models.llama)
    generate(model, prompt(), speculate("ar"))
    return model


@pytest.fixture
def model(ready: Any) -> Iterator[Any]:
    """No pass of it may be made."""
    passes = Passes(ready)
    yield ready
    assert passes.stop() == 0


class CountingProcessor:
    """It says that it isn't prefix-pure."""

    hasten_prefix_pure = False

    def __call__(self, ids: Any, scores: Any) -> Any:
        return scores


synth_id = hf.SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=2)

CACHE = tiny_models.CACHE_NAME

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("num_beams", {"num_beams": 3}),
    ("num_beam_groups", {"num_beam_groups": 2}),
    ("dola_layers", {"dola_layers": "high"}),
    ("penalty_alpha", {"penalty_alpha": 0.6, "top_k": 4}),
    ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 3}),
    ("assistant_early_exit", {"assistant_early_exit": 1}),
    ("guidance_scale", {"guidance_scale": 1.5}),
    ("output_attentions", {"output_attentions": True, "return_dict_in_generate": True}),
    ("output_hidden_states", {"output_hidden_states": True, "return_dict_in_generate": True}),
    ("cache_implementation", {"cache_implementation": "offloaded"}),
    (CACHE, {CACHE: hf.DynamicCache()}),
    ("position_ids", {"position_ids": torch.arange(9)[None] + 1}),
    ("logits_processor: Counting", {"logits_processor": [CountingProcessor()]}),
    ("logits_processor: SynthID", {"watermarking_config": synth_id}),
    (
        "logits_processor: ClassifierFree",
        {"logits_processor": [logits_process.ClassifierFreeGuidanceLogitsProcessor(2.0)]},
    ),
    ("attention_mask: hides", {"attention_mask": torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1, 1]])}),
    ("attention_mask: hides", {"attention_mask": torch.tensor([[1] * 8 + [0]])}),
    ("attention_mask: leaves no", {"attention_mask": torch.zeros(1, 9, dtype=torch.long)}),
]


@pytest.mark.parametrize(("names", "options"), REFUSED, ids=lambda v: v if type(v) is str else "")
@pytest.mark.filterwarnings("ignore:.*eager")
def test_an_option_that_is_not_honoured_is_refused_by_name(
    names: str, options: Any, model: Any
) -> None:
    with pytest.raises(OptionError, match=f"^{names}") as caught:
        generate(model, prompt(), speculate("ar"), **options)
    assert caught.value.option == names.partition(":")[0]


def test_an_assistant_is_refused_though_generate_would_drop_it(model: Any) -> None:
    helper = tiny_models.build(tiny_models.llama, seed=1)
    with pytest.raises(OptionError, match="assistant_model: drafts too"):
        generate(model, prompt(), speculate("ar"), assistant_model=helper)


def test_inputs_that_are_no_ids_are_refused(model: Any) -> None:
    vectors = model.get_input_embeddings().weight[None, :9].detach()
    with pytest.raises(OptionError, match="inputs_embeds: hasten runs the model on token ids"):
        model.generate(
            inputs_embeds=vectors, max_new_tokens=3, pad_token_id=0, custom_generate=speculate("ar")
        )


def test_a_filled_cache_is_refused_and_left_as_it_was(ready: Any) -> None:
    cache = hf.DynamicCache()
    with torch.no_grad():
        ready(prompt(), **{CACHE: cache})
    before = cache.layers[0].keys.clone()
    longer = torch.cat([prompt(), prompt(3)], 1)
    passes = Passes(ready)
    with pytest.raises(OptionError, match=r"keeps keys and values of its own.*Leave it out"):
        generate(ready, longer, speculate("ar"), **{CACHE: cache})
    assert passes.stop() == 0
    assert torch.equal(cache.layers[0].keys, before)


def test_rows_without_an_end_of_sequence_id_are_refused_with_criteria(model: Any) -> None:
    def never(ids: torch.Tensor, _: Any) -> torch.Tensor:
        return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.raises(OptionError, match=r"^stopping_criteria: without an end-of-sequence id"):
        generate(model, prompt().repeat(2, 1), speculate("ar"), stopping_criteria=[never])


def test_a_prompt_without_room_is_refused_before_any_row_runs(model: Any) -> None:
    long = prompt(tiny_models.CONTEXT)
    with pytest.raises(ContextError, match="no room for an answer"):
        generate(model, long, speculate("ar"))


def test_training_mode_is_refused(ready: Any) -> None:
    ready.train()
    try:
        with pytest.raises(CapabilityError, match=r"training mode.*model\.eval\(\)"):
            generate(ready, prompt(), speculate("ar"))
        assert ready.training
    finally:
        ready.eval()


def test_an_encoder_decoder_is_refused() -> None:
    config = hf.T5Config(
        vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = hf.T5ForConditionalGeneration(config).eval()
    with pytest.raises(CapabilityError, match="encoder-decoder"):
        generate(model, torch.tensor([[3, 4, 5]]), speculate("ar"))


def test_a_method_that_the_model_cannot_carry_is_refused_by_name() -> None:
    model = tiny_models.build(tiny_models.mamba2)
    with pytest.raises(CapabilityError, match="prompt-lookup"):
        generate(model, prompt(), speculate("prompt-lookup"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "nope"}, "method: unknown method 'nope'"),
        ({"method": "racer", "node": 3}, r"racer\.node: no such option"),
        ({"method": "racer,nodes=4", "nodes": 3}, r"racer\.nodes: is given twice"),
        ({"temperature": 0.5}, r"auto\.temperature: no such option"),
        ({"verify": "smc"}, "verify: unknown verifier 'smc'"),
        ({"engine": "onnx"}, "engine: unknown: 'onnx'"),
        ({"seed": "one"}, "seed: must be a whole number"),
        ({"seed": [1, True]}, "seed: must be a whole number"),
    ],
)
def test_options_of_speculate_are_checked_at_once(options: Any, message: str) -> None:
    with pytest.raises(HastenError, match=message):
        speculate(**options)


def test_options_of_a_method_may_be_python_values() -> None:
    assert str(speculate("racer", nodes=24).method) == "racer,nodes=24"
    assert str(speculate("racer,nodes=24", fuse=False).method) == "racer,nodes=24,fuse=off"


@pytest.mark.parametrize("engine", ["transformers", "fused"])
def test_a_population_is_refused_by_name_in_every_engine(model: Any, engine: str) -> None:
    fast = speculate("smc,draft=self", engine=engine)
    with pytest.raises(OptionError, match="method: 'smc' answers by a population"):
        generate(model, prompt(), fast, do_sample=True)


@pytest.mark.parametrize("engine", ["transformers", "fused"])
def test_arbitration_is_refused_by_name_before_anything_loads(model: Any, engine: str) -> None:
    fast = speculate("cospec:typical,exits=2,modules=nowhere", engine=engine)
    with pytest.raises(OptionError, match="method: 'cospec' decides by a rule of its own"):
        generate(model, prompt(), fast)

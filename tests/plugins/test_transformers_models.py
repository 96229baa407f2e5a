"""`speculate` and the user's model: used as it is, left as it was, never kept alive."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from tests.plugins.transformers_cases import Passes, generate, knowing, prompt
from tests.targets import tiny_models
from tests.tiny_llm import make_tokenizer

from hasten import methods
from hasten.errors import CapabilityError, DrafterError, VocabularyError
from hasten.plugins import _hf_models
from hasten.plugins.transformers import speculate

__all__ = ["knowing"]

ENGINES = ["transformers", "fused"]


def build(**options: Any) -> Any:
    return tiny_models.build(tiny_models.llama, **options)


def _snapshot(model: Any) -> Any:
    """All of a model that a call could change."""
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        pickle.dumps((model.config.to_dict(), model.generation_config.to_dict())),
        model.config._attn_implementation,
        [
            (name, m.training, len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m)))
            for name, m in model.named_modules()
        ],
        [p.requires_grad for p in model.parameters()],
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
    )


def _same(one: Any, two: Any) -> bool:
    return all(torch.equal(one[0][k], two[0][k]) for k in one[0]) and one[1:] == two[1:]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_is_left_as_it_was(engine: str, knowing: Any) -> None:
    model = build()
    config = copy.deepcopy(model.generation_config)
    before = _snapshot(model)
    for options in ({}, {"repetition_penalty": 1.3, "eos_token_id": 5}, {"do_sample": True}):
        generate(model, prompt(), speculate("racer,nodes=6", seed=1, engine=engine), **options)
    assert _same(before, _snapshot(model))
    assert model.generation_config.to_dict() == config.to_dict()


class _Fails:
    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == self.at:
            raise KeyboardInterrupt
        return scores


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("at", [9, 14])
def test_a_model_is_left_as_it_was_after_an_exception(engine: str, at: int) -> None:
    model = build()
    before = _snapshot(model)
    options = {"logits_processor": [_Fails(at)]}
    with pytest.raises(KeyboardInterrupt):
        generate(model, prompt(), speculate("racer,nodes=6", engine=engine), **options)
    assert _same(before, _snapshot(model))
    got = generate(model, prompt(), speculate("racer,nodes=6", engine=engine))
    assert torch.equal(got, generate(model, prompt()))


def test_a_failing_drafter_names_itself_and_leaves_the_model_usable(
    knowing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    plain = generate(model, prompt())
    knowing.append([*plain[0].tolist()[:-3], "not an id"])
    with pytest.raises(DrafterError, match="'oracle'"):
        generate(model, prompt(), speculate("oracle"))
    knowing.clear()
    assert torch.equal(generate(model, prompt(), speculate("oracle")), plain)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_can_be_freed(engine: str) -> None:
    model = build()
    speculation = speculate("racer,nodes=6", engine=engine)
    generate(model, prompt(), speculation)
    gone, held = weakref.ref(model), weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    kept = len(_hf_models._KEPT)
    del model
    gc.collect()
    assert gone() is None
    assert held() is None
    assert len(_hf_models._KEPT) < kept


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_is_loaded_once(engine: str) -> None:
    model = build()
    generate(model, prompt(), speculate("ar", engine=engine))
    target = _hf_models.llm_for(model, methods.parse("ar"), engine=engine, tokenizer=None).target
    for method in ("ar", "racer,nodes=6"):
        generate(model, prompt(), speculate(method, engine=engine), max_new_tokens=3)
        again = _hf_models.llm_for(model, methods.parse(method), engine=engine, tokenizer=None)
        assert again.target is target


def test_the_model_itself_runs_unless_a_copy_is_asked_for() -> None:
    model = build()
    generate(model, prompt(), speculate("ar"))
    passes = Passes(model)
    generate(model, prompt(), speculate("ar"))
    assert passes.stop() == 24
    for engine, runs in (("transformers", "transformers"), ("fused", "fused"), ("auto", "fused")):
        llm = _hf_models.llm_for(model, methods.parse("ar"), engine=engine, tokenizer=None)
        assert llm.target.info.engine == runs


def _step(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(-1.0)


def _through_data(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data += torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))


def _loaded(model: Any) -> None:
    model.load_state_dict(build(seed=9).state_dict())


def _replaced(model: Any) -> None:
    linear = model.model.layers[0].mlp.down_proj
    model.model.layers[0].mlp.down_proj = torch.nn.Sequential(linear, torch.nn.ReLU()).eval()


def _hooked(model: Any) -> None:
    model.model.norm.register_forward_hook(lambda _m, _i, output: -output)


@pytest.mark.parametrize("engine", ["transformers", "auto"])
@pytest.mark.parametrize("change", [_step, _through_data, _loaded, _replaced, _hooked])
def test_a_changed_model_is_answered_as_it_is_now(change: Any, engine: str) -> None:
    model = build()
    before = generate(model, prompt(), speculate("racer,nodes=6", engine=engine))
    change(model)
    got = generate(model, prompt(), speculate("racer,nodes=6", engine=engine))
    assert torch.equal(got, generate(model, prompt()))
    assert not torch.equal(got, before)


def test_another_dtype_is_noticed() -> None:
    model = build()
    generate(model, prompt(), speculate("racer,nodes=6"))
    model.double()
    options = {"return_dict_in_generate": True, "output_logits": True}
    got, plain = (generate(model, prompt(), s, **options) for s in (speculate("ar"), None))
    assert torch.equal(got.sequences, plain.sequences)
    torch.testing.assert_close(got.logits, plain.logits, atol=1e-6, rtol=0)


def test_another_attention_is_checked_anew() -> None:
    model = build()
    generate(model, prompt(), speculate("racer,nodes=6"))
    model.set_attn_implementation("eager")
    assert torch.equal(
        generate(model, prompt(), speculate("racer,nodes=6")), generate(model, prompt())
    )


def test_a_model_without_rollback_is_decoded_plainly_by_auto() -> None:
    model = tiny_models.build(tiny_models.mamba2)
    speculation = speculate("auto")
    assert torch.equal(generate(model, prompt(), speculation), generate(model, prompt()))
    assert speculation.statistics[0].drafted == 0


def test_bfloat16_runs_in_bfloat16() -> None:
    model = build(dtype=torch.bfloat16)
    options = {"return_dict_in_generate": True, "output_logits": True}
    got = generate(model, prompt(), speculate("ar"), **options)
    plain = generate(model, prompt(), **options)
    assert got.logits[0].dtype == torch.float32
    torch.testing.assert_close(got.logits[0], plain.logits[0], atol=0.2, rtol=0)


def test_a_draft_model_drafts_if_it_has_the_same_vocabulary(tmp_path: Path) -> None:
    model = build()
    for name, seed, vocab in (("same", 0, tiny_models.VOCAB), ("other", 1, 99)):
        build(seed=seed, vocab_size=vocab).save_pretrained(tmp_path / name)
        make_tokenizer().save_pretrained(tmp_path / name)
    speculation = speculate("draft-model", model=str(tmp_path / "same"), nodes=5)
    assert torch.equal(generate(model, prompt(), speculation), generate(model, prompt()))
    assert speculation.statistics[0].mean_accepted_length > 4
    with pytest.raises(VocabularyError):
        generate(model, prompt(), speculate("draft-model", model=str(tmp_path / "other")))


def test_two_threads_share_a_model() -> None:
    model = build()
    prompts = [prompt(9, seed) for seed in range(4)]
    plain = [generate(model, ids) for ids in prompts]
    got: dict[int, torch.Tensor] = {}

    def answer(index: int) -> None:
        got[index] = generate(model, prompts[index], speculate("racer,nodes=6"))

    threads = [Thread(target=answer, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[i], plain[i]) for i in range(4))


def test_one_speculation_serves_several_models() -> None:
    speculation = speculate("racer,nodes=6")
    for kind in (tiny_models.llama, tiny_models.gpt2):
        model = tiny_models.build(kind)
        assert torch.equal(generate(model, prompt(), speculation), generate(model, prompt()))


def test_other_architectures_are_not_copied() -> None:
    model = tiny_models.build(tiny_models.gpt2)
    with pytest.raises(CapabilityError, match="engine='fused' can't run"):
        generate(model, prompt(), speculate("ar", engine="fused"))
    assert torch.equal(
        generate(model, prompt(), speculate("ar", engine="auto")), generate(model, prompt())
    )


@pytest.mark.parametrize(
    "get", ["import hasten.plugins.transformers as plugin", "plugin = hasten.plugins.transformers"]
)
def test_importing_the_plug_in_imports_neither_torch_nor_transformers(get: str) -> None:
    code = f"""
import sys, hasten
{get}
assert plugin.speculate and not hasattr(hasten.plugins, "nope")
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"

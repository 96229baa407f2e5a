"""What the fused target refuses, with a reason, before anything runs or changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from tests.targets import tiny_models as tiny
from tests.targets.fused_models import (
    LONG,
    chain,
    fused,
    random_model,
)

from hasten.errors import CapabilityError, ContextError, ModelError, OptionError
from hasten.targets.base import Rows
from hasten.targets.fused import FusedTarget
from hasten.targets.pending import CacheStateError


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(max_position_embeddings=LONG)


@pytest.fixture
def target(model: Any) -> FusedTarget:
    return fused(model)


def test_rows_that_cannot_run_are_refused_and_change_nothing(target: FusedTarget) -> None:
    sequence = target.open()
    target.prefill(sequence, tiny.random_ids(5))
    target.forward([Rows(sequence, (11, 12), (-1, 0))], layers=(0, 1))
    wrong = [
        (Rows(sequence, (13,), (1,)), None, "its parent 1 stands at layer 1"),
        (Rows(sequence, (13,), (5,)), (0, 1), "must come before"),
        (Rows(sequence, (11,), (-1,)), (1, 3), "stand at layer 1"),
        (Rows(sequence, (11, 13), (-1, 0)), (1, 3), "stand at layer 1"),
        (Rows(sequence, (11, 12), (-1, 0)), (2, 3), "stand at layer 2"),
        (Rows(sequence, (), ()), None, "at least one"),
        (Rows(sequence, (1, 2), (-1,)), None, "as many of both"),
        (Rows(sequence, (1,), (-1,)), (2, 2), "isn't a range"),
        (Rows(sequence, (1,), (-1,)), (0, 4), "isn't a range"),
    ]
    for rows, layers, message in wrong:
        with pytest.raises(CacheStateError, match=message):
            target.forward([rows], layers=layers)
    with pytest.raises(CacheStateError, match="only once"):
        target.forward([chain(sequence, [1]), chain(sequence, [1])])
    with pytest.raises(CacheStateError, match="pending rows"):
        target.prefill(sequence, [1])
    assert sequence.pending == 2
    target.forward([Rows(sequence, (11, 12), (-1, 0))], layers=(1, 3))
    target.commit(sequence, [0, 1])
    target.check()


def test_an_interrupted_pass_leaves_no_rows(
    target: FusedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = target.open()
    target.prefill(sequence, tiny.random_ids(5))

    def interrupt(*_: Any) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(target._decoder, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            target.forward([chain(sequence, [1, 2])])
    assert sequence.pending == 0
    target.check()


def test_bad_input_is_refused_before_anything_runs(target: FusedTarget) -> None:
    sequence = target.open()
    ids = tiny.random_ids(LONG - 2)
    for use in (target.embed, lambda tokens: target.prefill(sequence, tokens)):
        for tokens in ([1, tiny.VOCAB], [-1]):
            with pytest.raises(OptionError, match="vocabulary"):
                use(tokens)
    with pytest.raises(ContextError, match="at least one"):
        target.prefill(sequence, [])
    with pytest.raises(ContextError, match="don't fit in the context of 600"):
        target.prefill(sequence, [1] * (LONG + 1))
    with pytest.raises(OptionError, match="taps"):
        target.prefill(sequence, [1], taps=(4,))
    assert (sequence.length, target.layer_rows) == (0, 0)
    target.prefill(sequence, ids)
    target.forward([Rows(sequence, (1, 2, 3), (-1, 0, 0))])
    with pytest.raises(ContextError, match="601 tokens"):
        target.forward([Rows(sequence, (4,), (1,))])
    with pytest.raises(OptionError, match="vocabulary"):
        target.forward([Rows(sequence, (tiny.VOCAB,), (0,))])
    assert sequence.pending == 3
    target.commit(sequence, [0, 2])
    assert sequence.length == LONG


def test_unsupported_configs_give_their_reason() -> None:
    shape = tiny.SHAPE
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    odd = hf.LlamaConfig(**shape)
    odd.head_dim = 7
    cases: list[tuple[Any, str]] = [
        (hf.GPT2Config(), "model type 'gpt2'"),
        (hf.Gemma2Config(**shape, head_dim=8), "model type 'gemma2'"),
        (hf.MixtralConfig(**shape), "model type 'mixtral'"),
        (hf.MistralConfig(**shape, sliding_window=8), "window of 8"),
        (
            hf.Qwen2Config(**shape, use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "sliding_attention",
        ),
        (hf.LlamaConfig(**shape, hidden_act="gelu"), "activation 'gelu'"),
        (hf.LlamaConfig(**shape, rope_parameters=dynamic), "type 'dynamic'"),
        (odd, "odd"),
        (hf.LlamaConfig(**shape, architectures=["OtherModel"]), "OtherModel"),
        (hf.LlamaConfig(**shape, quantization_config={"quant_method": "x"}), "quantized"),
        (hf.LlamaConfig(**{**shape, "num_key_value_heads": 3}), "evenly"),
        (hf.LlamaConfig(**shape, use_bidirectional_attention=True), "causal"),
        (object(), "model type None"),
    ]
    for config, reason in cases:
        assert reason in (FusedTarget.unsupported(config) or "nothing")
    never_reached = hf.MistralConfig(**shape, sliding_window=tiny.CONTEXT)
    assert FusedTarget.unsupported(never_reached) is None


def test_building_refuses_what_does_not_fit(model: Any) -> None:
    tensors = dict(model.state_dict())

    def build(config: Any = model.config, **options: Any) -> FusedTarget:
        facts = {"dtype": torch.float32, "device": torch.device("cpu"), **options}
        return FusedTarget.from_tensors(config, tensors, name="tiny", eos_ids=[], **facts)

    with pytest.raises(CapabilityError, match="'gpt2'"):
        build(hf.GPT2Config())
    with pytest.raises(CapabilityError, match="not on meta"):
        build(device=torch.device("meta"))
    with pytest.raises(OptionError, match="dtype"):
        build(dtype=torch.float64)
    tensors["model.layers.1.self_attn.q_norm.weight"] = torch.ones(8)
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.q_norm"):
        build()
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    norm = tensors.pop("model.norm.weight")
    with pytest.raises(ModelError, match=r"no tensor 'model\.norm\.weight'"):
        build()
    tensors["model.norm.weight"] = norm[:5]
    with pytest.raises(ModelError, match=r"\(5,\), the config says \(32,\)"):
        build()

"""A GGUF file becomes a folder once, and runs with the logits of the model it was made from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from tests.targets.checkpoints import (
    VOCAB,
    Saved,
    load,
    logits_of,
    logits_of_model,
    tiny_llama,
)
from transformers import (
    LlamaForCausalLM,
)

from hasten.errors import ModelError
from hasten.targets import catalog, gguf_file
from hasten.targets.checkpoint import SafetensorsFolder


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    """The model as llama.cpp's converter writes it, in float32, with a byte-level tokenizer."""
    from gguf import GGUFWriter

    config, heads = model.config, {"q": 4, "k": 2}
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads["q"])
    writer.add_head_count_kv(heads["k"])
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(VOCAB)
    letters = ["<s>", "<end>", *(chr(ord("!") + i) for i in range(VOCAB - 3)), "!!"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(letters)
    writer.add_token_types([3, 3] + [1] * (VOCAB - 2))
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.layers": "blk",
    }
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        for kind, count in heads.items():
            if f"attn_{kind}." in name:  # llama.cpp keeps the rotary halves interleaved
                split = tensor.reshape(count, 2, -1, tensor.shape[-1])
                tensor = split.transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_converted_once_and_runs_with_its_own_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    model = tiny_llama(tie_word_embeddings=True)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model)
    loaded = load(path)
    assert loaded.source.kind == "gguf"
    assert loaded.target.info.eos_ids == {1}
    assert loaded.target.info.dtype == torch.float32
    assert loaded.target.info.engine == "fused"
    torch.testing.assert_close(logits_of(loaded), logits_of_model(model), atol=1e-4, rtol=0)
    assert loaded.tokenizer.decode(loaded.tokenizer("!!%").input_ids) == "!!%"
    assert catalog.verify_cache(path) == []
    monkeypatch.setattr(gguf_file, "convert", None)
    assert load(str(path)).source == loaded.source


def test_a_damaged_gguf_file_is_a_model_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\1" * 100)
    with pytest.raises(ModelError, match=r"broken\.gguf can't be converted"):
        load(path)


def test_a_damaged_prepared_model_is_repaired_at_load(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    made, model = saved(tiny_llama())

    def convert(gguf: Path, into: Path, name: str) -> None:
        for file in made.iterdir():
            (into / file.name).write_bytes(file.read_bytes())

    monkeypatch.setattr(gguf_file, "convert", convert)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF and more")
    weights = Path(catalog.prepare(catalog.resolve(path))) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(b"\xff" * 16 + whole[16:])  # of the same size: the marker can't tell
    with pytest.raises(SafetensorError):
        SafetensorsFolder(weights.parent)
    loaded = load(path)
    torch.testing.assert_close(logits_of(loaded), logits_of_model(model), atol=1e-4, rtol=0)
    assert weights.read_bytes() == whole

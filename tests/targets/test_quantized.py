"""Quantized weights: how far they are from the floats, and a GGUF file's own blocks as they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.exits.layerskip import COSTS
from tests.targets.checkpoints import load, logits_of, tiny_llama
from tests.targets.fused_models import fused, llama, random_model
from tests.targets.test_gguf_file import write_gguf
from tests.tiny_llm import make_model, make_tokenizer

import hasten
from hasten.errors import CapabilityError, ModelError, OptionError
from hasten.native import library as native
from hasten.native.library import Q4, Q8, why_not_native
from hasten.policies import cost
from hasten.targets.catalog import prepare
from hasten.targets.checkpoint import SafetensorsFolder
from hasten.targets.quantized import GGUFTensors, Quantized, joined, quantize

if (missing := why_not_native(torch.float32, torch.device("cpu"), 16)) is not None:
    pytest.skip(f"no CPU kernels here: {missing}", allow_module_level=True)


CONFIG = SimpleNamespace(model_type="llama", num_attention_heads=4, num_key_value_heads=2)


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [(5, 32), (300, 70)])
def test_numbers_are_at_most_half_a_step_off(bits: int, size: tuple[int, int]) -> None:
    weight = random(*size)
    made = quantize(weight, bits)
    assert made.shape == size
    step = made.d.float().repeat_interleave(32, 1)[:, : size[1]]
    # Scale and offset are halves: their rounding comes on top.
    slack = 2e-3 * weight.abs().amax()
    assert ((made.dense() - weight).abs() <= step / 2 + slack).all()
    assert made.q.max() <= 2**bits - 1


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_constants_and_huge_numbers_survive(bits: int) -> None:
    rows = torch.stack([torch.zeros(32), torch.full((32,), -3.0), torch.full((32,), 5e4)])
    torch.testing.assert_close(quantize(rows, bits).dense(), rows, rtol=2e-3, atol=0)
    assert quantize(torch.full((1, 32), 1e30), bits).dense().isfinite().all()


def test_joined_weights_keep_their_numbers_where_4_bits_meet_8() -> None:
    four, eight = quantize(random(3, 40), 4), quantize(random(2, 40), 8)
    both = joined([four, eight])
    assert both.kind == Q8
    assert torch.equal(both.dense(), torch.cat([four.dense(), eight.dense()]))
    assert joined([four, four]).kind == Q4


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a tensor of each kind."""
    from gguf import GGMLQuantizationType as Kind
    from gguf import GGUFWriter
    from gguf import quantize as pack

    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    writer = GGUFWriter(tmp_path / "some.gguf", "llama")
    kinds = {
        "token_embd": (Kind.Q8_0, (70, 64)),
        "blk.0.attn_q": (Kind.Q4_0, (32, 64)),
        "blk.0.attn_k": (Kind.Q4_1, (16, 64)),
        "blk.0.ffn_up": (Kind.Q5_0, (24, 64)),
        "blk.0.ffn_down": (Kind.F16, (64, 24)),
        "output_norm": (Kind.F32, (64,)),
    }
    for name, (kind, size) in kinds.items():
        data = random(*size).numpy()
        if kind is Kind.F16:
            writer.add_tensor(f"{name}.weight", data.astype(np.float16))
        elif kind is Kind.F32:
            writer.add_tensor(f"{name}.weight", data)
        else:
            writer.add_tensor(f"{name}.weight", pack(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "some.gguf"


def dense(value: Any) -> torch.Tensor:
    return value.dense() if isinstance(value, Quantized) else value


def test_a_files_own_blocks_are_taken_as_they_are(gguf: Path) -> None:
    from gguf import GGUFReader, dequantize

    raw = {
        t.name: torch.tensor(np.array(dequantize(t.data, t.tensor_type)))
        for t in GGUFReader(gguf).tensors
    }
    for _ in range(2):  # the second time from the note of where tensors lie
        tensors = GGUFTensors(gguf, CONFIG, "f" * 64)
        assert set(tensors) == {
            "model.embed_tokens.weight",
            "model.norm.weight",
            *(f"model.layers.0.{n}.weight" for n in ("self_attn.q_proj", "self_attn.k_proj")),
            *(f"model.layers.0.{n}.weight" for n in ("mlp.up_proj", "mlp.down_proj")),
        }
        embeddings = tensors["model.embed_tokens.weight"]
        assert isinstance(embeddings, Quantized)
        assert torch.equal(embeddings.dense(), raw["token_embd.weight"])
        assert torch.equal(
            dense(tensors.rows("model.embed_tokens.weight", 32, 70)), raw["token_embd.weight"][32:]
        )
        assert torch.equal(dense(tensors["model.norm.weight"]), raw["output_norm.weight"])
        # Queries and keys lie pairwise in the file, in halves in transformers.
        for part, name, heads in (("q", "attn_q", 4), ("k", "attn_k", 2)):
            stored = raw[f"blk.0.{name}.weight"]
            want = stored.view(heads, -1, 2, 64).transpose(1, 2).reshape(stored.shape)
            found = tensors[f"model.layers.0.self_attn.{part}_proj.weight"]
            torch.testing.assert_close(dense(found), want, atol=1e-6, rtol=1e-6)


def test_types_of_other_groups_are_rounded_anew_and_named(gguf: Path) -> None:
    tensors = GGUFTensors(gguf, CONFIG, "e" * 64)
    up, down = (tensors[f"model.layers.0.mlp.{n}_proj.weight"] for n in ("up", "down"))
    assert isinstance(up, Quantized)
    assert up.kind == Q8
    assert isinstance(down, torch.Tensor)
    assert tensors.dequantised == {"model.layers.0.mlp.up_proj.weight"}


def test_a_whole_file_has_the_weights_that_transformers_reads_and_nearly_its_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf
    from gguf import GGMLQuantizationType as Kind
    from transformers import AutoConfig

    native.library()  # compiled now, not into the cache of this test
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    kinds = {"ffn_up": Kind.Q4_0, "attn_k": Kind.Q4_1, "attn_v": Kind.Q4_0, "ffn_down": Kind.Q5_0}
    add, turned = gguf.GGUFWriter.add_tensor, gguf.GGUFWriter.add_rope_dimension_count

    def packed(self: Any, name: str, data: Any) -> None:
        if data.ndim == 1:
            return add(self, name, data)
        kind = next((kind for part, kind in kinds.items() if part in name), Kind.Q8_0)
        return add(self, name, gguf.quantize(data, kind), raw_dtype=kind)

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", packed)
        patch.setattr(gguf.GGUFWriter, "add_rope_dimension_count", lambda self, _: turned(self, 16))
        sizes = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.2}
        write_gguf(tmp_path / "tiny.gguf", tiny_llama(tie_word_embeddings=True, **sizes))
    whole = load(tmp_path / "tiny.gguf")
    folder = prepare(whole.source)
    theirs, config = SafetensorsFolder(folder), AutoConfig.from_pretrained(folder)
    ours = GGUFTensors(tmp_path / "tiny.gguf", config, "c" * 64)
    assert set(ours) == set(theirs)
    for name in theirs:
        if "down_proj" not in name:
            assert torch.equal(dense(ours[name]), theirs[name]), name
    assert ours.dequantised == set()
    rounded = load(tmp_path / "tiny.gguf", quantize="gguf")
    assert rounded.target.info.quantize == "gguf"
    want = logits_of(whole)
    assert (logits_of(rounded) - want).norm() <= 0.05 * want.norm()


def test_a_damaged_note_of_where_tensors_lie_is_made_again(gguf: Path, tmp_path: Path) -> None:
    names = set(GGUFTensors(gguf, CONFIG, "b" * 64))
    (note,) = (tmp_path / "cache" / "gguf").iterdir()
    for damage in ("", "{", "[]", '{"output_norm.weight": 1}'):
        note.write_text(damage)
        assert set(GGUFTensors(gguf, CONFIG, "b" * 64)) == names


def test_a_cut_file_is_refused(gguf: Path) -> None:
    gguf.write_bytes(gguf.read_bytes()[:400])
    with pytest.raises(ModelError, match="can't be read"):
        GGUFTensors(gguf, CONFIG, "d" * 64)


def test_gguf_needs_a_gguf_file_and_names_are_checked_first() -> None:
    pair = (make_model(head_dim=16), make_tokenizer())
    with pytest.raises(OptionError, match="quantize"):
        hasten.load(pair, quantize="gguf")
    with pytest.raises(OptionError, match="quantize"):
        hasten.load("no-such-model/at-all", quantize="int5")
    with pytest.raises(OptionError, match="kernels"):
        hasten.load("no-such-model/at-all", kernels="cuda")
    with pytest.raises(OptionError, match="engine"):
        hasten.load(pair, quantize="int8", engine="transformers")


METHODS = [
    "prompt-lookup",
    "racer",
    "recycling",
    "suffix",
    "adapld",
    "ptd",
    "lookahead",
    "early-exit:layerskip,exits=1,length=3",
    "del,head=own",
    "auto",
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_dtype": "int8"},
        {"kv_dtype": "bfloat16"},
        {"quantize": "int8"},
        {"quantize": "int4"},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_answers_what_plain_decoding_answers(
    method: str, dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "load_or_measure", lambda target: COSTS)
    model = make_model(head_dim=16).to(dtype)
    llm = hasten.load((model, make_tokenizer()), method="ar", kernels="native", **options)
    drafted = 0
    for prompt in ("abcabcabc", "to be or not to be, that is", "1 2 3 4 5 6 7"):
        want = llm.generate(prompt, max_new_tokens=40, ignore_eos=True)
        got = llm.generate(prompt, max_new_tokens=40, ignore_eos=True, method=method)
        assert got.tokens == want.tokens
        drafted += got.metrics.drafted
    assert drafted > 0


def test_a_model_the_kernels_cannot_run_is_refused_with_quantize() -> None:
    with pytest.raises(CapabilityError, match="multiple of 16"):
        hasten.load((make_model(), make_tokenizer()), quantize="int8")


def test_weights_are_rounded_on_the_cpu_alone() -> None:
    with pytest.raises(CapabilityError, match="quantize='int8' needs hasten's CPU kernels"):
        fused(random_model(llama(head_dim=16)), device="cuda", quantize="int8")

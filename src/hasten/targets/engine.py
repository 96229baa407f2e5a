"""Which of the two engines runs a model: hasten's own decoder, or transformers for all the rest."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from hasten.targets.base import Target

_INERT = frozenset({"training", "gradient_checkpointing", "padding_idx", "attention_dropout"})
"""Numbers a module holds that change nothing in evaluation."""
_KERNELS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_TRIED = 6
"""Tokens of the pass that compares a loaded model with its fused copy."""
_SPARE = 1.2
"""The fused engine's packed copy, its buffers and cache, as a multiple of the weights."""


def why_not_fused(
    config: Any,
    *,
    device: torch.device,
    device_map: Any = None,
    attn_implementation: str | None = None,
) -> str | None:
    """Why a model with this config can't run in the fused engine as asked; None when it can.

    A sentence without a full stop, to be put after "can't run NAME: ".
    """
    from hasten.targets.fused import FusedTarget

    if device_map is not None:
        return "device_map spreads it over devices, which only transformers does"
    if attn_implementation is not None:
        return f"attn_implementation={attn_implementation!r} is a choice of transformers' kernels"
    if device.type not in ("cpu", "cuda"):
        return f"the fused engine runs on cpu and cuda, not on {device.type}"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised (quantization_config)"
    if not type(config).__module__.startswith("transformers."):
        return "it brings code of its own"
    reason: str | None = FusedTarget.unsupported(config)
    return reason


def why_object_not_fused(model: torch.nn.Module) -> str | None:
    """Why a loaded model of a supported config must be run as it is.

    None when its plain weights are all there is to it, as far as its modules show.
    """
    from hasten.targets.fused_config import DTYPES

    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        return "it carries PEFT adapters"
    if not type(model).__module__.startswith("transformers."):
        return f"{type(model).__name__} is not a class of transformers"
    if getattr(model, "is_quantized", False):
        return "its weights are quantised"
    parameters = list(model.parameters())
    if len({p.device for p in parameters}) != 1 or parameters[0].is_meta:
        return "it is spread over several devices"
    if len({p.dtype for p in parameters}) != 1:
        return "it holds several dtypes"
    if parameters[0].dtype not in DTYPES:
        return f"the fused decoder has no {parameters[0].dtype}"
    if not all(_plain(p) for p in parameters):
        return "its weights are not plain tensors"
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return "it has forward hooks"
    if any(m.training for m in model.modules()):
        return "a part of it is in training mode"
    if (changed := _why_not_stock(model)) is not None:
        return changed
    if not _room_for_copy(parameters):
        return "there is no memory left for the packed copy of its weights"
    return None


def why_weights_do_not_fit(config: Any, tensors: Mapping[str, Any]) -> str | None:
    """Why these tensors aren't those transformers expects for a supported config; None if they are.

    Names and shapes are compared. A tied head may be there or not; rotary tables, which old
    checkpoints store, are computed anew.
    """
    expected = {n: tuple(t.shape) for n, t in _stock(config).state_dict().items()}
    found = {n: tuple(getattr(t, "shape", ())) for n, t in tensors.items() if "rotary_emb" not in n}
    if config.tie_word_embeddings and "lm_head.weight" not in found:
        del expected["lm_head.weight"]
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            return f"it has no tensor {name!r}, which its config asks for"
        if name not in expected:
            return f"it has a tensor {name!r}, which its config doesn't ask for"
        if found[name] != expected[name]:
            return f"tensor {name!r} is {found[name]}, its config says {expected[name]}"
    return None


def why_copy_differs(
    model: torch.nn.Module, target: Target, cache: torch.dtype | None = None
) -> str | None:
    """Why the fused copy `target` doesn't stand for the loaded model; None when both agree.

    One pass of a few tokens through each. Nothing of the model changes. `cache` is the dtype asked
    for keys and values: narrower ones than the model's may differ as bfloat16 does.
    """
    info = target.info
    ids = [(2 * i + 1) * info.vocab_size // (2 * _TRIED) for i in range(_TRIED)]
    ids = ids[: info.context_limit]
    narrow = cache is not None and cache.itemsize < info.dtype.itemsize
    device, limit = info.device, _tolerance(torch.bfloat16 if narrow else info.dtype)
    try:
        with torch.inference_mode(), torch.autocast(device.type, enabled=False):
            rows = torch.tensor([ids], dtype=torch.int64, device=device)
            right = model(input_ids=rows, use_cache=False).logits[0].float()
    except Exception as problem:  # a model's own error, of any kind: transformers may know better
        return f"its own forward pass failed ({type(problem).__name__})"
    sequence = target.open()
    got = target.prefill(sequence, ids, all_logits=True).logits
    target.close(sequence)
    assert got is not None
    error = _difference(got.float(), right)
    if error <= limit:
        return None
    return (
        f"it doesn't compute what its config says: logits differ by {error:.2g} of their scale "
        f"(limit {limit:g})"
    )


def _tolerance(dtype: torch.dtype) -> float:
    """As `hasten.targets.capabilities.tolerance`, for two programs that do the same."""
    if dtype == torch.bfloat16:
        return 0.15
    reduced = torch.get_float32_matmul_precision() != "highest"
    return 0.05 if dtype == torch.float16 or reduced else 1e-4


def _difference(got: torch.Tensor, right: torch.Tensor) -> float:
    """Largest difference as a share of the scale; numbers that aren't finite must coincide."""
    finite = right.isfinite()
    if got.shape != right.shape or not torch.equal(finite, got.isfinite()):
        return float("inf")
    got, right = got[finite], right[finite]
    if not right.numel():
        return 0.0
    scale = (right - right.mean()).abs().max().clamp_min(1e-12)
    return float((got - right).abs().max() / scale)


def _stock(config: Any) -> torch.nn.Module:
    """The model transformers makes of a supported config, without memory for its weights."""
    import transformers

    from hasten.targets.fused_config import ARCHITECTURES

    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    kind = getattr(transformers, ARCHITECTURES[config.model_type])
    with torch.device("meta"):
        model: torch.nn.Module = kind(config)
    return model


def _why_not_stock(model: Any) -> str | None:
    """The first module that isn't as transformers makes it for the config; None when all are."""
    if getattr(model.config, "_attn_implementation", "eager") not in _KERNELS:
        return "its attention is none of transformers' own"
    stock = dict(_stock(model.config).named_modules())
    found = dict(model.named_modules())
    for name in sorted(stock.keys() | found.keys()):
        mine, theirs = found.get(name), stock.get(name)
        where = name or type(model).__name__
        if mine is None or theirs is None:
            return f"its module {where} is {'missing' if mine is None else 'an addition'}"
        if type(mine) is not type(theirs):
            return f"its module {where} is a {type(mine).__name__}, not a {type(theirs).__name__}"
        for key in sorted(vars(mine).keys() | vars(theirs).keys()):
            value, usual = vars(mine).get(key), vars(theirs).get(key)
            if callable(value) and callable(getattr(type(mine), key, None)):
                return f"{key} of its module {where} is replaced"
            number = isinstance(value, (int, float)) or isinstance(usual, (int, float))
            if number and key not in _INERT and not key.startswith("_") and value != usual:
                return f"{key} of its module {where} is {value}, its config says {usual}"
    return None


def _plain(parameter: torch.nn.Parameter) -> bool:
    return type(parameter.data) is torch.Tensor and parameter.is_floating_point()


def _room_for_copy(parameters: list[torch.nn.Parameter]) -> bool:
    need = _SPARE * sum(p.numel() * p.element_size() for p in parameters)
    device = parameters[0].device
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return need <= free
    import psutil

    return need <= float(psutil.virtual_memory().available)

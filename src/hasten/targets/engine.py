"""Which of the two engines runs a model: hasten's own decoder, or transformers for all the rest."""

from __future__ import annotations

from typing import Any

import torch

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
    """Why a loaded model must be run as it is, whatever its config says.

    None when its plain weights are all there is to it.
    """
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
    if not all(_plain(p) for p in parameters):
        return "its weights are not plain tensors"
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return "it has forward hooks"
    if not _room_for_copy(parameters):
        return "there is no memory left for the packed copy of its weights"
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

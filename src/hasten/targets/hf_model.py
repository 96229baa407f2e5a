"""The facts of a transformers model object, and how its forward is called. Reads, never writes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hasten.errors import CapabilityError

NO_LIMIT = 2**31 - 1
"""Context limit of a model whose config names none (recurrent models, ALiBi)."""

LENGTH_NAMES = ("max_position_embeddings", "max_seq_len", "n_positions", "max_sequence_length")
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")
"""Rotary variants whose angles depend on the longest position of the pass."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the target knows of its model.

    model            the object that is called (it may be a wrapper)
    base             the transformers model inside
    config           its text config
    attention        ``"sdpa"``, ``"eager"``, ``"flash_attention_2"``, ...
    cache_name       the forward's argument for the cache
    keep_name        the forward's argument that limits the logits to the last rows, or ""
    takes_positions  the forward takes ``position_ids``
    layers           the decoder layers, or None when they weren't found
    whole_prompt     a prompt's rotary angles depend on its length: it must run in one pass
    """

    model: Any
    base: Any
    config: Any
    architecture: str
    attention: str
    cache_name: str
    keep_name: str
    takes_positions: bool
    takes_return_dict: bool
    embedding: Any
    embedding_rows: int
    layers: torch.nn.ModuleList | None
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_limit: int
    dtype: torch.dtype
    device: torch.device
    quantized: bool
    whole_prompt: bool


def inspect_model(model: Any) -> ModelFacts:
    """Read a model's facts; CapabilityError names what keeps it from being a target."""
    base = _unwrap(model)
    config = base.config.get_text_config(decoder=True)
    if getattr(base.config, "is_encoder_decoder", False):
        raise CapabilityError(
            f"{type(base).__name__} is an encoder-decoder; hasten runs causal models"
        )
    require_eval(model)
    names, open_ended = _forward_names(base)
    cache_name = next((n for n in CACHE_NAMES if n in names), "")
    if not cache_name:
        raise CapabilityError(
            f"{type(base).__name__}.forward takes no cache (none of {', '.join(CACHE_NAMES)})"
        )
    embedding = base.get_input_embeddings()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return ModelFacts(
        model=model,
        base=base,
        config=config,
        architecture=type(base).__name__,
        attention=getattr(config, "_attn_implementation", None) or "eager",
        cache_name=cache_name,
        keep_name="logits_to_keep" if "logits_to_keep" in names else "",
        takes_positions="position_ids" in names,
        takes_return_dict="return_dict" in names or open_ended,
        embedding=embedding,
        embedding_rows=int(embedding.weight.shape[0]),
        layers=_decoder_layers(base, config.num_hidden_layers),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=_head_rows(base, config),
        context_limit=_context_limit(config),
        dtype=_compute_dtype(base, embedding),
        device=_input_device(embedding),
        quantized=getattr(base, "hf_quantizer", None) is not None,
        whole_prompt=_rope_types(rope) & set(LENGTH_DEPENDENT_ROPE) != set(),
    )


def require_eval(model: Any) -> None:
    """Refuse a model in training mode: its dropout would make every pass another one."""
    if model.training:
        raise CapabilityError(
            "the model is in training mode, where dropout changes answers; call model.eval() first"
        )


def _unwrap(model: Any) -> Any:
    """The transformers model inside a compiled or PEFT-wrapped one."""
    inner = getattr(model, "_orig_mod", model)
    if callable(getattr(inner, "get_base_model", None)):
        adapter = getattr(inner, "active_peft_config", None)
        if getattr(adapter, "is_prompt_learning", False):
            raise CapabilityError(
                "prompt-learning adapters (prompt, prefix, p-tuning) put rows of their own before "
                "the prompt, which hasten can't do; use a LoRA-like adapter or the bare model"
            )
        inner = inner.get_base_model()
    if not hasattr(inner, "config") or not hasattr(inner, "get_input_embeddings"):
        raise CapabilityError(
            f"{type(model).__name__} isn't a transformers causal language model (it has no config)"
        )
    return inner


def _forward_names(base: Any) -> tuple[set[str], bool]:
    """Argument names of the forward, and whether it takes any other."""
    for function in (base.forward, type(base).forward):
        parameters = inspect.signature(function).parameters
        if "input_ids" in parameters:
            kinds = {p.kind for p in parameters.values()}
            return set(parameters), inspect.Parameter.VAR_KEYWORD in kinds
    raise CapabilityError(f"{type(base).__name__}.forward takes no input_ids")


def _decoder_layers(base: Any, count: int) -> torch.nn.ModuleList | None:
    """The list of `count` decoder layers: the outermost one of that length."""
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else base
    for root in (decoder, base):
        for module in root.modules():
            if isinstance(module, torch.nn.ModuleList) and len(module) == count:
                return module
    return None


def _head_rows(base: Any, config: Any) -> int:
    head = base.get_output_embeddings()
    rows = getattr(head, "out_features", None) or getattr(config, "vocab_size", None)
    return int(rows) if rows else int(head.weight.shape[0])


def _context_limit(config: Any) -> int:
    for name in LENGTH_NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return NO_LIMIT


def _compute_dtype(base: Any, embedding: Any) -> torch.dtype:
    dtype: torch.dtype = embedding.weight.dtype
    return dtype if dtype.is_floating_point else base.dtype


def _input_device(embedding: Any) -> torch.device:
    """Where ids go; an offloaded embedding's weight is on "meta", its hook knows better."""
    device: torch.device = embedding.weight.device
    if device.type == "meta":
        hook = getattr(embedding, "_hf_hook", None)
        return torch.device(getattr(hook, "execution_device", None) or "cpu")
    return device


def _rope_types(rope: Any) -> set[str]:
    """Names of the rotary variants in a config's rope parameters (one set, or one a layer type)."""
    sets = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return {str(s.get("rope_type", s.get("type", "default"))) for s in sets}


@contextmanager
def tapped(facts: ModelFacts, wanted: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Catch the hidden states of layers during one call; the hooks are gone afterwards.

    ``got[i]`` is what layer i is handed (the output of layer i - 1, or the embeddings), and
    ``got[num_layers]`` what the last layer gives, before the final norm. The model's own
    ``output_hidden_states`` isn't used: it norms the last one and leaves hooks behind.
    """
    got: dict[int, torch.Tensor] = {}
    handles = []
    layers: Sequence[Any] = list(facts.layers or ())

    def before(index: int) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            got[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    def after(_module: Any, _args: Any, output: Any) -> None:
        got[facts.num_layers] = output if isinstance(output, torch.Tensor) else output[0]

    try:
        for index in wanted:
            if index == facts.num_layers:
                handles.append(layers[-1].register_forward_hook(after))
            else:
                handles.append(
                    layers[index].register_forward_pre_hook(before(index), with_kwargs=True)
                )
        yield got
    finally:
        for handle in handles:
            handle.remove()

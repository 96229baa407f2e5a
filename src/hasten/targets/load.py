"""From what the user names to a target: finds the model, picks the engine, reads the weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from hasten.errors import CapabilityError, ModelError, OptionError
from hasten.targets.base import Target
from hasten.targets.catalog import (
    KNOWN_WEIGHTS,
    ModelSource,
    prepare,
    repair,
    resolve,
    source_gguf,
)
from hasten.targets.checkpoint import (
    SafetensorsFolder,
    eos_ids,
    has_safetensors,
    weights_fingerprint,
)
from hasten.targets.engine import (
    why_copy_differs,
    why_not_fused,
    why_object_not_fused,
    why_weights_do_not_fit,
)
from hasten.targets.exactness import why_not_exact
from hasten.targets.hf_model import require_eval
from hasten.targets.load_options import (
    FusedOptions,
    Kernels,
    LoadOptions,
    check_names,
    default_device,
    read_cache_dtype,
    read_device,
    read_dtype,
    read_engine,
    read_pair,
)
from hasten.targets.quantized import GGUFTensors, Quantize

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run: its target, its tokenizer (transformers' kind) and its source."""

    target: Target
    tokenizer: Any
    source: ModelSource


def load_target(
    model: Any = None,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    engine: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    attn_implementation: str | None = None,
    device_map: Any = None,
    quantize: Quantize | None = None,
    kernels: Kernels = "auto",
    kv_dtype: str | torch.dtype | None = None,
    exact: bool = False,
) -> Loaded:
    """Load a model as a target.

    model                None (the embedded default), an alias, a folder, a ``.gguf`` file, a
                         Hugging Face id, a loaded transformers model, or (model, tokenizer)
    tokenizer            a tokenizer or where to load one from; default: the model's own. Needed
                         with a loaded model
    dtype                ``"float32"``, ``"bfloat16"``, ``"float16"`` or a torch dtype; default: the
                         checkpoint's own, float32 for the embedded model
    device               ``"cpu"``, ``"cuda"``, ``"mps"``, ...; default: CUDA where there is one
    engine               ``"auto"`` takes hasten's own decoder where it can run the model, else
                         transformers; the other two insist
    trust_remote_code    run Python code that comes with the model
    revision             of a hub model: branch, tag or commit
    attn_implementation  transformers' attention kind: means the transformers engine
    device_map           transformers' placement over devices: means the transformers engine

    quantize             ``"int8"`` or ``"int4"`` rounds the weights in groups of 32; ``"gguf"``
                         takes a GGUF file's own blocks as they are. The inputs of products are
                         rounded to 8 bits then. Lossless means: equal to plain decoding of that
                         model
    kernels              of the fused engine: ``"native"`` (hasten's own, compiled once for this
                         CPU), ``"torch"``, or ``"auto"``: native where they are quick
                         (AVX-512)
    kv_dtype             of keys and values with native kernels: ``"float32"``, ``"bfloat16"`` or
                         ``"int8"`` (rounded, a scale for each token of each head); default: the
                         dtype. Lossless means: equal to plain decoding with the same
    exact                insist that a row's logits have the same bits whatever else is in its pass,
                         checked at load, so that speculation in 16 bits or fewer equals plain
                         decoding always. With native kernels it does anyway

    A loaded model is never changed. The fused engine keeps a packed copy of its weights, so later
    changes to the model are not seen. Raises ModelError (not found, incomplete, can't be read),
    OptionError (contradictory or unknown options), CapabilityError (``engine="fused"`` can't run
    it).
    """
    if isinstance(model, tuple):
        model, tokenizer = read_pair(model, tokenizer)
    check_names(quantize, kernels)
    options = LoadOptions(
        engine=read_engine(engine),
        dtype=read_dtype(dtype),
        device=read_device(device),
        device_map=device_map,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        revision=revision,
        fused=FusedOptions(quantize, kernels, read_cache_dtype(kv_dtype), exact),
    )
    if device is not None and device_map is not None:
        raise OptionError("device_map", "contradicts device", "Give one of the two")
    if model is None or isinstance(model, (str, Path)):
        return _load_named(resolve(model), tokenizer, options)
    return _load_object(model, tokenizer, options)


def _tokenizer(given: Any, home: Path | str, options: LoadOptions) -> Any:
    """The tokenizer given, or loaded from where `given` says, or from the model's own folder."""
    if given is not None and not isinstance(given, (str, Path)):
        if not (callable(given) and hasattr(given, "decode")):
            raise OptionError(
                "tokenizer", f"a {type(given).__name__} is none", "Give a transformers tokenizer"
            )
        return given
    from transformers import AutoTokenizer

    where = home
    if given is not None:
        where = prepare(resolve(given), remote_code=options.trust_remote_code)
    try:
        return AutoTokenizer.from_pretrained(where, trust_remote_code=options.trust_remote_code)
    except Exception as error:  # the tokenizers library raises the bare class
        raise ModelError(
            f"no tokenizer can be loaded from {where}: {_first_line(error)}. Give one: tokenizer=."
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0].rstrip(".")


# -- a model by name -------------------------------------------------------------------------------


def _load_named(source: ModelSource, tokenizer: Any, options: LoadOptions) -> Loaded:
    if options.revision is not None and source.kind != "hub":
        raise OptionError("revision", f"only a Hugging Face model has one, {source.name} has none")
    folder = prepare(source, revision=options.revision, remote_code=options.trust_remote_code)
    try:
        return _open_folder(source, folder, tokenizer, options)
    except (OptionError, CapabilityError):
        raise
    except (ModelError, OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if repair(source):  # the files in the cache were damaged, and have been made again
            return _open_folder(source, folder, tokenizer, options)
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{source.name} can't be loaded: {_first_line(error)}.") from error


def _open_folder(source: ModelSource, folder: Path, tokenizer: Any, options: LoadOptions) -> Loaded:
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    tokenizer = _tokenizer(tokenizer, folder, options)
    has_generation = (folder / "generation_config.json").is_file()
    generation = GenerationConfig.from_pretrained(folder) if has_generation else None
    tensors = SafetensorsFolder(folder) if has_safetensors(folder) else {}
    fingerprint = source.fingerprint or weights_fingerprint(config.model_type, tensors)
    fingerprint = KNOWN_WEIGHTS.get(fingerprint, fingerprint)
    own_dtype = source.default_dtype or _own_dtype(config, tensors)
    source = replace(source, fingerprint=fingerprint, default_dtype=own_dtype)
    dtype = options.dtype or own_dtype
    facts: dict[str, Any] = {
        "name": source.name,
        "eos_ids": eos_ids(generation, config, tokenizer),
        "fingerprint": fingerprint,
    }
    device = options.device or default_device()
    reason = why_not_fused(
        config,
        device=device,
        device_map=options.device_map,
        attn_implementation=options.attn_implementation,
    )
    if reason is None and not tensors:
        reason = "its weights are not in safetensors files"
    if reason is None:
        reason = why_weights_do_not_fit(config, tensors)
    if _choose(options, reason, source.name) == "transformers":
        model = _transformers_model(source, folder, dtype, options)
        return Loaded(_transformers_target(model, facts), tokenizer, source)
    blocks = _gguf_blocks(source, config) if options.fused.quantize == "gguf" else tensors
    target = _fused_target(config, blocks, dtype, device, facts, options.fused)
    return Loaded(target, tokenizer, source)


def _gguf_blocks(source: ModelSource, config: Any) -> Mapping[str, Any]:
    """The tensors of the GGUF file that the model came from, quantized as they are there."""
    if source.kind not in ("embedded", "gguf"):
        raise OptionError(
            "quantize",
            f"'gguf' takes a GGUF file's own blocks, and {source.name} comes from none",
            "Take 'int8' or 'int4'",
        )
    return GGUFTensors(source_gguf(source.location), config, source.fingerprint)


def _own_dtype(config: Any, tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    """What the config says, else the first float tensor's dtype, else float32."""
    named = getattr(config, "dtype", None)
    if isinstance(named, torch.dtype):
        return named
    return next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32)


def _transformers_model(
    source: ModelSource, folder: Path, dtype: torch.dtype, options: LoadOptions
) -> Any:
    from transformers import AutoModelForCausalLM

    named = {
        "attn_implementation": options.attn_implementation,
        "device_map": options.device_map,
    }
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        trust_remote_code=options.trust_remote_code,
        output_loading_info=True,
        **{name: value for name, value in named.items() if value is not None},
    )
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would go on with random numbers in their place
        raise ModelError(
            f"{source.name} is no complete causal language model: {len(missing)} of its weights "
            f"are missing ({missing[0]}, ...)."
        )
    if options.device_map is None and getattr(model, "quantization_method", None) is None:
        model = model.to(options.device or default_device())
    return model.eval()


# -- a loaded model --------------------------------------------------------------------------------


def _load_object(model: Any, tokenizer: Any, options: LoadOptions) -> Loaded:
    is_module = isinstance(model, torch.nn.Module) and hasattr(model, "config")
    if not is_module or next(model.parameters(), None) is None:
        raise OptionError(
            "model",
            f"a {type(model).__name__} is no model",
            "Give a name, a path, a loaded transformers model or (model, tokenizer)",
        )
    options.refuse_for_loaded_model()
    require_eval(model)
    if tokenizer is None:
        raise OptionError("tokenizer", "is needed with a loaded model", "Give (model, tokenizer)")
    config = model.config
    home = str(getattr(config, "_name_or_path", "") or "")
    tokenizer = _tokenizer(tokenizer, home, options)
    weights = model.state_dict()
    fingerprint = weights_fingerprint(config.model_type, weights)
    fingerprint = KNOWN_WEIGHTS.get(fingerprint, fingerprint)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    name = Path(home).name if home else type(model).__name__
    source = ModelSource("object", home, name, fingerprint, dtype)
    facts: dict[str, Any] = {
        "name": name,
        "eos_ids": eos_ids(getattr(model, "generation_config", None), config, tokenizer),
        "fingerprint": fingerprint,
    }
    device = next(model.parameters()).device
    reason = (
        why_not_fused(config, device=device)
        or why_object_not_fused(model)
        or why_weights_do_not_fit(config, weights)
    )
    if options.fused.quantize == "gguf":
        raise OptionError("quantize", "'gguf' can't be given with a loaded model", "Name the file")
    if _choose(options, reason, name) == "fused":
        facts["copy"] = True
        target = _fused_target(config, weights, dtype, device, facts, options.fused)
        reason = None
        if not options.fused.quantize:
            reason = why_copy_differs(model, target, options.fused.kv_dtype)
        del facts["copy"]
        if _choose(options, reason, name) == "fused":
            return Loaded(target, tokenizer, source)
    return Loaded(_transformers_target(model, facts), tokenizer, source)


# -- engines ---------------------------------------------------------------------------------------


def _choose(options: LoadOptions, reason: str | None, name: str) -> str:
    """The engine to take, given why the fused one can't run the model (None: it can)."""
    engine, asked = options.engine, options.fused.named()
    if asked is not None:
        if engine == "transformers":
            raise OptionError("engine", f"'transformers' has no {asked}", "Take 'auto' or 'fused'")
        if reason is not None:
            raise CapabilityError(
                f"{asked} is the fused engine's, which can't run {name}: {reason}"
            )
    if engine == "fused" and reason is not None:
        raise CapabilityError(
            f"engine='fused' can't run {name}: {reason}. Take engine='auto' or 'transformers'."
        )
    if engine == "auto" and reason is not None:
        _log.info("%s runs in transformers: %s", name, reason)
    return "fused" if engine != "transformers" and reason is None else "transformers"


def _fused_target(
    config: Any,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    facts: Mapping[str, Any],
    fused: FusedOptions,
) -> Target:
    from hasten.targets.fused import FusedTarget

    target = FusedTarget.from_tensors(
        config,
        tensors,
        dtype=dtype,
        device=device,
        quantize=fused.quantize,
        kernels=_kernels(config, dtype, device, fused),
        kv_dtype=fused.kv_dtype,
        **facts,
    )
    if isinstance(tensors, GGUFTensors) and tensors.dequantised:
        _log.warning(
            "%s: %d tensors have GGUF types of other groups; they were rounded to 8 bits anew",
            target.info.name,
            len(tensors.dequantised),
        )
    if fused.exact and (reason := why_not_exact(target)) is not None:
        raise CapabilityError(f"exact=True: {target.info.name} isn't bit-exact here, {reason}")
    return target


def _kernels(config: Any, dtype: torch.dtype, device: torch.device, fused: FusedOptions) -> Kernels:
    """The kernels asked for; the exact ones, also where they aren't the quicker ones, for exact."""
    from hasten.native.library import why_not_native
    from hasten.targets.fused_config import head_dim

    if fused.exact and fused.kernels == "auto":
        return "auto" if why_not_native(dtype, device, head_dim(config)) else "native"
    return fused.kernels


def _transformers_target(model: Any, facts: Mapping[str, Any]) -> Target:
    from hasten.targets.transformers import TransformersTarget

    return TransformersTarget(model, **facts)

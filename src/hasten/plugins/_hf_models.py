"""The LLM behind a user's model object: made once, gone with it, made anew when it changes.

Nothing here keeps a model alive. A `TransformersTarget` runs the user's own object, so its
references to it are made weak; the fused engine holds a copy of its own.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch

from hasten.api import LLM
from hasten.errors import HastenError
from hasten.methods import MethodSpec
from hasten.targets.base import Target
from hasten.targets.checkpoint import weights_fingerprint
from hasten.targets.hf_model import ModelFacts, inspect_model
from hasten.targets.load import load_target
from hasten.targets.transformers import TransformersTarget


@dataclass(frozen=True, slots=True)
class _Kept:
    """An LLM, and the state of the model it was made for."""

    llm: LLM
    state: tuple[Any, ...]


_KEPT: weakref.WeakKeyDictionary[Any, dict[tuple[str, int], _Kept]] = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()


def llm_for(model: Any, spec: MethodSpec, *, engine: str, tokenizer: Any) -> LLM:
    """The model's LLM with this method prepared.

    The first call for a model loads it (a self-check of a few passes) and prepares the method.
    `tokenizer` only serves methods that compare vocabularies; None: there is none. Raises
    CapabilityError, OptionError, VocabularyError or ModelError.
    """
    facts = inspect_model(model)
    with _LOCK:
        kept = _KEPT.setdefault(model, {})
        key = (engine, id(tokenizer))
        found = kept.get(key)
        if found is None or found.state != _state(model, facts, found.llm.target):
            kept.pop(key, None)
            llm = _load(model, spec, engine, tokenizer)
            kept[key] = _Kept(llm, _state(model, facts, llm.target))
            return llm
    found.llm.prepare(spec)
    return found.llm


def _load(model: Any, spec: MethodSpec, engine: str, tokenizer: Any) -> LLM:
    """The LLM of a loaded model, without strong references to it."""
    device = next(model.parameters()).device.type
    # What is checked at load is the model's own precision, whatever surrounds the first call.
    with torch.autocast(device if device != "meta" else "cpu", enabled=False):
        loaded = load_target(model, tokenizer=tokenizer or _NoTokenizer(), engine=engine)
        llm = LLM(replace(loaded, tokenizer=tokenizer), method=spec)
    target = loaded.target
    if isinstance(target, TransformersTarget):
        target.facts = _weak(target.facts)
    return llm


def _weak(facts: ModelFacts) -> ModelFacts:
    """The same facts, which don't keep the model or a part of it alive."""
    parts = {name: getattr(facts, name) for name in ("model", "base", "embedding", "layers")}
    weak: dict[str, Any] = {n: weakref.proxy(p) for n, p in parts.items() if p is not None}
    return replace(facts, **weak)


class _NoTokenizer:
    """Stands where loading asks for a tokenizer: `generate` works on ids."""

    def __call__(self, *_args: Any, **_options: Any) -> Any:
        raise HastenError("generate works on ids: there is no tokenizer here")

    decode = __call__


def _state(model: Any, facts: ModelFacts, target: Target) -> tuple[Any, ...]:
    """What an LLM depends on: compared before each call.

    A target that runs the model itself sees new weights by itself, and depends on how the model is
    built and held. A copy also depends on every weight and on what is hooked on or put over it.
    """
    held = (
        facts.architecture,
        facts.attention,
        facts.dtype,
        facts.device,
        facts.vocab_size,
        facts.embedding_rows,
        facts.context_limit,
        id(facts.embedding),
        tuple(id(layer) for layer in facts.layers or ()),
    )
    if isinstance(target, TransformersTarget):
        return held
    modules = tuple(
        (id(m), len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m), m.training)
        for m in model.modules()
    )
    tensors = [*model.parameters(), *model.buffers()]
    versions = tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors)
    # Changes made through `.data` leave no version behind: a few numbers of each weight are read.
    return (*held, modules, versions, weights_fingerprint(facts.architecture, model.state_dict()))

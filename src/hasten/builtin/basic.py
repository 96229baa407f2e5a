"""Plain decoding, prompt lookup and a draft model: options and how each is put together."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.builtin.common import opt
from hasten.drafters.ar import Plain
from hasten.drafters.draft_model import DraftModel
from hasten.drafters.prompt_lookup import PromptLookup
from hasten.errors import CapabilityError, OptionError
from hasten.methods import MakeRequest, Method, MethodContext, NoOptions
from hasten.policies.base import FixedPolicy
from hasten.vocabulary import check_same_vocabulary


def _check_nodes(name: str, nodes: int) -> None:
    if nodes < 1:
        raise OptionError(f"{name}.nodes", f"must be at least 1 (1 is plain decoding), got {nodes}")


def _plain(options: NoOptions, context: MethodContext) -> MakeRequest:
    return lambda: (Plain(), FixedPolicy(nodes=1))


@dataclass(frozen=True, slots=True)
class PromptLookupOptions:
    """Options of ``prompt-lookup``."""

    nodes: int = opt(6, "rows per pass, the root included: copies are at most nodes - 1 long")
    max_ngram: int = opt(3, "longest n-gram looked up first")
    min_ngram: int = opt(1, "shortest n-gram trusted")
    mode: str = opt("latest", "which occurrence is copied: latest, hf or original")


def _prompt_lookup(options: PromptLookupOptions, context: MethodContext) -> MakeRequest:
    _check_nodes("prompt-lookup", options.nodes)

    def make() -> tuple[PromptLookup, FixedPolicy]:
        drafter = PromptLookup(
            num_tokens=max(options.nodes - 1, 1),
            max_ngram=options.max_ngram,
            min_ngram=options.min_ngram,
            mode=options.mode,
            eos_ids=context.target.info.eos_ids,
        )
        return drafter, FixedPolicy(nodes=options.nodes)

    make()  # bad options are refused now, not at the first request
    return make


@dataclass(frozen=True, slots=True)
class DraftModelOptions:
    """Options of ``draft-model``."""

    model: str = opt(
        "", "the draft model: a Hugging Face id, a folder, a .gguf file or a known alias"
    )
    nodes: int = opt(5, "rows per pass, the root included")
    draw: bool = opt(True, "draw from the draft model; off: take its argmax")
    threshold: float = opt(0.0, "stop drafting when the draft model is less sure than this")


def _draft_model(options: DraftModelOptions, context: MethodContext) -> MakeRequest:
    _check_nodes("draft-model", options.nodes)
    if not options.model:
        raise OptionError(
            "draft-model.model", "is missing", "Name one: draft-model,model=ID_OR_PATH"
        )
    model, tokenizer = context.load(options.model)
    if not model.capabilities.rollback:
        raise CapabilityError(
            f"{model.info.name} can't be a draft model: its cache can't be cut back. Choose another"
        )
    check_same_vocabulary(context.tokenizer, tokenizer, context.target.info, model.info)

    def make() -> tuple[DraftModel, FixedPolicy]:
        drafter = DraftModel(
            model,
            vocab_size=context.target.info.vocab_size,
            num_tokens=max(options.nodes - 1, 1),
            draw=options.draw,
            threshold=options.threshold,
        )
        return drafter, FixedPolicy(nodes=options.nodes)

    make()
    return make


METHODS = (
    Method(
        name="ar",
        summary="plain decoding, one token a pass: the baseline",
        prepare=_plain,
        requires=(),
    ),
    Method(
        name="prompt-lookup",
        summary="copies what followed an earlier occurrence of the last few tokens",
        prepare=_prompt_lookup,
        options=PromptLookupOptions,
        variants={
            "hf": {"mode": "hf", "max_ngram": 2, "nodes": 11},
            "original": {"mode": "original", "max_ngram": 3, "nodes": 11},
        },
    ),
    Method(
        name="draft-model",
        summary="a smaller model with the same vocabulary drafts a chain",
        prepare=_draft_model,
        options=DraftModelOptions,
        needs="a draft model",
    ),
)

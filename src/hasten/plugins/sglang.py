"""hasten's drafters in SGLang, with trees: ``--speculative-algorithm HASTEN``.

**Untested on a GPU**: what is tested is the contract, with a stand-in. Written for SGLang 0.5.23;
docs/plugins/sglang.md says what it relies on.

SGLang loads `register` through the entry point group ``sglang.srt.plugins``. It adds an algorithm
whose worker is SGLang's own n-gram worker, which verifies trees; only where that asks its corpus
for drafts does it ask `hasten.plugins._sglang_corpus.Corpus`. The method comes from the
environment: ``HASTEN_SGLANG="suffix"``. Nothing of SGLang, nor anything heavy, is imported before
it is needed.
"""

from __future__ import annotations

import inspect
import logging
import os
from importlib import import_module
from typing import Any

from hasten.errors import CapabilityError, OptionError

logger = logging.getLogger(__name__)

VARIABLE = "HASTEN_SGLANG"
ALGORITHM = "HASTEN"
TESTED_WITH = "0.5.23"

_SPEC = "sglang.srt.speculative.spec_info"
_REGISTRY = "sglang.srt.speculative.spec_registry"
_WORKER = "sglang.srt.speculative.ngram_worker"

_DEVICES = ("cuda", "cpu", "xpu")
_ROWS, _REQUESTS = 12, 48
"""Nodes of a tree and requests at a time where nobody says: SGLang's own for n-grams."""


def register() -> None:
    """SGLang's entry point: add the algorithm, or say in one line why not. Never raises."""
    try:
        spec, registry = import_module(_SPEC), import_module(_REGISTRY)
        problem = _unknown(spec, registry)
        if not problem:
            algorithms = spec.SpeculativeAlgorithm
            kind = _algorithm(registry.CustomSpecAlgo, algorithms.NGRAM)
            algorithms.register(ALGORITHM, supports_overlap=True, spec_class=kind)(_worker)
    except Exception as error:  # an engine without us is better than no engine
        problem = f"{type(error).__name__}: {error}"
    if problem:
        logger.warning(
            "no speculative algorithm %s in this SGLang (written for %s): %s",
            ALGORITHM,
            TESTED_WITH,
            problem,
        )


def _unknown(spec: Any, registry: Any) -> str:
    """What of SGLang isn't as it was; empty when all is."""
    algorithms: Any = getattr(spec, "SpeculativeAlgorithm", None)
    if not hasattr(algorithms, "NGRAM") or not hasattr(algorithms, "register"):
        return "SpeculativeAlgorithm has no NGRAM, or no register()"
    wanted = {"supports_overlap", "spec_class"}
    if not wanted <= set(inspect.signature(algorithms.register).parameters):
        return "SpeculativeAlgorithm.register() takes other arguments"
    base = getattr(registry, "CustomSpecAlgo", None)
    names = ("is_ngram", "has_draft_kv", "handle_server_args")
    missing = [name for name in names if not hasattr(base, name)]
    return f"CustomSpecAlgo lacks {', '.join(missing)}" if missing else ""


def _algorithm(base: type, ngram: Any) -> type:
    """`base` as an algorithm that is treated like SGLang's own NGRAM."""

    def missing(self: Any, name: str) -> Any:
        # The scheduler asks more than the base class answers; what it asks is NGRAM's to say.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(ngram, name)

    return type(
        "HastenAlgorithm",
        (base,),
        {
            "is_ngram": lambda self: True,
            "has_draft_kv": lambda self: False,
            "handle_server_args": lambda self, server_args: settle(server_args),
            "__getattr__": missing,
        },
    )


def settle(server_args: Any) -> None:
    """What SGLang settles for NGRAM by name, settled for us. Raises OptionError for what its worker
    can't do."""
    args = server_args
    if args.device not in _DEVICES:
        raise OptionError("device", f"{ALGORITHM} runs on {', '.join(_DEVICES)}, not {args.device}")
    if getattr(args, "enable_dp_attention", False):
        raise OptionError("enable-dp-attention", f"{ALGORITHM} can't be combined with it")
    if args.device == "cpu":
        args.disable_overlap_schedule = True
    if args.max_running_requests is None:
        args.max_running_requests = _REQUESTS
    args.enable_mixed_chunk = False
    if args.speculative_num_draft_tokens is None:
        args.speculative_num_draft_tokens = _ROWS
    rows = args.speculative_num_draft_tokens
    if rows < 2:
        raise OptionError("speculative-num-draft-tokens", f"must be at least 2, got {rows}")
    breadth = args.speculative_eagle_topk = args.speculative_ngram_max_bfs_breadth
    if args.speculative_num_steps is None:
        args.speculative_num_steps = max(rows // breadth, 1)
    # A step adds `rows` tokens at most, and the worker hands over no more than this many.
    depth = args.speculative_ngram_max_trie_depth
    args.speculative_ngram_max_trie_depth = max(depth, 2 * rows)
    if breadth > 1 and (args.page_size or 1) > 1 and args.attention_backend != "flashinfer":
        raise OptionError(
            "page-size",
            f"trees need page size 1 or the flashinfer backend, got {args.page_size} with "
            f"{args.attention_backend or 'no backend named'}",
            "Or draft chains: --speculative-ngram-max-bfs-breadth 1",
        )


def _worker(server_args: Any) -> type:
    """The worker class: SGLang's n-gram worker with drafts from hasten."""
    base: type = import_module(_WORKER).NGRAMWorker
    if not callable(getattr(base, "_prepare_draft_tokens", None)):
        raise CapabilityError(
            f"this SGLang's NGRAMWorker isn't the one that {ALGORITHM} was written for "
            f"({TESTED_WITH}). Use --speculative-algorithm NGRAM"
        )
    init, prepare_tokens = base.__init__, base._prepare_draft_tokens  # type: ignore[misc, attr-defined]

    def __init__(self: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
        init(self, server_args, *args, **kwargs)
        self.ngram_corpus = _corpus(self)

    def _prepare_draft_tokens(self: Any, batch: Any) -> Any:
        # The worker hands over the last tokens only; a request that is new needs all of them.
        self.ngram_corpus.requests = {request.rid: request for request in batch.reqs}
        return prepare_tokens(self, batch)

    methods = {"__init__": __init__, "_prepare_draft_tokens": _prepare_draft_tokens}
    return type("HastenWorker", (base,), methods)


def _corpus(worker: Any) -> Any:
    """The drafter of a worker."""
    from hasten.plugins._sglang_corpus import Corpus
    from hasten.plugins.session import EngineFacts

    model = worker.model_runner.model_config
    eos = getattr(model, "hf_eos_token_id", None) or ()
    facts = EngineFacts(
        name="SGLang",
        vocab_size=int(model.vocab_size),
        context_limit=int(model.context_len),
        eos_ids=frozenset(eos),
        trees=worker.topk > 1,
        padded=True,
    )
    method = os.environ.get(VARIABLE, "").strip() or "auto"
    return Corpus(method, facts, rows=int(worker.draft_token_num))

"""A stand-in of what the SGLang plug-in touches: the registry of algorithms and the n-gram worker.

The worker does with its corpus what SGLang's does: hands over the last tokens of each request,
takes trees and masks, rebuilds the trees from the masks, accepts greedily, and erases requests that
have left. Its target is a function of the prefix (`fake_texts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from tests.plugins.fake_texts import VOCAB, NextToken


class CustomSpecAlgo:
    """SGLang's base of registered algorithms."""

    def __init__(
        self,
        name: str,
        factory: Callable[[Any], type],
        *,
        supports_overlap: bool = False,
        validate_server_args: Any = None,
    ) -> None:
        self.name, self.factory, self.supports_overlap = name, factory, supports_overlap

    def is_ngram(self) -> bool:
        return False

    def is_eagle(self) -> bool:
        return False

    def has_draft_kv(self) -> bool:
        return True

    def handle_server_args(self, server_args: Any) -> None:
        return

    def create_worker(self, server_args: Any) -> type:
        return self.factory(server_args)


def algorithms() -> tuple[type, dict[str, Any]]:
    """A fresh SpeculativeAlgorithm, and what is registered with it."""
    registered: dict[str, Any] = {}

    class SpeculativeAlgorithm(Enum):
        NGRAM = auto()
        NONE = auto()

        @classmethod
        def register(
            cls,
            name: str,
            *,
            supports_overlap: bool = False,
            validate_server_args: Any = None,
            spec_class: type = CustomSpecAlgo,
        ) -> Callable[[Any], Any]:
            if name in registered:
                raise ValueError(f"Speculative algorithm '{name}' already registered.")

            def decorator(factory: Any) -> Any:
                registered[name] = spec_class(
                    name=name, factory=factory, supports_overlap=supports_overlap
                )
                return factory

            return decorator

        def carries_draft_hidden_states(self) -> bool:
            return False

        def create_future_map(self, device: str) -> tuple[str, Any]:
            return device, self

    return SpeculativeAlgorithm, registered


def arguments(**changes: Any) -> Any:
    """Server arguments as SGLang's parser leaves them."""
    values: dict[str, Any] = {
        "device": "cuda",
        "disable_overlap_schedule": False,
        "enable_dp_attention": False,
        "max_running_requests": None,
        "enable_mixed_chunk": True,
        "speculative_num_draft_tokens": None,
        "speculative_num_steps": None,
        "speculative_eagle_topk": None,
        "speculative_ngram_max_bfs_breadth": 10,
        "speculative_ngram_max_trie_depth": 18,
        "page_size": 1,
        "attention_backend": "flashinfer",
    }
    return SimpleNamespace(**{**values, **changes})


@dataclass
class Request:
    """A request; `output_ids` lag one step behind `late` where the schedule overlaps."""

    rid: str
    origin_input_ids_unpadded: list[int]
    count: int
    output_ids: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [*self.origin_input_ids_unpadded, *self.output_ids, *self.late]


class NGRAMWorker:
    """SGLang's n-gram worker, as far as drafts are concerned."""

    def __init__(self, server_args: Any, target_worker: Any, after: NextToken) -> None:
        self.model_runner = target_worker.model_runner
        self.topk = server_args.speculative_eagle_topk
        self.draft_token_num = server_args.speculative_num_draft_tokens
        self.max_trie_depth = server_args.speculative_ngram_max_trie_depth
        self.overlap = not server_args.disable_overlap_schedule
        self.after = after
        self.ngram_corpus: Any = None
        self.seen: set[str] = set()
        self.passes = self.accepted = 0
        self.trees: list[list[int]] = []
        """The tokens of every tree that was verified."""

    def _prepare_draft_tokens(self, batch: Any) -> tuple[Any, Any]:
        depth = self.max_trie_depth
        self.ngram_corpus.synchronize()
        tails = [request.ids[-depth:] for request in batch.reqs]
        lengths = [len(request.ids) for request in batch.reqs]
        drafts, mask = self.ngram_corpus.batch_get([r.rid for r in batch.reqs], tails, lengths)
        assert len(drafts) == len(batch.reqs) * self.draft_token_num
        return drafts, mask

    def step(self, batch: Any) -> None:
        """Draft, verify and accept for a batch."""
        rows = self.draft_token_num
        drafts, mask = self._prepare_draft_tokens(batch)
        assert drafts.dtype == mask.dtype == np.int64
        trees = drafts.reshape(-1, rows)
        masks = mask.reshape(-1, rows, rows)
        for request, tokens, ancestors in zip(batch.reqs, trees, masks, strict=True):
            request.output_ids, request.late = [*request.output_ids, *request.late], []
            request.late = self._accept(request, tokens.tolist(), ancestors)
            if not self.overlap:
                request.output_ids, request.late = [*request.output_ids, *request.late], []
        self.ngram_corpus.batch_put([request.ids[-8:] for request in batch.reqs])
        now = {request.rid for request in batch.reqs}
        if self.seen - now:
            self.ngram_corpus.erase_match_state(sorted(self.seen - now))
        self.seen = now

    def _accept(self, request: Request, tokens: list[int], mask: Any) -> list[int]:
        """The target's tokens along the tree that the mask describes."""
        self.passes += 1
        self.trees.append(tokens)
        rows = len(tokens)
        assert tokens[0] == request.ids[-1], "node 0 is the last committed token"
        assert all(0 <= token < VOCAB for token in tokens)
        assert not np.triu(mask, 1).any(), "ancestors come first"
        assert (mask.diagonal() == 1).all()
        parents = [-1]
        for node in range(1, rows):
            above = np.flatnonzero(mask[node, :node])
            assert len(above), "only node 0 is a root"
            parents.append(int(above.max()))
            own = mask[node].copy()
            own[node] = 0
            assert (own == mask[parents[-1]]).all(), "ancestors of a node are its parent's and it"
        new: list[int] = []
        node = 0
        while True:
            new.append(self.after([*request.ids, *new]))
            kept = [k for k in range(1, rows) if parents[k] == node and tokens[k] == new[-1]]
            if not kept:
                break
            node = kept[0]
        self.accepted += len(new) - 1
        return new


def modules() -> tuple[dict[str, ModuleType], dict[str, Any]]:
    """SGLang's modules by name, and what gets registered."""
    kind, registered = algorithms()
    spec = ModuleType("spec_info")
    spec.SpeculativeAlgorithm = kind  # type: ignore[attr-defined]
    registry = ModuleType("spec_registry")
    registry.CustomSpecAlgo = CustomSpecAlgo  # type: ignore[attr-defined]
    worker = ModuleType("ngram_worker")
    worker.NGRAMWorker = NGRAMWorker  # type: ignore[attr-defined]
    speculative = "sglang.srt.speculative"
    packages = ("sglang", "sglang.srt", speculative)
    made = {name: ModuleType(name) for name in packages}
    made[f"{speculative}.spec_info"] = spec
    made[f"{speculative}.spec_registry"] = registry
    made[f"{speculative}.ngram_worker"] = worker
    return made, registered


def target(context: int = 512) -> Any:
    """A target worker, as far as ours reads it."""
    config = SimpleNamespace(vocab_size=VOCAB, context_len=context, hf_eos_token_id={VOCAB - 1})
    return SimpleNamespace(model_runner=SimpleNamespace(model_config=config))


def serve(worker: Any, requests: Sequence[Request], *, most: int = 4) -> dict[str, list[int]]:
    """Answer requests, `most` at a time; a prompt's first token comes without a draft."""
    waiting, running, done = list(requests), [], {}
    while waiting or running:
        for request in [r for r in running if len(r.output_ids) + len(r.late) >= r.count]:
            running.remove(request)
            done[request.rid] = [*request.output_ids, *request.late][: request.count]
        while waiting and len(running) < most:
            request = waiting.pop(0)
            if not request.output_ids:
                request.output_ids.append(worker.after(request.ids))
            running.append(request)
        if running:
            worker.step(SimpleNamespace(reqs=list(running)))
    return done

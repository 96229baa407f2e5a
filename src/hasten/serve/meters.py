"""``/metrics``: vLLM's names where it has them, so that its dashboards go on working."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hasten.types import Round

if TYPE_CHECKING:
    from hasten.api import LLM
    from hasten.targets.base import Target
    from hasten.worker import Worker

_TO_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TO_LAST = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Meters:
    """One server's counts, in a registry of its own."""

    def __init__(self, model: str, worker: Worker, target: Target) -> None:
        self._registry, self._model = CollectorRegistry(), model
        running = self._make(Gauge, "vllm:num_requests_running", "Requests that share passes.")
        running.set_function(lambda: worker.active)
        waiting = self._make(Gauge, "vllm:num_requests_waiting", "Requests that wait for room.")
        waiting.set_function(lambda: worker.waiting)
        kept = self._make(
            Gauge, "hasten:kept_prefix_tokens", "Tokens of finished requests kept for next turns."
        )
        kept.set_function(lambda: worker.cached_tokens)
        self._kv: Any = None
        if hasattr(type(target), "bytes_in_use"):  # not every target knows
            self._kv = self._make(
                Gauge, "hasten:kv_cache_bytes", "Bytes of keys and values, kept ones included."
            )
        self._prompt = self._make(Counter, "vllm:prompt_tokens", "Tokens of prompts.")
        self._cached = self._make(
            Counter, "vllm:prompt_tokens_cached", "Tokens of prompts that had run before."
        )
        self._generated = self._make(Counter, "vllm:generation_tokens", "Tokens of answers.")
        self._ended = self._make(
            Counter, "vllm:request_success", "Answers by how they ended.", "finished_reason"
        )
        self._first = self._make(
            Histogram,
            "vllm:time_to_first_token_seconds",
            "From the request to the first token of an answer.",
            buckets=_TO_FIRST,
        )
        self._last = self._make(
            Histogram,
            "vllm:e2e_request_latency_seconds",
            "From the request to the end of an answer.",
            buckets=_TO_LAST,
        )
        self._drafts = self._make(
            Counter, "vllm:spec_decode_num_drafts", "Target passes that verified a draft."
        )
        self._drafted = self._make(
            Counter, "vllm:spec_decode_num_draft_tokens", "Draft tokens verified."
        )
        self._accepted = self._make(
            Counter, "vllm:spec_decode_num_accepted_tokens", "Draft tokens kept."
        )
        self._by_position = self._make(
            Counter,
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens kept, by how far they stood behind the last certain token (0: next).",
            "position",
        )

    def _make(self, kind: Any, name: str, help: str, *labels: str, **more: Any) -> Any:
        made = kind(name, help, ("model_name", *labels), registry=self._registry, **more)
        # A series without labels of its own is there from the start, at zero.
        return made if labels else made.labels(self._model)

    def round(self, made: Round) -> None:
        """Count one round of an answer."""
        self._generated.inc(len(made.emitted))
        if made.tree is None or not made.drafted:
            return
        kept = made.accepted[1:]
        self._drafts.inc()
        self._drafted.inc(made.drafted)
        self._accepted.inc(len(kept))
        for node in kept:
            self._by_position.labels(self._model, str(made.tree.depths[node] - 1)).inc()

    def prompt(self, tokens: int, cached: int) -> None:
        """Count a prompt; `cached` of its tokens had run before."""
        self._prompt.inc(tokens)
        self._cached.inc(cached)

    def first(self, seconds: float) -> None:
        """An answer has its first token."""
        self._first.observe(seconds)

    def ended(self, reason: str, seconds: float) -> None:
        """An answer is over: ``stop``, ``length``, ``abort`` or ``error``."""
        self._ended.labels(self._model, reason).inc()
        if reason in ("stop", "length"):
            self._last.observe(seconds)

    def page(self, llm: LLM) -> bytes:
        """Prometheus' text. Waits for the pass under way: not for an event loop."""
        if self._kv is not None:
            target: Any = llm.target
            with llm._lock:  # nobody may change the sequences while they are counted
                self._kv.set(target.bytes_in_use)
        return generate_latest(self._registry)

"""What vLLM's worker knows of a step and doesn't hand to a custom proposer: taken with care.

The runner's `propose_draft_token_ids` is wrapped once, if it still looks as it did in the releases
this was written for (0.32, 0.33); else the plug-in goes on without: it then finds requests by their
tokens, and reads no logits.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)

RUNNER = "vllm.v1.worker.gpu_model_runner"
METHOD = "propose_draft_token_ids"
_WANTED = {"scheduler_output", "sampled_token_ids", "spec_decode_metadata"}


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine.

    keys    the requests' ids, by row
    drafts  how many draft tokens of each row were verified
    alive   ids of all requests that aren't over
    most    draft tokens that will be scheduled, at most
    """

    keys: tuple[str, ...]
    drafts: tuple[int, ...]
    alive: Container[str]
    most: int


class Watcher(Protocol):
    """A proposer that is told of steps."""

    def see(self, step: Step) -> None:
        """A step has been verified; `propose` is called next."""
        ...


def watch(kind: type) -> bool:
    """Have every runner whose drafter is a `kind` tell it of its steps; False, and a line in the
    log, when this vLLM isn't one that is known. Wrapping twice is harmless."""
    runner = getattr(sys.modules.get(RUNNER), "GPUModelRunner", None)
    method = getattr(runner, METHOD, None)
    if getattr(method, "_hasten", False):
        return True
    if runner is None or method is None or not _known(method):
        logger.warning(
            "this vLLM's runner isn't one the plug-in knows: requests are found by their tokens, "
            "and no logits are read"
        )
        return False
    setattr(runner, METHOD, _wrapped(method, kind))
    return True


def _known(method: Callable[..., Any]) -> bool:
    try:
        return set(inspect.signature(method).parameters) >= _WANTED
    except (TypeError, ValueError):
        return False


def _wrapped(method: Callable[..., Any], kind: type) -> Callable[..., Any]:
    bind = inspect.signature(method).bind

    @functools.wraps(method)
    def propose_draft_token_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = getattr(self, "drafter", None)
        if isinstance(drafter, kind):
            watcher: Any = drafter
            watcher.see(_read(self, bind(self, *args, **kwargs).arguments))
        return method(self, *args, **kwargs)

    propose_draft_token_ids._hasten = True  # type: ignore[attr-defined]
    return propose_draft_token_ids


def _read(runner: Any, given: dict[str, Any]) -> Step | None:
    """The step, or None when something isn't where it was."""
    try:
        keys = tuple(runner.input_batch.req_ids)
        metadata = given["spec_decode_metadata"]
        drafts = (0,) * len(keys) if metadata is None else tuple(metadata.num_draft_tokens)
        most = given["scheduler_output"].num_spec_tokens_to_schedule
        return Step(keys, drafts, runner.requests, int(most))
    except (AttributeError, TypeError, ValueError):
        return None


class LogitsReader:
    """Keeps the ids of the `k` largest logits of each step's rows.

    `attach` wraps the target's ``compute_logits`` on the object; only these few ids are kept, never
    the logits.
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self._topk: torch.Tensor | None = None

    def attach(self, target: Any) -> bool:
        """Read what `target` computes; False when it has no ``compute_logits``."""
        inner = getattr(target, "compute_logits", None)
        if not callable(inner):
            return False

        @functools.wraps(inner)
        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = inner(*args, **kwargs)
            self._keep(logits)
            return logits

        target.compute_logits = compute_logits
        return True

    def _keep(self, logits: Any) -> None:
        self._topk = None
        if isinstance(logits, torch.Tensor) and logits.dim() == 2:
            with suppress(RuntimeError):  # out of memory, say: this pass is the engine's
                self._topk = logits.topk(min(self._k, logits.shape[1]), dim=1).indices

    def take(self, rows: int) -> torch.Tensor | None:
        """``(rows, k)`` int64 on the CPU, of the step's rows; None when there were others."""
        topk, self._topk = self._topk, None
        return None if topk is None or len(topk) != rows else topk.cpu()

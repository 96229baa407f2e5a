"""hasten's drafters in vLLM, as its ``custom_class`` proposer::

    vllm serve MODEL --speculative-config '{"method": "custom_class",
        "model": "hasten.plugins.vllm.Proposer", "num_speculative_tokens": 8}'

vLLM verifies, samples, batches and serves; a `Proposer` says what to try next, for each request of
the batch, as many tokens as pay, or none. docs/plugins/vllm.md says what is tested and what isn't.

The method and a few options come from the environment, because vLLM lets no further keys through:
``HASTEN_VLLM="suffix"``, ``HASTEN_VLLM="auto;row_cost=0.05;window=8192;logits=off"``.

Nothing heavy is imported, and nothing of vLLM, before `Proposer` is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.plugins._vllm_options import Options as Options
    from hasten.plugins._vllm_proposer import Proposer as Proposer

_LAZY = {"Options": "hasten.plugins._vllm_options", "Proposer": "hasten.plugins._vllm_proposer"}

__all__ = ["Options", "Proposer"]


def __getattr__(name: str) -> Any:
    """Import the rest on first use."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""A stand-in of llama-cpp-python: its kind of draft model, and the loop that asks it for drafts."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from tests.plugins.fake_texts import NextToken


class LlamaDraftModel(abc.ABC):
    """llama-cpp-python's abstract class."""

    @abc.abstractmethod
    def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
        raise NotImplementedError


def modules() -> dict[str, ModuleType]:
    """Its modules by name."""
    package, speculative = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    speculative.LlamaDraftModel = LlamaDraftModel  # type: ignore[attr-defined]
    return {"llama_cpp": package, "llama_cpp.llama_speculative": speculative}


class Llama:
    """Greedy answers of `after`, with the drafts of `draft_model` compared to them."""

    def __init__(self, draft_model: Any, after: NextToken, n_ctx: int = 512) -> None:
        self.draft_model, self.after, self.n_ctx = draft_model, after, n_ctx
        self.input_ids = np.zeros(n_ctx, dtype=np.intc)
        self.passes = self.accepted = self.drafted = 0

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """`count` tokens after the prompt, or fewer at the context's end."""
        self.input_ids[: len(prompt)] = prompt
        done, pending, out = 0, list(prompt), []
        while len(out) < count and done + len(pending) <= self.n_ctx:
            self.input_ids[done : done + len(pending)] = pending
            self.passes += 1
            kept = done + (len(pending) if not out else 1)
            end = done + len(pending)
            while len(out) < count:
                token = self.after(self.input_ids[:kept].tolist())
                out.append(token)
                if kept >= end or self.input_ids[kept] != token:
                    break
                kept += 1
                self.accepted += 1
            done, pending = kept, [out[-1]]
            if len(out) >= count or done + 1 > self.n_ctx:
                break
            self.input_ids[done] = out[-1]
            draft = self.draft_model(self.input_ids[: done + 1])
            assert draft.dtype == np.intc
            assert draft.ndim == 1
            self.drafted += len(draft)
            pending += draft.astype(int)[: self.n_ctx - done - 1].tolist()
        return out

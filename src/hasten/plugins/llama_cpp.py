"""hasten's drafters in llama-cpp-python: ``Llama(..., draft_model=DraftModel("suffix"))``.

llama.cpp verifies a chain by comparing it with what its sampler picks, so answers stay its own. It
tells a draft model nothing but the ids so far; what was kept of the last draft is read off them.
Importing this imports neither llama_cpp nor anything else that is heavy.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from hasten.errors import OptionError

if TYPE_CHECKING:
    from hasten.plugins.session import Session

logger = logging.getLogger(__name__)

Ids = np.ndarray[Any, np.dtype[np.intc]]

ANY_ID = 1 << 31
"""llama-cpp-python tells no draft model the size of the vocabulary; copied ids are in it."""
NO_LIMIT = 1 << 31
"""Nor the context's; it cuts drafts to it itself."""


class DraftModel:
    """A `llama_cpp.llama_speculative.LlamaDraftModel` that drafts with a method of hasten.

    method           one that copies from the text: ``suffix``, ``prompt-lookup``,
                     ``racer:retrieval``, or ``auto``, which is ``suffix`` here
    num_pred_tokens  most tokens drafted at a time
    row_cost         first guess of what a row more costs, as a share of a pass of one; what passes
                     take is watched, and decides
    window           tokens of a prompt that are read at most, the last ones; 0: the default
    eos_ids          nothing is drafted after these

    One text at a time, as `Llama` has it: a text that doesn't go on from the last one is a new one.
    Raises OptionError and CapabilityError for the method. A drafter that fails is logged, and
    nothing more is drafted for that text.
    """

    def __init__(
        self,
        method: str = "auto",
        *,
        num_pred_tokens: int = 8,
        row_cost: float = 0.25,
        window: int = 0,
        eos_ids: Iterable[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        from hasten.plugins import session
        from hasten.plugins._llama_cpp_costs import PassCosts

        if num_pred_tokens < 1:
            raise OptionError("num_pred_tokens", f"must be at least 1, got {num_pred_tokens}")
        if not 0 < row_cost < float("inf"):
            raise OptionError("row_cost", f"must be a number above 0, got {row_cost!r}")
        facts = session.EngineFacts("llama.cpp", ANY_ID, NO_LIMIT, frozenset(eos_ids))
        self._source = session.prepare(
            method,
            facts,
            most=num_pred_tokens,
            costs=PassCosts(row_cost, num_pred_tokens + 1),
            window=window or session.WINDOW,
        )
        self._session: Session | None = None
        self._read: Ids = np.empty(0, np.intc)
        self._clock, self._left = clock, 0.0
        self._failed = False
        _be_a_draft_model()

    def __call__(self, input_ids: Ids, /, **kwargs: Any) -> Ids:
        """The tokens to try after `input_ids` ``(n,)``: ``(m,)``, m may be 0. Never raises."""
        seconds = self._clock() - self._left
        try:
            draft = self._draft(np.asarray(input_ids), seconds)
        except Exception as error:  # the answer would be lost
            logger.warning(
                "hasten failed, and llama.cpp goes on without: %s", error, exc_info=error
            )
            self._failed = True
            draft = []
        self._left = self._clock()
        return np.array(draft, dtype=np.intc)

    def _draft(self, ids: Ids, seconds: float) -> list[int]:
        known = len(self._read)
        goes_on = 0 < known < len(ids) and np.array_equal(self._read, ids[:known])
        self._read = ids.copy()
        if not goes_on:
            self._failed = False
            session = self._session = self._session or self._source.open()
            session.begin(ids[:-1].tolist())
            session.commit(ids[-1:].tolist())
        elif self._failed or self._session is None:
            return []
        else:
            session = self._session
            session.commit(ids[known:].tolist(), seconds=seconds)
        return list(session.propose().tree.tokens[1:])


def _be_a_draft_model() -> None:
    """Count as one of llama-cpp-python's own draft models, where that is loaded."""
    module = sys.modules.get("llama_cpp.llama_speculative")
    if module is not None:
        module.LlamaDraftModel.register(DraftModel)

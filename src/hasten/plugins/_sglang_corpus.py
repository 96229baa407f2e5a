"""Drafts in the shape that SGLang's n-gram worker asks its corpus for. See
`hasten.plugins.sglang`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from hasten.errors import CapabilityError, DrafterError
from hasten.plugins.session import EngineFacts, Session, even_costs, prepare
from hasten.policies.cost_model import CostModel
from hasten.types import DraftTree

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

PADDING = 0
"""Id of the nodes that fill a tree up, children of the root: SGLang's own choice."""


def pad_tree(tree: DraftTree, rows: int) -> tuple[list[int], Array]:
    """A tree as `rows` tokens and a mask ``(rows, rows)`` of int64: row i is 1 at node i and its
    ancestors."""
    missing = rows - len(tree)
    tokens = [*tree.tokens, *[PADDING] * missing]
    parents = [*tree.parents, *[0] * missing]
    mask = np.eye(rows, dtype=np.int64)
    for node in range(1, rows):
        mask[node, : parents[node] + 1] |= mask[parents[node], : parents[node] + 1]
    return tokens, mask


class Corpus:
    """Stands where SGLang's worker has its n-gram corpus.

    It must say the same on every rank: each drafts by itself, and all verify one tree. So nothing
    here depends on a clock, and a drafter's failure is one on all ranks.

    Raises OptionError and CapabilityError for the method, before the first request.
    """

    def __init__(self, method: str, facts: EngineFacts, *, rows: int) -> None:
        self._source = prepare(method, facts, most=rows - 1, costs=CostModel(even_costs(0.0)))
        self._rows = rows
        self._sessions: dict[str, Session | None] = {}
        """None: its drafter has failed."""
        self._said: set[str] = set()
        self.requests: Mapping[str, Any] = {}
        """SGLang's requests of this step by id: set by the worker before it asks."""
        logger.info("hasten drafts with %s, %d rows a pass", self._source.spec, rows)

    def __len__(self) -> int:
        """Requests held."""
        return len(self._sessions)

    # -- what the worker calls -------------------------------------------------------------------

    def batch_get(
        self, req_ids: Sequence[str], batch_tokens: Sequence[list[int]], total_lens: Sequence[int]
    ) -> tuple[Array, Array]:
        """Each request's tree, one after the other: tokens ``(requests * rows,)`` and masks
        ``(requests * rows * rows,)``, int64. Never raises.

        batch_tokens  each request's last tokens, the pending one last
        total_lens    how many tokens each has, these included
        """
        tokens: list[int] = []
        masks: list[Array] = []
        for rid, tail, total in zip(req_ids, batch_tokens, total_lens, strict=True):
            ids, mask = pad_tree(self._tree(rid, tail, total), self._rows)
            tokens += ids
            masks.append(mask)
        flat = np.concatenate(masks, axis=None) if masks else np.empty(0, np.int64)
        return np.array(tokens, dtype=np.int64), flat

    def batch_put(self, batch_tokens: Sequence[list[int]]) -> None:
        """Nothing: a request's tokens are read when its draft is asked for."""

    def synchronize(self) -> None:
        """Nothing is under way."""

    def erase_match_state(self, req_ids: Iterable[str]) -> None:
        """Forget requests that have left the batch; one that comes back is read again."""
        for rid in req_ids:
            self._end(rid)

    def reset(self) -> None:
        """Forget all requests."""
        self.erase_match_state(list(self._sessions))

    def load_external_corpus_named(self, corpus_id: str, chunks: Any) -> int:
        """Refused: hasten drafts from the request's own text. Raises CapabilityError."""
        raise CapabilityError(
            f"corpus {corpus_id!r}: HASTEN drafts from a request's own text. For a corpus use "
            "--speculative-algorithm NGRAM"
        )

    def list_external_corpora(self) -> dict[str, int]:
        """There are none."""
        return {}

    # -- one request -----------------------------------------------------------------------------

    def _tree(self, rid: str, tail: list[int], total: int) -> DraftTree:
        """The draft of one request; the pending token alone when there is nothing to say."""
        session = None
        try:
            session = self._session(rid, tail, total)
            if session is not None:
                return session.propose().tree
        except Exception as error:  # the engine would die of it
            self._say(error)
            self._end(rid)
            self._sessions[rid] = None
        return DraftTree.chain(tail[-1])

    def _session(self, rid: str, tail: list[int], total: int) -> Session | None:
        """The request's session, told of all its tokens."""
        if rid in self._sessions:
            session = self._sessions[rid]
            if session is None:
                return None
            new = total - session.length
            known = len(tail) - new
            if 0 < new <= len(tail) and session.ids[len(session.ids) - known :] == tail[:known]:
                session.commit(tail[known:])
                return session
            self._end(rid)  # it was taken back, or is another one by the same name
        session = self._sessions[rid] = self._source.open()
        ids = self._all_ids(rid, tail, total)
        session.begin(ids[:-1])
        session.commit(ids[-1:])
        return session

    def _all_ids(self, rid: str, tail: list[int], total: int) -> list[int]:
        """All tokens of a request, or its last ones where no more is to be had."""
        request = self.requests.get(rid)
        if request is None or len(tail) == total:
            return tail
        ids = [*request.origin_input_ids_unpadded, *request.output_ids]
        late = total - len(ids)  # accepted, and not yet among its output
        return ids[:total] if late <= 0 else [*ids, *tail[-late:]]

    def _end(self, rid: str) -> None:
        session = self._sessions.pop(rid, None)
        if session is not None:
            with suppress(DrafterError):
                session.end()

    def _say(self, error: Exception) -> None:
        """Log a failure, each once."""
        said = f"{type(error).__name__}: {error}"
        if said not in self._said and len(self._said) < 32:
            self._said.add(said)
            logger.warning("hasten failed, and SGLang goes on without: %s", said, exc_info=error)

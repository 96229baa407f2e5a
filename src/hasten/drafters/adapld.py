"""AdaPLD: copy what followed an earlier place like this one, and branch where it may go elsewhere.

One step (arXiv 2606.05742): find an *anchor*, the earlier occurrence of the last token whose hidden
state before it is nearest to the present one; only when the token never occurred, one of a token
that resembles it. Draft the tokens that followed the anchor; beside them branches, the target's own
candidates stored at the anchor; and after each branch a successor, the token that followed the
branch's own anchor. PLD+ (arXiv 2412.01447) is the copy alone. What follows the papers, what is
ours and what is unknown: docs/methods/adapld.md.

Candidates are added best first by how often their like is kept, so that a budget smaller than the
tree is well spent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

import torch

from hasten.drafters.base import BaseDrafter, DraftContext
from hasten.drafters.reuse_memory import Anchor, Embed, ReuseMemory
from hasten.drafters.reuse_ranks import (
    BRANCH,
    BY_RESEMBLANCE,
    CHANCES,
    COPY,
    SEMANTIC,
    SUCCESSOR,
    branch_rank,
    copy_rank,
    nearness,
    place_of,
    semantic_rank,
    strength,
)
from hasten.drafters.tree_builder import TreeBuilder
from hasten.errors import OptionError
from hasten.types import Budget, Draft, Round, RowSignals, Signals

RERANKS = ("hidden", "latest")
QUERIES = ("anchor", "previous")

_HOPE = 0.5
"""A branch's successor is looked for when its chance could be this much of the branch's."""


class _Place(NamedTuple):
    """Where a node of the tree stands in the memory."""

    position: int
    agreement: int
    """Tokens before it that agree too."""
    semantic: bool = False
    near: int = 0
    """Level of the similarity the anchor won by."""


class AdaPLD(BaseDrafter):
    """A tree of a copied span, branches from stored candidates, and their successors.

    layer             whose outputs are compared, 1 to the number of layers
    breadth           branches at an anchor (the paper's K)
    copy              longest copied span (its ell)
    tau               least embedding cosine of a resembling token
    blend             weight of that cosine beside the hidden states' (ours; the paper's: 0)
    max_cand          most anchors compared
    rerank            ``hidden``, or ``latest``: the most recent occurrence (plain prompt lookup)
    semantic          look for resembling tokens when the last one never occurred
    branches          draft stored candidates
    successors        ... and what followed each of them elsewhere
    successor_length  tokens copied after a branch
    succ_semantic     let a branch that never occurred have the successor of a resembling token
    succ_query        the hidden state a branch's anchors are compared with: the one at the
                      ``anchor`` it was stored at, or the ``previous`` one, before the pending token
    deep              branch off below drafted tokens too, and go on where a copy reaches the end of
                      the text (ours)
    eos_ids           nothing is drafted after these
    """

    name = "adapld"

    def __init__(
        self,
        layer: int,
        *,
        breadth: int = 8,
        copy: int = 30,
        tau: float = 0.1,
        blend: float = 1.0,
        max_cand: int = 64,
        rerank: str = "hidden",
        semantic: bool = True,
        branches: bool = True,
        successors: bool = True,
        successor_length: int = 30,
        succ_semantic: bool = False,
        succ_query: str = "anchor",
        deep: bool = True,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        for option, value, known in (
            ("rerank", rerank, RERANKS),
            ("succ_query", succ_query, QUERIES),
        ):
            if value not in known:
                raise OptionError(
                    f"adapld.{option}", f"unknown {value!r}", f"Choose one of {', '.join(known)}"
                )
        self.layer, self.breadth, self.copy, self.deep = layer, breadth, copy, deep
        self.semantic, self.branches = semantic and branches, branches
        self.successors = successors and branches
        self.successor_length, self.succ_semantic = successor_length, succ_semantic
        self.succ_query, self.eos_ids = succ_query, eos_ids
        hidden = rerank == "hidden"
        self.needs = Signals(
            topk=breadth + 1 if branches else 0,
            hidden=(layer,) if hidden else (),
            embeddings=self.semantic or (self.successors and succ_semantic),
            prompt=branches or hidden,
        )
        self._memory = ReuseMemory(
            width=breadth + 1, max_cand=max_cand, tau=tau, blend=blend, rerank=hidden
        )

    def begin(self, prompt: Sequence[int], signals: RowSignals) -> None:
        """Remember the prompt, with the signals of its last rows."""
        self._memory.begin(prompt, signals.hidden.get(self.layer), self._listed(signals))

    def propose(self, ctx: DraftContext, budget: Budget) -> Draft:
        """The best candidates that fit the budget."""
        tree = TreeBuilder(ctx.ids[-1], budget.nodes, budget.depth)
        memory = self._memory
        before = len(memory) - 1
        anchor = memory.retrieve(ctx.ids[-1], before, ctx.embed if self.semantic else None)
        if anchor is not None and not tree.full:
            _Growth(self, memory, tree, ctx.embed).run(self._root_place(anchor, before))
        return tree.draft()

    def _root_place(self, anchor: Anchor, before: int) -> _Place:
        memory = self._memory
        agreement = memory.agreement(anchor.position, before)
        near = 0
        if anchor.semantic:
            near = nearness(anchor.score)
        elif agreement == 0 and memory.rerank:
            near = nearness(memory.cosine(anchor.position, before))
        return _Place(anchor.position, agreement, anchor.semantic, near)

    def observe(self, round: Round) -> None:
        """Remember what was kept: rows of rejected nodes, which had another text before them, are
        left out."""
        signals = round.signals
        self._memory.commit(
            round.emitted, round.accepted, signals.hidden.get(self.layer), self._listed(signals)
        )

    def _listed(self, signals: RowSignals) -> torch.Tensor | None:
        """The stored candidates, where this drafter asked for them."""
        return signals.topk_ids if self.branches else None

    def end(self) -> None:
        """Forget the request."""
        self._memory.clear()


class _Growth:
    """One tree on its way: steps wait in a heap, the likeliest is taken next.

    Entries are ``(-chance, order, step, arguments)``; `order` is unique, so that no more is ever
    compared. A step is called with its chance and its arguments.
    """

    def __init__(
        self, drafter: AdaPLD, memory: ReuseMemory, tree: TreeBuilder, embed: Embed | None
    ) -> None:
        self._drafter, self._memory, self._tree = drafter, memory, tree
        self._embed = embed if drafter.succ_semantic else None
        self._last = len(memory)
        """Position of the pending token."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._root = _Place(0, 0)

    def run(self, root: _Place) -> None:
        """Grow from the root, which stands at the anchor `root`, until nothing more fits."""
        self._root = root
        self._expand(0, root, 1.0, self._drafter.copy)
        heap, tree = self._heap, self._tree
        while heap and not tree.full:
            chance, _, step, arguments = heappop(heap)
            step(-chance, *arguments)

    def _push(self, chance: float, step: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        heappush(self._heap, (-chance, self._order, step, arguments))

    def _expand(
        self, node: int, place: _Place, chance: float, left: int, source: str = COPY
    ) -> None:
        """Propose the children of `node`, itself kept with probability `chance`: what followed its
        place (`left` tokens may still be copied), and the candidates stored there."""
        drafter, memory = self._drafter, self._memory
        position = place.position
        follow = memory.tokens[position + 1]
        row = memory.candidates[position] if position < len(memory.candidates) else ()
        if left > 0 and (source == SUCCESSOR or not place.semantic):
            if source == COPY:
                rank = copy_rank(strength(place.agreement, place.near), place_of(follow, row))
            else:
                rank = BY_RESEMBLANCE if place.semantic else strength(place.agreement)
            after = _Place(position + 1, place.agreement + 1)
            kept = chance * CHANCES[source][rank]
            self._push(kept, self._add_copy, node, after, left - 1, source, rank)
        if row and (node == 0 or (drafter.deep and not place.semantic)):
            self._propose_branches(node, place, chance, follow, row)

    def _propose_branches(
        self, node: int, place: _Place, chance: float, follow: int, row: Sequence[int]
    ) -> None:
        """Line up the stored candidates: each is proposed when the one before it was added."""
        breadth = self._drafter.breadth
        if place.semantic:  # no copy beside them
            others = list(enumerate(row[:breadth]))
        else:
            listed = row if self._drafter.deep else row[:breadth]
            others = [each for each in enumerate(listed) if each[1] != follow][:breadth]
        self._next_branch(node, place, chance, others, 0)

    def _next_branch(
        self, node: int, place: _Place, chance: float, others: list[tuple[int, int]], index: int
    ) -> None:
        if index == len(others):
            return
        at = others[index][0]
        if place.semantic:
            source, rank = SEMANTIC, semantic_rank(at, place.near, place.agreement)
        else:
            source, rank = BRANCH, branch_rank(at, place.agreement)
        kept = chance * CHANCES[source][rank]
        self._push(kept, self._add_branch, node, place, chance, others, index, source, rank)

    # -- steps -------------------------------------------------------------------------------------

    def _add_copy(
        self, chance: float, node: int, place: _Place, left: int, source: str, rank: int
    ) -> None:
        """Add the token at `place`, and propose what comes after it."""
        token = self._memory.tokens[place.position]
        child = self._tree.add(node, token, source, rank)
        if child is None or token in self._drafter.eos_ids:
            return
        if place.position == self._last:
            # The copy has reached the pending token, which stands at the root's anchor: what comes
            # after the one should come after the other, and so the text repeats.
            root = self._root
            if root.semantic or not self._drafter.deep:
                return
            place = _Place(root.position, min(place.agreement, root.agreement))
        self._expand(child, place, chance, left)

    def _add_branch(
        self,
        chance: float,
        node: int,
        place: _Place,
        above: float,
        others: list[tuple[int, int]],
        index: int,
        source: str,
        rank: int,
    ) -> None:
        """Add a stored candidate; its successor is looked for later, if its chance is up to it."""
        token = others[index][1]
        child = self._tree.add(node, token, source, rank)
        if child is None:
            return
        self._next_branch(node, place, above, others, index + 1)
        if self._drafter.successors and token not in self._drafter.eos_ids:
            self._push(_HOPE * chance, self._find_successor, child, place.position)

    def _find_successor(self, hope: float, node: int, stored_at: int) -> None:
        """Find the branch's own anchor and propose what followed it."""
        tree, drafter = self._tree, self._drafter
        if tree.depths[node] >= tree.max_depth:
            return
        before = stored_at if drafter.succ_query == "anchor" else self._last - 1
        anchor = self._memory.retrieve(tree.tokens[node], before, self._embed)
        if anchor is None:
            return
        above = []
        parent = tree.parents[node]
        while parent > 0:
            above.append(tree.tokens[parent])
            parent = tree.parents[parent]
        agreement = self._memory.agreement(anchor.position, self._last, above)
        place = _Place(anchor.position, agreement, anchor.semantic)
        self._expand(node, place, hope / _HOPE, drafter.successor_length, SUCCESSOR)
